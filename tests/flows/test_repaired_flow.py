"""A model joined in closed form: grown, taught, shrunk, restored, rebuilt; killed on its way.

Its attention is merged by RegMean and its head fitted to all experts. These are repaired twice: for
the merged backbone, and for what the solved routers send them. `test_dume_flow` builds another.
"""

import json
import shutil
import sys

import pytest
from project import Project
from texts import pico_recipe, save_recipe, write_texts

from tasks.recipes import load_recipe
from upcycle_core.errors import InputError

OLD, NEW = ("letters", "numbers"), "colours"
MERGED = {"embeddings": "counts", "attention": "regmean", "head": "fitted"}
SEPARATOR = "\n<|doc|>\n"
REPAIRED = "repaired/letters/model.safetensors"


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
    values["backbone"] = {"merge": MERGED}
    values["versions"] = {"remote": "remote"}
    return save_recipe(folder / f"{len(domains)}.yaml", values | more)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where nothing is built yet."""
    folder = tmp_path_factory.mktemp("joined")
    texts = write_texts(folder / "texts", domains=(*OLD, NEW))
    project = Repaired(folder, recipe_of(folder, texts, OLD))
    project.grown_recipe = recipe_of(folder, texts, (*OLD, NEW))
    return project


@pytest.fixture(scope="module")
def joined(home):
    home.built = home.call("flows.dume", home.recipe)
    home.first = home.digests()
    return home


@pytest.mark.faults
def test_life_goes_on_with_repaired_experts(joined):
    """Grow, nothing new, shrink, restore, new text, shrink anew: each upon the one before."""
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

    # New text of one domain: its expert alone is trained and repaired, for the pinned backbone.
    before = joined.digests()
    text = joined.grown_recipe.parent / "texts" / "letters" / "train.txt"
    text.write_text(text.read_text() + SEPARATOR + "omega psi chi phi upsilon tau " * 60)
    done = joined.call("flows.retrain", joined.grown_recipe)
    assert (done.calls["train"], done.calls["repair_expert"]) == (1, 1)
    assert not done.calls["write_backbone"] + done.calls["merge_attention"]
    taught = joined.digests()
    kept = ("seed/", "backbone/", "experts/numbers/", "repaired/numbers/", "statistics/numbers/")
    assert all(taught[name] == digest for name, digest in before.items() if name.startswith(kept))
    assert taught[REPAIRED] != before[REPAIRED]

    # A rebuild merges attention and head of all experts anew; each is repaired for what that makes.
    done = joined.call("flows.shrink", joined.recipe, NEW, "--rebuild")
    assert (done.calls["train"], done.calls["merge_attention"]) == (0, 1)
    assert done.calls["repair_expert"] == len(OLD)
    rebuilt = joined.digests()
    assert rebuilt["backbone/model.safetensors"] != taught["backbone/model.safetensors"]
    assert rebuilt[REPAIRED] != taught[REPAIRED]
    assert json.loads((joined.workspace / "lineage.json").read_text())["backbone"] == list(OLD)


def test_too_little_text_is_refused_before_anything_is_computed(home, tmp_path):
    texts = home.grown_recipe.parent / "texts"
    statistics = {"tokens": 90, "sequence_length": 32}
    recipe = recipe_of(tmp_path, texts, OLD, statistics=statistics)
    said = home.refused(recipe=recipe)
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
def test_other_methods_refuse_what_they_do_not_do(home, tmp_path, change):
    texts = home.grown_recipe.parent / "texts"
    values = pico_recipe(texts, domains=OLD) | change | {"symphony": {}}
    recipe = save_recipe(tmp_path / "recipe.yaml", values)
    said = home.refused(recipe=recipe, module="flows.symphony")
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
    [
        "states before the head:1",
        "fitting the head:2",
        "merging attention:3",
        "repairing:5",
        "repairing what is routed:1",
    ],
)
def test_killed_repair_ends_with_the_same_bytes(joined, tmp_path, moment):
    texts = joined.grown_recipe.parent / "texts"
    shutil.rmtree(texts)
    write_texts(texts, domains=(*OLD, NEW))  # as they were when it was built
    project = Repaired(tmp_path, recipe_of(tmp_path, texts, OLD))
    project.kill_flow(moment)
    assert not list((project.workspace / "routed").glob("*/repair.json"))
    project.flow()
    assert project.digests() == joined.first
