import pytest
import torch

from tests.upcycle_core.moe.joined import join
from tests.upcycle_core.training.runs import RandomRows, run, settings
from upcycle_core.training import causal_trainer
from upcycle_core.training.checkpoints import newest_complete
from upcycle_core.training.config import MoEObjective

CONFIG = settings(checkpoint_steps=1)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return join(tmp_path_factory.mktemp("moe"), top_k=2).model


def broken(monkeypatch, place, step, value=float("nan")):
    """From ``step`` on, the gradient that leaves a module towards the input is not finite.

    Everything that is nearer to the output than the module has a finite gradient.
    """
    build = causal_trainer.CausalTrainer.__init__

    def init(self, model, *args, **kwargs):
        build(self, model, *args, **kwargs)

        def poison(module, inputs, output):
            if self.state.global_step + 1 < step:
                return output
            output.register_hook(lambda gradient: torch.full_like(gradient, value))
            return output

        if place == "lm_head":  # it multiplies inside the loss
            loss = model.loss_function
            model.loss_function = lambda *a, **k: poison(None, None, loss(*a, **k))
        else:
            model.get_submodule(place).register_forward_hook(poison)

    monkeypatch.setattr(causal_trainer.CausalTrainer, "__init__", init)


@pytest.mark.parametrize(
    ("place", "first"),
    [
        # The gradient breaks behind lm_head and the final norm, and so on from the output.
        ("lm_head", r"lm_head\.weight"),
        ("model.norm", r"model\.norm\.weight"),
        ("model.layers.1.mlp.experts", r"model\.layers\.1\.mlp\.experts\.down_proj"),
        ("model.layers.1.post_attention_layernorm", r"model\.layers\.1\.post_attention_layernorm"),
        ("model.layers.1.self_attn.o_proj", r"model\.layers\.1\.self_attn\.o_proj"),
        ("model.layers.0.mlp.experts", r"model\.layers\.0\.mlp\.experts\.down_proj"),
        ("model.embed_tokens", r"model\.embed_tokens\.weight"),
    ],
)
def test_the_first_bad_gradient_from_the_output_is_named(tmp_path, moe, monkeypatch, place, first):
    broken(monkeypatch, place, step=3)
    message = rf"gradient of step 3 is not finite; .* is that of {first}"
    with pytest.raises(FloatingPointError, match=message):
        run(tmp_path, moe, config=CONFIG, objective=MoEObjective())
    kept = newest_complete(tmp_path / "out-checkpoints")
    assert kept.step == 2
    weights = (kept.directory / "model.safetensors").read_bytes()
    run(tmp_path, moe, "short", config=settings(steps=2, checkpoint_steps=1))
    expected = tmp_path / "short-checkpoints" / "checkpoint-2" / "model.safetensors"
    assert weights == expected.read_bytes()


def test_an_infinite_gradient_is_found_although_clipping_would_make_it_zero(
    tmp_path, moe, monkeypatch
):
    broken(monkeypatch, "model.layers.1.mlp.experts", step=2, value=float("inf"))
    with pytest.raises(FloatingPointError, match=r"step 2 .*layers\.1\.mlp\.experts\.down_proj"):
        run(tmp_path, moe, config=CONFIG)
    assert not (tmp_path / "out").exists()


def test_a_frozen_tensor_is_passed_over(tmp_path, moe, monkeypatch):
    broken(monkeypatch, "lm_head", step=1)
    with pytest.raises(FloatingPointError, match=r"that of model\.layers\.1\.mlp\.gate\.weight"):
        run(tmp_path, moe, config=CONFIG, objective=MoEObjective(trainable=("router",)))


def test_a_loss_that_is_not_finite_is_said(tmp_path, moe, monkeypatch):
    add = causal_trainer.StepLosses.add

    def infinite(self, text, **kwargs):
        return add(self, text + float("inf"), **kwargs)  # its gradient stays finite

    monkeypatch.setattr(causal_trainer.StepLosses, "add", infinite)
    message = r"The loss of step 1 is not finite: it is inf; every gradient is finite.*Lower"
    with pytest.raises(FloatingPointError, match=message):
        run(tmp_path, moe, rows=RandomRows(12))
