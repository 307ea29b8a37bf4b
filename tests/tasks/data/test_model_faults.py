"""What is wrong with given models is said of them by the names that the recipe has for them."""

import shutil

import pytest
from forms import save_bpe_model, save_gguf

from tasks.data import sources
from tasks.recipes import validate
from tasks.symphony import sources as strangers

WORDS = ["alpha beta gamma"] * 9


@pytest.mark.parametrize(("method", "check"), [("dume", sources), ("symphony", strangers)])
def test_a_converted_model_is_named_as_in_the_recipe(tmp_path, method, check):
    first = save_gguf(tmp_path / "first.gguf", save_bpe_model(tmp_path / "dense", WORDS))
    shutil.copyfile(first, tmp_path / "second.gguf")
    values = {
        "name": "named",
        "method": method,
        "domains": {
            name: {"expert": str(tmp_path / f"{name}.gguf"), "train": {"files": ["a.txt"]}}
            for name in ("first", "second")
        },
        "statistics": {"sequence_length": 32, "window": None},
        "evaluation": {"sequence_length": 32},
    }
    if method == "symphony":
        values |= {"symphony": {"anchor": "first", "calibration": {"sequence_length": 32}}}
        del values["statistics"]
    cache = tmp_path / "models"
    found = [str(fault) for fault in check.model_faults(validate(values), cache)]
    assert found == [
        f"domains.second.expert = '{tmp_path}/second.gguf': is the same model as "
        f"domains.first.expert ({first}); give each model once"
    ]
    assert (cache / "converted").is_dir()
