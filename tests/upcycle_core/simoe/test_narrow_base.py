"""Pre-trained layers held in bf16: half the memory, and the same training to the bit."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.pico import save_pico_tokenizer
from tests.upcycle_core.moe.joined import recast
from tests.upcycle_core.simoe.grown import save_dense
from tests.upcycle_core.simoe.test_t5_simoe import save_t5
from tests.upcycle_core.simoe.test_train_simoe import CONFIG, SIMOE, call
from upcycle_core import precision
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.simoe import train
from upcycle_core.simoe.model import SimoeForCausalLM
from upcycle_core.simoe.upcycle import narrow_base, restore_base

BF16 = replace(CONFIG, precision="bf16", steps=8)
QUICK = replace(SIMOE, mask_learning_rate=1.5)


def file_of(folder):
    return folder / "out" / "model.safetensors"


def of_linear_bases(tensors):
    return {n: t for n, t in tensors.items() if n.endswith("base.weight") and t.dim() == 2}


@pytest.mark.parametrize(("family", "standardise"), [("llama", True), ("gpt2", False)])
def test_training_is_the_same_with_bases_in_bf16(tmp_path, monkeypatch, family, standardise):
    save_pico_tokenizer(save_dense(tmp_path / "model", family))
    simoe = replace(QUICK, standardise=standardise)
    found = call(tmp_path / "narrow", config=BF16, simoe=simoe)
    monkeypatch.setattr(train, "narrow_base", lambda network, dtype: None)
    wide = call(tmp_path / "wide", config=BF16, simoe=simoe)
    assert replace(found, training=None) == replace(wide, training=None)
    assert found.training.curves == wide.training.curves
    for place, dtype in (("narrow", torch.bfloat16), ("wide", torch.float32)):
        checkpoint = tmp_path / place / "checkpoints" / "checkpoint-8" / "model.safetensors"
        held = of_linear_bases(load_file(checkpoint))
        assert {tensor.dtype for tensor in held.values()} == {dtype}
    written = [
        load_file(tmp_path / way / "out" / "model.safetensors") for way in ("narrow", "wide")
    ]
    assert written[0].keys() == written[1].keys()
    for name, tensor in written[0].items():
        assert torch.equal(tensor, written[1][name]), name
        assert tensor.dtype == written[1][name].dtype


def test_a_checkpoint_of_wide_bases_goes_on(tmp_path, monkeypatch):
    """Of a training that a version before this began."""
    save_pico_tokenizer(save_dense(tmp_path / "model"))
    whole = call(tmp_path / "whole", config=BF16, simoe=QUICK)
    with monkeypatch.context() as patched:
        patched.setattr(train, "narrow_base", lambda network, dtype: None)
        patched.setattr(train.SimoeObjective, "after_step", dying(train.SimoeObjective, 5))
        with pytest.raises(KeyboardInterrupt):
            call(tmp_path / "resumed", config=BF16, simoe=QUICK)
    resumed = call(tmp_path / "resumed", config=BF16, simoe=QUICK)
    assert resumed.training.curves == whole.training.curves
    files = [
        (tmp_path / way / "out" / "model.safetensors").read_bytes() for way in ("resumed", "whole")
    ]
    assert files[0] == files[1]


def test_a_training_that_goes_on_in_fp32_writes_the_base_as_it_was_given(tmp_path, monkeypatch):
    """On a machine without units for bf16, of a checkpoint of one that has them."""
    save_pico_tokenizer(save_dense(tmp_path / "model"))
    auto = replace(BF16, precision="auto")
    with monkeypatch.context() as patched:
        patched.setattr(precision, "bf16_units", lambda: "bf16")
        patched.setattr(train.SimoeObjective, "after_step", dying(train.SimoeObjective, 5))
        with pytest.raises(KeyboardInterrupt):
            call(tmp_path / "resumed", config=auto, simoe=QUICK)
    checkpoint = tmp_path / "resumed" / "checkpoints" / "checkpoint-3" / "model.safetensors"
    held = of_linear_bases(load_file(checkpoint))
    assert {tensor.dtype for tensor in held.values()} == {torch.bfloat16}
    monkeypatch.setattr(precision, "bf16_units", lambda: None)
    call(tmp_path / "resumed", config=auto, simoe=QUICK)
    given = load_file(tmp_path / "model" / "model.safetensors")
    written = load_file(file_of(tmp_path / "resumed"))
    for name in held:
        dense = name.removeprefix("model.").replace(".base.", ".")
        assert torch.equal(written[name], given[dense]), name


def dying(owner, at):
    original = owner.after_step

    def after_step(self, step):
        if step == at:
            raise KeyboardInterrupt
        original(self, step)

    return after_step


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_was_rounded_is_put_back_to_the_bit(tmp_path, family):
    dense = save_dense(tmp_path / "dense", family)
    model = train.upcycle_in_memory(dense, SIMOE, seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    narrow_base(model, torch.bfloat16)
    narrowed = {n for n, t in model.state_dict().items() if t.dtype == torch.bfloat16}
    assert narrowed == of_linear_bases(before).keys()
    restore_base(model, dense)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_nothing_is_read_again_of_a_model_that_was_given_in_bf16(tmp_path, monkeypatch):
    dense = save_dense(tmp_path / "dense")
    recast(dense, torch.bfloat16)
    model = train.upcycle_in_memory(dense, SIMOE, seed=1)
    monkeypatch.setattr("upcycle_core.simoe.upcycle._load_dense", pytest.fail)
    restore_base(model, dense)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_an_encoder_decoder_stays_wide(tmp_path):
    """T5 multiplies what goes into some layers in their weights' type."""
    model = train.upcycle_in_memory(save_t5(tmp_path / "t5", "relu"), SIMOE, seed=1)
    narrow_base(model, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_head_with_experts_stays_wide(tmp_path):
    dense = save_dense(tmp_path / "dense")
    model = train.upcycle_in_memory(dense, replace(SIMOE, lm_head=True), seed=1)
    narrow_base(model, torch.bfloat16)
    assert isinstance(model, SimoeForCausalLM)
    assert model.get_output_embeddings().base.weight.dtype == torch.float32


def test_the_published_model_is_the_seed_where_nothing_was_learned(tmp_path):
    """Its deltas are zero with a learning rate of next to nothing."""
    save_pico_tokenizer(save_dense(tmp_path / "model"))
    still = replace(BF16, learning_rate=1e-30, steps=8)
    call(tmp_path / "run", config=still, simoe=QUICK)
    ids = torch.randint(2, 90, (2, 9))
    with torch.no_grad():
        seed, tuned = (load_causal_lm(tmp_path / p)(ids).logits for p in ("model", "run/out"))
    torch.testing.assert_close(tuned, seed, atol=1e-6, rtol=0)
