"""One pass over calibration text, against both models run window by window, token by token."""

from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.pico import save_pico
from tests.vocabularies import CODE, NATURE, TEXTS, byte_level, pieces
from upcycle_core.activations.cross import CrossMoments, similarity
from upcycle_core.errors import InputError
from upcycle_core.symphony.config import CalibrationConfig
from upcycle_core.symphony.moments import (
    collect_moments,
    layer_groups,
    layer_moments,
    residual_moments,
)
from upcycle_core.symphony.texts import paired_texts

CONFIG = CalibrationConfig(tokens=70, sequence_length=24, batch_size=4, features="fp32", layers=1)
ENTRIES = 400


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("texts")
    found = {}
    for domain, documents in {"code": [CODE, *TEXTS], "nature": [NATURE] * 20}.items():
        found[domain] = folder / f"{domain}.parquet"
        column = pyarrow.array(documents, pyarrow.string())
        parquet.write_table(pyarrow.table({"text": column}), found[domain])
    return found


def stranger(directory: Path, family: str, seed: int) -> Path:
    """A pico model whose vocabulary is its own."""
    save_pico(directory, family, seed=seed, vocab_size=ENTRIES)
    if seed:
        pieces(directory, CODE + NATURE, merges=30)
    else:
        byte_level(directory, NATURE, merges=30)
    return directory


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def models(request, tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return tuple(stranger(folder / str(seed), request.param, seed) for seed in (0, 1))


@torch.no_grad()
def features(model: torch.nn.Module, ids: list[int]) -> dict[str, torch.Tensor]:
    """[n, .] of every kind, in fp64; the MLP written out, the stream from attention's sums."""
    attended: dict[int, torch.Tensor] = {}
    said: dict[int, torch.Tensor] = {}
    hooks = []
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        hooks.append(
            attention.register_forward_hook(
                lambda _m, _i, out, number=number: attended.update({number: out[0][0]})
            )
        )
        hooks.append(
            attention.o_proj.register_forward_hook(
                lambda _m, i, _o, number=number: said.update({number: i[0][0]})
            )
        )
    out = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    found, stream = {}, []
    for number, layer in enumerate(model.model.layers):
        before = out.hidden_states[number][0]
        middle = before + attended[number]
        x, mlp = layer.post_attention_layernorm(middle), layer.mlp
        found[f"heads.{number}"] = said[number]
        neurons = torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
        found[f"neurons.{number}"] = neurons
        stream += [before, middle]
    stream.append(middle + mlp.down_proj(neurons))
    found["residual"] = torch.stack([x / x.norm(dim=-1, keepdim=True) for x in stream], dim=1)
    return found


def plain_moments(models: tuple[Path, Path], texts: dict[str, Path]) -> dict[str, CrossMoments]:
    """The slow way: each window alone and without padding, each pair of tokens alone."""
    loaded = [AutoModelForCausalLM.from_pretrained(m, dtype=torch.float64).eval() for m in models]
    found: dict[str, CrossMoments] = {}
    for window in paired_texts(texts, *models, config=CONFIG).windows:
        first, second = (features(m, i.tolist()) for m, i in zip(loaded, window[:2], strict=True))
        for key in first:
            for i, j in window.places:
                x, y = first[key][i], second[key][j]
                for u, v in zip(x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1]), strict=True):
                    moments = found.setdefault(key, CrossMoments(len(u)))
                    moments.products += torch.outer(u, v)
                    moments.sums += torch.stack([u, v])
                    moments.squares += torch.stack([u, v]) ** 2
                    moments.count += 1
    return found


def read(files: list[Path], group: int) -> dict[str, CrossMoments]:
    """Everything that the files of groups of ``group`` layers hold."""
    found = {"residual": residual_moments(files)}
    for layer in (0, 1):
        file = files[layer // group]
        found |= {f"neurons.{layer}": layer_moments(file, "neurons", layer)}
        found |= {f"heads.{layer}": layer_moments(file, "heads", layer)}
    return found


def test_sums_are_those_of_every_pair_of_tokens(models, texts, tmp_path):
    out = tmp_path / "sums.safetensors"
    counts = collect_moments(*models, texts, out, config=CONFIG, layers=(0, 1))
    assert counts["tokens"] == {"code": 70, "nature": 70}
    found, expected = read([out], 2), plain_moments(models, texts)
    assert found.keys() == expected.keys()
    for key, moments in expected.items():
        readings = 5 if key == "residual" else 1
        assert found[key].count == moments.count == readings * sum(counts["pairs"].values())
        for part in ("products", "sums", "squares"):
            one, other = getattr(found[key], part), getattr(moments, part)
            assert (one - other).abs().max() <= 1e-5 * other.abs().max(), (key, part)
    assert [file.name for file in tmp_path.iterdir()] == ["sums.safetensors"]


def test_groups_of_layers_add_up_to_the_whole_model(models, texts, tmp_path):
    whole = tmp_path / "whole"
    collect_moments(*models, texts, whole, config=CONFIG, layers=(0, 1))
    files = [tmp_path / f"{layer}" for layer in (0, 1)]
    for group, file in zip(layer_groups(2, 1), files, strict=True):
        collect_moments(*models, texts, file, config=CONFIG, layers=group)
    with pytest.raises(InputError, match=r"does not have neurons\.1, its layers are \[0\]"):
        layer_moments(files[0], "neurons", 1)
    found, expected = read(files, 1), read([whole], 2)
    for key, moments in expected.items():
        for part, tensor in moments.tensors().items():
            torch.testing.assert_close(found[key].tensors()[part], tensor, rtol=1e-9, atol=1e-12)
    assert residual_moments(files[::-1]).products.equal(found["residual"].products)


def test_equal_sums_are_equal_bytes_and_only_what_is_wanted_is_there(models, texts, tmp_path):
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        collect_moments(
            *models, texts, file, config=CONFIG, layers=(1,), residual=False, heads=False
        )
    assert files[0].read_bytes() == files[1].read_bytes()
    assert {name.rsplit(".", 1)[0] for name in load_file(files[0])} == {"neurons.1"}
    for missing in (lambda: layer_moments(files[0], "heads", 1), lambda: residual_moments(files)):
        with pytest.raises(InputError, match="does not have"):
            missing()
    files[0].write_bytes(b"no file")
    with pytest.raises(InputError, match="cannot be read"):
        layer_moments(files[0], "neurons", 1)


def test_features_are_rounded_to_bf16_before_everything(models, texts, tmp_path):
    """A model beside itself: rounded or not, a feature is exactly like itself."""
    config = CalibrationConfig(tokens=70, sequence_length=24, features="bf16")
    out, exact = tmp_path / "out", tmp_path / "exact"
    collect_moments(models[0], models[0], texts, out, config=config, layers=(0, 1))
    collect_moments(models[0], models[0], texts, exact, config=CONFIG, layers=(0, 1))
    for key, moments in read([out], 2).items():
        diagonal = moments.products.diagonal()
        torch.testing.assert_close(diagonal, moments.squares[0], rtol=1e-5, atol=0)
        alike = similarity(moments, "correlation")
        assert (alike.matrix.diagonal()[~alike.dead_first] >= 1 - 1e-5).all()
        unrounded = read([exact], 2)[key].squares[0]
        change = (moments.squares[0] / unrounded - 1).abs()
        assert 1e-6 < change.max() <= 2**-7


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kinds", ["residual", "neurons"])
def test_non_finite_activations_name_layer_and_model(models, texts, tmp_path, side, kinds):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in models[side].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3] = torch.inf
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    chosen = [broken if side == at else model for at, model in enumerate(models)]
    wanted = {kind: kind == kinds for kind in ("residual", "heads", "neurons")}
    with pytest.raises(InputError) as caught:
        collect_moments(
            *chosen,
            texts,
            tmp_path / "out",
            config=CONFIG,
            layers=(0, 1),
            names=("law", "med"),
            **wanted,
        )
    (fault,) = caught.value.faults
    place = {"residual": "model.norm", "neurons": "model.layers.1.mlp.down_proj"}[kinds]
    assert (fault.field, fault.value) == (f"models.{('law', 'med')[side]}", place)
    assert not (tmp_path / "out").exists()


def test_an_empty_domain_is_named(models, texts, tmp_path):
    empty = tmp_path / "empty.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), empty)
    with pytest.raises(InputError, match=r"calibration\.domains\.law = .*empty\.parquet"):
        collect_moments(
            *models, {**texts, "law": empty}, tmp_path / "out", config=CONFIG, layers=(0,)
        )


def test_layers_come_in_groups():
    assert layer_groups(5, 2) == [(0, 1), (2, 3), (4,)]
    assert layer_groups(2, 8) == [(0, 1)]
