"""What a night looks at is what it would make: else it never has nothing to do."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from pico import save_pico
from texts import TRAINING, pico_recipe, write_texts

from flows import compare
from flows.making import dume
from flows.making.building import build_stages, built, made
from infra.recipe.schema import Lineage
from tasks.data.sources import sources
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace, fingerprint
from tasks.living.freshness import news, outdated
from tasks.methods import stages_of
from tasks.recipes import validate
from upcycle_core.errors import InputError

DOMAINS = ("letters", "numbers")
TASK = {"heldout": "text", "domain": "letters", "metric": "bits_per_byte"}
ROW = {"method": "btx", "training": {**TRAINING, "steps": 4, "learning_rate": 1e-3}}


class Publishing(Session):
    """Publishes for each stage what the others read of it, and the record that it would have."""

    def ensure(self, stage, only=None):
        for item in stage.items(self.recipe):
            if only is None or item in only:
                self.publish(stage, item)

    def publish(self, stage, item):
        artifact = stage.artifact(item)
        staged = self.workspace.stage(artifact)
        for other in stages_of(self.recipe):
            for name in self.read_by(other):
                if name.startswith(f"{artifact}/"):
                    file = staged / name.removeprefix(f"{artifact}/") / "part"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.touch()
        made_from = stage.made_from(self, item)
        record = {**made_from, "fingerprint": fingerprint(made_from)}
        self.workspace.publish(staged, artifact, record)

    def read_by(self, stage):
        items = stage.items(self.recipe)
        return [name for item in items for name in stage.inputs(self.recipe, item)]

    def finish(self):
        pass


@pytest.fixture
def recipe(tmp_path):
    values = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
    return validate({**values, "tasks": {"words": TASK}, "baselines": {"btx": ROW}})


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path / "home" / "pico")


def test_rows_of_a_comparison_that_nobody_made_are_not_waited_for(recipe, workspace, monkeypatch):
    monkeypatch.setattr(dume, "publish", lambda session, models: models)
    monkeypatch.setattr(dume, "check_champion", lambda session: None)  # there is no registry
    session = Publishing(recipe, workspace, log=print)
    assert "task_scores-dume" in outdated(session, built(recipe))
    assert "btx" not in dume.build(session)
    assert outdated(session, built(recipe)) == []
    other = replace(recipe, task_evaluation=replace(recipe.task_evaluation, seeds=(7,)))
    assert "task_scores-dume" in outdated(Session(other, workspace, log=print), built(other))


def test_tasks_that_an_evaluation_added_are_no_news(recipe, workspace):
    sources.ensure(Session(recipe, workspace, log=print))
    for tasks in (recipe.tasks, {}):
        asked = replace(recipe, tasks=tasks)
        assert not news(Session(asked, workspace, log=print)).any
    more = replace(recipe, tasks={**recipe.tasks, "more": recipe.tasks["words"]})
    assert news(Session(more, workspace, log=print)).any


class Enough(Exception):
    """What is before the documents has been asked for."""


class Looking(Session):
    """Makes nothing; says which stages it was asked for, and ends after some."""

    def ensure(self, stage, only=None):
        self.made.add(stage.name)
        if stage.name == "documents":
            raise Enough

    @property
    def stages(self):
        return self


@pytest.mark.parametrize("how", ["compare", "evaluate"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_rows_that_given_models_cannot_begin_are_said_before_one_is_trained(
    tmp_path, workspace, monkeypatch, how, family
):
    values = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
    values["seed_model"] = {"model": str(save_pico(tmp_path / "seed", family))}
    del values["tokenizer"]
    recipe = validate({**values, "baselines": {"bam": {**ROW, "method": "bam"}}})
    session = Looking(recipe, workspace, log=print)
    call, said = partial(build_stages, session), r"baselines\.bam\.method = 'bam': .* for qwen2"
    if how == "compare":
        monkeypatch.setattr(compare, "open_session", lambda *_, **__: nullcontext(session))
        call = partial(compare.compare.fn.__wrapped__, recipe)
    if family == "qwen2":
        with pytest.raises(InputError, match=said):
            call()
    else:
        with pytest.raises(Enough):
            call()
    assert session.made == {"sources"} | ({"documents"} if family == "llama" else set())


def test_a_deployment_of_before_undoes_no_domain_that_came_or_left(recipe, tmp_path, monkeypatch):
    """It holds its recipe as it was; a command reads the file as it is."""
    session = Publishing(recipe, Workspace(tmp_path / "pico"), log=lambda text: None)
    for stage in stages_of(recipe):
        session.ensure(stage)
    letters = {"letters": recipe.domains["letters"]}
    built_of = []

    def run(*, lineage, **domains):
        held = replace(recipe, domains=domains, lineage=lineage)
        opened = nullcontext(SimpleNamespace(recipe=held, workspace=session.workspace))
        monkeypatch.setattr("flows.making.building.open_session", lambda *_, **__: opened)
        with pytest.raises(AttributeError):  # what is behind the build needs more of a session
            made("dume", held, lambda session: built_of.append([*domains]))

    run(lineage=Lineage(), **letters)
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "a-deployment")
    run(lineage=None, **letters)
    run(lineage=Lineage(), **recipe.domains)
    assert built_of == [["letters"], ["letters"], [*DOMAINS]]
    with pytest.raises(InputError, match=r"domains\.numbers.*a deployment holds"):
        run(lineage=Lineage(), **letters)
    more = {**recipe.domains, "colours": recipe.domains["letters"]}
    with pytest.raises(InputError, match=r"domains\.colours.*flows\.grow"):
        run(lineage=Lineage(), **more)
    assert len(built_of) == 3
