"""A recipe's tasks as the harness holds them, before there is any model."""

from pathlib import Path

import datasets
import pytest

from tests.upcycle_core.evaluation.tasks.made import (
    ALLOWED,
    CHOOSING,
    ROWS,
    ask,
    documents,
    load,
    made,
    save_task,
    save_yaml,
    write,
)
from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.config import CodeConfig
from upcycle_core.evaluation.tasks.tasks import HarnessTask, check_tasks

CHOICES = [
    {"id": "0", "prompt": "Go", "choices": ["on", "off", "in"], "answer": 0},
    {"id": "1", "prompt": "Look", "choices": ["up", "at"], "answer": 1},
    {"id": "2", "prompt": "Sit", "choices": ["down", "up"], "answer": 0},
]
CALLS = "def called(rows):\n    return rows\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "gsm9k",
            r"^tasks.hub.harness = 'gsm9k': the lm-evaluation-harness has no such task or gr",
        ),
        ("humaneval", r"^tasks.hub.harness = 'humaneval': runs the model's .*humaneval-hub.yaml$"),
        # What a task includes counts, and is known before its data are.
        ("humaneval_plus", r"^tasks.hub.harness = 'humaneval_plus': runs the model's programs"),
        (
            "gsm8k",
            r"^tasks.hub = 'gsm8k': its data are neither in the cache CACHE nor to be had from the "
            r"hub \(.*\); load it once where there is a network, or describe local files by "
            r"tasks.hub.definition$",
        ),
    ],
)
def test_what_the_harness_cannot_give_is_said(name, message, tmp_path):
    message = message.replace("CACHE", str(datasets.config.HF_DATASETS_CACHE))
    with pytest.raises(InputError, match=message):
        load(write(tmp_path / "hub", harness=name))


def test_a_definition_of_hub_data_needs_them(tmp_path):
    path = save_yaml(tmp_path / "task.yaml", {"dataset_path": "some/where", "test_split": "test"})
    with pytest.raises(InputError, match=r"^tasks.hub = 'some/where': its data are neither in"):
        load(write(tmp_path / "hub", definition=str(path)))


def test_data_files_on_the_hub_stay_there(tmp_path, monkeypatch):
    asked = {}

    def load_dataset(**arguments):
        asked.update(arguments)
        return {"test": datasets.Dataset.from_list(ROWS)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    files = {"data_files": {"test": "test.jsonl"}}
    made(tmp_path, dataset_path="some/where", dataset_kwargs=files)
    assert asked == {"path": "some/where", "name": None, **files}


def test_the_recipe_s_settings_reach_the_harness(tmp_path):
    settings = {"shots": 2, "stop": ("=", "!"), "max_new_tokens": 3, "limit": 4}
    task = made(tmp_path, num_fewshot=1, settings=settings)
    _, asked = ask(task)
    assert len(asked) == 4 == task.requests
    for (prompt, generation), row in zip(asked, ROWS, strict=False):
        assert generation == {"until": ["=", "!"], "max_gen_toks": 3, "do_sample": False}
        assert prompt.count("=") == 3
        assert prompt.endswith("\n\n" + row["prompt"])


def test_the_task_s_own_settings_stay_where_the_recipe_has_none(tmp_path):
    task = made(tmp_path, num_fewshot=1)
    _, asked = ask(task)
    assert len(asked) == len(ROWS) == task.requests
    for prompt, generation in asked:
        assert generation == {"until": ["\n"], "max_gen_toks": 6, "do_sample": False}
        assert prompt.count("=") == 2


def test_an_item_is_never_among_its_own_examples(tmp_path):
    """There is one split, and an example for every other item: all of them are shown."""
    _, asked = ask(made(tmp_path, settings={"shots": len(ROWS) - 1}))
    for (prompt, _), row in zip(asked, ROWS, strict=True):
        assert [prompt.count(other["prompt"]) for other in ROWS] == [1] * len(ROWS)
        assert f"{row['prompt']} {row['answer']}" not in prompt


def test_requests_count_every_choice(tmp_path):
    task = made(tmp_path, CHOICES, **CHOOSING)
    assert len(ask(task)[1]) == task.requests == 7
    task = made(tmp_path / "two", CHOICES, **CHOOSING, settings={"limit": 2})
    assert len(ask(task)[1]) == task.requests == 5


@pytest.mark.parametrize(
    ("keys", "settings", "message"),
    [
        ({}, {"shots": 6}, r"^tasks.own.shots = 6: own has 5 examples to show; ask for no more$"),
        (CHOOSING, {"stop": ("!",)}, r"^tasks.own.stop = \['!'\]: the model writes nothing"),
        (CHOOSING, {"max_new_tokens": 9}, r"^tasks.own.max_new_tokens = 9: the model writes no"),
        (
            {"category": "subject"},
            {},
            r"^tasks.own.definition = 'subject': the data have no such field; they have id, prompt",
        ),
        ({"rouge_l": "answers"}, {}, r"^tasks.own.definition = 'answers': the data have no such"),
        ({"program": "{{response}}{{test}}"}, {}, r"^tasks.own.definition = 'test': the data have"),
        ({"program": "{{respon"}, {}, r"^tasks.own.definition = 'task.yaml': .*TemplateSyntaxErr"),
        (
            {"out_put": 1},
            {},
            r"^tasks.own.definition = 'task.yaml': .* use it \(TypeError: .*out_p",
        ),
        ({"test_split": "tset"}, {}, r"^tasks.own.definition = 'task.yaml': .*KeyError: 'tset'"),
        ({"unsafe_code": True}, {}, r"^tasks.own = 'own': runs the model's programs in the evalu"),
    ],
)
def test_what_a_definition_cannot_do_is_said_before_there_is_a_model(
    keys, settings, message, tmp_path
):
    rows = CHOICES if keys is CHOOSING else ROWS
    with pytest.raises(InputError, match=message):
        made(tmp_path, rows, **keys, settings=settings)


def test_a_function_that_is_not_there_is_said(tmp_path):
    path = Path(save_task(tmp_path))
    path.with_name("utils.py").write_text(CALLS)
    path.write_text(path.read_text() + "process_docs: !function utils.colled\n")
    with pytest.raises(InputError, match=r"tasks.own.definition = 'task.yaml': .*'colled'"):
        load(write(tmp_path / "own", definition=str(path)))
    path.write_text(path.read_text().replace("utils.colled", "other.called"))
    with pytest.raises(InputError, match=r"tasks.own.definition = 'task.yaml': .*module 'other'"):
        load(write(tmp_path / "again" / "own", definition=str(path)))


def test_local_data_that_cannot_be_read_do_not_send_to_the_hub(tmp_path):
    path = Path(save_task(tmp_path))
    path.with_name("rows.jsonl").write_text("{no JSON\n")
    with pytest.raises(InputError, match=r"^tasks.own = 'json': its files cannot be read") as error:
        load(write(tmp_path / "own", definition=str(path)))
    assert "hub" not in str(error.value)


def test_programs_run_only_where_they_may(tmp_path):
    out = write(tmp_path / "own", definition=save_task(tmp_path, program="{{response}}"))
    with pytest.raises(InputError, match=r"^tasks.own = 'program': .*task_evaluation.code.allow"):
        load(out, CodeConfig())
    load(out, ALLOWED)


def test_two_tasks_stay_apart_whatever_the_harness_calls_its_own(tmp_path):
    """One is named as a task of the harness, with data on the hub."""
    first = made(tmp_path / "a", ROWS[:2], name="gsm8k", rouge_l="answer")
    second = made(tmp_path / "b", ROWS[2:], name="other", settings={"max_new_tokens": 2})
    assert documents(first) == ROWS[:2]
    assert documents(second) == ROWS[2:]
    for task, metric in ((first, "rouge_l,none"), (second, "exact_match,none")):
        results, asked = ask(task, lambda prompt: str(2 * int(prompt[0])))
        assert list(task.tasks) == [task.name]
        assert results["results"][task.name][metric] == 1.0
        assert [prompt for prompt, _ in asked] == [row["prompt"] for row in documents(task)]
    assert asked[0][1]["max_gen_toks"] == 2


@pytest.mark.parametrize(
    ("generation", "longest"),
    [
        ({"max_gen_toks": 20}, 20),
        ({"max_new_tokens": 20}, 20),
        ({}, 256),  # the harness's default
    ],
)
def test_an_answer_leaves_room_for_a_prompt(generation, longest, tmp_path):
    task = made(tmp_path, generation_kwargs={"until": ["\n"], **generation})
    assert not list(task.room_faults(longest + 1))
    (fault,) = task.room_faults(longest)
    assert (fault.field, fault.value) == ("tasks.own.max_new_tokens", longest)
    assert f"{longest} positions" in fault.remedy


def test_choices_need_no_room(tmp_path):
    assert not list(made(tmp_path, CHOICES, **CHOOSING).room_faults(4))


def test_all_tasks_are_tried_and_all_faults_told(tmp_path):
    sets = {
        "good": write(tmp_path / "good", definition=save_task(tmp_path)),
        "hub": write(tmp_path / "hub", harness="gsm9k"),
        "many": write(tmp_path / "many", definition=save_task(tmp_path), shots=7),
    }
    check_tasks({"good": sets["good"]}, code=CodeConfig(), positions=7)
    with pytest.raises(InputError, match=r"^tasks.good.max_new_tokens = 6: no room for a prompt"):
        check_tasks({"good": sets["good"]}, code=CodeConfig(), positions=6)
    with pytest.raises(InputError) as error:
        check_tasks(sets, code=CodeConfig())
    fields = [fault.field for fault in error.value.faults]
    assert fields == ["tasks.hub.harness", "tasks.many.shots"]


def test_the_harness_keeps_its_copy_where_it_is_told(tmp_path):
    out = write(tmp_path / "own", definition=save_task(tmp_path))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    HarnessTask("own", out, code=ALLOWED, cache=tmp_path / "kept")
    new = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert new
    assert all(path.is_relative_to(tmp_path / "kept") for path in new)


@pytest.mark.parametrize("metric", ["bleu", "exact_match,strict"])
def test_a_metric_that_it_lacks_is_said_before_any_model_is_scored(tmp_path, metric):
    task = save_task(tmp_path)
    with pytest.raises(InputError) as found:
        load(write(tmp_path / "own", definition=task, metric=metric))
    assert str(found.value) == f"tasks.own.metric = '{metric}': the task has exact_match,none"
    for asked in ("exact_match", "exact_match,none"):
        assert load(write(tmp_path / f"of-{len(asked)}", definition=task, metric=asked)).tasks


@pytest.mark.parametrize("metric", [None, "chrf"])
def test_a_metric_without_scores_of_items_is_said_before_any_model_is_scored(tmp_path, metric):
    entries = [
        {"metric": name, "aggregation": name, "higher_is_better": True} for name in ("bleu", "chrf")
    ]
    with pytest.raises(InputError) as found:
        load(write(tmp_path / "own", definition=save_task(tmp_path, metric_list=entries)))
    said = "has no score of single items, which are compared; and the task no other: leave it out"
    assert str(found.value) == f"tasks.own.metric = 'bleu': {said}"
    entries.append({"metric": "exact_match", "aggregation": "mean", "higher_is_better": True})
    other = save_task(tmp_path, metric_list=entries)
    with pytest.raises(InputError, match="compared; the task has exact_match,none"):
        load(write(tmp_path / "other", definition=other, metric=metric))
    assert load(write(tmp_path / "asked", definition=other, metric="exact_match")).tasks


@pytest.mark.parametrize(
    ("keys", "only"),
    [
        ({"rouge_l": "answer"}, "rouge_l"),
        ({"contains": "answer"}, "contains"),
        ({"program": "{{response}}"}, "pass@1"),
    ],
)
def test_a_metric_of_ours_that_a_task_lacks_is_said_before_any_model_is_scored(
    tmp_path, keys, only
):
    task = save_task(tmp_path, **keys)
    for metric in ("exact_match", f"{only},strict"):
        with pytest.raises(InputError) as found:
            load(write(tmp_path / metric / "own", definition=task, metric=metric))
        said = f"tasks.own.metric = '{metric}': the task has {only},none"
        assert str(found.value) == said
    for metric in (None, only, f"{only},none"):
        assert load(write(tmp_path / f"of-{metric}", definition=task, metric=metric)).tasks


def test_a_metric_of_a_function_is_known_by_its_results_alone(tmp_path):
    scores = "def scores(document, results):\n    return {'bleu': 1.0}\n"
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "own.py").write_text(scores)
    task = Path(save_task(tmp_path))
    task.write_text(task.read_text() + "process_results: !function own.scores\n")
    assert load(write(tmp_path / "own", definition=str(task), metric="bleu")).tasks


def test_a_metric_that_is_several_is_known_by_its_results_alone(tmp_path):
    scores = "def scores(references, predictions):\n    return {'first': 1.0, 'second': 0.0}\n"
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "own.py").write_text(scores)
    task = Path(save_task(tmp_path, metric_list=[]))
    text = task.read_text().replace(
        "metric_list: []", "metric_list:\n- metric: !function own.scores"
    )
    task.write_text(text + "  aggregation: mean\n  higher_is_better: true\n")
    assert load(write(tmp_path / "own", definition=str(task), metric="second")).tasks


def test_parts_without_a_common_filter_are_judged_by_their_results(tmp_path):
    loose = load(write(tmp_path / "loose", definition=save_task(tmp_path), metric=None))
    strict = load(write(tmp_path / "strict", definition=save_task(tmp_path), metric=None))
    (own,) = strict.tasks.values()
    own._filters[0].name = "strict"
    loose.tasks |= {"strict": own}
    assert loose._metrics() == {}
