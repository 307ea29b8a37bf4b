"""Recipes lose no key without a word, and cost no more to read than they are worth."""

import time
from pathlib import Path

import pytest
import yaml
from texts import pico_recipe, save_recipe

from infra.recipe.strict_yaml import DEPTH, read_yaml
from tasks.recipes import load_recipe
from upcycle_core.errors import InputError

DEMO = Path("recipes/demo.yaml")
SHIPPED = sorted(Path("recipes").rglob("*.yaml"))


def laughs(form, levels=9, width=9):
    """A text of a few hundred bytes with ``width ** levels`` values.

    Args:
        form: What holds a level's aliases, as ``%s``.
        levels: How often they are repeated.
        width: How often a level repeats the one before.
    """
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels + 1):
        aliases = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} {form % aliases}")
    return "\n".join(lines)


ENDLESS = {
    "cyclic list": "a: &a [*a]",
    "cyclic mapping": "a: &a {b: *a}",
    "cyclic merge": "a: &a {<<: *a}",
    "billion laughs": laughs("[%s]"),
    "of mappings": laughs("{b: [%s]}"),
    "of merges": laughs("{<<: [%s], y: 2}"),
    "deep list": "a: " + "[" * 1_000 + "]" * 1_000,
    "deep mapping": "a: " + "{a: " * 1_000 + "1" + "}" * 1_000,
    "deep, yet read": "a: " + "[" * (DEPTH + 1) + "]" * (DEPTH + 1),
    "endless number": "a: " + "9" * 10_000,
    "no such day": "a: 2024-13-45",
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_what_has_no_end_is_refused_at_once(tmp_path, text):
    """In a recipe, in a file beside it, and in a setting."""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(InputError, match="not YAML"):
        load_recipe(path)
    with pytest.raises(InputError, match="not YAML"):
        load_recipe(DEMO, added=[path])
    assert time.monotonic() - began < 30
    with pytest.raises(InputError, match="the value is not YAML"):
        load_recipe(DEMO, [f"domains={{{', '.join(text.splitlines())}}}"])


TWICE = [
    ("name: a\nseed: 1\nname: b\n", {"name": (1, 3)}),
    ("domains: {x: A, x: B}\n", {"domains.x": (1, 1)}),
    ("a:\n  b:\n    - c: 1\n      'c': 2\n", {"a.b.c": (3, 4)}),
    ("domains:\n  x: 1\nseed: 0\ndomains:\n  y: 1\n", {"domains": (1, 4)}),
    ("a: {b: 1, b: 2}\nc: {d: 1,\n d: 2}\n", {"a.b": (1, 1), "c.d": (2, 3)}),
    (".t: &t {x: 1}\na: {<<: *t, x: 2, x: 3}\n", {"a.x": (2, 2)}),
    ("true: 1\ntrue: 2\n", {"true": (1, 2)}),
]


@pytest.mark.parametrize(("text", "twice"), TWICE, ids=[" ".join(found) for _, found in TWICE])
def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path, text, twice):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    for added in ([], [path]):
        with pytest.raises(InputError) as raised:
            load_recipe(DEMO if added else path, added=added)
        assert {fault.field for fault in raised.value.faults} == set(twice)
        for fault in raised.value.faults:
            first, second = twice[fault.field]
            lines = f"line {first}" if first == second else f"lines {first} and {second}"
            assert fault.value == str(path)
            assert f"stands twice, on {lines}, and one of them would be lost" in fault.remedy


def test_a_key_that_stands_twice_in_a_setting_is_refused_where_it_belongs():
    with pytest.raises(InputError) as raised:
        load_recipe(DEMO, ["domains.law={train: {files: [a], files: [b]}}"])
    [fault] = raised.value.faults
    assert fault.field == "domains.law.train.files"
    assert fault.value.startswith("domains.law={")
    assert "on line 1," in fault.remedy


def test_a_mapping_that_aliases_repeat_is_named_once():
    with pytest.raises(InputError) as raised:
        read_yaml("a: &a {x: 1, x: 2}\nb: *a\nc: {<<: *a}\n", "file")
    assert [fault.field for fault in raised.value.faults] == ["a.x"]


def test_anchors_and_merge_keys_mean_what_they_meant():
    text = """
    base: &base {x: 1, y: 2}
    more: &more {<<: *base, y: 3, z: 4}
    both: {<<: [*more, *base], x: 5}
    twice: {<<: *more, <<: *base}
    list: [*base, *more, 0x10, 1_000, 2e-4, yes, ~, 2024-01-02]
    """
    assert read_yaml(text, "file") == yaml.safe_load(text)
    assert read_yaml("", "file") is None


def test_a_section_with_nothing_under_it_has_its_defaults():
    text = "a:\nb:\n  one: &none\n  two: {a: }\nc: {x: null, y: ~, z: ''}\nd: *none\n"
    found = read_yaml(text, "file", sections=["a", "b.*.a", "c.*", "b.one"])
    none = {"x": None, "y": None, "z": ""}
    assert found == {"a": {}, "b": {"one": {}, "two": {"a": {}}}, "c": none, "d": None}
    assert read_yaml("two: {a: }", "file", "b", sections=["b.*.a"]) == {"two": {"a": {}}}
    assert read_yaml(text, "file") == yaml.safe_load(text)


def test_a_setting_changes_one_of_the_rows_that_share_an_anchor():
    def batches(*changes):
        rows = [Path("recipes/ablations.yaml")]
        recipe = load_recipe(Path("recipes/symphony.yaml"), ["folder=x", *changes], added=rows)
        return {name: row.training.batch_size for name, row in recipe.baselines.items()}

    before = batches()
    changed = batches("baselines.two-paper.training.batch_size=3")
    assert changed == {**before, "two-paper": 3}
    assert len(changed) > 4


@pytest.mark.parametrize("path", SHIPPED, ids=str)
def test_every_shipped_file_is_read_as_before(path):
    assert read_yaml(path.read_text(), str(path)) == yaml.safe_load(path.read_text())


def test_tags_that_could_run_code_are_refused():
    with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
        read_yaml("a: !!python/object/apply:os.getcwd []", "file")


@pytest.mark.parametrize("text", ["1: {}\n", "true: {}\nbaselines: {}\n", "{[a]: 1}\n"])
def test_an_added_file_with_keys_that_are_no_text_is_refused(tmp_path, text):
    (tmp_path / "rows.yaml").write_text(text)
    with pytest.raises(InputError):
        load_recipe(DEMO, added=[tmp_path / "rows.yaml"])


def test_places_that_cannot_be_are_named(tmp_path):
    with pytest.raises(InputError, match=r"recipe = .*cannot be read"):
        load_recipe(Path("a\0b.yaml"))
    recipe = save_recipe(tmp_path / "recipe.yaml", pico_recipe(tmp_path))
    with pytest.raises(InputError, match=r"folder = '~nobody-of-that-name/x': .*the whole path"):
        load_recipe(recipe, ["folder=~nobody-of-that-name/x"])
