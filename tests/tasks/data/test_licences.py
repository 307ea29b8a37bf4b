"""Licences of the models that a recipe names."""

import pytest
from pico import save_pico
from texts import pico_recipe, write_texts

from tasks.data.licences import stated_licences
from tasks.data.sources import model_faults
from tasks.recipes import validate

DOMAINS = ("letters", "numbers")


@pytest.fixture
def given(tmp_path):
    """A recipe of a given seed and two ready experts of it, each with a licence."""
    values = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
    values.pop("tokenizer")
    values.pop("seed_model")
    models = {"seed": "apache-2.0", "letters": "CC-BY-ND-4.0", "numbers": None}
    for seed, (name, licence) in enumerate(models.items()):
        folder = save_pico(tmp_path / name, seed=seed)
        if licence is not None:
            (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    values["seed_model"] = {"model": str(tmp_path / "seed")}
    for domain in DOMAINS:
        values["domains"][domain]["expert"] = str(tmp_path / domain)
    return values


def test_licences_are_told_by_the_fields_that_name_models(given, tmp_path):
    assert stated_licences(validate(given), tmp_path / "models") == {
        "domains.letters.expert": "CC-BY-ND-4.0",
        "domains.numbers.expert": None,
        "seed_model.model": "apache-2.0",
    }


def test_a_part_that_forbids_derivatives_is_refused_before_work_until_accepted(given, tmp_path):
    [fault] = model_faults(validate(given), tmp_path / "models")
    assert (fault.field, fault.value) == ("domains.letters.expert", "CC-BY-ND-4.0")
    assert "registry.accept_licences: [cc-by-nd-4.0]" in fault.remedy
    given["registry"]["accept_licences"] = ["cc-by-nd-4.0"]
    assert model_faults(validate(given), tmp_path / "models") == []
