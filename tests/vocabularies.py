"""Tiny tokenizers of the kinds that models have, trained on a line of text."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|end|>"
NATURE = "the cat sat on the mat and the bat ate the rat; the fat hat"
CODE = "def total(x):\n    return x + 1\n\ndef other(y):\n    return y + 1\n"
ACCENTS = "naïve café – naïve café – 中文中文中文 中文"
TEXTS = [
    NATURE,
    CODE,
    ACCENTS,
    "return the cat; def café(x)",
    "  two  spaces\tand\n\nlines 😀 über",
    "A<0x41>▁ ĠĊ \ue000",
    "",
]


def byte_level(
    directory: Path,
    text: str,
    *,
    merges: int,
    specials: Sequence[str] = (END,),
    alphabet: bool = True,
    ignore_merges: bool = False,
) -> Path:
    """Byte-level BPE; with ``alphabet`` all 256 bytes are tokens."""
    core = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) if alphabet else []
    if not alphabet:
        letters = sorted(set(text.replace(" ", "Ġ").replace("\n", "Ċ")))
    trainer = trainers.BpeTrainer(
        vocab_size=len(specials) + len(letters) + merges,
        special_tokens=list(specials),
        initial_alphabet=letters,
        show_progress=False,
    )
    core.train_from_iterator([text], trainer)
    return _saved(core, directory, specials[0])


def pieces(directory: Path, text: str, *, merges: int, fallback: bool = True) -> Path:
    """BPE as sentencepiece's models are converted to; with ``fallback`` all bytes are tokens."""
    core = Tokenizer(models.BPE())
    core.normalizer = _spaces()
    letters = sorted(set(text.replace(" ", "▁")))
    trainer = trainers.BpeTrainer(
        vocab_size=1 + len(letters) + merges,
        special_tokens=["<s>"],
        initial_alphabet=letters,
        show_progress=False,
    )
    core.train_from_iterator([text], trainer)
    content = json.loads(core.to_str())
    if fallback:
        vocab = {"<s>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
        learned = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
        for token in learned[1:]:
            vocab[token] = len(vocab)
        content["model"] |= {"vocab": vocab, "byte_fallback": True}
    core = Tokenizer.from_str(json.dumps(content))
    core.decoder = _pieces_decoder()
    return _saved(core, directory, "<s>")


def unigram(directory: Path, text: str) -> Path:
    """Unigram over sentencepiece's spaces, without bytes."""
    core = Tokenizer(models.Unigram())
    core.normalizer = _spaces()
    trainer = trainers.UnigramTrainer(
        vocab_size=30, special_tokens=["<unk>", "<s>"], unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator([text], trainer)
    core.decoder = _pieces_decoder()
    return _saved(core, directory, "<s>")


def three_vocabularies(folder: Path) -> list[Path]:
    """Two byte-level tokenizers of other texts and a sentencepiece one."""
    return [
        byte_level(folder / "nature", NATURE, merges=30),
        byte_level(folder / "mixed", CODE + ACCENTS, merges=60, specials=["<|end|>", "<|im|>"]),
        pieces(folder / "pieces", NATURE + " " + ACCENTS, merges=30),
    ]


def core_of(directory: Path) -> Tokenizer:
    """The tokenizer of a directory, as its file has it."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def edited(source: Path, out: Path, change: Callable[[dict], object]) -> Path:
    """A copy of a tokenizer whose tokenizer.json went through ``change``."""
    out.mkdir()
    for file in source.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    core = json.loads((out / "tokenizer.json").read_text())
    change(core)
    (out / "tokenizer.json").write_text(json.dumps(core))
    return out


def shuffled(source: Path, out: Path, seed: int = 0) -> Path:
    """A copy of a tokenizer with other ids for the same tokens."""

    def shuffle(core: dict) -> None:
        vocab = core["model"]["vocab"]
        order = torch.randperm(len(vocab), generator=torch.Generator().manual_seed(seed)).tolist()
        core["model"]["vocab"] = {token: order[id] for token, id in vocab.items()}
        for token in core["added_tokens"]:
            token["id"] = order[token["id"]]

    return edited(source, out, shuffle)


def tokens_of(directory: Path) -> dict[bytes, int]:
    """Oracle: the bytes of every token of a byte-level or sentencepiece vocabulary, and its id."""
    core = json.loads((directory / "tokenizer.json").read_text())
    added = {token["content"] for token in core["added_tokens"]}
    shown = [chr(b) for b in range(256) if 33 <= b <= 126 or (b >= 161 and b != 173)]
    letters = {c: ord(c) for c in shown}
    letters |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if chr(b) not in shown)}
    found = {}
    for content, id in sorted(core["model"]["vocab"].items(), key=lambda entry: "<0x" in entry[0]):
        if core["model"]["byte_fallback"]:
            single = content.startswith("<0x") and bytes.fromhex(content[3:5])
            text = single or content.replace("▁", " ").encode()
        else:
            text = bytes(letters[c] for c in content) if content not in added else content.encode()
        found.setdefault(text, id)
    return found


def _spaces() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def _pieces_decoder() -> decoders.Decoder:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])


def _saved(core: Tokenizer, directory: Path, end: str) -> Path:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=end, eos_token=end)
    tokenizer.save_pretrained(directory)
    return directory
