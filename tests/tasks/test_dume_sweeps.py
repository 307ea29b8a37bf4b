"""Sweeps over a finished model's routers: another k leaves them as they are."""

import pytest
import torch
from pico import save_pico
from texts import pico_recipe

from tasks.dume.variants import Saved, Swept
from tasks.recipes import validate
from tests.upcycle_core.dume.synthetic import random_domains, statistics_of
from upcycle_core.dume.config import RouterConfig
from upcycle_core.dume.router import save_routers, solve_routers
from upcycle_core.errors import InputError


@pytest.fixture
def solved(tmp_path):
    """Statistics, and routers that are another solution than theirs, as the sequential one is."""
    statistics = statistics_of(tmp_path, random_domains())
    solution = solve_routers(statistics, config=RouterConfig(ridge_lambda=7.0))
    save_routers(solution, tmp_path / "routers")
    files = {name: tmp_path / f"{name}.safetensors" for name in statistics}
    return {"routers": tmp_path / "routers", "statistics": files, "router": RouterConfig()}


def test_another_k_has_the_routers_of_the_table(solved, tmp_path):
    model = save_pico(tmp_path / "model")
    own = Saved(solved["routers"]).variant(model)
    swept = Swept(parameter="top_k", value=2, **solved).variant(model)
    assert swept.top_k == 2
    assert torch.equal(swept.routers[0], own.routers[0])
    other = Swept(parameter="ridge_lambda", value=0.5, **solved).variant(model)
    assert other.top_k is None
    assert not torch.allclose(other.routers[0], own.routers[0])


@pytest.mark.parametrize("where", ["evaluation", "task_evaluation"])
@pytest.mark.parametrize("name", ["sweep_ridge_lambda", "sweep_window"])
def test_what_is_solved_at_once_is_no_sweep_of_what_is_solved_layer_by_layer(tmp_path, where, name):
    values = pico_recipe(tmp_path)
    values[where] = {**values.get(where, {}), name: [1]}
    values["router"] = {"solve": "sequential"}
    with pytest.raises(InputError, match=rf"{where}\.{name} = \[1.*router\.solve is sequential"):
        validate(values)


WITHOUT_LAMBDA = {
    "router.ridge_lambda": (1.0, "cross-validate"),
    "router.domain_weights": ({"letters": 2.0},),
    "evaluation.sweep_ridge_lambda": ([0.1],),
    "task_evaluation.sweep_ridge_lambda": ([0.1],),
}


@pytest.mark.parametrize("key", WITHOUT_LAMBDA)
def test_no_lambda_and_no_weight_decides_rows_that_are_means(tmp_path, key):
    for values in recipes_of_means(tmp_path):
        validate(values)
        section, name = key.split(".")
        for value in WITHOUT_LAMBDA[key] if key.startswith("router") or "moe" not in values else ():
            asked = {**values, section: {**values.get(section, {}), name: value}}
            with pytest.raises(InputError) as error:
                validate(asked)
            (fault,) = error.value.faults
            assert (fault.field, fault.value) == (key, value)
            assert "rows that are means" in fault.remedy
            validate({**asked, "router": {**asked["router"], "rows": "ridge"}})


def recipes_of_means(folder):
    """Of DUME, and of Symphony-MoE with routers in closed form."""
    values = pico_recipe(folder)
    values["evaluation"] |= {"sweep_ridge_lambda": [], "sweep_top_k": [], "sweep_window": []}
    values["router"] = {"rows": "means"}
    own = {"router": "ridge", "calibration": {"sequence_length": 32}}
    return values, {**values, "symphony": own, "moe": {"top_k": 2}}
