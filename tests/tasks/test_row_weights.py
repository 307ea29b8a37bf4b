"""How often each domain's text is drawn: of a dense rival as of the Mixtures it stands beside."""

from types import SimpleNamespace

import pytest
from texts import TRAINING, pico_recipe

from tasks import training
from tasks.baselines import baselines as module
from tasks.recipes import validate

WEIGHTS = {"letters": 8.0, "numbers": 0.0}


class Asked(Exception):
    """Ends the stage where it would train."""


@pytest.mark.parametrize("method", ["full-finetune", "btx"])
def test_every_row_draws_its_domains_as_its_objective_says(tmp_path, monkeypatch, method):
    values = pico_recipe(tmp_path, domains=tuple(WEIGHTS))
    row = {"method": method, "training": TRAINING, "objective": {"domain_weights": WEIGHTS}}
    recipe = validate({**values, "baselines": {"row": row}})

    def asked(run, name, start, data, *_, **__):
        raise Asked(data.weights)

    monkeypatch.setattr(training, "training_piece", asked)
    monkeypatch.setattr(module, "start_of", lambda *_, **__: tmp_path)
    run = SimpleNamespace(recipe=recipe, item="row", path=lambda artifact: tmp_path / artifact)
    with pytest.raises(Asked) as found:
        module.baselines.function(run)
    assert found.value.args[0] == [8.0, 0.0]


@pytest.mark.parametrize(("method", "decides"), [("dume", True), ("btx", False)])
def test_how_experts_are_weighted_decides_dume_plus_as_it_does_dume(tmp_path, method, decides):
    values = pico_recipe(tmp_path, domains=tuple(WEIGHTS))
    values["seed_model"]["shape"]["family"] = "qwen2"
    values["baselines"] = {"row": {"method": method, "training": TRAINING}}
    found = [
        module.baselines.values(validate({**values, "moe": {"normalise_top_k": summed}}), "row")
        for summed in (True, False)
    ]
    assert (found[0] != found[1]) == decides
