"""Tokenizer classes that rebuild what tokenizer.json says: a text is the same tokens everywhere."""

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from upcycle_core.checkpoints.tokenizer import (
    AS_IT_IS,
    check_tokenizer,
    copy_tokenizer,
    load_tokenizer,
)
from upcycle_core.errors import InputError

TEXT = "In 2024:\n\n1. foo_bar(12345)\n\n    2\t= HELLO's\n  return 100 \n"
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OWN_SIDES = {"GPT2Tokenizer": "right", "LlamaTokenizer": "left"}
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def bytes_core(first):
    """Byte-level BPE that cuts text by ``first``."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([first, BYTES])
    core.decoder = decoders.ByteLevel()
    return trained(core, pre_tokenizers.ByteLevel.alphabet())


def pieces_core(normalizer):
    """BPE as SentencePiece has it, of whole texts."""
    core = Tokenizer(models.BPE(unk_token="<|end|>", fuse_unk=True))
    core.normalizer = normalizer
    core.decoder = decoders.Replace("▁", " ")
    return trained(core, list(set(TEXT)))


def trained(core, alphabet):
    texts = [TEXT * 3, " 2024 12345 123 "] * 50
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return core


OWN = {
    "olmo2": (
        *("GPT2Tokenizer", "olmo2", "flex_olmo"),
        bytes_core(pre_tokenizers.Split(Regex(GPT4), "isolated")),
    ),
    "smollm2": (
        *("GPT2Tokenizer", "llama", "mixtral"),
        bytes_core(pre_tokenizers.Digits(individual_digits=True)),
    ),
    "yi": ("LlamaTokenizer", "llama", "mixtral", pieces_core(normalizers.Replace(" ", "▁"))),
    "mistral": (
        *("LlamaTokenizer", "mistral", "mixtral"),
        pieces_core(
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        ),
    ),
}


@pytest.fixture(params=OWN)
def expert(request, tmp_path):
    """A dense model's directory as people have it: directory, its MoE's kind, its true tokens."""
    kind, dense, moe, core = OWN[request.param]
    directory = tmp_path / "expert"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|end|>", eos_token="<|end|>"
    )
    tokenizer.save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    said = json.loads(settings.read_text()) | {"tokenizer_class": kind}
    settings.write_text(json.dumps(said))
    (directory / "config.json").write_text(json.dumps({"model_type": dense}))
    return directory, moe, core.encode(TEXT).ids


def ids(tokenizer):
    return tokenizer(TEXT, add_special_tokens=False)["input_ids"]


def test_a_text_is_the_same_tokens_of_expert_corpus_and_moe(tmp_path, expert):
    directory, moe, true = expert
    check_tokenizer(directory)
    assert ids(load_tokenizer(directory)) == true
    kinds = {"corpora": None, "moe": moe, "ders": "ders", "simoe": "simoe"}
    for place, model_type in kinds.items():
        copy_tokenizer(directory, tmp_path / place)
        if model_type is not None:
            (tmp_path / place / "config.json").write_text(json.dumps({"model_type": model_type}))
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / place, local_files_only=True)
        assert ids(tokenizer) == ids(load_tokenizer(tmp_path / place)) == true, place
        assert tokenizer.padding_side == OWN_SIDES[expert_class(directory)]


def expert_class(directory):
    return json.loads((directory / "tokenizer_config.json").read_text())["tokenizer_class"]


def test_what_the_files_say_of_padding_comes_first(tmp_path, expert):
    directory, _, _ = expert
    settings = directory / "tokenizer_config.json"
    said = json.loads(settings.read_text()) | {"padding_side": "right", "chat_template": "mine"}
    settings.write_text(json.dumps(said))
    copy_tokenizer(directory, tmp_path / "copy")
    copied = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
    assert copied["padding_side"] == "right"
    assert {name: copied[name] for name in said} == said | {"tokenizer_class": AS_IT_IS}


@pytest.mark.parametrize("text", ["{", "[]"])
def test_settings_that_are_none_are_refused(tmp_path, expert, text):
    directory, _, _ = expert
    (directory / "tokenizer_config.json").write_text(text)
    for call in (check_tokenizer, lambda path: copy_tokenizer(path, tmp_path / "copy")):
        with pytest.raises(InputError, match="cannot be read"):
            call(directory)


@pytest.mark.parametrize("has_settings", [True, False])
def test_roles_that_a_class_alone_says_are_kept(tmp_path, has_settings):
    """As the files of some fine-tunes, which hold a tokenizer.json and a class's name at most."""
    core = bytes_core(pre_tokenizers.Digits(individual_digits=True))
    directory = tmp_path / "expert"
    directory.mkdir()
    text = core.to_str().replace("<|end|>", "<|endoftext|>")
    (directory / "tokenizer.json").write_text(text)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    if has_settings:
        said = json.dumps({"tokenizer_class": "Qwen2Tokenizer"})
        (directory / "tokenizer_config.json").write_text(said)
    copy_tokenizer(directory, tmp_path / "copy")
    for place in ("expert", "copy"):
        loaded = load_tokenizer(tmp_path / place)
        assert loaded.eos_token == "<|endoftext|>", place
        assert ids(loaded) == core.encode(TEXT).ids


@pytest.mark.parametrize("named", ["GPT2Tokenizer", None])
@pytest.mark.parametrize("dense", ["qwen2", "qwen3"])
def test_files_without_a_core_are_the_same_tokens_beside_the_moe(tmp_path, dense, named):
    """As slow tokenizers were saved: which class reads them says the config.json beside them."""
    core = bytes_core(pre_tokenizers.Digits(individual_digits=True))
    directory = tmp_path / "expert"
    directory.mkdir()
    core.model.save(str(directory))  # vocab.json and merges.txt
    said = {"eos_token": "<|end|>"} | ({} if named is None else {"tokenizer_class": named})
    (directory / "tokenizer_config.json").write_text(json.dumps(said))
    (directory / "config.json").write_text(json.dumps({"model_type": dense}))
    true = ids(AutoTokenizer.from_pretrained(directory))
    assert ids(load_tokenizer(directory)) == true
    for place, model_type in {"corpora": None, "moe": f"{dense}_moe", "other": "mixtral"}.items():
        copy_tokenizer(directory, tmp_path / place)
        if model_type is not None:
            (tmp_path / place / "config.json").write_text(json.dumps({"model_type": model_type}))
        for tokenizer in (
            AutoTokenizer.from_pretrained(tmp_path / place),
            load_tokenizer(tmp_path / place),
        ):
            assert ids(tokenizer) == true, place
            assert tokenizer.eos_token == "<|end|>"
