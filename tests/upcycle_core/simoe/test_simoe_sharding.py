"""A SIMoE whose deltas workers divide, against one worker that holds them all."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.pico import save_pico, save_pico_tokenizer
from tests.upcycle_core.simoe.dividing_simoe import DeadlyRows, TaskRows, tune
from tests.upcycle_core.simoe.grown import save_dense
from tests.upcycle_core.simoe.test_t5_simoe import save_t5
from tests.upcycle_core.training.runs import settings
from tests.upcycle_core.training.together import Group, said, together
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent
from upcycle_core.simoe import train
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.sparsity import realised_sparsity
from upcycle_core.simoe.upcycle import upcycle_in_memory
from upcycle_core.training import workers

CONFIG = settings(steps=16, checkpoint_steps=4, gradient_accumulation=4)
ROWS = 16 * 4 * 2
SIMOE = SimoeUpcyclingConfig(
    experts=3, mask_learning_rate=0.6, router_learning_rate=1e-2, multiplier_learning_rate=2.0
)
KINDS: dict[str, dict] = {
    "tied": {
        "config": replace(CONFIG, gradient_checkpointing=True),
        "simoe": replace(SIMOE, sparsity="use", standardise=True, balance=0.1),
    },
    "head": {"config": CONFIG, "simoe": replace(SIMOE, lm_head=True, routing="token")},
    "gpt2": {
        "config": CONFIG,
        "simoe": replace(SIMOE, masks="real", routing="task"),
        "rows": TaskRows(ROWS),
        "tasks": ("a", "b"),
    },
    "narrow": {"config": replace(CONFIG, precision="bf16"), "simoe": SIMOE},
    "stored narrow": {"config": CONFIG, "simoe": SIMOE},
}
DIVIDED = {**KINDS["tied"], "divided": "full"}
OTHERS = [name for name in KINDS if name != "tied"]
ROUNDED = {"narrow": 5e-2}
"""How far losses come apart where sums of another order are rounded to bf16."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tied = save_pico(folder / "tied", tie_word_embeddings=True)
    certain = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    gpt2 = save_dense(folder / "gpt2", "gpt2", **certain)
    save_pico_tokenizer(gpt2)
    head = save_pico(folder / "head")
    narrow = save_pico(folder / "narrow")
    tensors = load_file(narrow / "model.safetensors")
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(halves, narrow / "model.safetensors", metadata={"format": "pt"})
    return {"tied": tied, "head": head, "gpt2": gpt2, "narrow": narrow, "stored narrow": narrow}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, models):
    """Trainings in one process, each once, with their results."""
    folder, done = tmp_path_factory.mktemp("alone"), {}

    def train(name):
        if name not in done:
            done[name] = tune(folder, models[name], name, progress=Silent(), **KINDS[name])
        return folder / name, done[name]

    return train


@pytest.fixture(scope="module")
def folder(tmp_path_factory, models):
    """What two workers do."""
    folder = tmp_path_factory.mktemp("divided")
    together(folder, Group(2, [(models["tied"], "tied", DIVIDED)], tune))
    return folder


@pytest.fixture(scope="module")
def more(tmp_path_factory, models):
    """What else they do, and where they go on from what others wrote."""
    folder = tmp_path_factory.mktemp("more")
    deadly = {**DIVIDED, "rows": DeadlyRows(ROWS, deadly=9 * 8 + 5)}
    calls = [(models[name], name, {**KINDS[name], "divided": "full"}) for name in OTHERS]
    goes_on = [(models["tied"], "killed", DIVIDED)]
    together(
        folder,
        Group(4, [(models["tied"], "killed", deadly)], tune, is_killed=True),
        Group(2, [*calls, *goes_on], tune),
    )
    return folder


def curve(result, key="loss"):
    return {point["step"]: point[key] for point in result.training.curves if key in point}


def assert_alike(result, expected, apart=1e-4):
    assert not isinstance(result, str), result
    assert len(curve(result)) == 16
    for key in ("loss", "gradient_norm", "loss/orthogonality", "lambda", "sparsity", "overlap"):
        assert curve(result, key) == pytest.approx(curve(expected, key), abs=apart, rel=apart), key
    assert result.training.trained_parameters == expected.training.trained_parameters
    assert result.training.total_parameters == expected.training.total_parameters
    assert result.kept_step == expected.kept_step


def test_two_workers_learn_what_one_learns(alone, folder):
    result, _ = said(folder, "tied")
    assert_alike(result, alone("tied")[1])
    assert result.common == pytest.approx(alone("tied")[1].common, rel=1e-5)
    assert said(folder, "tied", rank=1)[0].overlap == result.overlap


@pytest.mark.faults
@pytest.mark.parametrize("name", OTHERS)
def test_so_they_do_with_experts_of_a_head_and_of_other_families(alone, more, name):
    assert_alike(said(more, name)[0], alone(name)[1], ROUNDED.get(name, 1e-4))


def assert_same_files(here, there, apart=1e-4):
    assert {path.name for path in here.iterdir()} == {path.name for path in there.iterdir()}
    for file in ("config.json", "tokenizer.json", "modeling_simoe.py"):
        assert (here / file).read_bytes() == (there / file).read_bytes(), file
    found, expected = (load_file(place / "model.safetensors") for place in (here, there))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        torch.testing.assert_close(found[key], value, atol=apart, rtol=0)


def test_what_they_write_is_what_one_writes(alone, folder):
    place, _ = alone("tied")
    assert_same_files(folder / "tied", place)
    saved = realised_sparsity(load_causal_lm(folder / "tied"))
    assert (saved.mean, saved.union) == (
        said(folder, "tied")[0].sparsity_mean,
        said(folder, "tied")[0].sparsity_union,
    )


@pytest.mark.faults
@pytest.mark.parametrize("name", ["head", "gpt2", "stored narrow"])
def test_so_is_what_they_write_of_others(alone, more, name):
    assert_same_files(more / name, alone(name)[0])


@pytest.mark.faults
def test_what_was_held_in_bf16_is_written_as_it_was_given(alone, more):
    """Gates may close elsewhere where sums are rounded otherwise; nothing else may differ."""
    found, expected = (
        load_file(place / "model.safetensors") for place in (more / "narrow", alone("narrow")[0])
    )
    bases = [name for name in expected if ".base." in name]
    assert bases
    assert all(torch.equal(found[name], expected[name]) for name in bases)


@pytest.mark.faults
def test_two_go_on_where_four_were_killed(alone, more):
    assert_alike(said(more, "killed")[0], alone("tied")[1])
    assert_same_files(more / "killed", alone("tied")[0])


@pytest.mark.faults
def test_one_goes_on_where_two_stopped(tmp_path, models, alone, more):
    shutil.copytree(more / "killed-checkpoints", tmp_path / "out-checkpoints")
    (tmp_path / "out-checkpoints" / "checkpoint-16" / "complete.json").unlink()
    result = tune(tmp_path, models["tied"], "out", progress=Silent(), **KINDS["tied"])
    assert_alike(result, alone("tied")[1])


def test_deltas_that_are_to_be_divided_take_no_memory(models):
    network = upcycle_in_memory(models["tied"], SIMOE, seed=3, divided="full")
    deltas = [p for name, p in network.named_parameters() if name.endswith(".delta")]
    assert deltas
    assert all(delta.untyped_storage().nbytes() == 4 for delta in deltas)


def test_what_workers_cannot_divide_is_refused_before_weights_are_read(
    tmp_path, models, monkeypatch
):
    monkeypatch.setattr(workers, "count", lambda: 2)
    monkeypatch.setattr(train, "upcycle_in_memory", None)
    options = {"config": CONFIG, "progress": Silent(), "divided": "full"}
    fine = replace(SIMOE, masks="parameters")
    with pytest.raises(InputError, match=r"simoe\.masks = .parameters.: is a gate a parameter"):
        tune(tmp_path, models["tied"], "out", simoe=fine, **options)
    save_t5(tmp_path / "t5", "relu")
    with pytest.raises(InputError, match=r"an encoder-decoder has two lists of layers"):
        tune(tmp_path, tmp_path / "t5", "out", simoe=SIMOE, **options)
    assert not (tmp_path / "out-checkpoints").exists()
