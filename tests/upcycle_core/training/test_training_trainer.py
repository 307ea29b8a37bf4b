import math
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import warm
from tests.pico import VOCABULARY, save_pico
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent
from upcycle_core.training.causal_trainer import CausalTrainer
from upcycle_core.training.config import TrainingConfig
from upcycle_core.training.trainer import train

ROOT = Path(__file__).parents[3]
LENGTH = 16


class Rows(Dataset):
    """Row i counts upwards from a number that depends on i; notes which rows were read."""

    def __init__(self, count):
        self.count = count
        self.read = []

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read.append(index)
        return (torch.arange(LENGTH) + 37 * index) % VOCABULARY


class Recorder(Silent):
    def __init__(self):
        self.total, self.done, self.curve = None, 0, {}

    def start(self, what, total, unit="steps"):
        self.total = total

    def advance(self, amount=1, **shown):
        self.done += amount

    def metrics(self, values, step):
        self.curve[step] = dict(values)


def _config(**changes):
    settings = {
        "steps": 6,
        "batch_size": 4,
        "sequence_length": LENGTH,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "precision": "fp32",
        "checkpoint_steps": 100,
        "log_steps": 1,
    }
    return TrainingConfig(**{**settings, **changes})


def _train(tmp_path, name="out", *, config, rows=None, seed=0, progress=None, model=None):
    model = model or save_pico(tmp_path / "model")
    needed = config.steps * config.batch_size * config.gradient_accumulation
    return train(
        model,
        rows or Rows(needed),
        tmp_path / name,
        config=config,
        seed=seed,
        checkpoints=tmp_path / f"{name}-checkpoints",
        progress=progress or Silent(),
        device="cpu",
    )


def _weights(directory):
    model = AutoModelForCausalLM.from_pretrained(directory)
    return dict(model.named_parameters())


def _difference(left, right):
    left, right = _weights(left), _weights(right)
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loss_goes_down_on_text_that_can_be_learned(tmp_path, precision):
    recorder = Recorder()
    config = _config(steps=80, learning_rate=1e-2, precision=precision)
    result = _train(tmp_path, config=config, progress=recorder)
    assert recorder.curve[1]["loss"] > 4.5  # chance is ln 96 = 4.56
    assert result.final_loss < 2.0
    assert result.final_loss == recorder.curve[80]["loss"]


def test_bf16_is_the_arithmetic_not_the_type_of_the_weights(tmp_path):
    for precision in ("fp32", "bf16"):
        _train(tmp_path, precision, config=_config(precision=precision))
    assert _difference(tmp_path / "fp32", tmp_path / "bf16") > 1e-6
    assert all(weight.dtype == torch.float32 for weight in _weights(tmp_path / "bf16").values())


def test_weights_equal_a_plain_loop_with_torch_alone(tmp_path):
    config = _config(max_gradient_norm=0.5)
    _train(tmp_path, config=config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)
    for step in range(config.steps):
        ids = torch.stack([Rows(24)[4 * step + i] for i in range(4)])
        logits = model(input_ids=ids).logits
        targets = ids[:, 1:].reshape(-1)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = _cosine(step, config)
        optimizer.step()
        optimizer.zero_grad()
    trained = _weights(tmp_path / "out")
    for name, expected in model.named_parameters():
        torch.testing.assert_close(trained[name], expected.data, atol=1e-6, rtol=0)
    assert _difference(tmp_path / "model", tmp_path / "out") > 1e-3


def _cosine(step, config):
    """Learning rate of the step after ``step`` steps."""
    if step < config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    share = (step - config.warmup_steps) / (config.steps - config.warmup_steps)
    return config.learning_rate * (1 + math.cos(math.pi * share)) / 2


def _linear(step, config):
    if step < config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    return config.learning_rate * (config.steps - step) / (config.steps - config.warmup_steps)


def _constant(step, config):
    return config.learning_rate * min(1.0, step / config.warmup_steps)


@pytest.mark.parametrize(
    ("schedule", "closed_form"),
    [("cosine", _cosine), ("linear", _linear), ("constant", _constant)],
)
def test_learning_rates_equal_the_closed_form(tmp_path, schedule, closed_form):
    recorder = Recorder()
    config = _config(steps=12, warmup_steps=4, schedule=schedule)
    _train(tmp_path, config=config, progress=recorder)
    rates = [recorder.curve[step]["learning_rate"] for step in range(1, 13)]
    expected = [closed_form(step, config) for step in range(12)]
    assert rates == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_two_batches_of_two_equal_one_of_four(tmp_path):
    _train(tmp_path, "whole", config=_config(batch_size=4))
    _train(tmp_path, "parts", config=_config(batch_size=2, gradient_accumulation=2))
    # Rounding of the gradient's sum, which Adam can blow up where a gradient is near zero.
    assert _difference(tmp_path / "whole", tmp_path / "parts") < 2e-5
    assert _difference(tmp_path / "model", tmp_path / "parts") > 1e-3


def test_the_same_call_gives_the_same_bytes(tmp_path):
    model = save_pico(tmp_path / "model", attention_dropout=0.1)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        _train(tmp_path, name, config=_config(), seed=seed, model=model)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c, "dropout must follow the seed"


def test_rows_are_read_once_and_in_order(tmp_path):
    rows = Rows(1000)
    _train(tmp_path, config=_config(steps=3, gradient_accumulation=2), rows=rows)
    # One row is looked at to check its length; the loader reads one batch ahead.
    assert rows.read[1 : 1 + 3 * 8] == list(range(3 * 8))
    assert len(rows.read) <= 1 + 3 * 8 + 4


def test_out_is_an_ordinary_checkpoint(tmp_path):
    _train(tmp_path, config=_config())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert expected | {"tokenizer_config.json"} == names
    model, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values())
    assert model.config.use_cache
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids


def test_progress_is_told_of_every_step_and_of_the_curve(tmp_path):
    recorder = Recorder()
    config = _config(steps=7, log_steps=3, checkpoint_steps=4)
    result = _train(tmp_path, config=config, progress=recorder)
    assert (recorder.total, recorder.done) == (7, 7)
    assert list(recorder.curve) == [1, 3, 4, 6, 7]  # the first, every third, at each checkpoint
    assert set(recorder.curve[6]) == {
        "loss",
        "learning_rate",
        "gradient_norm",
        "tokens_per_second",
    }
    assert (result.steps, result.tokens) == (7, 7 * 4 * LENGTH)
    assert result.tokens_per_second == pytest.approx(result.tokens / result.seconds)


def test_a_finished_training_only_writes_out_again(tmp_path, monkeypatch):
    first = _train(tmp_path, config=_config())
    expected = (tmp_path / "out" / "model.safetensors").read_bytes()
    (tmp_path / "out" / "model.safetensors").unlink()
    monkeypatch.setattr(CausalTrainer, "compute_loss", None)
    recorder = Recorder()
    assert _train(tmp_path, config=_config(), progress=recorder) == first
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == expected
    assert (recorder.total, recorder.done) == (6, 6)


def test_the_last_two_checkpoints_are_kept(tmp_path):
    _train(tmp_path, config=_config(steps=7, checkpoint_steps=2))
    names = {path.name for path in (tmp_path / "out-checkpoints").iterdir()}
    assert names == {"checkpoint-6", "checkpoint-7"}


def test_a_diverged_gradient_is_an_error_that_names_the_step(tmp_path):
    config = _config(learning_rate=1e38, schedule="constant", warmup_steps=0, checkpoint_steps=1)
    with pytest.raises(FloatingPointError, match=r"step 2 is not finite.*Lower learning_rate"):
        _train(tmp_path, config=config)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out-checkpoints" / "checkpoint-2").exists()


def test_too_few_rows_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"23 rows.*reads 24 rows"):
        _train(tmp_path, config=_config(), rows=Rows(23))


def test_rows_of_another_length_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"training.sequence_length = 32.*16 tokens"):
        _train(tmp_path, config=_config(sequence_length=32))


def test_checkpoints_of_another_training_are_refused(tmp_path):
    _train(tmp_path, config=_config())
    for other in ({"config": _config(), "seed": 1}, {"config": _config(steps=5)}):
        with pytest.raises(InputError, match="another training"):
            _train(tmp_path, **other)


def test_nothing_is_printed(tmp_path):
    save_pico(tmp_path / "model")
    script = f"""
from pathlib import Path
from tests.upcycle_core.training.test_training_trainer import Rows, _config, _train
from tests.pico import save_pico_tokenizer
from upcycle_core.training.config import LlamaShape
from upcycle_core.training.seed import initialise_model
here = Path({str(tmp_path)!r})
initialise_model(LlamaShape(), save_pico_tokenizer(here / "words"), here / "seed", seed=0)
_train(here, config=_config(steps=4, checkpoint_steps=2), model=here / "model")
print("end")
"""
    done = warm.run(["-c", script], cwd=ROOT, env=os.environ, timeout=warm.TIMEOUT)
    assert (done.stdout, done.stderr, done.returncode) == ("end\n", "", 0)
