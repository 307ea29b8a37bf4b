"""What of a task lies outside the workspace decides whether it is made anew."""

import json
from pathlib import Path

import pytest
import yaml

from tasks.data.task_sets import task_fingerprint, task_positions, task_set_faults
from tasks.engine.sources import CODE
from tasks.recipes import load_recipe
from tests.pico import save_pico


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    definition = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "{folder}/rows.jsonl"}},
        "test_split": "test",
        "program": "assert {{response}} == {{answer}}",
    }
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump(definition))
    changes = [
        f"tasks.sums={{definition: {tmp_path / 'sums.yaml'}}}",
        f"task_evaluation.folder={tmp_path / 'data'}",
    ]
    return lambda *more: load_recipe(CODE / "recipes" / "demo.yaml", [*changes, *more])


@pytest.mark.parametrize("file", ["data/rows.jsonl", "sums.yaml"])
def test_the_fingerprint_follows_data_and_definition(recipe, tmp_path, file):
    before = task_fingerprint(recipe(), "sums")
    assert task_fingerprint(recipe(), "sums") == before
    path: Path = tmp_path / file
    path.write_text(path.read_text() + "\n")
    after = task_fingerprint(recipe(), "sums")
    assert after.keys() == before.keys()
    assert len({*after.items()} - {*before.items()}) == 1


def test_positions_are_known_before_there_is_a_model(recipe, tmp_path):
    assert task_positions(recipe("seed_model.shape.max_positions=777"), tmp_path) == 777
    long, short = (
        save_pico(tmp_path / f"{n}", max_position_embeddings=n, seed=n) for n in (300, 200)
    )
    given = recipe(f"seed_model.model={long}", f"domains.python.expert={short}")
    assert task_positions(given, tmp_path / "models") == 200
    gone = recipe(f"seed_model.model={long}", "domains.python.expert=/gone")
    assert task_positions(gone, tmp_path / "models") == 300


def test_programs_need_leave(recipe):
    [fault] = task_set_faults(recipe())
    assert "task_evaluation.code.allow" in str(fault)
    assert not task_set_faults(recipe("task_evaluation.code.allow=true"))
