"""SIGKILL at every kind of moment: the same call again gives the bytes of a run never killed."""

import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from tests.pico import VOCABULARY, save_pico
from upcycle_core.progress import Silent
from upcycle_core.training import causal_trainer, checkpoints, trainer
from upcycle_core.training.config import TrainingConfig

ROOT = Path(__file__).parents[3]
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

    trainer._write = half


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


def _call(folder: Path, arm=None) -> None:
    """The whole call, in a process of its own, which ``arm`` prepares to die."""
    torch.set_num_threads(1)
    trainer.Silent = Silent
    if arm:
        arm()
    trainer.train(
        folder.parent / "model",
        Rows(folder / "read"),
        folder / "out",
        config=CONFIG,
        seed=5,
        checkpoints=folder / "checkpoints",
        progress=trainer.Silent(),
        device="cpu",
    )


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


def run_all(folder: Path) -> None:
    """Every run, forked from one process that imported everything once and has no threads."""
    assert _fork(folder / "whole") == 0
    for arm in MOMENTS:
        assert _fork(folder / arm.__name__, arm) == -signal.SIGKILL, arm
        (folder / arm.__name__ / "read").unlink()
        assert _fork(folder / arm.__name__) == 0, arm


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of all runs. The model has dropout, so that the random state counts."""
    folder = tmp_path_factory.mktemp("kills")
    save_pico(folder / "model", attention_dropout=0.2)
    script = (
        "from pathlib import Path; from tests.upcycle_core.training import test_training_kill; "
        f"test_training_kill.run_all(Path({str(folder)!r}))"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("arm", MOMENTS, ids=lambda arm: arm.__name__.removeprefix("_die_"))
def test_after_a_kill_the_same_call_gives_the_same_bytes(runs, arm):
    folder, whole = runs / arm.__name__, runs / "whole"
    for path in (whole / "out").iterdir():
        assert (folder / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {"checkpoint-8", "checkpoint-9"}


@pytest.mark.parametrize("arm", MOMENTS, ids=lambda arm: arm.__name__.removeprefix("_die_"))
def test_after_a_kill_only_rows_not_yet_trained_on_are_read(runs, arm):
    # The first row is a look at the rows' length.
    read = [int(line) for line in (runs / arm.__name__ / "read").read_text().split()][1:]
    assert read == list(range(MOMENTS[arm] * 4, ROWS))
