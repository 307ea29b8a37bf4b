"""SIMoE's training as a whole: what is kept, what is frozen, and that kills leave no trace."""

import json
import os
import signal
import socket
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from tests import warm
from tests.pico import save_pico
from tests.upcycle_core.training.runs import AnswerRows, Recorder, settings
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent
from upcycle_core.simoe import objective, train
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import gated_modules
from upcycle_core.simoe.sparsity import overlap, realised_sparsity
from upcycle_core.simoe.train import train_simoe
from upcycle_core.simoe.upcycle import upcycle_in_memory
from upcycle_core.training import causal_trainer
from upcycle_core.training.checkpoints import newest_complete

CONFIG = settings(steps=16, checkpoint_steps=3, log_steps=5, gradient_accumulation=2)
SIMOE = SimoeUpcyclingConfig(
    experts=3, mask_learning_rate=0.6, router_learning_rate=1e-2, multiplier_learning_rate=2.0
)
UNION = replace(SIMOE, sparsity="union", tau=0.6)
USE = replace(SIMOE, sparsity="use")
CURVES = {
    *("loss", "loss/orthogonality", "lambda", "sparsity", "sparsity/mean", "sparsity/union"),
    *("sparsity/expected", "overlap"),
}


def call(folder, *, config=CONFIG, simoe=SIMOE, progress=None, rows=None, **options):
    """Train ``folder.parent / model`` into ``folder / out``."""
    return train_simoe(
        folder.parent / "model",
        rows or AnswerRows(config.steps * config.batch_size * config.gradient_accumulation),
        folder / "out",
        config=config,
        simoe=simoe,
        seed=3,
        checkpoints=folder / "checkpoints",
        progress=progress or Silent(),
        device="cpu",
        **options,
    )


def _die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def _at(time, name, owner):
    """Die in the ``time``-th call of ``owner.name``."""
    original, times = getattr(owner, name), []

    def counted(*args, **kwargs):
        times.append(None)
        if len(times) == time:
            _die()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


MOMENTS = {
    "in_a_step": lambda: _at(8, "after_step", objective.SimoeObjective),
    "before_lambda_is_written": lambda: _at(2, "save_state", causal_trainer),
    "before_the_marker": lambda: _at(4, "mark_complete", causal_trainer),
    "in_publishing": lambda: _at(1, "save_pruned", train),
}
FEW = ("in_a_step", "before_the_marker")
MORE = ("before_lambda_is_written", "in_publishing")


def _join(rank, port):
    """Make this process one of two workers."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    # Unset, accelerate gives each worker all cores, and they wait for each other spinning.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    where = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)


def _fork(folder, arm=None, told_in="told.json"):
    return _wait(_start(folder, arm, told_in))


def _wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _noted_use():
    """A list that holds the last step's use of the experts, as this process sees it."""
    original, use = objective.SimoeObjective.after_step, []

    def noted(self, step):
        original(self, step)
        use[:] = self.use

    objective.SimoeObjective.after_step = noted
    return use


def _start(folder, arm=None, told_in="told.json"):
    """Train in a child that ``arm`` prepares, say to die; its process id."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            if arm:
                arm()
            use = _noted_use() if told_in != "told.json" else None
            more = {"validation": AnswerRows(3, 7), "fingerprint": {"corpus": "ab"}}
            result = call(folder, simoe=USE, **more)  # whose state is the largest
            told = {"curves": result.training.curves, "lambda": result.multiplier}
            told |= {"kept": result.kept_step, "overlap": result.overlap, "use": use}
            (folder / told_in).write_text(json.dumps(told))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def run_all(folder: Path, *names: str):
    """Every run, forked from one process that imported everything once."""
    assert _fork(folder / "whole") == 0
    for name in names:
        assert _fork(folder / name, MOMENTS[name]) == -signal.SIGKILL, name
        assert _fork(folder / name) == 0, name


def run_two(folder: Path):
    """The same training by two workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [
        _start(folder / "two", partial(_join, rank, port), f"told-{rank}.json") for rank in (0, 1)
    ]
    assert [_wait(child) for child in children] == [0, 0]


def in_one_process(folder, calls):
    save_pico(folder / "model", attention_dropout=0.2)
    script = (
        "from pathlib import Path; from tests.upcycle_core.simoe import test_train_simoe as t;"
        f"folder = Path({str(folder)!r}); {calls}"
    )
    warm.call(script)
    return folder


@pytest.fixture(scope="module")
def kills(tmp_path_factory):
    calls = f"t.run_all(folder, *{FEW!r}); t.run_two(folder)"
    return in_one_process(tmp_path_factory.mktemp("kills"), calls)


@pytest.fixture(scope="module")
def more_kills(tmp_path_factory):
    return in_one_process(tmp_path_factory.mktemp("more"), f"t.run_all(folder, *{MORE!r})")


@pytest.mark.faults
@pytest.mark.parametrize("name", MORE)
def test_after_other_kills_too(more_kills, name):
    test_after_a_kill_the_same_call_gives_the_same_bytes(more_kills, name)


@pytest.mark.faults
@pytest.mark.parametrize("name", FEW)
def test_after_a_kill_the_same_call_gives_the_same_bytes(kills, name):
    whole, killed = kills / "whole", kills / name
    told = json.loads((whole / "told.json").read_text())
    assert json.loads((killed / "told.json").read_text()) == told
    assert max(point.get("lambda", 0) for point in told["curves"]) > 0.5
    for path in (whole / "out").iterdir():
        assert (killed / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    last = "checkpoints/checkpoint-16"
    for file in ("model.safetensors", "extension.json"):
        assert (killed / last / file).read_bytes() == (whole / last / file).read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    save_pico(folder / "model")
    return folder


@pytest.fixture(scope="module", params=[SIMOE, USE, UNION], ids=["mean", "use", "union"])
def trained(request, folder):
    """(folder, settings, result, what was reported) of one training."""
    own, recorder = folder / request.param.sparsity, Recorder()
    return own, request.param, call(own, simoe=request.param, progress=recorder), recorder.points


def test_the_kept_model_is_as_sparse_as_tau_and_no_more(trained):
    own, simoe, result, _ = trained
    kept = getattr(result, f"sparsity_{simoe.sparsity}")
    assert simoe.tau <= kept < simoe.tau + 0.02
    saved = load_causal_lm(own / "out")
    found = realised_sparsity(saved)
    assert (found.mean, found.union) == (result.sparsity_mean, result.sparsity_union)
    assert overlap(saved).tolist() == [list(row) for row in result.overlap]
    assert result.kept_step == 16
    assert result.multiplier == 0


def test_curves_have_a_point_at_every_checkpoint(trained):
    _, simoe, result, points = trained
    curves = [point for point in result.training.curves if "loss" in point]
    assert [point["step"] for point in curves] == [1, 3, 5, 6, 9, 10, 12, 15, 16]
    assert all(point.keys() >= CURVES for point in curves)
    assert [p["sparsity"] for p in points] == [p["sparsity"] for p in curves]
    assert all(p["sparsity"] == p[f"sparsity/{simoe.sparsity}"] for p in curves)
    assert curves[0]["lambda"] == simoe.multiplier_learning_rate * simoe.tau
    first, last = curves[0], curves[-1]
    assert first["overlap"] == 1
    assert last["overlap"] < 1
    assert last["loss/orthogonality"] < first["loss/orthogonality"]


def test_what_was_pre_trained_is_frozen_and_has_no_optimizer_state(trained):
    own, simoe, result, _ = trained
    start = upcycle_in_memory(own.parent / "model", simoe, seed=3)
    checkpoint = own / "checkpoints" / "checkpoint-16"
    weights = load_file(checkpoint / "model.safetensors")
    names = [name for name, p in start.named_parameters() if p.requires_grad]
    for name, parameter in start.named_parameters():
        assert torch.equal(weights[name], parameter) == (name not in names), name
    state = torch.load(checkpoint / "optimizer.pt")
    assert len(state["state"]) == len(names)
    groups = {(g["initial_lr"], g["weight_decay"]): len(g["params"]) for g in state["param_groups"]}
    gated = gated_modules(start)
    norms = sum("norm" in name for name in gated)
    assert groups == {
        (CONFIG.learning_rate, 0.1): len(gated) - norms,
        (CONFIG.learning_rate, 0.0): norms,
        (1e-2, 0.1): 2,  # the router's matrices
        (1e-2, 0.0): 2,  # and biases
        (simoe.mask_learning_rate, 0.0): len(gated),
    }
    assert result.training.trained_parameters == sum(
        p.numel() for p in start.parameters() if p.requires_grad
    )


def test_the_loss_of_the_curves_is_the_text_s_alone(trained):
    own, simoe, result, _ = trained
    start = upcycle_in_memory(own.parent / "model", simoe, seed=3)
    rows = AnswerRows(4)
    logp = [start(input_ids=rows[i]["input_ids"][None]).logits[0].log_softmax(-1) for i in range(4)]
    losses = [
        -logp[i][at - 1, label]
        for i in range(4)
        for at, label in enumerate(rows[i]["labels"].tolist())
        if label != -100
    ]
    assert result.training.curves[0]["loss"] == pytest.approx(
        torch.stack(losses).mean().item(), abs=1e-4
    )


def test_the_same_call_afterwards_only_writes(trained):
    own, simoe, result, _ = trained
    written = (own / "out" / "model.safetensors").read_bytes()
    again = Recorder()
    assert call(own, simoe=simoe, progress=again) == result
    assert again.points == []
    assert (own / "out" / "model.safetensors").read_bytes() == written


def test_another_tau_does_not_go_on_from_these_checkpoints(trained):
    own, simoe, *_ = trained
    with pytest.raises(InputError, match=r"extension\.simoe\.tau was .*, is 0\.8"):
        call(own, simoe=replace(simoe, tau=0.8))


def test_a_constraint_that_is_never_met_is_an_error_and_the_checkpoints_stay(folder):
    simoe = replace(SIMOE, mask_learning_rate=0.18)
    with pytest.raises(InputError) as error:
        call(folder / "never", simoe=simoe)
    for part in (
        "simoe.tau = 0.75",
        "16 steps",
        "mask_learning_rate (now 0.18)",
        "the last has 0.",
    ):
        assert part in str(error.value)
    assert not (folder / "never" / "out").exists()
    assert newest_complete(folder / "never" / "checkpoints").step == 16


def test_a_lambda_that_cannot_pull_is_refused_before_the_first_step(folder):
    with pytest.raises(InputError, match=r"simoe\.multiplier_learning_rate = 1e-09"):
        call(folder / "pulled", simoe=replace(SIMOE, multiplier_learning_rate=1e-9, beta=0.0))
    assert not list((folder / "pulled").rglob("checkpoint-*"))


def test_what_lambda_had_closed_before_the_rest_was_is_known(folder, monkeypatch):
    """With a lambda that closes nothing, the last tenth of the steps closes all that tau asks."""
    monkeypatch.setattr(train, "pull_faults", lambda *_: ())
    lazy = replace(SIMOE, multiplier_learning_rate=1e-9, reopen=True, closing=0.4)
    result = call(folder / "lazy", simoe=lazy)
    assert result.sparsity_mean >= lazy.tau
    assert result.sparsity_unsettled < 0.5
    again = call(folder / "lazy", simoe=lazy)  # what was resumed knows it as well
    assert again.sparsity_unsettled == result.sparsity_unsettled


def test_the_last_checkpoint_that_is_sparse_enough_is_kept(folder, monkeypatch):
    may_keep = objective.SimoeObjective.may_keep
    monkeypatch.setattr(
        objective.SimoeObjective, "may_keep", lambda s, p: may_keep(s, p) and p["step"] <= 9
    )
    result = call(folder / "earlier", simoe=replace(SIMOE, mask_learning_rate=0.9))
    assert result.kept_step == 9
    kept = sorted(p.name for p in (folder / "earlier" / "checkpoints").iterdir())
    assert kept == ["checkpoint-15", "checkpoint-16", "checkpoint-9"]
    saved = realised_sparsity(load_causal_lm(folder / "earlier" / "out"))
    point = next(p for p in result.training.curves if p["step"] == 9)
    assert saved.mean == result.sparsity_mean == point["sparsity"]


def test_masks_that_are_not_finite_stop_it_with_the_last_good_checkpoint(folder, monkeypatch):
    after = objective.open_surplus
    calls = []

    def break_at_last(model, tau, way, **use):
        calls.append(None)
        if len(calls) == 8:
            gated_modules(model)["model.model.norm"].log_phi.data[0, 0] = float("nan")
        after(model, tau, way, **use)

    monkeypatch.setattr(objective, "open_surplus", break_at_last)
    with pytest.raises(FloatingPointError, match=r"After step 8 the masks of model\.model\.norm"):
        call(folder / "broken")
    assert newest_complete(folder / "broken" / "checkpoints").step == 6


def test_real_masks_are_trained_without_a_constraint(folder):
    config = replace(CONFIG, steps=3)
    result = call(
        folder / "real", config=config, simoe=SimoeUpcyclingConfig(experts=2, masks="real")
    )
    assert (result.kept_step, result.multiplier, result.sparsity_mean) == (3, 0.0, 0.0)
    assert not {"lambda", "sparsity"} & result.training.curves[0].keys()


def test_gradients_of_masks_and_of_the_others_are_clipped_apart(folder, monkeypatch):
    """With lambda a million, a step of the deltas is what it is without lambda."""
    changed = {}
    for name, rate in (("small", 1e-9), ("large", 1e6)):
        config = replace(CONFIG, steps=2, checkpoint_steps=2, max_gradient_norm=0.5)
        simoe = replace(SIMOE, multiplier_learning_rate=rate, tau=0.5, mask_learning_rate=1.0)
        own = folder / f"clipped-{name}"
        monkeypatch.setattr(objective.SimoeObjective, "may_keep", lambda *_: True)
        monkeypatch.setattr(train, "fit_faults", lambda *_: ())
        monkeypatch.setattr(train, "pull_faults", lambda *_: ())
        monkeypatch.setattr(torch.optim.AdamW, "step", _plain_descent)
        result = call(own, config=config, simoe=simoe)
        weights = load_file(own / "checkpoints/checkpoint-2/model.safetensors")
        changed[name] = weights["model.model.layers.1.mlp.down_proj.delta"]
        assert result.training.curves[-1]["gradient_norm"] > 0.5
    torch.testing.assert_close(changed["small"], changed["large"], atol=2e-5, rtol=1e-3)


@torch.no_grad()
def _plain_descent(optimizer, closure=None):
    """Masks stay, so that both trainings see the same; others go down their clipped gradients."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if group["initial_lr"] != 1.0:
                parameter -= parameter.grad


@pytest.mark.faults
def test_two_workers_agree_with_each_other_and_begin_like_one(kills):
    both = [json.loads((kills / "two" / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    one = json.loads((kills / "whole" / "told.json").read_text())
    assert both[0]["overlap"] == both[1]["overlap"]
    assert both[0]["use"] == both[1]["use"] != []
    keys = ("lambda", "sparsity/mean", "sparsity/use", "sparsity/expected", "loss/orthogonality")
    for key in keys:
        first, second, alone = (
            [point[key] for point in told["curves"] if key in point] for told in (*both, one)
        )
        assert first == second, key
        assert first[0] == pytest.approx(alone[0], rel=1e-3), key  # later dropout differs
    assert 0.75 <= both[0]["curves"][-2]["sparsity"] < 0.77
