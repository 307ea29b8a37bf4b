from pathlib import Path

import pytest

from upcycle_core.checkpoints import fetch
from upcycle_core.errors import InputError


def test_a_directory_is_taken_as_it_is(tmp_path):
    assert fetch.resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path


def test_a_hub_name_is_fetched_without_pickle_or_code(tmp_path, monkeypatch):
    asked = {}

    def snapshot(name, **options):
        asked.update(options, name=name)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(fetch, "snapshot_download", snapshot)
    assert fetch.resolve_model("owner/name", tmp_path) == tmp_path / "snapshot"
    assert asked["name"] == "owner/name"
    assert asked["cache_dir"] == tmp_path
    wanted = asked["allow_patterns"]
    for name in ("pytorch_model.bin", "modeling.py", "adapter_model.safetensors"):
        assert not any(Path(name).match(pattern) for pattern in wanted)
    for name in ("model-00001-of-00002.safetensors", "config.json", "tokenizer.json"):
        assert any(Path(name).match(pattern) for pattern in wanted)


@pytest.mark.parametrize("reference", ["./no/such/place", "a/b/c"])
def test_a_path_that_is_not_there_is_named(tmp_path, reference):
    with pytest.raises(InputError, match="is no directory") as caught:
        fetch.resolve_model(reference, tmp_path)
    assert caught.value.faults[0].value == reference


def test_an_unreachable_hub_is_said(tmp_path):
    with pytest.raises(InputError, match="hub cannot be reached"):
        fetch.resolve_model("nobody/such-a-model", tmp_path / "cache")
