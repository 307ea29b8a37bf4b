import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from upcycle_core.corpora.config import CorpusConfig, Domain, Source
from upcycle_core.corpora.documents import domain_faults, write_documents, write_texts
from upcycle_core.corpora.reader import read_documents
from upcycle_core.corpora.shards import write_corpus
from upcycle_core.corpora.sources import source_files
from upcycle_core.errors import InputError

ROOT = Path(__file__).resolve().parents[3]
LETTERS = (
    "abcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijklmnopqrstuvwxyzabcdefghijkl"
)
CONFIG = CorpusConfig(calibration_share=0.2, heldout_share=0.1, min_characters=10)


def text_file(path, texts):
    path.write_text("\n<|doc|>\n".join(texts))
    return Source(files=(str(path),))


def save_line_tokenizer(directory):
    """A line is a token: what it takes to tokenise much text in seconds."""
    core = Tokenizer(models.WordLevel({"<end>": 0, "<other>": 1}, unk_token="<other>"))
    core.pre_tokenizer = pre_tokenizers.Split("\n", "removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    tokenizer.save_pretrained(directory)


def distinct_texts(count, start=0, words=10):
    return [f"document {n} " + f"word{n} " * words for n in range(start, start + count)]


def written(domain, out, *, seed=0, config=CONFIG, **options):
    """Texts by split, and the manifest."""
    write_documents(domain, out, config=config, seed=seed, **options)
    manifest = json.loads((out / "manifest.json").read_text())
    texts = {split: list(read_documents(out / f"{split}.parquet")) for split in manifest["splits"]}
    assert {path.stem for path in out.glob("*.parquet")} == set(texts)
    return texts, manifest


def size(texts):
    return sum(len(text.encode()) for text in texts)


def test_a_file_s_name_may_be_of_another_encoding_than_utf_8(tmp_path):
    """As of an archive that another system made: its text is read, and the night ends."""
    name = os.fsdecode("caf\xe9.txt".encode("latin-1"))
    domain = Domain(train=text_file(tmp_path / name, distinct_texts(200)))
    _, manifest = written(domain, tmp_path / "out")
    assert list(manifest["sources"]["train"]["files"]) == [f"{tmp_path / name}"]
    save_line_tokenizer(tmp_path / "tokenizer")
    write_corpus(tmp_path / "out", tmp_path / "tokenizer", tmp_path / "corpora")
    corpora = json.loads((tmp_path / "corpora" / "manifest.json").read_text())
    assert corpora["sources"] == manifest["sources"]


def test_splits_are_disjoint_and_together_everything(tmp_path):
    texts = [text.strip() for text in distinct_texts(200)]
    split, manifest = written(Domain(train=text_file(tmp_path / "a.txt", texts)), tmp_path / "out")
    together = [text.strip() for part in split.values() for text in part]
    assert set(split) == {"train", "calibration", "heldout"}
    assert sorted(together) == sorted(texts)
    for name, part in split.items():
        facts = manifest["splits"][name]
        content = (tmp_path / "out" / f"{name}.parquet").read_bytes()
        assert facts["documents"] == len(part)
        assert facts["bytes"] == size(part)
        assert facts["sha256"] == hashlib.sha256(content).hexdigest()


def test_shares_are_of_bytes_not_of_documents(tmp_path):
    texts = [*distinct_texts(300, words=3), *distinct_texts(30, start=1000, words=300)]
    split, _ = written(Domain(train=text_file(tmp_path / "a.txt", texts)), tmp_path / "out")
    total = sum(map(size, split.values()))
    largest = max(len(text) for text in texts)
    assert 0.2 * total - largest < size(split["calibration"]) <= 0.2 * total
    assert 0.1 * total - largest < size(split["heldout"]) <= 0.1 * total


def test_seed_decides_order_and_splits(tmp_path):
    domain = Domain(train=text_file(tmp_path / "a.txt", distinct_texts(100)))
    first, _ = written(domain, tmp_path / "first")
    other, _ = written(domain, tmp_path / "other", seed=1)
    written(domain, tmp_path / "again")
    for path in sorted((tmp_path / "first").iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    assert set(first["heldout"]) != set(other["heldout"])
    assert first["train"] != sorted(first["train"])


def test_duplicates_and_short_documents_are_left_out_and_counted(tmp_path):
    texts = distinct_texts(30)
    noisy = [*texts, "too short", texts[3].upper(), texts[3].replace(" ", "\n") + "!!"]
    split, manifest = written(Domain(train=text_file(tmp_path / "a.txt", noisy)), tmp_path / "out")
    assert sum(map(len, split.values())) == 30
    assert manifest["left_out"]["train"] == {"duplicate": 2, "short": 1}


def test_bytes_are_capped_before_shares_are_taken(tmp_path):
    text_file(tmp_path / "a.txt", [*distinct_texts(200), *distinct_texts(200)])
    # Files as a recipe writes them decide the order, and so which documents there are.
    capped = Source(files=("{folder}/a.txt",), max_bytes=4000)
    split, _ = written(Domain(train=capped), tmp_path / "out", folder=tmp_path)
    total = sum(map(size, split.values()))
    assert 4000 <= total < 4000 + max(map(len, distinct_texts(200)))
    assert size(split["calibration"]) <= 0.2 * total
    assert size(split["heldout"]) <= 0.2 * total  # a tenth on average


def test_training_text_yields_to_named_heldout_and_calibration_text(tmp_path):
    texts = distinct_texts(50)
    domain = Domain(
        train=text_file(tmp_path / "train.txt", texts),
        heldout=text_file(tmp_path / "heldout.txt", [texts[0].upper(), *distinct_texts(5, 100)]),
        calibration=text_file(tmp_path / "calibration.txt", [*texts[1:3], *distinct_texts(5, 200)]),
    )
    split, manifest = written(domain, tmp_path / "out")
    assert (len(split["heldout"]), len(split["calibration"])) == (6, 7)
    assert sorted(text.strip() for text in split["train"]) == sorted(t.strip() for t in texts[3:])
    assert manifest["left_out"]["train"] == {"in heldout": 1, "in calibration": 2}


def test_text_from_elsewhere_stands_in_no_other_split(tmp_path):
    texts = distinct_texts(50)
    domain = Domain(
        train=text_file(tmp_path / "train.txt", texts),
        elsewhere=text_file(tmp_path / "other.txt", [*texts, *distinct_texts(5, 100)]),
    )
    split, manifest = written(domain, tmp_path / "out")
    assert sorted(split["elsewhere"]) == sorted(distinct_texts(5, 100))
    assert manifest["left_out"]["elsewhere"] == {"in train": 50}


def test_text_that_is_calibrated_on_and_held_out_is_a_fault(tmp_path):
    texts = distinct_texts(20)
    domain = Domain(
        train=text_file(tmp_path / "train.txt", distinct_texts(20, 100)),
        heldout=text_file(tmp_path / "heldout.txt", texts[:10]),
        calibration=text_file(tmp_path / "calibration.txt", texts[7:]),
        elsewhere=text_file(tmp_path / "elsewhere.txt", texts[9:]),
    )
    with pytest.raises(InputError) as error:
        write_documents(domain, tmp_path / "out", config=CONFIG, seed=0, name="domains.law")
    calibration, elsewhere = error.value.faults
    assert (calibration.field, elsewhere.field) == (
        "domains.law.calibration",
        "domains.law.elsewhere",
    )
    assert calibration.remedy.startswith("3 of them are also held-out text, for example 'document")
    assert elsewhere.remedy.startswith("1 of them")
    assert not (tmp_path / "out").exists()


def test_a_split_without_documents_is_a_fault(tmp_path):
    texts = distinct_texts(10)
    same = text_file(tmp_path / "a.txt", texts)
    with pytest.raises(InputError, match=r"domains\.law\.train = .*10 in calibration") as error:
        write_documents(
            Domain(train=same, calibration=same),
            tmp_path / "out",
            config=CONFIG,
            seed=0,
            name="domains.law",
        )
    assert len(error.value.faults) == 1


@pytest.mark.parametrize(
    ("named", "count", "missing"),
    [
        ((), 1, "calibration"),
        ((), 2, "calibration"),
        (("heldout",), 1, "calibration"),
        (("calibration",), 1, "heldout"),
    ],
)
def test_training_text_that_is_too_little_to_set_text_aside_is_one_fault(
    tmp_path, named, count, missing
):
    given = {split: text_file(tmp_path / f"{split}.txt", distinct_texts(5, 100)) for split in named}
    domain = Domain(train=text_file(tmp_path / "a.txt", ["short", *distinct_texts(count)]), **given)
    with pytest.raises(InputError) as error:
        write_documents(domain, tmp_path / "out", config=CONFIG, seed=0, name="domains.law")
    (fault,) = error.value.faults
    assert fault.field == "domains.law.train"
    assert fault.value == ("1 document" if count == 1 else "2 documents")
    assert f"domains.law.{missing}" in fault.remedy
    assert not any(f"domains.law.{split}" in fault.remedy for split in named)
    assert "(left out: 1 shorter than corpus.min_characters)" in fault.remedy
    assert "in a .txt file, a line <|doc|> stands between two" in fault.remedy


def test_records_are_not_told_how_documents_of_text_are_separated(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": distinct_texts(1)[0]}))
    domain = Domain(train=Source(files=(str(tmp_path / "a.jsonl"),)))
    with pytest.raises(InputError, match=r"1 document.* give it more documents$"):
        write_documents(domain, tmp_path / "out", config=CONFIG, seed=0, name="domains.law")


def test_even_three_documents_fill_three_splits(tmp_path):
    domain = Domain(train=text_file(tmp_path / "a.txt", distinct_texts(3)))
    split, _ = written(domain, tmp_path / "out")
    assert [len(part) for part in split.values()] == [1, 1, 1]


def test_a_ready_expert_needs_no_training_text(tmp_path):
    domain = Domain(
        calibration=text_file(tmp_path / "a.txt", distinct_texts(5)),
        heldout=text_file(tmp_path / "b.txt", distinct_texts(5, 100)),
        expert="expert",
    )
    assert domain_faults(domain, "domains.law") == []
    split, _ = written(domain, tmp_path / "out")
    assert set(split) == {"calibration", "heldout"}


def test_a_domain_without_the_text_it_needs_is_a_fault():
    fields = [fault.field for fault in domain_faults(Domain(expert="expert"), "domains.law")]
    assert fields == ["domains.law.calibration", "domains.law.heldout"]
    assert [fault.field for fault in domain_faults(Domain(), "domains.law")] == [
        "domains.law.train"
    ]


def test_harvested_splits_share_no_file_and_the_manifest_hashes_what_was_read(tmp_path):
    source = Source(harvest="documentation", max_bytes=1_500_000)
    _, manifest = written(Domain(train=source), tmp_path / "out")
    paths = source_files(source, None)
    files = [set(manifest["splits"][split]["files"]) for split in manifest["splits"]]
    assert len(files) == 3
    assert len(set.union(*files)) == sum(map(len, files))
    for split in manifest["splits"].values():
        for label, sha256 in split["files"].items():
            assert hashlib.sha256(paths[label].read_bytes()).hexdigest() == sha256


def test_progress_counts_sources(tmp_path):
    class Watched:
        def __init__(self):
            self.seen = []

        def start(self, what, total, unit="steps"):
            self.seen.append((what, total, unit))

        def advance(self, amount=1, **shown):
            self.seen.append(amount)

        def metrics(self, values, step): ...

    watched = Watched()
    domain = Domain(train=text_file(tmp_path / "a.txt", distinct_texts(5)))
    written(domain, tmp_path / "out", progress=watched, name="domains.law")
    assert watched.seen == [("documents of law", 1, "sources"), 1]


def test_text_of_no_domain_yields_to_what_domains_hold_out(tmp_path):
    texts = distinct_texts(60)
    domain = Domain(train=text_file(tmp_path / "law.txt", texts[:30]))
    split, _ = written(domain, tmp_path / "law")
    apart = [tmp_path / "law" / f"{name}.parquet" for name in ("calibration", "heldout")]
    source = text_file(tmp_path / "all.txt", [text.upper() for text in texts])
    out = tmp_path / "seed" / "documents"
    write_texts("train", source, out, config=CONFIG, seed=0, apart_from=apart, name="seed")
    found = {text.lower().strip() for text in read_documents(out / "train.parquet")}
    held = {text.strip() for name in ("calibration", "heldout") for text in split[name]}
    assert held
    assert found == {text.strip() for text in texts} - held
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["left_out"] == {"train": {"in a domain's text": len(held)}}


def test_text_of_no_domain_that_leaves_no_document_is_named_as_the_recipe_does(tmp_path):
    source = text_file(tmp_path / "a.txt", ["short"])
    with pytest.raises(InputError) as error:
        write_texts(
            "heldout", source, tmp_path / "out", config=CONFIG, seed=0, name="outside.manual"
        )
    assert [fault.field for fault in error.value.faults] == ["outside.manual"]


def test_row_groups_are_bounded_by_rows_and_by_bytes(tmp_path):
    small = text_file(tmp_path / "small.txt", distinct_texts(5000, words=1))
    large = text_file(tmp_path / "large.txt", [f"{n} " + "x" * 3_000_000 for n in range(5)])
    for source, rows in ((small, [4096, 904]), (large, [2, 2, 1])):
        out = tmp_path / "out" / str(len(rows)) / str(rows[0])
        write_texts("heldout", source, out, config=CONFIG, seed=0, name="outside")
        file = parquet.ParquetFile(out / "heldout.parquet")
        groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        assert groups == rows
        assert file.schema_arrow.names == ["text"]


def test_a_file_of_documents_is_what_one_call_of_pyarrow_writes(tmp_path):
    source = text_file(tmp_path / "a.txt", distinct_texts(5000))
    write_texts("heldout", source, tmp_path / "out", config=CONFIG, seed=0, name="outside")
    found = list(read_documents(tmp_path / "out" / "heldout.parquet"))
    table = pyarrow.table({"text": pyarrow.array(found, pyarrow.large_string())})
    parquet.write_table(table, tmp_path / "whole.parquet", compression="zstd", row_group_size=4096)
    own = (tmp_path / "out" / "heldout.parquet").read_bytes()
    assert own == (tmp_path / "whole.parquet").read_bytes()


MEASURED = """
import json, resource, sys
from pathlib import Path
import upcycle_core.corpora.shards
from upcycle_core.corpora.config import CorpusConfig, Domain, Source
from upcycle_core.corpora.documents import write_documents
from upcycle_core.corpora.shards import write_corpus

def run(name):
    domain = Domain(train=Source(files=(f"{name}.jsonl",)))
    out = Path(f"{name}.documents")
    write_documents(domain, out, config=CorpusConfig(), seed=0)
    write_corpus(out, Path("tokenizer"), Path(f"{name}.tokens"))

run("small")  # what is imported, and the threads that are started, are no part of the text
used = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
limit = int(used.split()[1]) * 1024 + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
run("large")
"""


@pytest.mark.faults
def test_text_of_ten_times_the_memory_is_streamed(tmp_path):
    allowed, size = 16_000_000, 20_000
    save_line_tokenizer(tmp_path / "tokenizer")
    for name, total in (("small", 20 * size), ("large", 11 * allowed)):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for number in range(total // size):
                lines = [f"{number}{line:03d}{LETTERS}" for line in range(size // 100)]
                file.write(json.dumps({"text": "\n".join(lines)}) + "\n")
    assert (tmp_path / "large.jsonl").stat().st_size >= 10 * allowed
    found = subprocess.run(
        [sys.executable, "-c", MEASURED, str(allowed)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    manifest = json.loads((tmp_path / "large.tokens" / "manifest.json").read_text())
    assert sum(split["bytes"] for split in manifest["splits"].values()) > 10 * allowed
