"""What becomes of a model in the registry, night by night, and of what people do there between."""

import json
import re
from dataclasses import replace

import pytest
from databases import home_with_database
from mlflow import MlflowClient

from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from infra.versioning.versions import Versions
from tasks.ders.compression import row_title
from tasks.ders.register import register_compressed
from tasks.engine.sources import CODE
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import load_recipe
from tasks.release.champion import standing_champion
from tasks.release.history import FORMER_TAG, PREVIOUS_TAG, WITHDRAWN_TAG, roll_back
from tasks.release.register import Registrar, register
from tasks.release.versions import (
    BARE_TAG,
    BESIDE_TAG,
    OUTCOME_TAG,
    compressed_name,
    offered,
)
from upcycle_core.evaluation.text.results import expert_row

DOMAINS = ("cpp", "python")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return home_with_database(tmp_path_factory.mktemp("home"))


class Nights:
    """Registers models of a workspace: what is trained and scored is made up, the rest is real."""

    def __init__(self, settings, folder, name, recipe="demo"):
        own = load_recipe(CODE / "recipes" / "demo.yaml")
        recipe = replace(own, name=recipe)
        domains = {domain: recipe.domains[domain] for domain in DOMAINS}
        how = replace(recipe.registry, model=name, certificate="none")
        self.recipe = replace(recipe, domains=domains, registry=how)
        self.workspace = Workspace(folder / recipe.name)
        self.versions = Versions(self.workspace.root)
        self.versions.prepare(pipeline="", params="")
        self.registry, self.name = Registry(settings), name
        self.tracker = Tracker(settings, "test")
        self.client = MlflowClient(settings.mlflow_tracking_uri)

    def publish(self, artifact, texts):
        out = self.workspace.stage(artifact)
        for file, text in texts.items():
            (out / file).write_text(text)
        self.workspace.publish(out, artifact, {"fingerprint": json.dumps(texts)})

    def night(self, python, cpp="cpp"):
        """Offer the model of these experts; the version it is."""
        dense = {expert_row(d): dict.fromkeys(DOMAINS, 10.0) for d in DOMAINS}
        metrics = {
            "perplexity": {"dume": dict.fromkeys(DOMAINS, 10.0), **dense},
            "normalised": {"dume": dict.fromkeys(DOMAINS, 100.0)},
            "normalised_average": {"dume": 100.0},
            "heldout": {domain: {"tokens": 9, "bytes": 9} for domain in DOMAINS},
        }
        self.publish("experts/cpp", {"config.json": f'"{cpp}"'})
        self.publish("experts/python", {"config.json": f'"{python}"'})
        self.publish("model", {"config.json": f'"{python} {cpp}"'})
        self.publish("report", {"metrics.json": json.dumps(metrics), "table.md": "A table."})
        session = Session(self.recipe, self.workspace, log=lambda text: None)
        with (
            self.tracker.start_run("night", workspace=self.workspace.root) as run,
            standing_champion(session, self.registry) as champion,
        ):
            registrar = Registrar(session, self.registry, self.versions, run)
            judged = None if champion is None else self.judged(champion)
            return register(registrar, judged, None).version

    @staticmethod
    def judged(champion):
        """The champion, as if its files had been evaluated."""
        of_dense = dict.fromkeys(DOMAINS, 20.0)

        class Judged(type(champion)):
            def perplexities(self, heldout):
                return of_dense

        return Judged(**vars(champion))

    def delete(self, number):
        """As in MLflow's page."""
        self.client.delete_model_version(self.name, str(number))

    def forget(self):
        """What an earlier release wrote is in its versions alone."""
        for key in self.registry.model_tags(self.name):
            self.client.delete_registered_model_tag(self.name, key)

    @property
    def champion(self):
        return self.registry.pointed(self.name, "champion")


@pytest.fixture
def nights(settings, tmp_path, request):
    return Nights(settings, tmp_path, re.sub(r"\W", "-", request.node.name))


@pytest.mark.parametrize("is_earlier", [False, True])
def test_an_expert_that_was_rolled_back_stays_so_after_its_version_is_deleted(nights, is_earlier):
    """Of an earlier release, as soon as a night has looked."""
    nights.night("old")
    nights.night("bad")
    roll_back(nights.registry, nights.name, "bad answers")
    if is_earlier:
        nights.forget()
        nights.night("bad")
    nights.delete(2)
    again = nights.night("bad")
    assert (again.number, again.aliases) == (3, ("challenger",))
    assert again.tags[OUTCOME_TAG] == "refused: an expert was rolled back"
    assert nights.champion == 1
    assert nights.night("corrected").number == nights.champion == 4
    nights.registry.set_alias(again, "champion")  # a person knows better, and that holds
    [bad] = [k for k in nights.registry.model_tags(nights.name) if k.startswith(WITHDRAWN_TAG)]
    assert bad.startswith(f"{WITHDRAWN_TAG}python.")
    assert nights.night("bad", cpp="another").number == nights.champion == 5


@pytest.mark.parametrize("is_earlier", [False, True])
def test_a_champion_that_was_deleted_is_not_replaced_unjudged(nights, is_earlier):
    """By the version before it: an earlier release tagged no model."""
    nights.night("old")
    nights.night("bad")
    if is_earlier:
        nights.forget()
    nights.delete(2)
    again = nights.night("bad")
    assert nights.champion is None
    assert again.tags[OUTCOME_TAG] == "refused: no champion any more"
    was = 1 if is_earlier else 2
    assert f"version {was} was champion and none is now" in again.description
    assert "set the alias champion in MLflow" in again.description
    digests = nights.workspace.digests("model")
    found = offered(nights.registry, nights.name, digests, recipe=nights.recipe.name)
    assert "set the alias in MLflow" in found.verdict
    nights.registry.set_alias(again, "champion")
    better = nights.night("better")
    assert (better.tags[BESIDE_TAG], better.tags[PREVIOUS_TAG]) == ("3", "3")
    assert nights.champion == 4


def test_a_champion_that_a_person_made_is_remembered_by_the_next_night(nights):
    version = nights.night("first")
    assert nights.night("second").number == nights.champion == 2
    nights.registry.set_alias(version, "champion")
    assert nights.registry.model_tags(nights.name)[FORMER_TAG] == "2"
    nights.night("third")
    nights.delete(3)
    assert nights.night("fourth").tags[OUTCOME_TAG] == "refused: no champion any more"


def test_a_model_that_is_deleted_wholly_begins_again(nights):
    nights.night("first")
    nights.client.delete_registered_model(nights.name)
    assert nights.night("first").number == nights.champion == 1


def test_a_rollback_remembers_who_is_champion_after_it(nights):
    nights.night("old")
    nights.night("bad")
    roll_back(nights.registry, nights.name, "bad answers")
    assert nights.registry.model_tags(nights.name)[FORMER_TAG] == "1"


def test_recipes_that_share_a_registered_name_register_unchanged_models_once(
    nights, settings, tmp_path
):
    other = Nights(settings, tmp_path, nights.name, recipe="other")
    made = [nights.night("ours"), other.night("theirs")]
    assert [version.number for version in made] == [1, 2]
    again = [nights.night("ours"), other.night("theirs"), nights.night("ours")]
    assert [version.number for version in again] == [1, 2, 1]


def test_compressed_weights_are_one_version_whatever_their_card_says(nights):
    """One of an earlier release, which kept no digest of them alone, too."""
    nights.night("one")
    point = {
        "percent_of_original": 50.0,
        "normalised_average": 99.0,
        "perplexity": dict.fromkeys(DOMAINS, 10.0),
    }
    sweep = {"chosen": "half", "points": {"half": point}, "original": point}
    session = Session(nights.recipe, nights.workspace, log=lambda text: None)
    metrics = {"sweeps": {row_title(nights.recipe, "dume"): sweep}}

    def offer(weights, card):
        folder = nights.workspace.stage("compression")
        for part, files in {
            "model": {"config.json": f'"{weights}"', "README.md": card},
            "report": {"metrics.json": json.dumps(metrics), "table.md": "A table."},
        }.items():
            (folder / part).mkdir()
            for file, text in files.items():
                (folder / part / file).write_text(text)
        nights.workspace.publish(folder, "compression", {"fingerprint": weights + card})
        with nights.tracker.start_run("compress", workspace=nights.workspace.root) as run:
            return register_compressed(Registrar(session, nights.registry, nights.versions, run))

    first, again, other = offer("a", "3 %"), offer("a", "5 %"), offer("b", "5 %")
    assert [(o.version.number, o.is_new) for o in (first, again, other)] == [
        (1, True),
        (1, False),
        (2, True),
    ]
    name = compressed_name(nights.recipe)
    for card in ("5 %", "3 %"):
        nights.client.delete_model_version_tag(name, "2", BARE_TAG)
        known = offer("b", card)
        assert (known.version.number, known.is_new) == (2, False)
    nights.client.delete_model_version_tag(name, "2", BARE_TAG)
    assert offer("c", "3 %").version.number == 3
