"""Pico models of one architecture that share no seed and no vocabulary."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.pico import save_pico
from tests.vocabularies import ACCENTS, CODE, NATURE, byte_level, shuffled, tokens_of
from upcycle_core.backbone.vocabulary import Union, unite_vocabularies

RULING = "beta"
# The end that Qwen2's tokenizer adds to a vocabulary that has it not.
END = "<|endoftext|>"


def save_disparate(folder: Path, family: str = "llama", **overrides) -> dict[str, Path]:
    """Three models: two vocabularies of one size with other ids and tokens, and a larger one.

    The matrices of each are longer than its vocabulary, and ``RULING`` has an end of its own.
    """
    nature = byte_level(folder / "nature", NATURE, merges=20, specials=[END])
    code = byte_level(folder / "code", CODE, merges=20, specials=[END])
    accents = byte_level(folder / "accents", ACCENTS + NATURE, merges=40, specials=[END, "<|im|>"])
    tokenizers = {"alpha": nature, "beta": shuffled(code, folder / "shuffled"), "gamma": accents}
    tables = {name: tokens_of(directory) for name, directory in tokenizers.items()}
    assert len(tables["alpha"]) == len(tables["beta"]) < len(tables["gamma"])
    models = {}
    for seed, (name, tokenizer) in enumerate(tokenizers.items()):
        overrides["vocab_size"] = len(tables[name]) + seed
        overrides["eos_token_id"] = tables[name][END.encode()]
        overrides["bos_token_id"] = tables[name][b"a"]
        models[name] = save_pico(folder / name, family, seed=seed, **overrides)
        shutil.copytree(tokenizer, models[name], dirs_exist_ok=True)
    return models


def united(models: dict[str, Path], ruling: str = RULING) -> Union:
    """The union of the models' vocabularies, in their order."""
    return unite_vocabularies(list(models.values()), ruling=list(models).index(ruling))


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    found = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found
