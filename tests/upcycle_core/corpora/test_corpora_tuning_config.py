"""What is wrong with a recipe's instructions, without reading a file."""

import subprocess
import sys

import pytest

from upcycle_core.corpora.families.catalogue import UNSEEN
from upcycle_core.corpora.tuning.config import InstructionsConfig, InstructionSource

FAMILIES = InstructionSource(generate="families")
FILES = InstructionSource(files=("a.jsonl",))


def faults_of(**settings):
    settings = {"sources": {"a": FAMILIES}, **settings}
    return [str(fault) for fault in InstructionsConfig(**settings).faults("instructions")]


def test_the_embedded_families_need_nothing_else():
    assert faults_of() == []
    config = InstructionsConfig(sources={"a": FAMILIES})
    assert config.unseen_categories == UNSEEN
    assert config.per_family("sign") == config.train_per_task + config.test_per_task
    assert faults_of(sources={"a": FAMILIES, "b": FILES}) == []
    assert faults_of(sources={"b": FILES}, unseen=()) == []


@pytest.mark.parametrize(
    ("settings", "start", "part"),
    [
        ({"sources": {}}, "instructions.sources = {}", "nothing to tune on"),
        ({"unseen": ("vowel",), "train_categories": ("vowel", "largest")},
         "instructions.train_categories = 'vowel'", "is also in instructions.unseen"),
        ({"train_categories": ("largest", "give_number")},
         "instructions.train_categories = 'give_number'", "is also in"),
        ({"unseen": ("vowel", "vowel")}, "instructions.unseen = 'vowel'", "named twice"),
        ({"unseen": ("vowels",)}, "instructions.unseen = 'vowels'", "no such family"),
        ({"train_categories": ()}, "instructions.train_categories = []", "nothing to train on"),
        ({"sources": {"b": FILES}}, "instructions.unseen = None", "categories to hold out"),
        ({"train_per_task": 0}, "instructions.train_per_task = 0", "at least 1"),
        ({"test_per_task": 0}, "instructions.test_per_task = 0", "at least 1"),
        ({"unseen_per_task": 0}, "instructions.unseen_per_task = 0", "at least 1"),
        ({"generated_per_family": 1}, "instructions.generated_per_family = 1", "at least 2"),
        ({"domains": {"vowel": "a/b"}}, "instructions.domains.vowel = 'a/b'", "names a file"),
    ],
)  # fmt: skip
def test_faults_of_the_whole(settings, start, part):
    (fault,) = faults_of(**settings)
    assert fault.startswith(start)
    assert part in fault


@pytest.mark.parametrize(
    ("settings", "field", "part"),
    [
        ({}, "", "exactly one of generate, files and dataset"),
        ({"files": ("a",), "dataset": "b"}, "", "exactly one"),
        ({"generate": "families", "files": ("a",)}, "", "exactly one"),
        ({"files": ("a",), "subset": "b"}, ".subset", "is for a dataset"),
        ({"files": ("a",), "revision": "b"}, ".revision", "is for a dataset"),
        ({"files": ("a",), "max_records": 3}, ".max_records", "is for a dataset"),
        ({"files": ("a",), "split": "b"}, ".split", "is for a dataset or superni-rows"),
        ({"files": ("a",), "definitions": "b"}, ".definitions", "is for superni-rows"),
        ({"files": ("a",), "task_lists": ("b",)}, ".task_lists", "is for superni files"),
        ({"files": ("a",), "form": "superni-rows"}, ".definitions", "defines the tasks"),
        ({"dataset": "a", "form": "superni"}, ".form", "is a form of files"),
        ({"files": ("a",), "examples": 1}, ".examples", "is for superni and superni-rows"),
        ({"files": ("a",), "form": "superni", "examples": -1}, ".examples", "0 or more"),
        ({"files": ("a",), "max_per_task": 0}, ".max_per_task", "at least 1"),
        ({"files": ("a",), "domain": "../a"}, ".domain", "names a file"),
    ],
)
def test_faults_of_a_source(settings, field, part):
    (fault,) = faults_of(sources={"s": InstructionSource(**settings)}, unseen=())
    assert fault.startswith(f"instructions.sources.s{field} = ")
    assert part in fault


def test_all_faults_are_told_at_once():
    bad = InstructionSource(files=("a",), subset="b", max_per_task=-1)
    assert len(faults_of(sources={"a": bad, "b": InstructionSource()}, test_per_task=0)) == 5


def test_recipes_are_read_without_torch():
    code = (
        "import sys, upcycle_core.corpora.tuning.config\n"
        "sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
