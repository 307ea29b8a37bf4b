import datasets
import pytest

from upcycle_core.corpora.config import Source
from upcycle_core.corpora.dataset import open_dataset
from upcycle_core.corpora.sources import read_source, source_faults
from upcycle_core.corpora.tuning.config import InstructionsConfig, InstructionSource
from upcycle_core.corpora.tuning.readers import read_records


def rows_of(split, count=30):
    rows = [{"text": f"{split} {n}", "prompt": f"q{n}", "response": "a"} for n in range(count)]
    return datasets.Dataset.from_list(rows, split=split)


def opened(folder, split="train", subset=None, revision=None):
    rows = open_dataset(str(folder), subset=subset, split=split, revision=revision)
    return [row["text"] for row in rows]


def test_what_was_saved_to_disk_is_read_in_seeded_order(tmp_path):
    rows_of("train").save_to_disk(tmp_path / "saved")
    source = Source(dataset="{folder}/saved")
    assert source_faults(source, "train", tmp_path) == []
    first, again, other = (
        [one.text for one in read_source(source, seed=seed, folder=tmp_path)] for seed in (0, 0, 1)
    )
    assert sorted(first) == sorted(rows_of("train")["text"])
    assert first == again != other


def test_instructions_that_were_saved_to_disk_are_read(tmp_path):
    rows_of("train").save_to_disk(tmp_path / "saved")
    source = InstructionSource(dataset=str(tmp_path / "saved"), category="c")
    config = InstructionsConfig(sources={"own": source}, unseen=())
    found = read_records("own", source, config=config, folder=None, seed=0)
    assert sorted(one.prompt for one in found) == sorted(f"q{n}" for n in range(30))


def test_a_split_is_taken_of_what_was_saved_together(tmp_path):
    both = {split: rows_of(split, 3) for split in ("train", "test")}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    assert opened(tmp_path / "both", "test") == ["test 0", "test 1", "test 2"]
    assert opened(tmp_path / "both" / "test") == ["test 0", "test 1", "test 2"]
    with pytest.raises(ValueError, match="it has no split dev; choose of test, train"):
        opened(tmp_path / "both", "dev")
    with pytest.raises(ValueError, match="it has no split dev; choose of test"):
        opened(tmp_path / "both" / "test", "dev")


@pytest.mark.parametrize("named", [{"subset": "law"}, {"revision": "v1"}])
def test_what_was_saved_has_no_subset_and_no_revision(tmp_path, named):
    rows_of("train", 3).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="no subset and no revision"):
        opened(tmp_path / "saved", **named)
