"""One door for models in every form: what is made of them lies in the cache, made once."""

import json
import shutil
from pathlib import Path

import pytest
from forms import change_json, save_adapter, save_bpe_model, save_gguf
from huggingface_hub.errors import EntryNotFoundError
from pico import save_pico

from upcycle_core.errors import InputError
from upcycle_core.given import resolve
from upcycle_core.given.adapter import ADAPTER_CONFIG, Adapter, merge_adapter


def test_a_directory_is_taken_as_it_is(tmp_path):
    assert resolve.resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path


def test_a_hub_name_is_fetched_without_pickle_or_code(tmp_path, monkeypatch):
    asked = {}

    def snapshot(name, **options):
        asked.update(options, name=name)
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        (tmp_path / "snapshot" / "model.safetensors").touch()
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(resolve, "snapshot_download", snapshot)
    assert resolve.resolve_model("owner/name", tmp_path) == tmp_path / "snapshot"
    assert asked["name"] == "owner/name"
    assert asked["cache_dir"] == tmp_path
    wanted = asked["allow_patterns"]
    for name in ("pytorch_model.bin", "modeling.py", "adapter_model.bin", "model.gguf"):
        assert not any(Path(name).match(pattern) for pattern in wanted)
    for name in (
        "model-00001-of-00002.safetensors",
        "config.json",
        "adapter_model.safetensors",
        "additional_chat_templates/tool_use.jinja",
    ):
        assert any(Path(name).match(pattern) for pattern in wanted)


def test_of_a_family_that_is_not_supported_no_weights_are_fetched(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    asked = []

    def snapshot(name, *, allow_patterns, **_):
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(resolve, "snapshot_download", snapshot)
    with pytest.raises(InputError, match=r"config\.model_type = 'mamba': is not supported"):
        resolve.resolve_model("owner/name", tmp_path / "cache")
    assert asked == ["config.json"]


class Unreachable(Exception):
    """As clients of the hub have them, which are no OSError."""


@pytest.mark.parametrize("files", [["pytorch_model.bin", "config.json"], ["config.json"], None])
def test_a_repository_of_pickles_is_named(tmp_path, monkeypatch, files):
    """What is fetched holds no pickles, so that it cannot say why it holds no weights."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')

    def listed(name):
        if files is None:
            raise Unreachable
        return files

    monkeypatch.setattr(resolve, "snapshot_download", lambda name, **options: str(tmp_path))
    monkeypatch.setattr(resolve, "list_repo_files", listed)
    if files is not None and len(files) == 2:
        with pytest.raises(InputError, match=r"holds pickled weights \(pytorch_model.bin\)"):
            resolve.resolve_model("owner/name", tmp_path / "cache")
    else:  # who reads it says what it lacks
        assert resolve.resolve_model("owner/name", tmp_path / "cache") == tmp_path


@pytest.mark.parametrize(
    "reference",
    ["", "~nosuch/x", "x" * 5000, "\0", "~nosuch/x.gguf", "y" * 5000 + ".gguf", "a//.gguf"],
)
def test_what_can_be_no_path_is_an_input_error(tmp_path, reference):
    with pytest.raises(InputError) as refused:
        resolve.resolve_model(reference, tmp_path)
    (fault,) = refused.value.faults
    assert fault.value == reference
    assert fault.remedy.startswith(("is no directory", "is no file"))


@pytest.mark.parametrize("reference", ["./no/such/place", "a/b/c"])
def test_a_path_that_is_not_there_is_named(tmp_path, reference):
    with pytest.raises(InputError, match="is no directory") as caught:
        resolve.resolve_model(reference, tmp_path)
    assert caught.value.faults[0].value == reference


def test_an_unreachable_hub_is_said(tmp_path):
    for reference in ("nobody/such-a-model", "nobody/such-a-model/file.gguf"):
        with pytest.raises(InputError, match="hub cannot be reached"):
            resolve.resolve_model(reference, tmp_path / "cache")


@pytest.mark.parametrize("reference", ["model.gguf", "/no/such/place/model.gguf"])
def test_a_gguf_file_that_is_not_there_is_named(tmp_path, reference):
    with pytest.raises(InputError, match="is no file; give a path, or owner/name/FILE"):
        resolve.resolve_model(reference, tmp_path)


@pytest.fixture
def base(tmp_path):
    return save_pico(tmp_path / "base")


@pytest.fixture
def gguf_file(tmp_path):
    return save_gguf(tmp_path / "m.gguf", save_bpe_model(tmp_path / "m", ["alpha beta"] * 9))


def test_a_gguf_file_of_the_hub_is_fetched_alone(tmp_path, monkeypatch, gguf_file):
    asked = []

    def download(*names, **options):
        asked.append((*names, options["cache_dir"]))
        return str(gguf_file)

    monkeypatch.setattr(resolve, "hf_hub_download", download)
    assert (resolve.resolve_model("o/n/sub/m.gguf", tmp_path) / "model.safetensors").is_file()
    assert asked == [("o/n", "sub/m.gguf", tmp_path)]

    def missing(*_, **__):
        raise EntryNotFoundError("no")

    monkeypatch.setattr(resolve, "hf_hub_download", missing)
    with pytest.raises(InputError, match="is no file of that repository"):
        resolve.resolve_model("o/n/m.gguf", tmp_path)


def test_a_folder_of_gguf_files_asks_for_one(tmp_path, gguf_file):
    folder = tmp_path / "files"
    folder.mkdir()
    gguf_file.rename(folder / "a.gguf")
    with pytest.raises(InputError, match=f"name one of them: {folder}/a.gguf"):
        resolve.resolve_model(str(folder), tmp_path)


def test_a_whole_model_is_no_adapter_whatever_lies_beside_it(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    shutil.copyfile(base / "config.json", adapter / "config.json")
    assert resolve.resolve_model(str(adapter), tmp_path / "cache") != adapter
    shutil.copyfile(base / "model.safetensors", adapter / "model.safetensors")
    assert resolve.resolve_model(str(adapter), tmp_path / "cache") == adapter


def test_the_same_bytes_are_converted_once(tmp_path, base, gguf_file):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    for given in (adapter, gguf_file):
        made = resolve.resolve_model(str(given), tmp_path / "cache")
        stamp = (made / "model.safetensors").stat()
        moved = tmp_path / f"moved-{given.name}"
        shutil.copytree(given, moved) if given.is_dir() else shutil.copyfile(given, moved)
        assert resolve.resolve_model(str(moved), tmp_path / "cache") == made
        assert (made / "model.safetensors").stat() == stamp
    assert len(list((tmp_path / "cache" / resolve.CONVERTED).glob("*/model.safetensors"))) == 2


def test_another_base_or_adapter_is_converted_anew(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    cache = tmp_path / "cache"
    first = resolve.resolve_model(str(adapter), cache)
    change_json(adapter / ADAPTER_CONFIG, lora_alpha=7)
    second = resolve.resolve_model(str(adapter), cache)
    save_pico(base, seed=1)
    third = resolve.resolve_model(str(adapter), cache)
    assert len({first, second, third}) == 3


def test_what_a_killed_conversion_left_is_made_again(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    whole = resolve.resolve_model(str(adapter), tmp_path / "cache")
    whole.rename(whole.with_name(whole.name + ".partial"))
    (whole.with_name(whole.name + ".partial") / "model.safetensors").write_bytes(b"half")
    again = resolve.resolve_model(str(adapter), tmp_path / "cache")
    assert again == whole
    assert (again / "model.safetensors").stat().st_size > 1000
    assert not list(whole.parent.glob("*.partial"))


def test_a_conversion_that_fails_leaves_nothing(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    other = save_pico(tmp_path / "other", hidden_size=64, head_dim=16)
    change_json(adapter / ADAPTER_CONFIG, base_model_name_or_path=None)
    with pytest.raises(InputError, match="another model"):
        resolve.resolve_model(str(adapter), tmp_path / "cache", base=str(other))
    assert not list((tmp_path / "cache").glob("*/*/*"))


def test_the_recipes_seed_is_the_base_where_the_adapter_names_none_that_is_there(tmp_path, base):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    change_json(adapter / ADAPTER_CONFIG, base_model_name_or_path=None)
    with pytest.raises(InputError, match="names no base; name it in seed_model"):
        resolve.resolve_model(str(adapter), tmp_path / "cache")
    resolve.resolve_model(str(adapter), tmp_path / "cache", base=str(base))
    change_json(adapter / ADAPTER_CONFIG, base_model_name_or_path="/gone/with/its/machine")
    resolve.resolve_model(str(adapter), tmp_path / "cache", base=str(base))
    said = f"{adapter}': its base, by adapter_config.json, is /gone/with/its/machine, which .* "
    with pytest.raises(InputError, match=f"{said}or name the base in seed_model.model"):
        resolve.resolve_model(str(adapter), tmp_path / "cache")


def test_an_adapter_of_another_base_than_the_seed_is_named(tmp_path, base, monkeypatch):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    other = save_pico(tmp_path / "other", seed=1)
    with pytest.raises(InputError, match=f"an adapter of {base}, and the seed is {other}"):
        resolve.resolve_model(str(adapter), tmp_path / "cache", base=str(other))
    copied = shutil.copytree(base, tmp_path / "copied")
    resolve.resolve_model(str(adapter), tmp_path / "cache", base=str(copied))
    change_json(adapter / ADAPTER_CONFIG, base_model_name_or_path="owner/one")
    monkeypatch.setattr(resolve, "snapshot_download", lambda name, **_: str(base))
    with pytest.raises(InputError, match="an adapter of owner/one, and the seed is owner/two"):
        resolve.resolve_model(str(adapter), tmp_path / "cache", base="owner/two")


def test_an_adapter_is_merged_into_the_revision_of_its_base(tmp_path, base, monkeypatch):
    adapter, _ = save_adapter(tmp_path / "adapter", base)
    change_json(adapter / ADAPTER_CONFIG, base_model_name_or_path="owner/one", revision="v1.0")
    newest = save_pico(tmp_path / "newest", seed=1)
    revisions = {"v1.0": str(base), None: str(newest)}
    monkeypatch.setattr(
        resolve, "snapshot_download", lambda name, *, revision, **_: revisions[revision]
    )
    found = resolve.resolve_model(str(adapter), tmp_path / "cache")
    merge_adapter(Adapter(adapter), base, tmp_path / "wanted")
    name = "model.safetensors"
    assert (found / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
    with pytest.raises(InputError, match=r"at revision v1.0, and the seed is its newest: fetch"):
        resolve.resolve_model(str(adapter), tmp_path / "cache", base="owner/one")
    resolve.resolve_model(str(adapter), tmp_path / "cache", base=str(base))  # its user vouches
    change_json(adapter / ADAPTER_CONFIG, revision="main")  # the newest by its name
    resolve.resolve_model(str(adapter), tmp_path / "cache", base="owner/one")


def test_the_base_may_be_a_gguf_file_and_no_adapter(tmp_path, gguf_file):
    model = resolve.resolve_model(str(gguf_file), tmp_path / "cache")
    adapter, _ = save_adapter(tmp_path / "adapter", model)
    made = resolve.resolve_model(str(adapter), tmp_path / "cache", base=str(gguf_file))
    assert json.loads((made / "given_as.json").read_text())["given_as"].startswith("LoRA adapter")
    with pytest.raises(InputError, match="is an adapter too"):
        resolve.resolve_model(str(adapter), tmp_path / "cache", base=str(adapter))
