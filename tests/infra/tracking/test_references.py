"""Who names no version of a registered model is told what there is."""

import pytest

from infra.tracking.records import Version
from infra.tracking.references import parsed, unknown_fault

NAMES = ["mine", "upcycle-demo", "upcycle-law"]


def said(reference, versions=(), names=NAMES):
    return unknown_fault(reference, versions, names).remedy


@pytest.mark.parametrize("scheme", ["", "models:/"])
def test_a_reference_is_read_with_or_without_its_scheme(scheme):
    assert parsed(f"{scheme}demo@champion") == ("demo", "@", "champion")
    assert parsed(f"{scheme}demo/3") == ("demo", "/", "3")
    assert parsed(f"{scheme}demo") == ("demo", "", "")


def test_registered_models_are_named_as_they_are_to_be_written_and_the_most_alike_first():
    assert said("law@champion") == (
        "not in the registry; name a version that is, upcycle-law@champion or upcycle-law/NUMBER. "
        "Registered models: upcycle-law, mine, upcycle-demo"
    )
    assert "is, models:/upcycle-law@champion or models:/" in said("models:/law/1")
    many = [f"model-{number}" for number in range(12)]
    assert said("law/1", names=many).endswith("model-11, model-2, and 7 more (make up)")
    assert "not in the registry, which holds no model yet" in said("law/1", names=[])


def test_a_path_in_the_place_of_a_name_is_said_to_be_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo" / "model").mkdir(parents=True)
    for path in (f"{tmp_path}/model", "workspace/demo/model", "demo/model", "./model", "~/model"):
        assert said(path).startswith("is a path, and no registered model; name a version that is, ")
    for name in ("law/1", "owner/model", "https://host/owner/model", ""):
        assert said(name).startswith("not in the registry")


def test_of_a_model_that_is_there_its_versions_are_named():
    version = Version("demo", 1, "run", "model", "", ("champion",), {}, {}, {})
    assert said("demo", [version]) == "names no version; of demo there is @champion, /1"
    assert said("demo/model", [version]) == "not in the registry; of demo there is @champion, /1"
