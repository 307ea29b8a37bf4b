"""Batches of rows: what is padding for all of them is not computed, and changes nothing."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch
from pico import pico_config, save_pico
from transformers import AutoModelForCausalLM

from tests.upcycle_core.training.runs import AnswerRows, Recorder, run, settings
from upcycle_core.training import reporter
from upcycle_core.training.rows import collate


def padded(length, tokens, first_label):
    row = torch.zeros(3, length, dtype=torch.int64)
    row[0, :tokens] = torch.arange(5, 5 + tokens)
    row[1] = -100
    row[1, first_label:tokens] = row[0, first_label:tokens]
    row[2, :tokens] = 1
    return dict(zip(("input_ids", "labels", "attention_mask"), row, strict=True))


def test_a_batch_is_as_long_as_its_longest_row():
    rows = [padded(12, 4, 2), padded(12, 7, 3)]
    batch = collate(rows)
    for name, values in batch.items():
        assert values.tolist() == [row[name][:7].tolist() for row in rows], name
    assert collate([padded(12, 12, 3)])["input_ids"].shape == (1, 12)


def test_rows_without_padding_or_with_a_task_stay_as_they_are():
    rows = [torch.arange(6), torch.arange(6) + 1]
    assert collate(rows)["input_ids"].tolist() == [row.tolist() for row in rows]
    with_task = [{**padded(12, 4, 2), "task_ids": torch.tensor(n)} for n in (3, 0)]
    batch = collate(with_task)
    assert batch["task_ids"].tolist() == [3, 0]
    assert batch["labels"].shape == (2, 4)


def test_loss_and_gradients_are_those_of_the_padded_rows():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(pico_config()).double()
    rows = [padded(12, 4, 2), padded(12, 7, 3)]
    whole = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    found = []
    for batch in (whole, collate(rows)):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=1e-9)
    assert found[0][0].item() == pytest.approx(5.0, abs=2)


def test_tokens_and_speed_leave_padding_out_where_rows_say_how_many(tmp_path, monkeypatch):
    class Counted(AnswerRows):
        tokens = sum(int(AnswerRows(12)[index]["attention_mask"].sum()) for index in range(12))

    seconds = SimpleNamespace(perf_counter=count().__next__)  # one from a step's point to the next
    monkeypatch.setattr(reporter, "time", seconds)
    model, progress = save_pico(tmp_path / "model"), Recorder()
    for name, rows, tokens in (
        ("whole", AnswerRows(12), settings().tokens),
        ("counted", Counted(12), Counted.tokens),
        ("longer", Counted(24), Counted.tokens // 2),
    ):
        result = run(tmp_path, model, name, rows=rows, progress=progress)
        assert result.tokens == tokens
        assert result.tokens_per_second == tokens / result.seconds
        assert progress.points[-1]["tokens_per_second"] == tokens / 6
    assert Counted.tokens < settings().tokens
