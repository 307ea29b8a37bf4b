"""Small texts and recipes on which the whole pipeline runs in seconds."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

WORDS = {
    name: words.split()
    for name, words in {
        "letters": "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu",
        "numbers": "one two three four five six seven eight nine ten eleven twelve",
        "colours": "red green blue white black brown pink grey orange violet cyan teal",
    }.items()
}
DOMAINS = tuple(WORDS)
TRAINING = {
    "batch_size": 4,
    "sequence_length": 32,
    "warmup_steps": 2,
    "precision": "fp32",
    "checkpoint_steps": 5,
    "log_steps": 2,
}
"""What every pico training has; its steps and learning rate are its own."""


def write_texts(
    folder: Path,
    *,
    documents: int = 60,
    heldout: int = 8,
    words: int = 60,
    domains: tuple[str, ...] = DOMAINS,
) -> Path:
    """``FOLDER/DOMAIN/{train,heldout,elsewhere}.txt``: each domain has its own words."""
    for domain in domains:
        draw = random.Random(domain)
        (folder / domain).mkdir(parents=True)
        for split, count in (("train", documents), ("heldout", heldout), ("elsewhere", heldout)):
            texts = [
                " ".join(draw.choice(WORDS[domain]) for _ in range(words)) + f" {split} {i}"
                for i in range(count)
            ]
            (folder / domain / f"{split}.txt").write_text("\n<|doc|>\n".join(texts) + "\n")
    return folder


def pico_recipe(
    folder: Path, *, name: str = "pico", domains: tuple[str, ...] = DOMAINS
) -> dict[str, Any]:
    """Plain values of a recipe over ``write_texts``' folder: H=32, 2 layers, a few steps."""
    return {
        "name": name,
        "folder": str(folder),
        "domains": {
            domain: {
                "train": {"files": [f"{{folder}}/{domain}/train.txt"]},
                "heldout": {"files": [f"{{folder}}/{domain}/heldout.txt"]},
            }
            for domain in domains
        },
        "tokenizer": {"vocabulary_size": 320},
        "seed_model": {
            "shape": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "layers": 2,
                "attention_heads": 2,
                "key_value_heads": 1,
                "max_positions": 128,
            },
            "training": {**TRAINING, "steps": 20, "learning_rate": 3e-3},
        },
        "experts": {"training": {**TRAINING, "steps": 15, "learning_rate": 1e-3}},
        "statistics": {"sequence_length": 32, "batch_size": 4, "position_buckets": [2, 8]},
        "evaluation": {
            "sequence_length": 32,
            "batch_size": 4,
            "random_routing_seeds": [0, 1],
            "sweep_top_k": [1, 2],
            "sweep_ridge_lambda": [0.01, 100.0],
            "sweep_window": [2, 8],
        },
        "compute": {"cpus": 1},
        "registry": {"certificate": "none"},  # readers take a quarter of a minute a version
    }


def save_recipe(path: Path, values: dict[str, Any]) -> Path:
    """Write ``values`` as YAML."""
    path.write_text(yaml.safe_dump(values))
    return path


def write_choices(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A task of the harness, answered by likelihood: ``rows`` of prompt and choices, the first of
    which is right, in ``file``; the definition beside it, which looks for it in ``{folder}``."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    definition = {
        "task": file.stem,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{{folder}}/{file.name}"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "choices",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    path = file.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(definition))
    return path
