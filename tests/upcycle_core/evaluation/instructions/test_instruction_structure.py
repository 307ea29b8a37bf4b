"""Shares and overlaps against loops over single mask entries; pruned models; real module names."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from upcycle_core.errors import InputError
from upcycle_core.evaluation.instructions.structure import Structure, structure_of


def gated(masks: list, weight: tuple[int, ...], per_gate: int):
    base = SimpleNamespace(weight=torch.zeros(weight))
    return SimpleNamespace(
        base=base, weights_per_gate=per_gate, masks=lambda: torch.tensor(masks, dtype=torch.float)
    )


def modules() -> dict:
    """Two experts; zeros are exact, everything else counts as used, however small."""
    return {
        "model.model.layers.0.self_attn.q_proj": gated([[1, 0, 0.5], [0, 0, 1]], (4, 3), 4),
        "model.model.layers.0.input_layernorm": gated([[1, 1, 0], [0, 1e-6, 0]], (3,), 1),
        "model.model.layers.1.mlp.up_proj": gated([[0, 0, 0], [1, 1, 0]], (5, 3), 5),
        "model.model.layers.1.self_attn.q_norm": gated([[0, 1], [1, 1]], (2,), 1),
        "model.model.norm": gated([[0, 0, 1], [0, 0, 0]], (3,), 1),
    }


def test_every_share_by_hand():
    found = structure_of(modules())
    assert list(found.by_type) == ["q_proj", "up_proj", "norms"]
    assert found.by_type["q_proj"] == pytest.approx((8 / 12, 4 / 12))
    assert found.by_type["up_proj"] == pytest.approx((0, 10 / 15))
    assert found.by_type["norms"] == pytest.approx((4 / 8, 3 / 8))  # 2+1+1 and 1+2+0 of 3+2+3
    assert list(found.by_depth) == ["0", "1", "outside"]
    assert found.by_depth["0"] == pytest.approx((10 / 15, 5 / 15))
    assert found.by_depth["1"] == pytest.approx((1 / 17, 12 / 17))
    assert found.by_depth["outside"] == pytest.approx((1 / 3, 0))
    assert found.parameters == 12 + 3 + 15 + 2 + 3
    assert found.total == pytest.approx((12 / 35, 17 / 35))
    assert found.density == pytest.approx((12 + 17) / 70)
    assert found.union == pytest.approx((8 + 2 + 10 + 2 + 1) / 35)
    # Entries, not parameters: both have q 1, norm 1, q_norm 1; one of them 2 + 2 + 2 + 2 + 1.
    assert found.overlap[0][1] == found.overlap[1][0] == pytest.approx(3 / 9)
    assert found.overlap[0][0] == found.overlap[1][1] == 1.0
    assert found.mean_overlap == pytest.approx(1 / 3)
    assert Structure.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize("shape", [(5, 6), (5, 3, 6)], ids=["neurons", "parameters"])
def test_random_masks_against_a_loop_and_a_pruned_model_gives_the_same(shape):
    generator = torch.Generator().manual_seed(3)
    whole, pruned, entries = {}, {}, [[] for _ in range(5)]
    for layer in range(3):
        z = (torch.rand(shape, generator=generator) < 0.3).float()
        z[..., layer] = 0  # nobody uses this input
        per_gate = 3 if len(shape) == 2 else 1
        name = f"layers.{layer}.mlp.down_proj"
        whole[name] = gated(z.tolist(), (3, 6), per_gate)
        left = z.flatten(0, -2).any(0)
        pruned[name] = gated(z[..., left].tolist(), (3, 6), per_gate)
        for expert in range(5):
            entries[expert] += z[expert].flatten().tolist()
    found = structure_of(whole)
    for i in range(5):
        assert found.total[i] == pytest.approx(sum(entries[i]) / len(entries[i]))
        for j in range(5):
            both = sum(a and b for a, b in zip(entries[i], entries[j], strict=True))
            either = sum(a or b for a, b in zip(entries[i], entries[j], strict=True))
            assert found.overlap[i][j] == pytest.approx(both / either)
    assert structure_of(pruned) == found


def test_experts_that_nothing_is_left_of_overlap_by_zero():
    nothing = structure_of({"layers.0.mlp.up_proj": gated([[], []], (4, 3), 4)})
    assert nothing.total == (0.0, 0.0)
    assert nothing.overlap == ((1.0, 0.0), (0.0, 1.0))
    assert not math.isnan(nothing.mean_overlap)
    with pytest.raises(InputError, match="no layer with experts"):
        structure_of({})


def test_layers_of_an_encoder_decoder_and_depths_above_nine_are_told_apart():
    names = [f"model.decoder.block.{n}.layer.0.SelfAttention.q" for n in (10, 2)]
    names += ["model.encoder.block.2.layer.0.layer_norm", "model.encoder.final_layer_norm"]
    found = structure_of({name: gated([[1], [1]], (2, 1), 2) for name in names})
    assert list(found.by_depth) == ["encoder 2", "decoder 2", "decoder 10", "outside"]
    assert list(found.by_type) == ["q", "norms"]
    alone = structure_of({name: gated([[1], [1]], (2, 1), 2) for name in names[:2]})
    assert list(alone.by_depth) == ["2", "10"]
