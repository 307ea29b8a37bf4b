import hashlib
import json
import pickle

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.chat import CHATML, save_chat_tokenizer
from tests.pico import save_pico_tokenizer
from upcycle_core.corpora.config import CorpusConfig, Domain, Source
from upcycle_core.corpora.documents import write_documents
from upcycle_core.corpora.reader import TokenCorpus, read_documents
from upcycle_core.corpora.shards import write_corpus, write_encoded, write_split
from upcycle_core.errors import InputError


@pytest.fixture
def documents(tmp_path):
    texts = [f"document {n}: " + "some words " * (n % 7) + "é" for n in range(60)]
    texts.append("a text that names <|endoftext|> in its midst")
    (tmp_path / "a.txt").write_text("\n<|doc|>\n".join(texts))
    out = tmp_path / "documents"
    domain = Domain(train=Source(files=(str(tmp_path / "a.txt"),)))
    write_documents(domain, out, config=CorpusConfig(min_characters=1), seed=0)
    return out


def test_every_document_is_stored_as_its_tokens_alone(documents, tmp_path):
    directory = save_pico_tokenizer(tmp_path / "tokenizer")
    write_corpus(documents, directory, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    before = json.loads((documents / "manifest.json").read_text())
    assert set(manifest["splits"]) == {"train", "calibration", "heldout"}
    for split, facts in manifest["splits"].items():
        corpus = TokenCorpus(tmp_path / "out" / split)
        texts = list(read_documents(documents / f"{split}.parquet"))
        for index, text in enumerate(texts):
            expected = [
                tokenizer.convert_tokens_to_ids(c) if 32 <= ord(c) < 126 else tokenizer.pad_token_id
                for c in text
            ]
            assert corpus.document(index).tolist() == expected
            size = corpus.byte_offsets[index + 1] - corpus.byte_offsets[index]
            assert size == len(text.encode())
        assert len(corpus) == facts["documents"] == len(texts)
        assert len(corpus.tokens) == corpus.offsets[-1] == facts["tokens"]
        assert corpus.bytes == facts["bytes"] == before["splits"][split]["bytes"]
        content = (tmp_path / "out" / split / "tokens.bin").read_bytes()
        assert facts["sha256"] == hashlib.sha256(content).hexdigest()
        assert facts["files"] == before["splits"][split]["files"]
        assert (corpus.eos_id, corpus.vocabulary_size) == (0, 96)
    assert manifest["sources"] == before["sources"]


def test_writing_twice_gives_the_same_bytes(documents, tmp_path):
    directory = save_pico_tokenizer(tmp_path / "tokenizer")
    for name in ("first", "second"):
        write_corpus(documents, directory, tmp_path / name)
    files = [path for path in (tmp_path / "first").rglob("*") if path.is_file()]
    assert len(files) == 3 * 4 + 1
    for path in files:
        other = tmp_path / "second" / path.relative_to(tmp_path / "first")
        assert path.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(("vocabulary", "itemsize"), [(65536, 2), (65537, 4)])
def test_large_vocabularies_take_four_bytes_a_token(tmp_path, vocabulary, itemsize):
    documents = [([vocabulary - 1, 0], 3), ([], 0), ([1], 1)]
    write_split(tmp_path / "split", documents, eos_id=0, vocabulary_size=vocabulary)
    corpus = TokenCorpus(tmp_path / "split")
    assert corpus.tokens.itemsize == itemsize
    assert [corpus.document(i).tolist() for i in range(3)] == [[vocabulary - 1, 0], [], [1]]


def test_a_token_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(OverflowError):
        write_split(tmp_path / "split", [([70000], 1)], eos_id=0, vocabulary_size=96)


def test_a_corpus_without_documents_can_be_read(tmp_path):
    write_split(tmp_path / "split", [], eos_id=0, vocabulary_size=96)
    corpus = TokenCorpus(tmp_path / "split")
    assert (len(corpus), len(corpus.tokens), corpus.bytes) == (0, 0, 0)


def test_a_pickled_corpus_maps_the_file_instead_of_carrying_it(tmp_path):
    write_split(tmp_path / "split", [(list(range(90)) * 100, 9000)], eos_id=0, vocabulary_size=96)
    corpus = TokenCorpus(tmp_path / "split")
    assert isinstance(corpus.tokens, np.memmap)
    carried = pickle.dumps(corpus)
    assert len(carried) < 1000
    assert np.array_equal(pickle.loads(carried).tokens, corpus.tokens)


def test_a_missing_or_truncated_split_is_named(tmp_path):
    with pytest.raises(InputError, match="no tokenised split"):
        TokenCorpus(tmp_path / "absent")
    write_split(tmp_path / "split", [([1, 2, 3], 3)], eos_id=0, vocabulary_size=96)
    (tmp_path / "split" / "tokens.bin").write_bytes(b"\0\0\0\0")
    with pytest.raises(InputError, match="4 bytes for 3 tokens"):
        TokenCorpus(tmp_path / "split")


def test_ids_beyond_the_number_of_tokens_are_written(documents, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_pico_tokenizer(tmp_path / "tokenizer"))
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    core["model"]["vocab"]["o"] = 70_000  # ids between are of no token
    gapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(core)), eos_token="<|endoftext|>"
    )
    write_encoded(tmp_path / "split", documents / "train.parquet", gapped)
    assert TokenCorpus(tmp_path / "split").tokens.max() == 70_000


ALTERNATING = (
    "{% for message in messages if message['role'] != 'system' %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


def chat(said, *, roles=("system", "user", "assistant")):
    text = {"system": "Be kind.", "user": said, "assistant": "so"}
    return [{"role": role, "content": text[role]} for role in roles]


@pytest.mark.parametrize("wrong", [1, 5, 9])
def test_chats_that_the_template_refuses_are_told_together_as_they_begin(tmp_path, wrong):
    directory = save_chat_tokenizer(tmp_path / "model", "chatml", template=ALTERNATING + CHATML)
    twice = ("system", "user", "user", "assistant")
    chats = [chat(f"fine {n}") for n in range(300)]
    chats += [chat(f"bad {n}\n\x1b" + "x" * 99, roles=twice) for n in range(wrong)]
    chats += [chat("fine again")]
    table = {"text": [""] * len(chats), "messages": [json.dumps(one) for one in chats]}
    parquet.write_table(pyarrow.table(table), tmp_path / "train.parquet")
    encoder = AutoTokenizer.from_pretrained(directory)
    with pytest.raises(InputError) as error:
        write_encoded(tmp_path / "split", tmp_path / "train.parquet", encoder)
    first, *others = map(str, error.value.faults)
    begin = "bad 0\\n\\x1b" + "x" * (60 - len("bad 0\n\x1b"))
    assert first == (
        f"chat_template = 'train.parquet, chat 301 (system, user, user, assistant) that begins "
        f"\"{begin}\"': the tokenizer's chat template refuses it (roles must alternate); change "
        "or remove it"
    )
    assert len(others) == min(wrong, 6) - 1
    if wrong > 5:
        more = f"chat_template = '4 more of {len(chats)} documents': they are refused too; "
        assert others[-1] == f"{more}change or remove them"


def test_a_tokenizer_without_a_template_is_told_once(tmp_path):
    directory = save_chat_tokenizer(tmp_path / "model", "chatml", template=None)
    table = {"text": ["", ""], "messages": [json.dumps(chat("a")), json.dumps(chat("b"))]}
    parquet.write_table(pyarrow.table(table), tmp_path / "train.parquet")
    encoder = AutoTokenizer.from_pretrained(directory)
    with pytest.raises(InputError) as error:
        write_encoded(tmp_path / "split", tmp_path / "train.parquet", encoder)
    (fault,) = error.value.faults
    assert (fault.field, fault.value) == ("chat_template", None)


def test_a_tokenizer_without_an_end_token_is_refused(documents, tmp_path):
    directory = save_pico_tokenizer(tmp_path / "tokenizer")
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="no end-of-sequence token"):
        write_corpus(documents, directory, tmp_path / "out")
