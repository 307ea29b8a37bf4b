"""Scores that are ours, through the harness as it asks a model."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.upcycle_core.evaluation.tasks.made import (
    ALLOWED,
    ask,
    load,
    local,
    made,
    save_rows,
    save_yaml,
    write,
)
from upcycle_core.evaluation.tasks import scoring
from upcycle_core.evaluation.tasks.adapter import value_of
from upcycle_core.evaluation.tasks.config import CodeConfig, SuperNI
from upcycle_core.evaluation.tasks.sandbox import Outcome
from upcycle_core.evaluation.tasks.scoring import own_scoring

RECIPES = Path(__file__).resolve().parents[4] / "recipes" / "tasks"
NAMES = ["Ann Lee", "  ann ", "Å. Leé", ""]


def scores(task, metric, **model):
    """{prompt: the metric of its item}, and the harness's own figure."""
    results, _ = ask(task, **model)
    found = {one["arguments"][0][0]: one[metric] for one in results["samples"][task.name]}
    return found, results["results"][task.name][f"{metric},none"]


def scored(key, field, document, response):
    process = own_scoring({key: field}, ALLOWED)["process_results"]
    return process(document, [response])


def test_programs_decide_pass_at_1(tmp_path):
    """Right, wrong, endless and unreadable ones; marks of templates in rows are plain text."""
    answers = {
        "def right(a): # {{ a }} {% if %}": "\n    return '{{' + a",
        "def wrong(a):": "\n    return a",
        "def endless(a):": "\n    while True: pass",
        "def unreadable(a):": "\n    return (",
        "def early(a):": "\n    raise SystemExit",
    }
    rows = [
        {"prompt": prompt, "test": f"assert {prompt[4:].split('(')[0]}('}}}}') == '{{{{}}}}'"}
        for prompt in answers
    ]
    keys = {"doc_to_target": "", "program": "{{prompt}}{{response}}\n{{test}}\n"}
    path = save_yaml(
        tmp_path / "task.yaml",
        {
            **local(save_rows(tmp_path / "rows.jsonl", rows)),
            "output_type": "generate_until",
            "doc_to_text": "prompt",
            **keys,
        },
    )
    task = load(write(tmp_path / "code", definition=str(path)), CodeConfig(allow=True, seconds=1))
    found, mean = scores(task, "pass@1", answer=answers.get)
    assert [prompt for prompt, score in found.items() if score == 1.0] == [rows[0]["prompt"]]
    assert sum(found.values()) == 1.0
    assert mean == pytest.approx(1 / 5)


def test_programs_have_the_recipe_s_limits(monkeypatch):
    given = []

    def run_program(source, *, limits):
        given.append((source, limits.seconds, limits.memory_bytes))
        return Outcome(True, "passed")

    monkeypatch.setattr(scoring, "run_program", run_program)
    code = CodeConfig(allow=True, seconds=3, memory_bytes=2**27)
    process = own_scoring({"program": "{{response}}\n"}, code)["process_results"]
    assert process({"response": "the row's"}, ["pass"]) == {"pass@1": 1.0}
    assert given == [("pass\n", 3, 2**27)]


def test_humaneval_s_recipe_scores_its_own_answers(tmp_path):
    row = {
        "id": "HumanEval/0",
        "prompt": 'def twice(a):\n    """Two of {{a}}."""\n',
        "answer": "    return a + a\n",
        "test": "def check(candidate):\n    assert candidate('%') == '%%'\n",
        "entry_point": "twice",
    }
    rows = [row, {**row, "id": "HumanEval/1", "prompt": "def twice(a):\n"}]
    save_rows(tmp_path / "humaneval.jsonl", rows)
    definition = str(RECIPES / "humaneval.yaml")
    task = load(write(tmp_path / "humaneval", folder=tmp_path, definition=definition))
    found, _ = scores(
        task,
        "pass@1",
        answer={row["prompt"]: row["answer"], "def twice(a):\n": "    return a\n"}.get,
    )
    assert found == {row["prompt"]: 1.0, "def twice(a):\n": 0.0}


def test_rouge_l_takes_the_best_reference(tmp_path):
    folder = tmp_path / "source"
    instance = {"task": "say", "category": "Words", "split": "test"}
    rows = [
        {**instance, "id": "0", "prompt": "one", "answer": ["red blue", "green"]},
        {**instance, "id": "1", "prompt": "two", "answer": "red"},
    ]
    files = SuperNI(
        instances=str(save_rows(folder / "instances.jsonl", rows)),
        tasks=str(
            save_rows(
                folder / "tasks.jsonl",
                [{"id": "say", "category": "Words", "definition": "Say.", "positive_examples": []}],
            )
        ),
    )
    task = load(write(tmp_path / "superni", superni=files))
    found, mean = scores(
        task, "rouge_l", answer=lambda prompt: "Red, then blue!" if "one" in prompt else "blue"
    )
    # Two of the answer's three words in order, both of the reference's: F = 2 * 2/3 * 1 / (5/3).
    assert list(found.values()) == pytest.approx([0.8, 0.0], abs=1e-12)
    assert mean == pytest.approx(0.4, abs=1e-12)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("It was ANN LEE.", 1.0),
        ("Annie", 1.0),  # as published: within a word as well
        ("å. leÉ", 1.0),
        ("A. Lee", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_holds_one_of_the_names(response, score):
    for value in (NAMES, json.dumps(NAMES)):
        assert scored("contains", "names", {"names": value}, response) == {"contains": score}


def test_a_single_name_is_no_list_of_letters():
    assert scored("contains", "name", {"name": "Oslo"}, "In oslo") == {"contains": 1.0}
    assert scored("contains", "name", {"name": "Oslo"}, "so") == {"contains": 0.0}


def test_popqa_s_recipe_counts_answers_that_hold_a_name(tmp_path):
    """The recipe with rows here in place of the hub's."""
    rows = [
        {"id": n, "question": f"Who is {n}?", "possible_answers": json.dumps([f"Ann {n}", "X"])}
        for n in range(3)
    ]
    keys = yaml.safe_load((RECIPES / "popqa-hub.yaml").read_text())
    keys |= local(save_rows(tmp_path / "rows.jsonl", rows))
    path = save_yaml(tmp_path / "popqa.yaml", keys)
    task = load(write(tmp_path / "popqa", definition=str(path), shots=1))
    found, mean = scores(
        task, "contains", answer=lambda prompt: "It is ann 1" if "1?" in prompt[-6:] else "Ann"
    )
    assert [score for prompt, score in found.items() if prompt.endswith("Who is 1? A:")] == [1.0]
    assert mean == pytest.approx(1 / 3)
    assert all(prompt.count("A: Ann") == 1 for prompt in found)  # the example shows the first name


def test_a_definition_without_keys_of_ours_is_the_harness_s(tmp_path):
    assert own_scoring({}, ALLOWED) == {}
    assert own_scoring({"category": "topic"}, ALLOWED) == {}
    found, _ = scores(made(tmp_path), "exact_match", answer=lambda prompt: "4")
    assert found["2+2="] == 1.0
    assert found["1+1="] == 0.0


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"first": {"acc,none": 1.0}, "second": {"acc,none": 0.0}}, 0.5),
        ({"first": {"acc,none": 1.0}, "all": {"acc,none": 0.7}}, 0.7),
    ],
)
def test_a_group_s_figure_is_its_own_or_the_mean_of_its_items(groups, expected):
    """Not that of the first group within it."""
    items = [SimpleNamespace(score=score) for score in (1.0, 1.0, 0.0, 0.0)]
    task = SimpleNamespace(
        settings={"harness": "all"}, tasks=["a", "b"], groups=["all", "first", "second"]
    )
    results = {"groups": groups, "results": {"a": {"acc,none": 1.0}, "b": {"acc,none": 0.0}}}
    assert value_of(task, results, "acc,none", items) == expected
