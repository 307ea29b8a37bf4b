"""How a GGUF file's text is cut before byte pairs are merged: by the name that llama.cpp gave it.

transformers takes GPT-2's way for all files of Llama's architecture and Qwen's for Qwen's. Another
way is other tokens, which a model has never seen: spaces before digits that stand alone, numbers
whole that were read in threes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from upcycle_core.checkpoints.writer import write_text
from upcycle_core.errors import Fault

PRE = "tokenizer.ggml.pre"
MODEL = "tokenizer.ggml.model"
ADDS_BOS = "tokenizer.ggml.add_bos_token"
Steps = Sequence[Mapping[str, Any]]


def _bytes(*, words: bool) -> dict[str, Any]:
    """Bytes as letters; with ``words`` cut into words as GPT-2 does."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": words,
    }


def _cut(pattern: str) -> Steps:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return (cut, _bytes(words=False))


def _words(digits: str) -> Steps:
    """Words, numbers of ``digits``, signs with the line ends behind them, and white space."""
    return _cut(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + "|" + SIGNS + SPACE
    )


SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
GPT_2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "mellum")
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
LLAMA_3 = ("llama-bpe", "llama3", "llama-v3", "falcon3")
QWEN = ("qwen2", "deepseek-r1-qwen", "stablelm2")
TEKKEN = ("tekken",)
WAYS: Mapping[str, Steps] = {
    **dict.fromkeys(GPT_2, (_bytes(words=True),)),
    **dict.fromkeys(DIGITS, ({"type": "Digits", "individual_digits": True}, _bytes(words=True))),
    **dict.fromkeys(LLAMA_3, _words(r"\p{N}{1,3}")),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _words(r"\p{N}{1,3}")),
    **dict.fromkeys(QWEN, _words(r"\p{N}")),
    # Where a word's case changes, and slashes that end a line's signs.
    **dict.fromkeys(TEKKEN, _cut(rf"{CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{SPACE}")),
}
"""llama.cpp's names of ways to split text, as tokenizer.json says them."""
WHOLE = (*LLAMA_3, *TEKKEN)
"""A word that is a token is that token, whatever merges would make of it. And a text begins with
the token of its beginning, where the file does not say that it has none."""
UNSAID = (None, "default")
"""Files of before there were names, and of converters that knew none: as transformers reads it."""


def split_faults(values: Mapping[str, Any], path: Path) -> Iterator[Fault]:
    """The fault of a way that is not known.

    Args:
        values: What the file's header says, by key.
        path: The file, for the error.
    """
    said = values.get(PRE)
    if values.get(MODEL) == "gpt2" and said not in (*WAYS, *UNSAID):
        remedy = "how it cuts text is not known here, and another way is other tokens; give "
        remedy += "safetensors of the model with their tokenizer"
        yield Fault(f"{path.name}: {PRE}", said, remedy)


def split_as_said(said: str | None, tokenizer: Path, *, bos: str | None = None) -> None:
    """Let a tokenizer cut text as its file says.

    Args:
        said: The name of the way; one that is not known changes nothing.
        tokenizer: The tokenizer.json that transformers made, changed in place.
        bos: The token of a text's beginning, where the file leaves it to the way whether it stands
            there.
    """
    core = json.loads(tokenizer.read_text(encoding="utf-8"))
    if said is None or said not in WAYS or core["model"]["type"] != "BPE":
        return
    core["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": list(WAYS[said])}
    core["model"]["ignore_merges"] = said in WHOLE
    write_text(tokenizer, json.dumps(core, ensure_ascii=False))
    if bos is not None and said in WHOLE:
        _begin_with(bos, tokenizer)


def _begin_with(bos: str, tokenizer: Path) -> None:
    core = Tokenizer.from_file(str(tokenizer))
    core.post_processor = TemplateProcessing(
        single=[bos, "$A"],
        pair=[bos, "$A", bos, "$B:1"],
        special_tokens=[(bos, core.token_to_id(bos))],
    )
    core.save(str(tokenizer))
