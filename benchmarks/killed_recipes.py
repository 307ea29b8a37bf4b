"""Small recipes of every method, and what ``benchmarks.kills`` starts with them."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORDS = {
    "colours": [
        "red",
        "green",
        "blue",
        "white",
        "black",
        "brown",
        "pink",
        "grey",
        "orange",
        "violet",
        "cyan",
        "teal",
    ],
    "letters": [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
    ],
    "numbers": [
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
        "ten",
        "eleven",
        "twelve",
    ],
}
OLD = ("letters", "numbers")
SEPARATOR = "\n<|doc|>\n"
TRAINING = {"batch_size": 4, "sequence_length": 32, "warmup_steps": 2, "precision": "fp32"}
TRAINING |= {"checkpoint_steps": 5, "learning_rate": 1e-3}


@dataclass(frozen=True)
class Killed:
    """What is run.

    Args:
        recipes: Their values by name.
        command: Module and arguments; ``{name}`` is the file of a recipe.
        before: What is run first, in peace.
    """

    recipes: Mapping[str, Mapping[str, Any]]
    command: Sequence[str]
    before: Sequence[str] = ()


def write_texts(folder: Path) -> Path:
    """Documents of each domain's own words, and instructions about them."""
    folder.mkdir()
    asks = []
    for domain, words in WORDS.items():
        draw = random.Random(domain)
        for split, count in (("train", 60), ("heldout", 8)):
            texts = [" ".join(draw.choices(words, k=60)) + f" {split} {i}" for i in range(count)]
            (folder / f"{domain}-{split}.txt").write_text(SEPARATOR.join(texts) + "\n")
        for _ in range(40):
            some = draw.sample(words, 3)
            for ask, answer in (("first", some[0]), ("last", some[-1]), ("second", some[1])):
                row = {"category": ask, "task": f"{ask}-{domain}", "domain": domain}
                asks.append(row | {"prompt": f"{ask}: {' '.join(some)}", "response": answer})
    (folder / "asks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asks))
    return folder


def teach(texts: Path, flow: str) -> None:
    """New text, where the flow is about that."""
    if flow == "retrain":
        file = texts / "letters-train.txt"
        file.write_text(file.read_text() + f"{SEPARATOR}alpha and more of it" * 9)


def _recipe(texts: Path, domains: Sequence[str] = OLD) -> dict[str, Any]:
    shape = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "attention_heads": 2}
    shape |= {"key_value_heads": 1, "max_positions": 128}
    plain: dict[str, Any] = {f"sweep_{part}": [] for part in ("top_k", "ridge_lambda", "window")}
    return {
        "name": "kills",
        "domains": {
            domain: {
                split: {"files": [str(texts / f"{domain}-{split}.txt")]}
                for split in ("train", "heldout")
            }
            for domain in domains
        },
        "tokenizer": {"vocabulary_size": 320},
        "seed_model": {"shape": shape, "training": {**TRAINING, "steps": 20}},
        "experts": {"training": {**TRAINING, "steps": 15}},
        "statistics": {"sequence_length": 32, "batch_size": 4},
        "evaluation": {
            "sequence_length": 32,
            "batch_size": 4,
            "random_routing_seeds": [0],
            **plain,
        },
        "compute": {"cpus": 2},
        "registry": {"certificate": "none"},
    }


def _dume(texts: Path) -> Killed:
    return Killed({"recipe": _recipe(texts)}, ["flows.dume", "{recipe}"])


def _symphony(texts: Path) -> Killed:
    read = {"tokens": 400, "sequence_length": 32, "batch_size": 4}
    own = {"alignment": {"residual": "procrustes"}, "calibration": read}
    trained = {"training": {**TRAINING, "steps": 10}}
    more = {"symphony": own, "moe": {"top_k": 2}, "post_training": trained}
    return Killed({"recipe": {**_recipe(texts), **more}}, ["flows.symphony", "{recipe}"])


def _ders(texts: Path) -> Killed:
    codecs = {"rank-4": {"codec": "low_rank", "rank": 4}}
    compression = {"compression": {"codecs": codecs, "tolerance": 90}}
    return Killed({"recipe": {**_recipe(texts), **compression}}, ["flows.ders", "{recipe}"])


def _simoe(texts: Path) -> Killed:
    values = _recipe(texts)
    del values["experts"], values["statistics"], values["evaluation"]
    tuned = {**TRAINING, "steps": 30, "sequence_length": 48, "learning_rate": 3e-3}
    rates = {"mask_learning_rate": 0.3, "multiplier_learning_rate": 1.0}
    more: dict[str, Any] = {
        "simoe": {"experts": 3, "tau": 0.5, **rates},
        "tuning": {"training": {**tuned, "weight_decay": 0.0}, "max_new_tokens": 6},
        "instructions": {
            "sources": {"asks": {"files": [str(texts / "asks.jsonl")]}},
            "unseen": ["second"],
            "test_per_task": 6,
        },
    }
    values |= more
    values["registry"]["gate"] = {"metric": "rouge_l_unseen"}
    return Killed({"recipe": values}, ["flows.simoe", "{recipe}"])


def _retrain(texts: Path) -> Killed:
    recipes = {"recipe": _recipe(texts)}
    return Killed(recipes, ["flows.retrain", "{recipe}"], ["flows.dume", "{recipe}"])


def _grow(texts: Path) -> Killed:
    recipes = {"recipe": _recipe(texts), "grown": _recipe(texts, sorted(WORDS))}
    return Killed(recipes, ["flows.grow", "{grown}", "colours"], ["flows.dume", "{recipe}"])


RECIPES: Mapping[str, Callable[[Path], Killed]] = {
    "dume": _dume,
    "symphony": _symphony,
    "ders": _ders,
    "simoe": _simoe,
    "retrain": _retrain,
    "grow": _grow,
}
