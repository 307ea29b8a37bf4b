import dataclasses
import itertools
import json
import shutil
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pico import save_pico
from tests.upcycle_core.ders.grown import grow, logits_of, set_config, weights_of
from upcycle_core.checkpoints.hashing import sha256_file, tree_digest
from upcycle_core.ders.codec import Codec
from upcycle_core.ders.compress import compress
from upcycle_core.ders.config import CodecConfig
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent

EXACT = CodecConfig(codec="sparse", drop_rate=0.0)
EIGHT = CodecConfig(codec="quantised", bits=8)
FAMILIES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral, sliding window": ("mistral", {"sliding_window": 5}),
    "qwen2, sliding windows by layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3, sliding windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3, attention bias, tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "ernie4.5": ("ernie4_5", {}),
}
WHOLE = {"max_shard_bytes": 10**9}
PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    return grow(tmp_path_factory.mktemp("grown"))


def refused(*args, **kwargs) -> str:
    with pytest.raises(InputError) as caught:
        compress(*args, **{**WHOLE, **kwargs})
    return str(caught.value)


def test_a_bias_that_chooses_experts_is_no_delta(tmp_path):
    grown = grow(tmp_path, "ernie4_5")
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    file = grown.model / "model.safetensors"
    weights = load_file(file)
    weights[name][0, 2] = 0.5
    save_file(weights, file, {"format": "pt"})
    said = refused(grown.model, tmp_path / "out", config=EXACT, base=grown.seed)
    assert name in said
    assert "which experts are chosen" in said


@pytest.mark.parametrize("case", FAMILIES)
def test_with_nothing_dropped_it_is_the_original_and_with_8_bits_nearly(tmp_path, case):
    family, overrides = FAMILIES[case]
    # All experts: 8 bits must not decide between two that a router finds nearly equal.
    grown = grow(tmp_path, family, top_k=3, **overrides)
    original = logits_of(grown.model)
    size = original.abs().max()
    for name, config, base, tolerance in (
        # fp32: a sum in another order
        ("drop", EXACT, grown.seed, 1e-5),
        ("mean", EXACT, None, 1e-5),
        ("bits", EIGHT, grown.seed, 2e-2),
    ):
        compress(grown.model, tmp_path / name, config=config, base=base, **WHOLE)
        lost = (logits_of(tmp_path / name) - original).abs().max()
        assert lost <= tolerance * size, (name, lost)
    assert lost > 1e-5 * size


def test_weights_below_one_are_kept_where_the_original_does_not_divide_them(tmp_path):
    grown = grow(tmp_path, "qwen3")
    set_config(grown.model, norm_topk_prob=False)
    compress(grown.model, tmp_path / "out", config=EXACT, base=grown.seed, **WHOLE)
    original = logits_of(grown.model)
    assert (logits_of(tmp_path / "out") - original).abs().max() <= 1e-5 * original.abs().max()
    set_config(tmp_path / "out", combine="normalised")
    (tmp_path / "out" / "checksums.json").unlink()
    assert (logits_of(tmp_path / "out") - original).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", ["seed", "mean"])
def test_files_hold_the_base_its_deltas_and_the_rest_unchanged(tmp_path, base, dtype):
    grown = grow(tmp_path, dtype=dtype)
    report = compress(
        grown.model,
        tmp_path / "out",
        config=CodecConfig(codec="sparse", drop_rate=0.5, rescale=False),
        base=grown.seed if base == "seed" else None,
        max_shard_bytes=40_000,
    )
    moe, seed, out = (weights_of(d) for d in (grown.model, grown.seed, tmp_path / "out"))
    seen = set()
    for layer in range(2):
        mlp, old = f"model.decoder.layers.{layer}.mlp", f"model.layers.{layer}"
        assert torch.equal(out[f"{mlp}.gate.weight"], moe[f"{old}.block_sparse_moe.gate.weight"])
        seen.add(f"{mlp}.gate.weight")
        for matrix, part in PARTS.items():
            names = [f"{old}.block_sparse_moe.experts.{e}.{part}.weight" for e in range(3)]
            experts = [moe[name].float() for name in names]
            expected = sum(experts) / 3 if base == "mean" else seed[f"{old}.mlp.{matrix}.weight"]
            stored = out[f"{mlp}.base.{matrix}.weight"]
            assert torch.equal(stored, expected.to(dtype))
            values = out[f"{mlp}.experts.{matrix}.values"]
            places = out[f"{mlp}.experts.{matrix}.indices"]
            assert (stored.dtype, values.dtype, places.dtype) == (dtype, dtype, torch.uint16)
            lost = whole = 0.0
            for expert, weight in enumerate(experts):
                delta = (weight - stored.float()).flatten()
                own = places[expert].long()
                assert torch.equal(values[expert], delta[own].to(dtype))
                whole += float(delta.double().square().sum())
                delta[own] -= values[expert].float()
                lost += float(delta.double().square().sum())
                alike = torch.cosine_similarity(
                    weight.double().flatten(), stored.double().flatten(), dim=0
                )
                place = f"{layer}.{expert}.{matrix}"
                assert abs(report.cosines[place] - float(alike)) < 1e-9
            found = report.relative_errors[f"{layer}.{matrix}"]
            assert abs(found - (lost / whole) ** 0.5) < 1e-6
            prefix = f"{mlp}.experts.{matrix}"
            seen |= {f"{mlp}.base.{matrix}.weight", f"{prefix}.values", f"{prefix}.indices"}
    for name in out.keys() - seen:
        assert torch.equal(out[name], moe[name.replace("model.decoder.", "model.")])
    assert len(out) - len(seen) == sum("block_sparse_moe" not in name for name in moe)
    assert report.base == base
    assert len(report.cosines) == 18
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2


CODECS = {
    "p 0.5": CodecConfig(codec="sparse", drop_rate=0.5),
    "p 0.99": CodecConfig(codec="sparse", drop_rate=0.99),
    **{f"{b} bits": CodecConfig(codec="quantised", bits=b) for b in (8, 4, 2, 1)},
    "4 bits in groups": CodecConfig(codec="quantised", bits=4, group_size=32),
    "rank 4": CodecConfig(codec="low_rank", rank=4),
    "energy": CodecConfig(codec="low_rank", energy=0.5),
}


def paper_bits(name: str, ranks: dict) -> float:
    """Bits a layer of two 320 x 128 matrices and one 128 x 320, 4 experts, 32 bits a weight."""
    entries, config = 3 * 320 * 128, CODECS[name]
    if config.codec == "sparse":
        share = 4 * (1 - config.drop_rate)
        return 32 * entries * (1 + share) + 16 * entries * share
    if config.codec == "quantised":
        rows = 2 * 320 + 128
        scales = rows if config.group_size is None else entries // config.group_size
        return entries * (32 + 4 * config.bits) + 4 * 32 * scales
    return 32 * entries + 32 * 4 * (320 + 128) * sum(ranks.values())


def test_bytes_on_disk_are_within_two_percent_of_the_formula(tmp_path):
    wide = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 320, "num_hidden_layers": 1}
    grown = grow(tmp_path, experts=4, **wide)
    rest = sum(4 * t.numel() for n, t in weights_of(grown.model).items() if ".experts." not in n)
    for name, config in CODECS.items():
        out = tmp_path / name
        report = compress(grown.model, out, config=config, base=grown.seed, **WHOLE)
        found = sum(t.nbytes for t in weights_of(out).values())
        own = dict.fromkeys(PARTS, config.rank)
        ranks = {m: report.delta.get("ranks", {}).get(f"0.{m}", own[m]) for m in PARTS}
        expected = rest + paper_bits(name, ranks) / 8
        assert abs(report.bytes_by_formula - expected) < 0.51, name  # whole bytes
        on_disk = (out / "model.safetensors").stat().st_size
        assert report.bytes_on_disk == on_disk
        assert found < on_disk < found + 5000
        assert abs(on_disk / expected - 1) < 0.02, name
        assert abs(found / expected - 1) < 0.001, name
        assert report.bytes_of_original == (grown.model / "model.safetensors").stat().st_size
        assert json.loads(json.dumps(dataclasses.asdict(report)))["delta"] == report.delta
        numbers = rest // 4 + 3 * 320 * 128
        if config.codec == "quantised":
            assert report.parameters == numbers + 4 * 3 * 320 * 128
        elif config.codec == "low_rank":
            assert report.parameters == numbers + 4 * (320 + 128) * sum(ranks.values())
        else:
            kept = round((1 - config.drop_rate) * 320 * 128)
            assert report.parameters == numbers + 4 * 3 * kept


def test_the_same_seed_gives_the_same_bytes_and_the_original_is_not_touched(grown, tmp_path):
    before = tree_digest(grown.model), tree_digest(grown.seed)
    config = CodecConfig(codec="sparse", drop_rate=0.9)
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        compress(grown.model, tmp_path / name, config=config, base=grown.seed, seed=seed, **WHOLE)
    digests = [tree_digest(tmp_path / name) for name in ("one", "two", "other")]
    assert digests[0] == digests[1]
    assert digests[0]["model.safetensors"] != digests[2]["model.safetensors"]
    assert (tree_digest(grown.model), tree_digest(grown.seed)) == before
    sums = json.loads((tmp_path / "one" / "checksums.json").read_text())
    assert sums == {n: sha256_file(tmp_path / "one" / n) for n in ("config.json", *_shards(sums))}
    assert {"configuration_ders.py", "deltas_ders.py", "modeling_ders.py"} <= digests[0].keys()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "one")) == 96


def _shards(sums) -> list[str]:
    return [name for name in sums if name.endswith(".safetensors")]


def test_a_base_that_is_no_ancestor_is_refused_with_its_lowest_cosine(grown, tmp_path):
    stranger = save_pico(tmp_path / "stranger", seed=9, intermediate_size=64)
    out = tmp_path / "out"
    message = refused(grown.model, out, config=EXACT, base=stranger, minimum_cosine=0.5)
    assert not out.exists()
    report = compress(grown.model, out, config=EXACT, base=stranger, minimum_cosine=-1, **WHOLE)
    telling = {p: c for p, c in report.cosines.items() if not p.endswith("down_proj")}
    place = min(telling, key=telling.get)
    layer, expert, matrix = place.split(".")
    assert f"layer {layer}, expert {expert}, {matrix}" in message
    assert f"{report.cosines[place]:.4f}" in message
    assert "lowest of 12" in message
    assert str(stranger) in message


def test_no_rank_is_looked_for_before_base_and_tokenizer_are_known(grown, tmp_path, monkeypatch):
    monkeypatch.setattr("upcycle_core.ders.compress.rank_of_energy", None)
    stranger = save_pico(tmp_path / "stranger", seed=9, intermediate_size=64)
    energy = CodecConfig(codec="low_rank", energy=0.9)
    assert "is no ancestor" in refused(grown.model, tmp_path / "out", config=energy, base=stranger)
    bare = shutil.copytree(grown.model, tmp_path / "bare", ignore=shutil.ignore_patterns("tok*"))
    monkeypatch.setattr("upcycle_core.checkpoints.reader.CheckpointReader.tensor", None)
    assert "holds no tokenizer" in refused(bare, tmp_path / "out", config=energy, base=grown.seed)


def test_down_projections_that_a_repair_has_written_anew_are_no_strangers(tmp_path):
    grown = grow(tmp_path)
    file = grown.model / "model.safetensors"
    weights = load_file(file)
    for name in (n for n in weights if n.endswith("w2.weight")):
        weights[name] = torch.randn_like(weights[name])
    save_file(weights, file, {"format": "pt"})
    report = compress(grown.model, tmp_path / "out", config=EXACT, base=grown.seed, **WHOLE)
    assert min(c for p, c in report.cosines.items() if p.endswith("down_proj")) < 0.3


def test_what_cannot_be_is_refused_with_every_fault_before_weights_are_read(
    grown, tmp_path, monkeypatch
):
    wide = save_pico(tmp_path / "wide", intermediate_size=96)
    monkeypatch.setattr("upcycle_core.checkpoints.reader.CheckpointReader.tensor", None)
    out = tmp_path / "out"
    for bad, said in (
        ({"codec": "sparse", "drop_rate": 1.0}, "codec.drop_rate = 1.0"),
        ({"codec": "sparse", "drop_rate": -0.1}, "codec.drop_rate = -0.1"),
        ({"codec": "quantised", "bits": 3}, "codec.bits = 3"),
        ({"codec": "low_rank", "rank": 4, "energy": 0.5}, "codec.rank = 4"),
    ):
        message = refused(grown.model, out, config=CodecConfig(**bad), base=wide)
        assert said in message
        assert "base.config.intermediate_size = 96" in message
    rank = CodecConfig(codec="low_rank", rank=33)
    message = refused(grown.model, out, config=rank, base=grown.seed)
    assert "codec.rank = 33: is above the matrices, 64 by 32; use at most 32" in message
    assert "is only read" in refused(grown.model, grown.model / "x", config=EXACT)
    assert "is not empty" in refused(grown.model, grown.seed, config=EXACT)
    assert "model_type = 'llama'" in refused(grown.seed, out, config=EXACT)
    assert not out.exists()
    assert not (grown.model / "x").exists()


def test_broken_weights_are_refused(grown, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(grown.seed)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    model.save_pretrained(tmp_path / "nan")
    message = refused(grown.model, tmp_path / "out", config=EXACT, base=tmp_path / "nan")
    assert "NaN or infinity in 1.0.up_proj, 1.1.up_proj, 1.2.up_proj" in message


def test_nothing_is_left_behind_when_it_fails_half_way(grown, tmp_path, monkeypatch):
    calls = []

    def encode(self, deltas, *, dtype, key):
        calls.append(key)
        if len(calls) == 4:
            raise RuntimeError("out of space")
        return plain(self, deltas, dtype=dtype, key=key)

    plain = Codec.encode
    monkeypatch.setattr(Codec, "encode", encode)
    with pytest.raises(RuntimeError, match="out of space"):
        compress(grown.model, tmp_path / "out", config=EXACT, base=grown.seed, **WHOLE)
    assert len(calls) == 4
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "out").mkdir()  # a stage's own folder, empty
    compress(grown.model, tmp_path / "out", config=EXACT, base=grown.seed, **WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_one_matrix_of_all_experts_is_held_at_a_time(grown, tmp_path, monkeypatch):
    calls, alive = [], []

    def encode(self, deltas, *, dtype, key):
        assert all(reference() is None for reference in alive), f"{key}: the last is still held"
        alive[:] = [weakref.ref(deltas)]
        calls.append((key, tuple(deltas.shape), len(written)))
        tensors = plain(self, deltas, dtype=dtype, key=key)
        alive.extend(weakref.ref(tensor) for tensor in tensors.values())
        return tensors

    class Listener(Silent):
        def start(self, what, total, unit="steps"):
            written.clear()

        def advance(self, amount=1, **shown):
            written.append(amount)

    written, plain = [], Codec.encode
    monkeypatch.setattr(Codec, "encode", encode)
    compress(
        grown.model,
        tmp_path / "out",
        config=EXACT,
        base=grown.seed,
        progress=Listener(),
        **WHOLE,
    )
    shapes = {"gate_proj": (3, 64, 32), "up_proj": (3, 64, 32), "down_proj": (3, 32, 64)}
    expected = [((0, layer, m), shape) for layer in range(2) for m, shape in shapes.items()]
    assert [(key, shape) for key, shape, _ in calls] == expected
    steps = [count for _, _, count in calls]
    assert all(b - a >= 3 for a, b in itertools.pairwise(steps))  # base, values, indices


@pytest.mark.parametrize("damage", ["altered", "missing", "config"])
def test_a_damaged_model_does_not_load(grown, tmp_path, damage):
    out = tmp_path / "out"
    compress(grown.model, out, config=EXACT, base=grown.seed, max_shard_bytes=40_000)
    file = sorted(out.glob("*.safetensors"))[1]
    if damage == "missing":
        file.unlink()
    elif damage == "config":
        file = out / "config.json"
        set_config(out, combine="sum")
    else:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    with pytest.raises(ValueError, match=file.name):
        AutoModelForCausalLM.from_pretrained(out)


def test_a_tied_head_that_is_another_one_is_not_lost_in_silence(tmp_path):
    made = grow(tmp_path, tie_word_embeddings=True)
    file = made.model / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    compress(made.model, tmp_path / "same", config=EIGHT)
    tensors["lm_head.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert "is tied by config.json, yet lm_head.weight differs" in refused(
        made.model, tmp_path / "other", config=EIGHT
    )
