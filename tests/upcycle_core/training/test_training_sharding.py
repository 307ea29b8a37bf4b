"""Workers that divide weights, gradients and moments, against one that holds them all."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaPreTrainedModel,
    PretrainedConfig,
)

from tests.pico import save_pico
from tests.upcycle_core.moe.joined import join
from tests.upcycle_core.training.dividing import LoggedRows, freed, held, train_any
from tests.upcycle_core.training.runs import AnswerRows, run, settings, weights
from tests.upcycle_core.training.together import Group, said, together
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.ders.files import verify
from upcycle_core.ders.model.modeling_ders import __file__ as CODE
from upcycle_core.ders.upcycle import write_ders_upcycling
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent
from upcycle_core.training import sharding, workers
from upcycle_core.training.config import ExpertTrainingConfig, LoraSettings, MoEObjective
from upcycle_core.training.trainer import load_to_train

CONFIG = settings(steps=6, gradient_accumulation=4, checkpoint_steps=2)
ROWS = 6 * 4 * 2
PART = ExpertTrainingConfig(**{f: getattr(CONFIG, f) for f in CONFIG.__dataclass_fields__})
LORA = LoraSettings(rank=3, alpha=6, modules=("q_proj", "down_proj"))
KINDS: dict[str, dict] = {
    "tied": {
        "config": replace(CONFIG, gradient_checkpointing=True, keep="best", evaluation_steps=2),
        "validation": AnswerRows(5, 3),
    },
    "mixtral": {
        "config": CONFIG,
        "objective": MoEObjective(
            trainable=("router", "expert_gates"), z_coefficient=0.01, watch_steps=4
        ),
    },
    "ffn": {"config": replace(PART, method="ffn"), "rows": AnswerRows(ROWS)},
    "lora": {"config": replace(PART, method="lora", lora=LORA)},
    "narrow": {"config": replace(CONFIG, optimizer_state="bf16")},
    "sparse": {"config": CONFIG, "objective": MoEObjective(z_coefficient=0.01)},
    "low-rank": {"config": CONFIG},
    "pair": {"config": CONFIG},  # of experts
}
DELTAS = {
    "sparse": DersUpcyclingConfig(codec="sparse", drop_rate=0.8, universal="delta"),
    "low-rank": DersUpcyclingConfig(codec="low_rank", rank=4, layers="every-other"),
}
"""What each is trained with; those in ``folder`` beside them go on from others' checkpoints."""
ROUNDED = {"narrow": 1e-3, "low-rank": 5e-3}
"""How far losses and norms come apart where sums have another order, which differs between kinds of
CPUs too: moments are in bf16, or Adam makes whole steps of gradients that are nearly zero, those of
a factor whose other one is zero."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    dense = save_pico(folder / "dense")
    size = {"experts": 3, "top_k": 2, "seed": 5, "max_shard_bytes": 10**9}
    for name, config in DELTAS.items():
        write_ders_upcycling(dense, folder / name, config=config, **size)
    return {
        **{name: folder / name for name in DELTAS},
        "tied": save_pico(folder / "tied", tie_word_embeddings=True),
        "mixtral": join(folder / "mixtral", top_k=2).model,
        "pair": join(folder / "pair", seeds=(0, 1), top_k=2).model,
        **dict.fromkeys(("ffn", "lora", "narrow"), dense),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory, models):
    """Each training in one process, with its result."""
    folder = tmp_path_factory.mktemp("alone")
    results = {
        name: train_any(folder, models[name], name, progress=Silent(), **options)
        for name, options in KINDS.items()
    }
    return folder, results


@pytest.fixture(scope="module")
def folder(tmp_path_factory, models, alone):
    """Everything that several workers do."""
    folder = tmp_path_factory.mktemp("divided")
    tied, pair = KINDS["tied"], {**KINDS["pair"], "divided": "full"}
    deadly, late = (
        {**kind, "rows": LoggedRows(ROWS, folder / log, deadly=3 * 8 + 5), "divided": "full"}
        for kind, log in ((tied, "before"), (pair, "pair-before"))
    )
    goes_on = {**tied, "rows": LoggedRows(ROWS, folder / "after"), "divided": "full"}
    shutil.copytree(alone[0] / "tied-checkpoints", folder / "from-one-checkpoints")
    (folder / "from-one-checkpoints" / "checkpoint-6" / "complete.json").unlink()
    together(
        folder,
        Group(4, [(models["tied"], "killed", deadly)], is_killed=True),
        Group(4, [(models[name], f"held-{name}", {}) for name in ("tied", "mixtral")], held),
        Group(4, [(models["pair"], "pair-of-four", late)], is_killed=True),
        Group(2, [(models["narrow"], "freed", {})], freed),
        Group(
            2,
            [
                *((models[name], name, {**KINDS[name], "divided": "full"}) for name in KINDS),
                (models["tied"], "killed", goes_on),
                (models["tied"], "from-one", {**tied, "divided": "full"}),
                (models["pair"], "pair-of-four", pair),
            ],
            train_any,
        ),
    )
    return folder


def _curve(result, key="loss"):
    return {point["step"]: point[key] for point in result.curves if key in point}


@pytest.mark.parametrize("name", KINDS)
def test_two_workers_learn_what_one_learns(alone, folder, name):
    expected, (result, _) = alone[1][name], said(folder, name)
    assert not isinstance(result, str), result
    assert len(_curve(result)) == 6
    for key in ("loss", "gradient_norm", "loss/z", "validation_loss"):
        assert _curve(result, key) == pytest.approx(
            _curve(expected, key), abs=ROUNDED.get(name, 1e-4), rel=1e-5
        ), key
    assert result.trained_parameters == expected.trained_parameters


@pytest.mark.parametrize("name", KINDS)
def test_what_they_write_is_an_ordinary_checkpoint(alone, folder, name):
    files = {path.name for path in (alone[0] / name).iterdir()}
    assert {path.name for path in (folder / name).iterdir()} == files
    for file in ("config.json", "tokenizer.json"):
        assert (folder / name / file).read_bytes() == (alone[0] / name / file).read_bytes()
    if name in DELTAS:  # each worker's sums differ in the last digit, and so do weights' hashes
        assert verify(folder / name, field="model") is None
        assert (folder / name / "modeling_ders.py").read_bytes() == Path(CODE).read_bytes()
    there = load_file(alone[0] / name / "model.safetensors")
    here = load_file(folder / name / "model.safetensors")
    assert here.keys() == there.keys()
    for key, value in there.items():
        assert here[key].dtype == value.dtype, key
        tolerance = 2e-2 if name in ROUNDED else 1e-4
        torch.testing.assert_close(here[key], value, atol=tolerance, rtol=0)


def test_up_matrices_stay_as_they_are(models, folder):
    before, after = weights(models["mixtral"]), weights(folder / "mixtral")
    for name, value in before.items():
        if name.endswith("gate_up_proj"):
            (gate, up), (new_gate, new_up) = value.chunk(2, 1), after[name].chunk(2, 1)
            assert torch.equal(up, new_up)
            assert not torch.equal(gate, new_gate)


def test_two_go_on_where_four_were_killed(alone, folder):
    """Every row is read once after the checkpoint; the curve is that of a training never killed."""
    result, _ = said(folder, "killed")
    assert _curve(result) == pytest.approx(_curve(alone[1]["tied"]), abs=1e-4)
    rows = [int(line) for line in (folder / "after").read_text().split()]
    assert sorted(rows)[:2] == [0, 0]  # both workers look at the first row's length
    assert sorted(rows)[2:] == list(range(2 * 8, ROWS))
    kept = [int(line) for line in (folder / "before").read_text().split()]
    assert set(range(2 * 8)) <= set(kept)


def test_what_workers_write_together_runs_no_code_when_it_is_read(folder):
    files = (folder / "lora-checkpoints" / "checkpoint-6" / sharding.SHARDS).iterdir()
    assert {path.suffix for path in files} == {".safetensors", ".json"}


def test_one_goes_on_where_two_stopped(tmp_path, models, alone, folder):
    shutil.copytree(folder / "killed-checkpoints", tmp_path / "out-checkpoints")
    (tmp_path / "out-checkpoints" / "checkpoint-6" / "complete.json").unlink()
    result = run(tmp_path, models["tied"], **KINDS["tied"])
    assert _curve(result) == pytest.approx(_curve(alone[1]["tied"]), abs=1e-4)


def test_two_go_on_where_one_stopped(alone, folder):
    result, _ = said(folder, "from-one")
    assert not isinstance(result, str), result
    assert _curve(result) == pytest.approx(_curve(alone[1]["tied"]), abs=1e-4)


def test_two_divide_by_number_what_four_divided_by_width(tmp_path, models, alone, folder):
    """Two experts: four workers cut each, two have one each; one has both."""
    result, _ = said(folder, "pair-of-four")
    assert not isinstance(result, str), result
    assert _curve(result) == pytest.approx(_curve(alone[1]["pair"]), abs=1e-4)
    shutil.copytree(folder / "pair-of-four-checkpoints", tmp_path / "out-checkpoints")
    (tmp_path / "out-checkpoints" / "checkpoint-6" / "complete.json").unlink()
    result = run(tmp_path, models["pair"], **KINDS["pair"])
    assert _curve(result) == pytest.approx(_curve(alone[1]["pair"]), abs=1e-4)


def test_what_a_pass_gathered_is_given_back_the_head_too(folder):
    left, after = said(folder, "freed")[0]
    assert "lm_head.weight" in left
    assert not after


def test_the_dimension_that_workers_divide():
    sizes = (5, 2 * 14336, 4096)
    assert [workers.divided_dimension(sizes, count) for count in (2, 3, 5, 8)] == [2, 0, 0, 2]
    assert workers.divided_dimension((7,), 2) == 0


@pytest.mark.parametrize("name", ["tied", "mixtral"])
def test_no_worker_holds_what_another_holds(models, folder, name):
    whole = held(folder, models[name], "alone", progress=None)
    parts = [said(folder, f"held-{name}", rank)[0] for rank in range(4)]
    # Dimensions of the small model divide by 4, but for nothing: no padding.
    assert parts == [whole / 4] * 4


def test_a_file_of_several_types_loses_no_digit(tmp_path):
    model = save_pico(tmp_path / "model")
    first, *others = CheckpointReader(model).tensors
    tensors = load_file(model / "model.safetensors")
    tensors[first] = tensors[first].bfloat16()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    found = dict(load_to_train(model, torch.float32, CONFIG, "cpu", "full").named_parameters())
    assert all(torch.equal(found[name], tensors[name]) for name in others)


@pytest.mark.parametrize(("device", "is_mapped"), [("cpu", False), ("meta", True)])
def test_moments_that_are_for_another_device_are_mapped(tmp_path, monkeypatch, device, is_mapped):
    """Tensors without memory stand for those of a GPU."""
    there = nn.Linear(3, 2)
    written = torch.optim.AdamW(there.parameters())
    there(torch.ones(3)).sum().backward()
    written.step()
    torch.save(written.state_dict(), tmp_path / sharding.OPTIMIZER)
    load, asked = torch.load, []
    monkeypatch.setattr(torch, "load", lambda *a, **b: asked.append(b["mmap"]) or load(*a, **b))
    network = nn.Linear(3, 2, device=device)
    optimizer = torch.optim.AdamW(network.parameters())
    sharding.load_moments(network, optimizer, tmp_path)
    assert asked == [is_mapped]
    assert optimizer.state[network.weight]["exp_avg"].device.type == device


def test_sharding_with_one_worker_is_refused_before_weights_are_read(tmp_path, models):
    with pytest.raises(InputError, match=r"sharding = .full.: one worker has all there is"):
        run(tmp_path, models["tied"], divided="full")


class _FlatConfig(PretrainedConfig):
    model_type = "flat-test"
    num_hidden_layers = 2


class _Flat(LlamaPreTrainedModel):
    config_class = _FlatConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Linear(2, 2)


def test_a_model_without_decoder_layers_is_refused(monkeypatch):
    monkeypatch.setattr(workers, "count", lambda: 2)
    AutoConfig.register("flat-test", _FlatConfig)
    AutoModelForCausalLM.register(_FlatConfig, _Flat)
    (fault,) = sharding.sharding_faults(_FlatConfig())
    assert "_Flat has no list of decoder layers" in fault.remedy
    monkeypatch.setattr(_Flat, "save_pretrained", print)
    assert "writes itself whole" in list(sharding.sharding_faults(_FlatConfig()))[1].remedy
    assert not list(sharding.sharding_faults(LlamaConfig(num_hidden_layers=2, vocab_size=8)))
