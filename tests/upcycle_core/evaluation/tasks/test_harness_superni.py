import json
from pathlib import Path
from typing import Any

import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.superni import superni_definition, superni_items

TASKS: list[dict[str, Any]] = [
    {
        "id": "add",
        "category": "Sums",
        "definition": " Add two numbers ",
        "positive_examples": [
            {"input": "1 and 2", "output": "3"},
            {"input": "Add 2 and 2!", "output": " four. "},
            {"input": "3 and 3", "output": "6"},
        ],
    },
    {"id": "name", "category": "Names", "definition": "Say a name.", "positive_examples": []},
]


def instance(number: int, task: str = "add", **changed: Any) -> dict[str, Any]:
    category = {"add": "Sums", "name": "Names"}[task]
    row = {"id": f"{task}-{number}", "task": task, "category": category, "split": "test"}
    return {**row, "prompt": f"{number} and 1", "answer": str(number + 1), **changed}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


@pytest.fixture
def tasks(tmp_path) -> Path:
    return write(tmp_path / "tasks.jsonl", TASKS)


def test_a_prompt_is_tk_instruct_s(tasks, tmp_path):
    """Blanks before "Positive" and "Output" are the published encoding's; so are full stops."""
    instances = write(tmp_path / "instances.jsonl", [instance(7, prompt=" 7 and 1\n")])
    (item,) = superni_items(instances, tasks)
    assert item["prompt"] == (
        "Definition: Add two numbers.\n"
        "\n"
        " Positive Example 1 -\n"
        "Input: 1 and 2.\n"
        " Output: 3.\n"
        "\n"
        " Positive Example 2 -\n"
        "Input: Add 2 and 2!\n"
        " Output: four.\n"
        "\n"
        "Now complete the following example -\n"
        "Input: 7 and 1.\n"
        "Output:"
    )


def test_a_task_without_examples_shows_none(tasks, tmp_path):
    instances = write(tmp_path / "instances.jsonl", [instance(7, "name", prompt="Who?")])
    (item,) = superni_items(instances, tasks)
    assert item["prompt"] == (
        "Definition: Say a name.\n\nNow complete the following example -\nInput: Who?\nOutput:"
    )


def test_every_right_answer_is_a_reference(tasks, tmp_path):
    rows = [
        instance(1, answer="one"),
        instance(2, answer=["two", "2"]),
        instance(3, answer="three", answers=["three", "3", "iii"]),
    ]
    items = superni_items(write(tmp_path / "instances.jsonl", rows), tasks)
    assert [item["answers"] for item in items] == [["one"], ["two", "2"], ["three", "3", "iii"]]
    assert [item["answer"] for item in items] == ["one", "two", "three"]
    assert [item["id"] for item in items] == ["add-1", "add-2", "add-3"]


def test_the_first_instances_of_each_task_and_split_are_taken(tasks, tmp_path):
    rows = [
        instance(1, split="train"),
        instance(2),
        instance(3, "name"),
        instance(4),
        instance(5),
        instance(6, "name"),
    ]
    instances = write(tmp_path / "instances.jsonl", rows)
    items = superni_items(instances, tasks, per_task=2)
    assert [item["id"] for item in items] == ["add-2", "name-3", "add-4", "name-6"]
    items = superni_items(instances, tasks, split="train")
    assert [item["id"] for item in items] == ["add-1"]


def test_categories_choose(tasks, tmp_path):
    instances = write(tmp_path / "instances.jsonl", [instance(1), instance(2, "name")])
    (item,) = superni_items(instances, tasks, categories=["Names"])
    assert (item["id"], item["task"], item["category"]) == ("name-2", "name", "Names")


def test_unknown_categories_are_named_with_those_there(tasks, tmp_path):
    instances = write(tmp_path / "instances.jsonl", [instance(1), instance(2, "name")])
    with pytest.raises(InputError) as caught:
        superni_items(instances, tasks, categories=["Sums", "Verses", "Odes"])
    assert [fault.value for fault in caught.value.faults] == ["Verses", "Odes"]
    assert "it has Names, Sums" in str(caught.value)


def test_an_unknown_split_is_named_with_those_there(tasks, tmp_path):
    instances = write(tmp_path / "instances.jsonl", [instance(1), instance(2, split="train")])
    with pytest.raises(InputError, match=r"split = 'dev'.*it has test, train"):
        superni_items(instances, tasks, split="dev", categories=["Sums"])


def test_an_instance_of_an_undefined_task_is_an_error(tasks, tmp_path):
    instances = write(tmp_path / "instances.jsonl", [instance(1, task="add") | {"task": "sing"}])
    with pytest.raises(InputError, match=r"'sing': .*tasks\.jsonl does not define it"):
        superni_items(instances, tasks)


def test_every_bad_line_is_named(tasks, tmp_path):
    instances = tmp_path / "instances.jsonl"
    lines = [
        json.dumps(instance(1)),
        "{broken",
        "",
        "[1]",
        json.dumps({**instance(2), "prompt": 3}),
        json.dumps({key: value for key, value in instance(3).items() if key != "category"}),
        json.dumps(instance(4, answer=[])),
        json.dumps(instance(5, answers="five")),
    ]
    instances.write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        superni_items(instances, tasks)
    assert [fault.field.removeprefix(f"{instances}, ") for fault in caught.value.faults] == [
        "line 2",
        "line 4",
        "line 5: prompt",
        "line 6: category",
        "line 7: answer",
        "line 8: answers",
    ]


def test_a_bad_task_is_named(tmp_path):
    broken: list[dict[str, Any]] = [
        {**TASKS[0], "positive_examples": [{"input": "1"}]},
        {"id": "x"},
    ]
    tasks = write(tmp_path / "tasks.jsonl", broken)
    instances = write(tmp_path / "instances.jsonl", [instance(1)])
    with pytest.raises(InputError) as caught:
        superni_items(instances, tasks)
    assert [fault.field.removeprefix(f"{tasks}, ") for fault in caught.value.faults] == [
        "line 1: positive_examples",
        "line 2: definition",
        "line 2: positive_examples",
    ]


def test_a_missing_file_is_named(tasks, tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.jsonl"):
        superni_items(tmp_path / "nowhere.jsonl", tasks)


def test_a_line_may_hold_other_line_separators(tasks, tmp_path):
    instances = write(tmp_path / "instances.jsonl", [instance(1, prompt="a\u2028b")])
    (item,) = superni_items(instances, tasks)
    assert "Input: a\u2028b.\n" in item["prompt"]


def test_generation_is_greedy_and_ends_with_the_example():
    asked = superni_definition()["generation_kwargs"]
    assert asked == {"until": ["\n\n"], "max_gen_toks": 128, "do_sample": False}
