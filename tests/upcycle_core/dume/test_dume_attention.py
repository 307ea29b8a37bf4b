"""Attention merged by regression, against least squares on stacked inputs and outputs."""

import math

import pytest
import torch
from killed import killed_at
from test_dume_repair import EXACT, merged, paragraphs_of, related, write_corpus

from upcycle_core.activations.regression import LAMBDAS
from upcycle_core.architectures.families import FAMILIES
from upcycle_core.backbone.stitch import load_stitched
from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.dume.attention import ALPHAS, PARTS, merge_attention
from upcycle_core.errors import InputError


def made_by(way, experts, backbone, corpora, out):
    merge_attention(experts, backbone, corpora, out, way=way, config=EXACT, max_shard_bytes=10**9)
    return CheckpointReader(out)


@pytest.fixture
def corpora(tmp_path):
    """A text of each domain; they differ in how their words are spread."""
    return [write_corpus(tmp_path / f"text{n}", documents=20 + 6 * n) for n in range(2)]


MATRICES = [(layer, matrix) for layer in range(2) for part in PARTS for matrix in part]


def projection(model, layer, matrix):
    return getattr(model.model.layers[layer].self_attn, matrix)


def observed(model, texts):
    """{(layer, matrix): what it reads and gives}, token by token, paragraph by paragraph."""
    seen = {place: [] for place in MATRICES}

    def see(place):
        return lambda module, given, gave: seen[place].append((given[0][0], gave[0]))

    hooks = [projection(model, *place).register_forward_hook(see(place)) for place in MATRICES]
    with torch.no_grad():
        for _, ids in texts:
            model.model(ids[None])
    for hook in hooks:
        hook.remove()
    return {
        place: (torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))
        for place, pairs in seen.items()
    }


def halves_of(texts):
    return torch.tensor([half for half, ids in texts for _ in ids])


def slow_regmean(inputs, weights, texts):
    """Equation 2 of RegMean as a stacked least-squares problem, alpha from the halves."""

    def solved(chosen, alpha):
        rows, targets = [], []
        for x, weight in zip(chosen, weights, strict=True):
            diagonal = (x.square().sum(0) * (1 - alpha)).sqrt().diag()
            for block in (math.sqrt(alpha) * x, diagonal):
                rows.append(block)
                targets.append(block @ weight.T)
        return torch.linalg.lstsq(torch.cat(rows), torch.cat(targets)).solution.T

    def missed(alpha):
        error = 0.0
        for half in (0, 1):
            own = [x[halves_of(t) == half] for x, t in zip(inputs, texts, strict=True)]
            other = [x[halves_of(t) != half] for x, t in zip(inputs, texts, strict=True)]
            found = solved(own, alpha)
            for x, w in zip(other, weights, strict=True):
                error += float((x @ (found - w).T).square().sum())
        return error

    return solved(inputs, min(ALPHAS, key=missed))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_regmean_is_least_squares_on_the_experts_own_inputs(family, corpora, tmp_path):
    experts = related(tmp_path, family)
    backbone = merged(experts, tmp_path / "backbone")
    made = made_by("regmean", experts, backbone, corpora, tmp_path / "made")
    texts = [paragraphs_of(corpus) for corpus in corpora]
    models = [load_causal_lm(expert, dtype=torch.float64) for expert in experts]
    seen = [observed(model, text) for model, text in zip(models, texts, strict=True)]
    changed = set()
    for layer, matrix in MATRICES:
        name = f"model.layers.{layer}.self_attn.{matrix}.weight"
        changed.add(name)
        inputs = [of_model[layer, matrix][0] for of_model in seen]
        weights = [projection(model, layer, matrix).weight.detach() for model in models]
        expected = slow_regmean(inputs, weights, texts)
        torch.testing.assert_close(made.tensor(name), expected, atol=1e-5, rtol=1e-5)
    before = CheckpointReader(backbone)
    for name in set(made.tensors) - changed:
        assert made.tensor(name).equal(before.tensor(name))


def slow_distilled(experts, backbone, texts):
    """Matrix by matrix, whole passes of the models as they have become."""
    own = [
        observed(load_causal_lm(expert, dtype=torch.float64), text)
        for expert, text in zip(experts, texts, strict=True)
    ]
    models = [load_stitched(backbone, expert, dtype=torch.float64) for expert in experts]
    halves = [halves_of(text) for text in texts]
    found = {}
    for layer in range(2):
        for part in PARTS:
            seen = [observed(model, text) for model, text in zip(models, texts, strict=True)]
            for matrix in part:
                read, drift = [], []
                for mine, become in zip(own, seen, strict=True):
                    x, y = become[layer, matrix]
                    read.append(x)
                    drift.append(mine[layer, matrix][1] - y)
                change = cross_validated(*map(torch.cat, (read, drift, halves)))
                for model in models:
                    with torch.no_grad():
                        projection(model, layer, matrix).weight += change
                name = f"model.layers.{layer}.self_attn.{matrix}.weight"
                found[name] = model.state_dict()[name]
    return found


def cross_validated(x, r, half):
    def solved(rows, factor):
        mean = x[rows].square().sum() / x.shape[1]
        stacked = torch.cat([x[rows], (factor * mean).sqrt() * torch.eye(x.shape[1]).double()])
        right = torch.cat([r[rows], torch.zeros(x.shape[1], r.shape[1]).double()])
        return torch.linalg.lstsq(stacked, right).solution

    errors = {
        factor: sum(
            float((r[half != h] - x[half != h] @ solved(half == h, factor)).square().sum())
            for h in (0, 1)
        )
        for factor in LAMBDAS
    }
    best = min(errors, key=errors.get)
    if errors[best] >= r.square().sum():
        return torch.zeros(r.shape[1], x.shape[1]).double()
    return solved(torch.ones(len(x), dtype=bool), best).T


@pytest.mark.parametrize("family", list(FAMILIES))
def test_distilled_is_least_squares_on_what_the_merged_model_reads(family, corpora, tmp_path):
    experts = related(tmp_path, family)
    backbone = merged(experts, tmp_path / "backbone")
    made = made_by("distilled", experts, backbone, corpora, tmp_path / "made")
    texts = [paragraphs_of(corpus) for corpus in corpora]
    before = CheckpointReader(backbone)
    moved = 0
    for name, expected in slow_distilled(experts, backbone, texts).items():
        torch.testing.assert_close(made.tensor(name), expected, atol=1e-5, rtol=1e-5)
        moved += not torch.allclose(expected, before.tensor(name), atol=1e-4)
    assert moved >= 4


@pytest.mark.parametrize("way", ["regmean", "distilled"])
def test_attention_of_identical_experts_stays(way, corpora, tmp_path):
    (expert,) = related(tmp_path, count=1)
    backbone = merged([expert, expert], tmp_path / "backbone")
    made = made_by(way, [expert, expert], backbone, corpora, tmp_path / "made")
    before = CheckpointReader(expert)
    for name in made.tensors:
        torch.testing.assert_close(made.tensor(name), before.tensor(name), atol=1e-6, rtol=0)


@pytest.mark.parametrize("way", ["regmean", "distilled"])
def test_activations_that_are_not_finite_are_named(way, corpora, tmp_path):
    experts = related(tmp_path)
    model = load_causal_lm(experts[0])
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = math.nan
    model.save_pretrained(experts[0])
    backbone = merged(experts, tmp_path / "backbone")
    with pytest.raises(InputError, match=r"backbone.merge.attention = nan: layer 1's"):
        made_by(way, experts, backbone, corpora, tmp_path / "made")


def test_a_killed_merge_goes_on_at_its_layer(corpora, tmp_path, monkeypatch):
    experts = related(tmp_path, num_hidden_layers=3)
    backbone = merged(experts, tmp_path / "backbone")

    def call(out):
        made_by("regmean", experts, backbone, corpora, out)

    passed, whole, found = killed_at(monkeypatch, 2, call, tmp_path / "out")
    assert passed == [2]
    assert found == whole
