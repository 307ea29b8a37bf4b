"""A model joined in closed form: built, grown, shrunk, restored; killed while it is repaired.

Its head is fitted to all experts. These are repaired twice: for the merged backbone, and for what
the solved routers send them.
"""

import json
import shutil
import sys

import pytest
from project import Project
from texts import pico_recipe, save_recipe, write_texts

from tasks.recipes import load_recipe
from upcycle_core.architectures.family import EMBEDDING, LM_HEAD
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import InputError
from upcycle_core.evaluation.text.pieces import evaluate_checkpoint
from upcycle_core.evaluation.text.scores import Score

OLD, NEW = ("letters", "numbers"), "colours"
DOWN = "model.layers.1.mlp.down_proj.weight"


class Repaired(Project):
    def call(self, module, *arguments):
        """``python -m MODULE ARGUMENTS``, and the core functions that it called."""
        self.calls()
        done = self.run(sys.executable, "-m", module, *map(str, arguments))
        done.calls = self.calls()
        return done


def recipe_of(folder, texts, domains, **more):
    values = pico_recipe(texts, domains=domains)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    values["experts"] |= {"repair": "down+head_target", "repair_tokens": "routed"}
    values["backbone"] = {"merge": {"embeddings": "counts", "head": "fitted"}}
    values["versions"] = {"remote": "remote"}
    return save_recipe(folder / f"{len(domains)}.yaml", values | more)


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joined")
    texts = write_texts(folder / "texts", domains=(*OLD, NEW))
    project = Repaired(folder, recipe_of(folder, texts, OLD))
    project.grown_recipe = recipe_of(folder, texts, (*OLD, NEW))
    project.built = project.call("flows.dume", project.recipe)
    project.first = project.digests()
    return project


def test_the_moe_is_made_of_repaired_experts(joined):
    assert (joined.built.calls["repair_expert"], joined.built.calls["repair_routed"]) == (2, 1)
    moe = CheckpointReader(joined.workspace / "model")
    for index, domain in enumerate(OLD):
        expert, repaired, routed = (
            CheckpointReader(joined.workspace / kind / domain).tensor(DOWN)
            for kind in ("experts", "repaired", "routed")
        )
        place = f"model.layers.1.block_sparse_moe.experts.{index}.w2.weight"
        assert moe.tensor(place).equal(routed)
        assert not expert.equal(repaired)
        layers = json.loads((joined.workspace / "routed" / domain / "repair.json").read_text())
        assert repaired.equal(routed) == (layers[1]["lambda"] is None)
    assert changed_by_routing(joined)


def changed_by_routing(joined):
    """Down projections that the second repair has moved."""
    readers = {
        domain: [CheckpointReader(joined.workspace / k / domain) for k in ("repaired", "routed")]
        for domain in OLD
    }
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(2)]
    return [
        (domain, name)
        for domain, (before, after) in readers.items()
        for name in names
        if not before.tensor(name).equal(after.tensor(name))
    ]


def test_the_fitted_head_is_everybody_s_and_no_longer_the_embedding(joined):
    assert joined.built.calls["fitted_head"] == 1
    assert joined.built.calls["final_moments"] == len(OLD)
    moe = CheckpointReader(joined.workspace / "model")
    heads = [
        CheckpointReader(joined.workspace / kind / domain).tensor(LM_HEAD)
        for kind in ("repaired", "routed")
        for domain in OLD
    ]
    assert all(head.equal(moe.tensor(LM_HEAD)) for head in heads)
    assert moe.config["tie_word_embeddings"] is False
    assert not moe.tensor(LM_HEAD).equal(moe.tensor(EMBEDDING))
    more = f"{heads[0].numel():,} parameters more"
    assert f"the head is no longer the embedding: {more}" in joined.built.stderr


def test_the_oracle_is_the_repaired_expert(joined):
    measured = json.loads((joined.workspace / "report/metrics.json").read_text())
    config = load_recipe(joined.recipe).evaluation
    for domain in OLD:
        text = {domain: joined.workspace / "corpora" / domain / "heldout"}
        expected = evaluate_checkpoint(joined.workspace / "routed" / domain, text, config=config)
        (score,) = expected.values()
        assert measured["perplexity"]["oracle"][domain] == pytest.approx(
            Score.from_dict(score).perplexity, rel=1e-5
        )


@pytest.mark.faults
def test_life_goes_on_with_repaired_experts(joined):
    """Grow, nothing new, shrink, restore, in turn: each is built upon the one before."""
    before = joined.first
    done = joined.call("flows.grow", joined.grown_recipe, NEW)
    repairs = (done.calls["repair_expert"], done.calls["repair_routed"])  # routers are all new
    assert (*repairs, done.calls["train"]) == (1, 1, 1)
    assert not done.calls["write_backbone"]
    after = joined.digests()
    kept = ("seed/", "backbone/", "experts/", "repaired/", "statistics/")
    assert all(after[name] == digest for name, digest in before.items() if name.startswith(kept))
    assert json.loads((joined.workspace / "lineage.json").read_text())["backbone"] == list(OLD)

    assert "nothing to do" in joined.call("flows.retrain", joined.grown_recipe).stdout

    done = joined.call("flows.shrink", joined.grown_recipe, NEW)
    assert not done.calls["repair_expert"] + done.calls["domain_statistics"]
    assert not (joined.workspace / "repaired" / NEW).exists()
    first = {n: d for n, d in before.items() if n.startswith("model/") and "provenance" not in n}
    assert {n: d for n, d in joined.digests().items() if n in first} == first

    shutil.move(joined.workspace, joined.home / "lost")
    done = joined.call("flows.restore", "upcycle-pico", "champion")
    assert not done.calls["repair_expert"] + done.calls["train"]
    assert (joined.workspace / "repaired" / "letters" / "repair.json").exists()


def test_too_little_text_is_refused_before_anything_is_computed(joined, tmp_path):
    texts = joined.grown_recipe.parent / "texts"
    statistics = {"tokens": 90, "sequence_length": 32}
    recipe = recipe_of(tmp_path, texts, OLD, statistics=statistics)
    said = joined.refused(recipe=recipe)
    assert "statistics.tokens = 90" in said
    assert "at least 96" in said


@pytest.mark.parametrize(
    "change",
    [
        {"experts": {"repair": "down"}},
        {"experts": {"repair": "down", "repair_tokens": "routed"}},
        {"backbone": {"merge": {"embeddings": "counts"}}},
    ],
)
def test_other_methods_refuse_what_they_do_not_do(joined, tmp_path, change):
    texts = joined.grown_recipe.parent / "texts"
    values = pico_recipe(texts, domains=OLD) | change | {"symphony": {}}
    recipe = save_recipe(tmp_path / "recipe.yaml", values)
    said = joined.refused(recipe=recipe, module="flows.symphony")
    assert "is done by dume alone" in said


@pytest.mark.parametrize(
    ("section", "change", "fault"),
    [
        ("experts", {"repair_tokens": "routed"}, r"experts.repair_tokens = 'routed': nothing is"),
        ("moe", {"normalise_top_k": False}, r"moe.normalise_top_k = False: Mixtral.* always"),
        ("backbone", {"merge": {"head": "fitted"}}, r"head = 'fitted': .*experts.repair to down\+"),
    ],
)
def test_what_a_recipe_cannot_have_is_refused(tmp_path, section, change, fault):
    values = pico_recipe(write_texts(tmp_path / "texts", domains=OLD), domains=OLD)
    values[section] = {**values.get(section, {}), **change}
    with pytest.raises(InputError, match=fault):
        load_recipe(save_recipe(tmp_path / "recipe.yaml", values))


@pytest.mark.faults
@pytest.mark.parametrize(
    "moment",
    ["states before the head:1", "fitting the head:2", "repairing:5", "repairing what is routed:1"],
)
def test_killed_repair_ends_with_the_same_bytes(joined, tmp_path, moment):
    texts = joined.grown_recipe.parent / "texts"
    project = Repaired(tmp_path, recipe_of(tmp_path, texts, OLD))
    project.kill_flow(moment)
    assert not list((project.workspace / "routed").glob("*/repair.json"))
    project.flow()
    assert project.digests() == joined.first
