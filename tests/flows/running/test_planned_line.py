"""The first line of a flow: what is said of a recipe, and what is refused."""

from dataclasses import replace

import pytest
from texts import pico_recipe, write_texts

from flows.running.planned import say_plan
from infra import settings as environment
from tasks.planning.machine import Machine
from tasks.recipes import validate
from upcycle_core.errors import InputError


@pytest.fixture
def recipe(tmp_path):
    return validate(pico_recipe(write_texts(tmp_path / "texts")))


@pytest.fixture
def settings(tmp_path):
    return replace(environment.configure(), home=tmp_path / "home", ray_address="local")


def said_of(recipe, settings):
    lines = []
    say_plan(recipe, settings, lines.append)
    return lines


def test_a_line_says_memory_disk_and_what_is_made(recipe, settings):
    [line] = said_of(recipe, settings)
    assert line.startswith("plan: ")
    assert "of memory at the peak" in line
    assert "0 of 11 stages made before" in line
    assert "not known without rates" in line
    assert "\n" not in line
    assert not settings.home.exists()


def test_no_rehearsal_delays_a_small_model(recipe, settings, monkeypatch):
    def rehearse(*arguments, **options):
        raise AssertionError("a rehearsal takes a second")

    for name in ("training_bytes", "forward_bytes"):
        monkeypatch.setattr(f"upcycle_core.planning.rehearsal.{name}", rehearse)
    assert said_of(recipe, settings)


def test_nothing_is_said_of_what_cannot_be_planned(recipe, settings, monkeypatch):
    monkeypatch.setattr("tasks.planning.plan.ROWS", {})
    assert said_of(recipe, settings) == []


def test_a_cluster_s_memory_is_not_this_machine_s(recipe, settings, monkeypatch):
    small = Machine(memory=1, cpus=2, disk=10**12)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *where: small))
    assert said_of(recipe, replace(settings, ray_address="ray://there:1"))
    with pytest.raises(InputError, match=r"compute\.evaluation"):
        said_of(recipe, settings)


def test_a_resource_that_a_local_ray_cannot_have_is_refused(recipe, settings):
    statistics = replace(recipe.compute.statistics, resources={"ssd": 1.0})
    asked = replace(recipe, compute=replace(recipe.compute, statistics=statistics))
    with pytest.raises(InputError, match=r"compute\.statistics\.resources\.ssd = 1: the Ray that"):
        said_of(asked, settings)
    assert said_of(asked, replace(settings, ray_address="ray://there:1"))
