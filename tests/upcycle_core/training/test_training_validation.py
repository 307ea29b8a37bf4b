import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.pico import VOCABULARY, save_pico
from tests.upcycle_core.moe.joined import join
from tests.upcycle_core.training.runs import (
    AnswerRows,
    RandomRows,
    Recorder,
    run,
    settings,
    weights,
)
from upcycle_core.errors import InputError
from upcycle_core.training.config import MoEObjective


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A model with dropout, so that a random number drawn in between would show."""
    return join(tmp_path_factory.mktemp("moe"), top_k=2, attention_dropout=0.2).model


def slow_loss(directory, rows):
    """Mean over all targets of all rows, one row at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    losses = []
    for index in range(len(rows)):
        row = rows[index]
        row = row if isinstance(row, dict) else {"input_ids": row, "labels": row}
        with torch.no_grad():
            logits = model(
                **{name: values[None] for name, values in row.items() if name != "labels"}
            ).logits[0]
        for place in range(len(logits) - 1):
            if row["labels"][place + 1] != -100:
                losses.append(
                    functional.cross_entropy(logits[place].double(), row["labels"][place + 1])
                )
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize("rows", [RandomRows(7, 5), AnswerRows(7, 5)], ids=["plain", "answers"])
def test_the_validation_loss_is_the_mean_over_all_targets(tmp_path, moe, rows):
    recorder = Recorder()
    config = settings(checkpoint_steps=2, evaluation_steps=4)
    result = run(
        tmp_path, moe, config=config, validation=rows, objective=MoEObjective(), progress=recorder
    )
    curve = {p["step"]: p["validation_loss"] for p in result.curves if "validation_loss" in p}
    assert list(curve) == [4, 6]  # every four steps, and at the end
    assert result.validation_loss == curve[6]
    assert result.validation_loss == pytest.approx(slow_loss(tmp_path / "out", rows), rel=1e-5)
    told = {p["step"]: p["validation_loss"] for p in recorder.points if "validation_loss" in p}
    assert told == curve


def test_validation_leaves_no_trace_in_the_training(tmp_path, moe):
    config = {"steps": 8, "checkpoint_steps": 2}
    with_ = settings(**config, evaluation_steps=2)
    objective = MoEObjective(balance_coefficient=0.1, watch_steps=2)
    watched = run(
        tmp_path, moe, "a", config=with_, validation=RandomRows(5, 9), objective=objective
    )
    blind = run(tmp_path, moe, "b", config=settings(**config), objective=objective)
    a, b = (tmp_path / name / "model.safetensors" for name in "ab")
    assert a.read_bytes() == b.read_bytes()
    assert [p for p in watched.curves if "loss" in p] == blind.curves
    assert blind.validation_loss is None


def test_without_evaluation_steps_it_is_measured_at_the_end(tmp_path, moe):
    result = run(tmp_path, moe, validation=RandomRows(3, 9))
    assert [p["step"] for p in result.curves if "validation_loss" in p] == [6]


class HalfRows(RandomRows):
    """One half of the vocabulary: learning it makes the other half ever less likely."""

    def __init__(self, count, salt=0, *, upper=False):
        super().__init__(count, salt)
        self.first = VOCABULARY // 2 if upper else 0

    def __getitem__(self, index):
        return self.first + super().__getitem__(index) // 2


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_best_weights_come_back_whole(tmp_path, family):
    source = join(tmp_path / "moe", family, top_k=2).model
    config = settings(steps=8, checkpoint_steps=1, evaluation_steps=2, learning_rate=2e-2)
    rows, validation = HalfRows(16), HalfRows(6, 9, upper=True)
    last = run(tmp_path, source, "last", config=config, rows=rows, validation=validation)
    curve = {p["step"]: p["validation_loss"] for p in last.curves if "validation_loss" in p}
    best = min(curve, key=curve.get)
    assert best < 6, "the test needs a best that would be pruned"
    config = settings(
        steps=8, checkpoint_steps=1, evaluation_steps=2, learning_rate=2e-2, keep="best"
    )
    result = run(tmp_path, source, "best", config=config, rows=rows, validation=validation)
    assert result.validation_loss == min(curve.values())
    kept = {path.name for path in (tmp_path / "best-checkpoints").iterdir()}
    assert kept == {f"checkpoint-{best}", "checkpoint-7", "checkpoint-8"}
    found = slow_loss(tmp_path / "best", validation)
    assert found == pytest.approx(min(curve.values()), rel=1e-5)
    # Weights after `best` steps, from a training that was no longer.
    short = settings(steps=best, checkpoint_steps=1, learning_rate=2e-2)
    run(tmp_path, source, "short", config=short, rows=rows)
    whole, expected = weights(tmp_path / "best"), weights(tmp_path / "short")
    assert all(torch.equal(whole[name], expected[name]) for name in expected)
    (tmp_path / "best" / "model.safetensors").unlink()
    assert run(tmp_path, source, "best", config=config, rows=rows, validation=validation) == result
    again = weights(tmp_path / "best")
    assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("changes", "validation", "message"),
    [
        ({"keep": "best"}, RandomRows(4), r"training.keep = 'best'.*set evaluation_steps"),
        ({"evaluation_steps": 5, "checkpoint_steps": 2}, RandomRows(4), r"multiple of .* = 2"),
        ({"evaluation_steps": 100}, None, "no validation rows"),
        ({"steps": 0}, None, r"training.steps = 0: trains on no token"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, validation, message):
    with pytest.raises(InputError, match=message):
        run(
            tmp_path,
            save_pico(tmp_path / "model"),
            config=settings(**changes),
            validation=validation,
        )


def test_validation_rows_of_another_length_are_refused(tmp_path):
    class Long(RandomRows):
        def __getitem__(self, index):
            return super().__getitem__(index).repeat(2)

    with pytest.raises(InputError, match="rows of validation have 32 tokens"):
        run(tmp_path, save_pico(tmp_path / "model"), validation=Long(3))


def test_a_mapping_without_labels_is_refused(tmp_path):
    class Bare(RandomRows):
        def __getitem__(self, index):
            ids = super().__getitem__(index)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    with pytest.raises(InputError, match="holds input_ids and labels"):
        run(tmp_path, save_pico(tmp_path / "model"), rows=Bare(12))


def test_validation_on_rows_without_a_target_is_refused(tmp_path, moe):
    class Silent(RandomRows):
        def __getitem__(self, index):
            ids = super().__getitem__(index)
            return {"input_ids": ids, "labels": torch.full_like(ids, -100)}

    config = settings(checkpoint_steps=2, evaluation_steps=4)
    with pytest.raises(InputError, match="validation = '3 rows': no label to predict"):
        run(tmp_path, moe, config=config, validation=Silent(3, 5), objective=MoEObjective())
