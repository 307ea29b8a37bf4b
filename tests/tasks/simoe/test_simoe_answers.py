"""What a model of the table is asked, and what is looked at of it."""

import json

import pytest
from pico import save_pico

from tasks.simoe.answers import answers_piece
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.progress import Silent

ASKED = {"bos": "auto", "precision": "fp32", "device": "cpu"}
ASKED |= {"max_new_tokens": 3, "batch_size": 2}


@pytest.fixture
def instructions(tmp_path):
    folder = tmp_path / "instructions"
    folder.mkdir()
    for split, count in (("seen", 3), ("unseen", 2)):
        rows = [
            {"id": f"{split}-{n}", "task": "add", "category": split, "domain": "sums"}
            | {"prompt": f"{n} and {n}?", "response": f"{2 * n}"}
            for n in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_no_weight_of_a_rival_is_read_to_count_them(tmp_path, instructions, monkeypatch):
    def read(*_args, **_options):
        raise AssertionError("a rival is read whole")

    monkeypatch.setattr("tasks.simoe.answers.load_causal_lm", read)
    model = save_pico(tmp_path / "model", tie_word_embeddings=True)
    answers_piece(
        out=tmp_path / "out", progress=Silent(), model=model, instructions=instructions, **ASKED
    )
    found = json.loads((tmp_path / "out" / "answers.json").read_text())
    assert found["parameters"] == sum(p.numel() for p in load_causal_lm(model).parameters())
    assert "structure" not in found
