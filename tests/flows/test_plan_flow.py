"""``python -m flows.plan``: which machine a plan is for, and what is refused there."""

from dataclasses import replace

import pytest
import yaml
from texts import pico_recipe, write_texts

from flows.plan import main
from infra import settings as environment


@pytest.fixture
def plan_of(tmp_path, monkeypatch, capsys):
    """Plans a pico recipe that asks for more cores than any machine has; returns what is said."""
    monkeypatch.setattr("flows.plan.measured_rates", lambda home, again: None)
    values = pico_recipe(write_texts(tmp_path / "texts"))
    values["compute"] = {"statistics": {"cpus": 5000}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))

    def planned(*options, ray_address="local"):
        settings = replace(environment.configure(), home=tmp_path, ray_address=ray_address)
        monkeypatch.setattr(environment, "configure", lambda: settings)
        code = main([str(tmp_path / "recipe.yaml"), *options])
        return code, capsys.readouterr().err

    return planned


def test_cores_that_this_machine_has_not_are_refused(plan_of):
    code, said = plan_of()
    assert code == 2
    assert "compute.statistics.cpus = 5000" in said


def test_the_machines_of_a_cluster_are_not_known_unless_they_are_described(plan_of):
    assert plan_of(ray_address="ray://there:1") == (0, "")
    code, said = plan_of("--machine", "cpus=64", ray_address="ray://there:1")
    assert code == 2
    assert "Ray has 64 in all" in said


def test_texts_that_are_not_there_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("flows.plan.measured_rates", lambda home, again: None)
    settings = replace(environment.configure(), home=tmp_path / "home")
    monkeypatch.setattr(environment, "configure", lambda: settings)
    domains = ("letters", "numbers")
    values = pico_recipe(write_texts(tmp_path / "texts", domains=domains), domains=domains)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))

    def said():
        assert main([str(tmp_path / "recipe.yaml")]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "no text" in line]

    assert said() == []
    values["domains"]["numbers"]["heldout"] = {"files": [str(tmp_path / "texts/new/*.txt")]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    assert said() == ["Not there yet, and planned as no text: domains.numbers.heldout."]


def test_a_remote_that_is_a_file_is_refused(plan_of, tmp_path):
    code, said = plan_of("--set", "versions.remote=recipe.yaml")
    assert code == 2
    file = tmp_path / "recipe.yaml"
    assert said.strip() == f"versions.remote = '{file}': is a file; name a directory"


def test_a_resource_that_a_local_ray_cannot_have_is_refused_and_a_cluster_may_have_it(plan_of):
    asked = ("--set", "compute.statistics={resources: {ssd: 1}}")
    code, said = plan_of(*asked)
    assert code == 2
    assert said.startswith("compute.statistics.resources.ssd = 1: the Ray that a flow starts")
    assert plan_of(*asked, "--machine", "cpus=64") == (0, "")
    assert plan_of(*asked, ray_address="ray://there:1") == (0, "")
