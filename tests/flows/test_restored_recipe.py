"""Recipes of versions that are older than a rule are read all the same; where a remote is."""

from types import SimpleNamespace

import pytest
import yaml
from texts import pico_recipe

from flows import restore as flow
from flows.restore import _recipe
from infra.recipe.schema import resolve
from tasks.recipes import validate
from upcycle_core.errors import Fault, InputError


def test_a_version_that_was_made_with_idle_gpus_is_restored(tmp_path):
    resolved = resolve(validate(pico_recipe(tmp_path)))
    for kind, gpus in {"experts": 2.0, "statistics": 0.5, "evaluation": 4.0}.items():
        resolved["compute"][kind]["gpus"] = gpus
    resolved["compute"]["task_evaluation"] = {"gpus": 2.0}
    files = {"recipe.yaml": yaml.safe_dump(resolved), "dvc.lock": "stages: {}"}
    registry = SimpleNamespace(text=lambda version, name: files[name])
    compute = _recipe(registry, SimpleNamespace(tags={}, reference="models:/pico/1")).compute
    assert (compute.experts.gpus, compute.statistics.gpus, compute.evaluation.gpus) == (1, 0.5, 1)
    assert compute.task_evaluation.gpus == 2  # one model's layers on each: none is idle


def test_a_remote_of_prefect_s_page_is_seen_from_the_home_as_its_form_says(tmp_path, monkeypatch):
    found = SimpleNamespace(number=1, aliases=["champion"], tags={}, reference="models:/pico/1")
    files = {"recipe.yaml": yaml.safe_dump(pico_recipe(tmp_path)), "dvc.lock": "stages: {}"}
    registry = SimpleNamespace(
        text=lambda version, name: files[name], versions=lambda name: [found]
    )
    monkeypatch.setattr(flow, "Registry", lambda settings: registry)
    home = SimpleNamespace(home=tmp_path / "home")
    for given, source in {"store": f"{home.home}/store", "s3://bucket/x": "s3://bucket/x"}.items():
        assert flow.look(home, "pico", "champion", None, given)[-1] == source
    form = flow.restore.parameters.properties
    assert "seen from the home" in form["remote"]["description"]
    assert "of a deployed one is the checkout" in " ".join(form["into"]["description"].split())


@pytest.mark.parametrize(
    ("remote", "expected"),
    [("store", "{here}/store"), ("/store", "/store"), ("s3://bucket/store", "s3://bucket/store")],
)
def test_a_remote_of_the_command_line_is_seen_from_where_the_person_is(
    tmp_path, monkeypatch, remote, expected
):
    asked = []

    def look(settings, name, version, into, remote):
        asked.append(remote)
        raise InputError(Fault("name", name, "is no registered model"))

    monkeypatch.setattr(flow, "look", look)
    monkeypatch.setattr(flow, "configure", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert flow.main(["moe", "--remote", remote]) == 2
    assert asked == [expected.format(here=tmp_path.resolve())]
