"""Copying a checkpoint: what belongs to the model, and nothing else."""

import shutil
from pathlib import Path

from upcycle_core.checkpoints.given_as import GIVEN_AS

PATTERNS = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    GIVEN_AS,
)


def copy_checkpoint(source: Path, out: Path) -> None:
    """Copy weights, configuration and tokenizer of ``source`` into the directory ``out``.

    Pickled weights, training states and other files stay behind.
    """
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted({file for pattern in PATTERNS for file in source.glob(pattern)}):
        shutil.copyfile(file, out / file.name)
