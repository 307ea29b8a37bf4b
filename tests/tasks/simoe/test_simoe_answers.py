"""What a model of the table is asked, and what is looked at of it."""

import json

import pytest
from pico import save_pico
from test_simoe_faults import VALID

from infra.cluster.pieces import finish, is_finished, read_done
from infra.cluster.worker import Performed
from tasks.engine.stage_run import Session, StageRun
from tasks.engine.workspace import Workspace
from tasks.recipes import validate
from tasks.simoe.answers import answer_arguments, answers, answers_piece
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


def test_a_killed_flow_goes_on_behind_the_splits_that_are_asked(
    tmp_path, instructions, monkeypatch
):
    recipe, workspace = validate(VALID), Workspace(tmp_path / "home")
    workspace.root.mkdir()
    instructions.rename(workspace.path("instructions"))
    save_pico(workspace.path("seed"))
    run_names, dying = [], ["structure"]

    def run_pieces(pieces, *, directory, **_options):
        for piece in pieces:
            if not is_finished(directory, piece.name):
                run_names.append(piece.name)
                if piece.name in dying:
                    raise KeyboardInterrupt
                part = directory / f"{piece.name}.partial"
                result = piece.function(out=part, progress=Silent(), **piece.arguments)
                done = Performed(result, 0)
                finish(directory, piece.name, done, unfinished=part, started=0.0, ended=0.0)
        return {piece.name: read_done(directory, piece.name) for piece in pieces}

    monkeypatch.setattr("tasks.engine.stage_run.run_pieces", run_pieces)

    def ask(out):
        session = Session(recipe, workspace, log=print)
        answers.function(StageRun(session, answers, "seed", out=out, mark="mark", recorder=None))

    (tmp_path / "killed").mkdir()
    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path / "killed")
    dying.clear()
    (tmp_path / "out").mkdir()
    ask(tmp_path / "out")
    assert run_names == ["seen", "unseen", "structure", "structure"]
    arguments = answer_arguments(recipe, workspace.path) | {"model": workspace.path("seed")}
    answers_piece(out=tmp_path / "at once", progress=Silent(), **arguments)
    found, whole = (
        {file.name: file.read_text() for file in (tmp_path / out).iterdir()}
        for out in ("out", "at once")
    )
    assert set(found) == {"answers.json", "seen.jsonl", "unseen.jsonl"}
    assert found == whole


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
