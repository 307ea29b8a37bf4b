"""The model of a certificate: its changed copies, and what our own forward pass says of each."""

import json
import shutil
from collections.abc import Callable
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from infra.readers.ask.arrived import wanted
from tasks.scoring.architectures import register_architectures
from upcycle_core.certificate.answers import Answers, ours, write_prompts
from upcycle_core.certificate.changed import change
from upcycle_core.checkpoints.load import DTYPES, load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.encoding import asked
from upcycle_core.memory import free_memory

PROMPT_TOKENS, NEW_TOKENS = 24, 16
LONGEST_WINDOW = 512
"""Tokens of the longest sliding window that a prompt is made longer than."""
PROBE = (
    "Années 1984-2026:  3.14159 x 1000000\n\tif it's 'né' != \"naïf\" {\n\n\n  don't(); }"
    "  €5 \u2013 α→β 你好\n"
)
"""A text in which tokenizers differ that cut it otherwise: digits, spaces, quotes, letters that are
no ASCII."""
AS_IT_IS, EXCHANGED, ZEROED = "as-it-is", "exchanged", "zeroed"
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "F32": 4.0, "F16": 2.0, "Q8_0": 34 / 32}
"""Of a weight in each form: Q8_0 has blocks of 32 bytes and a scale of two."""
# What a reader holds beside the weights: buffers, and the largest tensor once more.
ROOM = 1.5
# Of a disk: vectors of a GGUF file stay in fp32, and there are tokenizers, answers and logs.
SPARE = 1.02


class Source:
    """The model, its changed copies, and what our own forward pass says of each.

    Args:
        files: Of a registered version.
        folder: Where the copies go.
        arrived: From the name of a variant to the files that readers get in place of ours: for
            tests, which damage them.
        made_of: What it was expanded from, in words; empty for a version itself.
    """

    def __init__(
        self,
        files: Path,
        folder: Path,
        arrived: Callable[[str], Path] | None = None,
        *,
        made_of: str = "",
    ) -> None:
        self.files, self.folder, self.made_of = files, folder, made_of
        self._arrived = arrived
        self.checkpoint = CheckpointReader(files, integers=True)
        self.own_code = "auto_map" in self.checkpoint.config
        self.fault = ""
        """What is wrong with it whoever reads it; empty if nothing is known."""
        self.paths = {AS_IT_IS: files}
        if not self.own_code:
            self.paths |= {name: folder / name for name in (EXCHANGED, ZEROED)}
        self._made = {AS_IT_IS}

    def path(self, variant: str) -> Path:
        """Our files of a variant, made when they are asked for."""
        if variant not in self._made:
            how: Any = variant
            # What a full disk left half written is in the way of a second try.
            shutil.rmtree(self.paths[variant], ignore_errors=True)
            change(self.files, self.paths[variant], how)
            self._made.add(variant)
        return self.paths[variant]

    def handed(self, variant: str) -> Path:
        """The files of a variant that readers get."""
        return self.path(variant) if self._arrived is None else self._arrived(variant)

    @cached_property
    def weights(self) -> int:
        """How many numbers it has."""
        return sum(torch.Size(info.shape).numel() for info in self.checkpoint.tensors.values())

    def memory(self, form: str) -> float:
        """Bytes that its weights and a reader's buffers take in a form."""
        return self.weights * WEIGHT_BYTES[form] * ROOM

    @cached_property
    def precision(self) -> str:
        """That of our own forward pass: ``fp32``, or ``bf16`` where memory has no room for it."""
        return "fp32" if self.own_code or self.memory("fp32") <= free_memory() else "bf16"

    def reason_for_memory(self, form: str) -> str | None:
        """Why memory is too small to ask for a form; None if it is not."""
        needed, free = max(self.memory(form), self.memory(self.precision)), free_memory()
        if needed <= free:
            return None
        return f"needs {_gb(needed)} of memory in {form}, {_gb(free)} are free"

    def reason_for_disk(self, form: str) -> str | None:
        """Why the disk is too small for the copies that a form needs; None if it is not."""
        stored = sum(
            torch.Size(info.shape).numel() * info.dtype.itemsize
            for info in self.checkpoint.tensors.values()
        )
        needed = 1.0 * stored * len(set(self.paths) - self._made)
        if form in ("F32", "F16", "Q8_0"):
            needed += self.weights * WEIGHT_BYTES[form]
        return reason_for_disk(self.folder, needed)

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's own."""
        return load_tokenizer(self.files)

    @cached_property
    def specials(self) -> set[int]:
        """Ids that end or frame text."""
        return set(self.tokenizer.all_special_ids)

    @cached_property
    def plain(self) -> int:
        """The id of a printable character."""
        ids = range(len(self.tokenizer))
        texts = ((i, self.tokenizer.decode([i])) for i in ids if i not in self.specials)
        return next((i for i, text in texts if text.isascii() and text.isprintable() and text), 0)

    def wanted(self, form: str) -> Path:
        """What to look for in what a reader has loaded: all tensors, in a form's type."""
        path = self.folder / f"wanted-{form}.json"
        if not path.exists():
            sought = {name: wanted(self._typed(name, form)) for name in self.checkpoint.tensors}
            path.write_text(json.dumps(sought))
        return path

    def _typed(self, name: str, form: str) -> torch.Tensor:
        tensor = self.checkpoint.tensor(name)
        return tensor.to(DTYPES[form]) if tensor.is_floating_point() else tensor

    @cached_property
    def window(self) -> int | None:
        """Tokens that layers with a sliding window look back at; None where that hides nothing."""
        window = self._said.get("sliding_window")
        is_used = self._said.get("use_sliding_window", True)
        return window if is_used and window and window < self._room else None

    @property
    def tries_window(self) -> bool:
        """Whether a prompt is longer than the window: who lost that answers it otherwise."""
        window, needed = self.window, PROMPT_TOKENS + NEW_TOKENS
        return window is not None and window <= min(LONGEST_WINDOW, self._room - needed)

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return self._said.get("num_hidden_layers", 1)

    @property
    def _said(self) -> dict[str, Any]:
        """Its configuration, of a DeRS model that of the dense one too."""
        return {**self.checkpoint.config.get("dense", {}), **self.checkpoint.config}

    @property
    def _room(self) -> int:
        return self._said.get("max_position_embeddings", 0)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """What each expert writes; and one that says it again until no short window holds it."""
        written = write_prompts(self._loaded(), length=PROMPT_TOKENS, specials=self.specials)
        if self.window is None or not self.tries_window:
            return written
        again = cycle(token for ids in written for token in ids)
        return [*written, list(islice(again, self.window + PROMPT_TOKENS))]

    @cached_property
    def answers(self) -> dict[str, Answers]:
        """Ours, of each variant."""
        return {
            variant: ours(self._loaded(variant), self.prompts, tokens=NEW_TOKENS)
            for variant in self.paths
        }

    def spoken(self, bos: Any) -> list[tuple[list[int], list[float]]]:
        """Ids that we say to the prompts as text, and margins; ``bos`` stands before a text."""
        ids = [asked(self.tokenizer, text, bos=bos) for text in self.texts]
        said = ours(self._loaded(), ids, tokens=NEW_TOKENS)
        return list(zip(said.greedy, said.margins, strict=True))

    @cached_property
    def read(self) -> list[list[int]]:
        """Ids of the prompts as text and of ``PROBE``, without special tokens."""
        return [asked(self.tokenizer, text, bos="never") for text in [*self.texts, PROBE]]

    def _loaded(self, variant: str = AS_IT_IS) -> Any:
        register_architectures()
        return load_causal_lm(self.path(variant), dtype=DTYPES[self.precision], device="cpu")

    def request(self, form: str, *, looks: bool) -> dict[str, Any]:
        """What a reader is asked, and whether it is asked for the places of all tensors."""
        return {
            "prompts": self.prompts,
            "texts": self.texts,
            "read": [*self.texts, PROBE],
            "tokens": NEW_TOKENS,
            "vocabulary": self.answers[AS_IT_IS].first.shape[1],
            "own_code": self.own_code,
            "precision": form if form in DTYPES else "",
            "plain": self.plain,
            "threads": max(1, torch.get_num_threads() // 2),
            "wanted": str(self.wanted(form)) if looks else "",
        }

    @cached_property
    def texts(self) -> list[str]:
        """What experts wrote as text, for readers that speak in text."""
        written = [ids for ids in self.prompts if len(ids) <= PROMPT_TOKENS]
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in written]


def free_disk(folder: Path) -> int:
    """Bytes that may be written into a folder."""
    return shutil.disk_usage(folder).free


def reason_for_disk(folder: Path, needed: float) -> str | None:
    """Why ``needed`` bytes cannot be written into a folder; None if they can."""
    free = free_disk(folder)
    if needed * SPARE <= free:
        return None
    remedy = "free some, or name a folder on a larger disk in TMPDIR"
    return f"needs {_gb(needed * SPARE)} of disk for copies, {_gb(free)} are free; {remedy}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size > 5e7 else f"{size / 1e6:.2g} MB"
