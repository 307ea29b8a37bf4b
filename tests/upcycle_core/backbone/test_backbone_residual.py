"""Residual alignment: exact changes of basis, and rotations that are known beforehand."""

import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from tests.pico import pico_config
from tests.upcycle_core.backbone.rewritten import (
    VARIANTS,
    difference,
    pico_reader,
    random_orthogonal,
    rewritten,
)
from upcycle_core.activations.cross import CrossMoments
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.backbone.residual import (
    embedding_moments,
    fold_norms,
    norm_before,
    residual_map,
    rotate_residual,
    unit_rows,
)
from upcycle_core.backbone.rewrite import read_untied, transformed

ROTATION = random_orthogonal(32)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_folded_and_rotated_model_computes_what_it_computed(tmp_path, family, overrides, tied):
    reader = pico_reader(tmp_path / "model", family, tie_word_embeddings=tied, **overrides)
    fold = fold_norms(FAMILIES[family], reader.tensor)
    rotate = rotate_residual(FAMILIES[family], ROTATION)
    folded = rewritten(reader, tmp_path / "folded", [fold], untie=True)
    rotated = rewritten(reader, tmp_path / "rotated", [fold, rotate], untie=True)
    assert difference(reader, folded) <= 1e-4
    assert difference(reader, rotated) <= 1e-4
    assert LM_HEAD in rotated.tensors
    assert rotated.config == {**reader.config, "tie_word_embeddings": False}
    for name in rotated.tensors:
        same = torch.equal(rotated.tensor(name), folded.tensor(name))
        kept = name.endswith(("norm.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias"))
        assert same == kept, name


def test_folding_is_written_out_for_every_tensor(tmp_path):
    reader = pico_reader(tmp_path, "qwen3", attention_bias=True)
    fold = fold_norms(FAMILIES["qwen3"], reader.tensor)
    scale = {
        part: reader.tensor(f"model.layers.1.{norm}_layernorm.weight")
        for norm, parts in {"input": "qkv", "post_attention": ("gate", "up")}.items()
        for part in parts
    }
    for name in reader.tensors:
        tensor = reader.tensor(name)
        expected = tensor
        part = name.split(".")[-2].removesuffix("_proj")
        if name.startswith("model.layers.1.") and part in scale and name.endswith(".weight"):
            expected = tensor * scale[part]
        elif name == LM_HEAD:
            expected = tensor * reader.tensor("model.norm.weight")
        elif part in ("input_layernorm", "post_attention_layernorm", "norm"):
            expected = torch.ones(32)
        if not name.startswith("model.layers.0."):
            assert torch.equal(fold(name, tensor), expected), name


def test_bf16_weights_are_rounded_once(tmp_path):
    reader = pico_reader(tmp_path, "llama", dtype="bfloat16")
    names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.o_proj.weight"]
    transforms = [
        fold_norms(FAMILIES["llama"], reader.tensor),
        rotate_residual(FAMILIES["llama"], ROTATION),
    ]
    read = transformed(lambda name: reader.tensor(name).bfloat16(), transforms, wide=torch.float64)
    gate, out = (reader.tensor(name).bfloat16().double() for name in names)
    scale = reader.tensor("model.layers.0.post_attention_layernorm.weight").double()
    assert torch.equal(read(names[0]), (gate * scale @ ROTATION).bfloat16())
    assert torch.equal(read(names[1]), (ROTATION.T @ out).bfloat16())


def test_a_model_is_rotated_only_after_its_norms_are_folded(tmp_path):
    reader = pico_reader(tmp_path, "llama")
    rotate = rotate_residual(FAMILIES["llama"], ROTATION)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is not folded"):
        rotate("model.norm.weight", reader.tensor("model.norm.weight"))


@pytest.mark.parametrize("family", [n for n, family in FAMILIES.items() if family.norms_first])
def test_every_norm_of_the_stream_is_read_by_something(family):
    names = FAMILIES[family].tensors(pico_config(family).to_dict())
    read = {norm_before(FAMILIES[family], name) for name in names} - {None}
    assert read == {name for name in names if name.endswith(("layernorm.weight", "l.norm.weight"))}


def rows(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 32, generator=generator, dtype=torch.float64)


def test_the_map_is_the_one_that_scipy_finds():
    x_TH, y_TH = unit_rows(rows(200)), unit_rows(rows(200, seed=1))
    moments = CrossMoments(32)
    for batch in zip(x_TH.split(64), y_TH.split(64), strict=True):
        moments.update(*batch)
    found = residual_map(moments)
    expected, _ = orthogonal_procrustes(y_TH.numpy(), x_TH.numpy())
    torch.testing.assert_close(found.rotation, torch.from_numpy(expected), rtol=0, atol=1e-9)
    assert found.before == pytest.approx(float((x_TH * y_TH).sum(1).mean()), abs=1e-12)
    assert found.after == pytest.approx(float((x_TH * (y_TH @ found.rotation)).sum(1).mean()))
    assert found.rank == 32


def test_rows_that_do_not_span_the_stream_still_give_a_rotation():
    x_TH = unit_rows(rows(5).float())
    moments = CrossMoments(32)
    moments.update(x_TH, x_TH @ ROTATION.T.float())
    found = residual_map(moments)
    assert found.rank == 5
    assert found.after == pytest.approx(1, abs=1e-6)
    identity = torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close(found.rotation @ found.rotation.T, identity, rtol=0, atol=1e-12)


def test_rows_weigh_alike_whatever_their_length():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.3, 0.4]], dtype=torch.bfloat16)
    unit = unit_rows(x)
    assert unit.dtype == torch.float32
    torch.testing.assert_close(unit.norm(dim=1), torch.tensor([1.0, 0.0, 1.0]))


def test_nothing_counted_is_no_map():
    with pytest.raises(ValueError, match="0 rows"):
        residual_map(CrossMoments(4))


def test_embeddings_of_shared_tokens_find_a_rotation_without_data(tmp_path):
    reader = pico_reader(tmp_path, "llama", tie_word_embeddings=True)
    family = FAMILIES["llama"]
    fold = fold_norms(family, reader.tensor)
    shuffle = torch.randperm(96, generator=torch.Generator().manual_seed(0))

    def relabelled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[shuffle] if name in (EMBEDDING, LM_HEAD) else tensor

    read = read_untied(reader)
    turned = [fold, rotate_residual(family, ROTATION), relabelled]
    # Token i of the stranger is token shuffle[i] of the anchor; some tokens are not shared.
    tokens = shuffle[:80], torch.arange(80)
    moments = embedding_moments(transformed(read, [fold]), transformed(read, turned), tokens)
    assert moments.count == 160
    found = residual_map(moments)
    torch.testing.assert_close(found.rotation, ROTATION.T, rtol=0, atol=1e-6)
    assert found.after == pytest.approx(1, abs=1e-6)
