"""Recipes of versions that are older than a rule are read all the same."""

from types import SimpleNamespace

import yaml
from texts import pico_recipe

from flows.restore import _recipe
from infra.recipe.schema import resolve
from tasks.recipes import validate


def test_a_version_that_was_made_with_idle_gpus_is_restored(tmp_path):
    resolved = resolve(validate(pico_recipe(tmp_path)))
    for kind, gpus in {"experts": 2.0, "statistics": 0.5, "evaluation": 4.0}.items():
        resolved["compute"][kind]["gpus"] = gpus
    files = {"recipe.yaml": yaml.safe_dump(resolved), "dvc.lock": "stages: {}"}
    registry = SimpleNamespace(text=lambda version, name: files[name])
    compute = _recipe(registry, SimpleNamespace(tags={}, reference="models:/pico/1")).compute
    assert (compute.experts.gpus, compute.statistics.gpus, compute.evaluation.gpus) == (1, 0.5, 1)
