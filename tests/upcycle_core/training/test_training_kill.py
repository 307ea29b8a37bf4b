"""SIGKILL at every kind of moment: the same call again gives the bytes of a run never killed."""

import json
import os
import signal
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset

from tests import warm
from tests.pico import VOCABULARY, save_pico
from tests.upcycle_core.moe.joined import join
from tests.upcycle_core.training.runs import AnswerRows
from upcycle_core.progress import Silent
from upcycle_core.training import causal_trainer, checkpoints, trainer
from upcycle_core.training.config import MoEObjective, TrainingConfig

LENGTH = 16
CONFIG = TrainingConfig(
    steps=9,
    batch_size=2,
    sequence_length=LENGTH,
    gradient_accumulation=2,
    learning_rate=3e-3,
    warmup_steps=2,
    checkpoint_steps=2,
    log_steps=3,
)
ROWS = 9 * 2 * 2
OPTIONS: dict[str, dict] = {
    "llama": {"config": CONFIG},
    "mixtral": {
        "config": replace(CONFIG, keep="best", evaluation_steps=2),
        "objective": MoEObjective(balance_coefficient=0.1, z_coefficient=0.01, watch_steps=5),
        "validation": AnswerRows(3, 7),
        "fingerprint": {"corpus": "ab"},
    },
    "qwen2": {
        "config": CONFIG,
        "objective": MoEObjective(
            trainable=("router", "experts"), balance_coefficient=0.1, watch_steps=5
        ),
    },
}
"""What each model is trained with, beside what all are."""


class Rows(Dataset):
    """Random rows; writes down which were read, across kills."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.log.open("a") as log:
            log.write(f"{index}\n")
        generator = torch.Generator().manual_seed(index)
        return torch.randint(VOCABULARY, (LENGTH,), generator=generator)


def _die(*_args, **_kwargs) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _at_second(call):
    """The function that calls ``call`` the second time it is called: in the second checkpoint."""
    times = []

    def counted(original):
        def wrapped(*args, **kwargs):
            times.append(None)
            return (call if len(times) == 2 else original)(*args, **kwargs)

        return wrapped

    return counted


def _die_in_a_step() -> None:
    class Deadly(Silent):
        def advance(self, amount: int = 1, **shown: float) -> None:
            self.done = getattr(self, "done", 0) + amount
            if self.done == 5:
                _die()

    trainer.Silent = Deadly  # what _call hands to train


def _die_in_the_weights() -> None:
    def half(_model, path):
        Path(path).write_bytes(b"\0" * 100)
        _die()

    causal_trainer.save_model = _at_second(half)(causal_trainer.save_model)


def _die_in_the_optimizer() -> None:
    original, times = torch.save, []

    def save(state, path, **options):
        if Path(path).name == "optimizer.pt":
            times.append(None)
        if len(times) == 2:
            Path(path).write_bytes(b"PK half")
            _die()
        original(state, path, **options)

    torch.save = save


def _die_after_the_optimizer() -> None:
    causal_trainer.CausalTrainer._save_rng_state = _at_second(_die)(
        causal_trainer.CausalTrainer._save_rng_state
    )


def _die_before_the_marker() -> None:
    causal_trainer.mark_complete = _at_second(_die)(causal_trainer.mark_complete)


def _die_in_the_marker() -> None:
    Path.replace = _at_second(_die)(Path.replace)


def _die_after_the_marker() -> None:
    causal_trainer.keep_newest = _at_second(_die)(causal_trainer.keep_newest)


def _die_in_the_cleaning() -> None:
    def half(directory):
        (directory / "model.safetensors").unlink()
        _die()

    checkpoints.shutil.rmtree = half


def _die_in_publishing() -> None:
    def half(_network, _source, out):
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"half")
        _die()

    trainer.write_network = half


MOMENTS = {
    _die_in_a_step: 4,
    _die_in_the_weights: 2,
    _die_in_the_optimizer: 2,
    _die_after_the_optimizer: 2,
    _die_before_the_marker: 2,
    _die_in_the_marker: 2,
    _die_after_the_marker: 4,
    _die_in_the_cleaning: 6,
    _die_in_publishing: 9,
}
"""How each child dies, and the step that its successor must continue from."""
DEATHS = {
    "llama": tuple(MOMENTS),
    "mixtral": (_die_in_a_step, _die_in_the_weights, _die_before_the_marker, _die_in_publishing),
    "qwen2": (_die_in_a_step, _die_in_the_optimizer, _die_in_the_cleaning),
}
FEW = {
    "llama": (_die_in_a_step, _die_before_the_marker, _die_in_publishing),
    "mixtral": (_die_in_a_step,),
    "qwen2": (_die_in_a_step,),
}
MORE = {name: tuple(a for a in deaths if a not in FEW[name]) for name, deaths in DEATHS.items()}


def _of(chosen):
    """Parameters of a test over these deaths."""
    cases = [(name, arm) for name, deaths in chosen.items() for arm in deaths]
    ids = [f"{name}-{arm.__name__.removeprefix('_die_')}" for name, arm in cases]
    return pytest.mark.parametrize(("name", "arm"), cases, ids=ids)


def _call(folder: Path, arm=None) -> None:
    """The whole call, in a process of its own, which ``arm`` prepares to die."""
    torch.set_num_threads(1)
    trainer.Silent = Silent
    if arm:
        arm()
    result = trainer.train(
        folder.parent / "model",
        Rows(folder / "read"),
        folder / "out",
        seed=5,
        checkpoints=folder / "checkpoints",
        progress=trainer.Silent(),
        device="cpu",
        **OPTIONS[folder.parent.name],
    )
    (folder / "curves.json").write_text(json.dumps(result.curves))


def _fork(folder: Path, arm=None) -> int:
    """Run ``_call`` in a child; its exit code, negative for a signal."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        try:
            _call(folder, arm)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_all(folder: Path, chosen: str) -> None:
    """Every run, forked from one process that imported everything once and has no threads."""
    assert _fork(folder / "whole") == 0
    for arm in {"few": FEW, "more": MORE}[chosen][folder.name]:
        assert _fork(folder / arm.__name__, arm) == -signal.SIGKILL, arm
        (folder / arm.__name__ / "read").unlink()
        assert _fork(folder / arm.__name__) == 0, arm


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of a few runs. The models have dropout, so that the random state counts."""
    return _run(tmp_path_factory.mktemp("kills"), "few")


@pytest.fixture(scope="module")
def more_runs(tmp_path_factory):
    """Folder of the others."""
    return _run(tmp_path_factory.mktemp("kills"), "more")


def _run(parent: Path, chosen: str) -> Path:
    for name in DEATHS:
        folder = parent / name
        if name == "llama":
            save_pico(folder / "model", attention_dropout=0.2)
        else:
            family = "llama" if name == "mixtral" else name
            joined = join(parent / f"{name}-parts", family, top_k=2, attention_dropout=0.2)
            folder.mkdir()
            joined.model.rename(folder / "model")
    script = (
        "from pathlib import Path; from tests.upcycle_core.training import test_training_kill as t;"
        f"[t.run_all(Path({str(parent)!r}) / name, {chosen!r}) for name in t.DEATHS]"
    )
    warm.call(script)
    return parent


@pytest.mark.faults
@_of(MORE)
def test_after_other_kills_too(more_runs, name, arm):
    test_after_a_kill_the_same_call_gives_the_same_bytes(more_runs, name, arm)
    test_after_a_kill_only_rows_not_yet_trained_on_are_read(more_runs, name, arm)


@_of(FEW)
def test_after_a_kill_the_same_call_gives_the_same_bytes(runs, name, arm):
    folder, whole = runs / name / arm.__name__, runs / name / "whole"
    for path in (whole / "out").iterdir():
        assert (folder / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    curves = json.loads((whole / "curves.json").read_text())
    assert json.loads((folder / "curves.json").read_text()) == curves
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    validated = [point for point in curves if "validation_loss" in point]
    best = [
        f"checkpoint-{p['step']}" for p in sorted(validated, key=lambda p: p["validation_loss"])
    ]
    assert kept == {"checkpoint-8", "checkpoint-9", *best[:1]}


@_of(FEW)
def test_after_a_kill_only_rows_not_yet_trained_on_are_read(runs, name, arm):
    # The first row is a look at the rows' length.
    read = [int(line) for line in (runs / name / arm.__name__ / "read").read_text().split()][1:]
    assert read == list(range(MOMENTS[arm] * 4, ROWS))


@pytest.mark.parametrize("name", ["mixtral", "qwen2"])
def test_what_a_kill_could_lose_of_a_moe_is_there(runs, name):
    """Experts and routers changed since the last checkpoint, and the watch covers all steps."""
    curves = json.loads((runs / name / "_die_in_a_step" / "curves.json").read_text())
    watched = [point["step"] for point in curves if "load/layer_1/expert_2" in point]
    assert watched == [2, 4, 5, 6, 8, 9]  # at checkpoints, every five steps, at the end
    before, after = (
        load_file(runs / name / "_die_in_a_step" / "checkpoints" / step / "model.safetensors")
        for step in ("checkpoint-8", "checkpoint-9")
    )
    for key in ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        moved = before[f"model.layers.1.{key}"] - after[f"model.layers.1.{key}"]
        assert moved.abs().max() > 1e-5, key
