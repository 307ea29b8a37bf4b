import json
import re
from pathlib import Path

import pytest

from upcycle_core.given.licence import TERMS, combined, faults, licences_of

DOCUMENT = Path(__file__).parents[3] / "docs" / "licences.md"


def model(folder, *, licence="", config=None, adapter_of=None, name=""):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if licence:
        lines = [f"license: {licence}", *([f"license_name: {name}"] if name else [])]
        front = "\n".join(["---", *lines, "---"])
        (folder / "README.md").write_text(f"{front}\n# A model\n")
    if adapter_of is not None:
        own = {"base_model_name_or_path": str(adapter_of)}
        (folder / "adapter_config.json").write_text(json.dumps(own))
    return str(folder)


@pytest.mark.parametrize(
    ("parts", "identifier", "words"),
    [
        ({}, "unknown", "No model was given"),
        ({"a": "apache-2.0", "b": "Apache-2.0"}, "apache-2.0", "All parts"),
        ({"a": "mit", "b": "apache-2.0"}, "apache-2.0", "asks most"),
        ({"a": "mit", "b": "GPL-3.0-or-later"}, "gpl-3.0", "asks most"),
        ({"a": "mit", "b": "llama3.1"}, "llama3.1", "asks most"),
        ({"a": "gemma", "b": "llama3.1"}, "other", "gemma, llama3.1"),
        ({"a": "cc-by-nc-4.0", "b": "llama3.1"}, "other", "hold at once"),
        ({"a": "cc-by-nc-4.0", "b": "cc-by-nc-sa-4.0"}, "cc-by-nc-sa-4.0", "asks most"),
        ({"a": "mit", "b": None}, "unknown", "under which licence b is"),
        ({"a": "gpl-3.0", "b": "cc-by-nc-4.0"}, "other", "do not go together"),
        ({"a": "cc-by-sa-4.0", "b": "gpl-3.0"}, "other", "do not go together"),
        ({"a": "agpl-3.0", "b": "gemma", "c": None}, "other", "do not go together"),
        ({"a": "mit", "b": "cc-by-nd-4.0"}, "other", "there is a leave"),
    ],
)
def test_a_joined_model_has_the_licence_that_its_parts_allow(parts, identifier, words):
    licence = combined(parts)
    assert licence.identifier == identifier
    assert words in licence.reason


def test_the_document_s_table_is_the_code_s():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", DOCUMENT.read_text(), re.MULTILINE)[2:]
    told = {name: asks for names, asks in rows for name in names.split(" (")[0].split(", ")}
    assert list(told) == list(TERMS)
    for name, asks in TERMS.items():
        for words in asks:
            assert words in told[name] or "**refused**" in told[name]


def test_what_forbids_derivatives_is_refused_until_the_recipe_accepts_it():
    parts = {"domains.law.expert": "CC-BY-NC-ND-4.0", "seed_model.model": "mit", "other": None}
    [fault] = faults(parts, ())
    assert fault.field == "domains.law.expert"
    assert "registry.accept_licences: [cc-by-nc-nd-4.0]" in str(fault)
    assert not list(faults(parts, ("CC-BY-NC-ND-4.0",)))


def test_a_licence_is_read_from_card_or_config_and_of_an_adapter_s_base(tmp_path):
    cache = tmp_path / "models"
    base = model(tmp_path / "base", licence="other", name="house-terms")
    adapter = model(tmp_path / "adapter", licence="mit", adapter_of=base)
    assert licences_of(adapter, cache) == {adapter: "mit", base: "house-terms"}
    by_config = model(tmp_path / "by-config", config={"license": "isc"})
    assert licences_of(by_config, cache) == {by_config: "isc"}
    for said in ("", "unknown", "[", "mit\n: ]["):
        silent = model(tmp_path / f"silent-{len(said)}", licence=said)
        assert licences_of(silent, cache) == {silent: None}
    assert licences_of("nobody/is-there", cache) == {"nobody/is-there": None}


def test_a_gguf_file_says_its_licence(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_license("Apache-2.0")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert licences_of(str(path), tmp_path) == {str(path): "Apache-2.0"}
