"""What the harness logs, as items that people read."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.upcycle_core.evaluation.tasks.made import (
    CHOOSING,
    ROWS,
    ask,
    load,
    made,
    save_task,
    write,
)
from upcycle_core.errors import InputError
from upcycle_core.evaluation.tasks.samples import (
    category_means,
    chosen_metric,
    is_truncated,
    items_of,
)

FILTERS = [
    {
        "name": name,
        "filter": [
            {"function": "regex", "regex_pattern": pattern},
            {"function": "take_first"},
        ],
    }
    for name, pattern in (("strict", r"^is (\d+)"), ("flexible", r"(\d+)"))
]
CHOICES = [
    {"id": "go", "prompt": "Go", "choices": ["on", "away from here", "in"], "answer": 1},
    {"id": "look", "prompt": "Look", "choices": ["up", "at", "in"], "answer": 0},
]


def metric_list(*names, aggregation="mean"):
    return [{"metric": n, "aggregation": aggregation, "higher_is_better": True} for n in names]


def chosen(task, **model):
    """The metric's name, the filter's, and the items under both."""
    results, _ = ask(task, **model)
    metric, name = chosen_metric(task, results["samples"])
    samples = [
        (part, sample)
        for part, found in results["samples"].items()
        for sample in found
        if sample["filter"] == name
    ]
    return metric, name, items_of(samples, task, metric=metric, seed=3)


def group(*tasks):
    """Several tasks as the parts of one."""
    first = tasks[0]
    first.tasks = {name: part for task in tasks for name, part in task.tasks.items()}
    first.loaded = {"tasks": first.tasks}
    return first


def calling(folder, code, rows=ROWS, **keys):
    """A task whose items are scored or asked by ``code``."""
    path = Path(save_task(folder, rows, **{k: v for k, v in keys.items() if k != "functions"}))
    path.with_name("utils.py").write_text(code)
    for key, function in keys["functions"].items():
        with path.open("a") as file:
            file.write(f"{key}: !function utils.{function}\n")
    return load(write(folder / "own", definition=str(path)))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, ("exact_match", "strict")),
        ("exact_match", ("exact_match", "strict")),
        ("exact_match,flexible", ("exact_match", "flexible")),
    ],
)
def test_a_metric_is_chosen_by_name_and_filter(asked, expected, tmp_path):
    task = made(tmp_path, filter_list=FILTERS, settings={"metric": asked})
    metric, name, items = chosen(task, answer=lambda prompt: "It is 4")
    assert (metric, name) == expected
    assert [item.response for item in items] == ["4" if name == "flexible" else "[invalid]"] * 6
    assert sum(item.score for item in items) == (1.0 if name == "flexible" else 0.0)


def test_the_first_metric_that_the_task_lists_is_the_default(tmp_path):
    orders = [("acc", "acc_norm"), ("acc_norm", "acc")]
    for number, order in enumerate(orders):
        keys = {**CHOOSING, "metric_list": metric_list(*order)}
        metric, name, _ = chosen(made(tmp_path / str(number), CHOICES, **keys))
        assert (metric, name) == (order[0], "none")


def test_an_unknown_metric_is_answered_with_all_there_are(tmp_path):
    message = (
        r"^tasks.own.metric = 'flexible': the task has exact_match,strict, exact_match,flexible$"
    )
    with pytest.raises(InputError, match=message):
        made(tmp_path / "known", filter_list=FILTERS, settings={"metric": "flexible"})
    task = made(tmp_path / "scored", filter_list=FILTERS)
    task.settings["metric"] = "flexible"  # as where results alone say what there is
    with pytest.raises(InputError, match=message):
        chosen(task)


def test_parts_of_a_group_need_a_metric_in_common(tmp_path):
    writing = made(tmp_path / "a", name="writing")
    choosing = made(tmp_path / "b", CHOICES, name="choosing", **CHOOSING)
    with pytest.raises(InputError, match=r"^tasks.writing.metric = None: its parts have no metric"):
        chosen(group(writing, choosing))
    only = {**CHOOSING, "metric_list": metric_list("acc_norm")}
    other = made(tmp_path / "c", CHOICES, name="other", **only)
    assert chosen(group(choosing, other))[0] == "acc_norm"  # though the first lists acc first


def test_items_of_written_answers(tmp_path):
    task = made(tmp_path, category="topic")
    metric, _, items = chosen(
        task, answer=lambda prompt: {"1+1=": "2", "2+2=": "5"}.get(prompt, "")
    )
    item = items[1]
    assert metric == item.metric == "exact_match"
    assert (item.task, item.subtask, item.category, item.id) == ("own", "", "odd", "sum-1")
    assert (item.prompt, item.target, item.response) == ("1+1=", "2", "2")
    assert (item.seed, item.score) == (3, 1.0)
    assert (items[2].target, items[2].response, items[2].score) == ("4", "5", 0.0)
    assert category_means(items) == {"even": 0.0, "odd": pytest.approx(1 / 3)}


def test_all_right_answers_are_shown(tmp_path):
    rows = [{"prompt": "Name one.", "answers": ["Ann", "Bo"]}]
    _, _, (item,) = chosen(made(tmp_path, rows, doc_to_target="answers"), answer=lambda p: "Bo")
    assert (item.target, item.response, item.score) == ("Ann | Bo", "Bo", 1.0)


@pytest.mark.parametrize(
    ("metric", "responses", "scores"),
    [
        ("acc", ["on", "up"], [0.0, 1.0]),
        # -4/2, -9/14 and -5/2 nats a character.
        ("acc_norm", ["away from here", "up"], [1.0, 1.0]),
    ],
)
def test_the_choice_shown_is_the_one_that_is_scored(metric, responses, scores, tmp_path):
    likelihoods = {" on": -4, " away from here": -9, " in": -5, " up": -1, " at": -2}
    task = made(tmp_path, CHOICES, **CHOOSING, settings={"metric": metric})
    _, _, items = chosen(task, likelihood=lambda prompt, text: likelihoods[text])
    assert [item.prompt for item in items] == ["Go", "Look"]
    assert [item.target for item in items] == ["away from here", "up"]
    assert [item.response for item in items] == responses
    assert [item.score for item in items] == scores


def test_choices_before_one_ending_are_shown(tmp_path):
    """As in Winogrande: what differs is the prompt."""
    rows = [{"id": "0", "options": ["The cup", "The box"], "label": 1, "ending": "held it."}]
    keys = {**CHOOSING, "doc_to_text": "label", "doc_to_choice": "options"}
    task = made(tmp_path, rows, **{**keys, "doc_to_target": "ending"})
    _, _, (item,) = chosen(task, likelihood=lambda prompt, text: float("x" in prompt))
    assert (item.target, item.response, item.score) == ("The box", "The box", 1.0)
    _, _, (item,) = chosen(task, likelihood=lambda prompt, text: float("p" in prompt))
    assert (item.target, item.response, item.score) == ("The box", "The cup", 0.0)


@pytest.mark.parametrize("greedy", [True, False])
def test_a_likely_ending_is_the_response_where_the_model_would_say_it(greedy, tmp_path):
    keys = {"output_type": "loglikelihood", "metric_list": metric_list("acc", "perplexity")}
    for number, metric in enumerate(("acc", "perplexity")):
        task = made(tmp_path / str(number), ROWS[1:2], **keys, settings={"metric": metric})
        _, _, (item,) = chosen(task, likelihood=lambda *asked: -2.0, greedy=greedy)
        assert (item.prompt, item.target) == ("1+1=", "2")
        assert item.response == ("2" if greedy else "")
        assert item.score == (float(greedy) if metric == "acc" else math.exp(2))


@pytest.mark.parametrize(
    ("metric", "score"),
    [
        ("bits_per_byte", 14 / 7 / math.log(2)),  # é is two bytes
        ("byte_perplexity", math.exp(14 / 7)),
        ("word_perplexity", math.exp(14 / 2)),
    ],
)
def test_the_likelihood_of_a_text_is_per_byte_or_word(metric, score, tmp_path):
    keys = {"output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}"}
    measured = [{"metric": metric}]
    task = made(tmp_path, [{"text": "hé las"}], **keys, doc_to_text="", metric_list=measured)
    _, _, (item,) = chosen(task, likelihood=lambda *asked: -14.0)
    assert (item.prompt, item.target, item.response) == ("", "hé las", "")
    assert item.score == pytest.approx(score)


def test_a_text_beyond_all_likelihood_has_a_score(tmp_path):
    """One endless word; all words together are likely enough."""
    rows = [{"text": "x" * 99}, {"text": "a b " * 50}]
    keys = {"output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}", "doc_to_text": ""}
    task = made(tmp_path, rows, **keys, metric_list=[{"metric": "word_perplexity"}])
    _, _, items = chosen(task, likelihood=lambda _, text: -1e4 if "x" in text else -1.0)
    assert 1e300 < items[0].score < math.inf


def test_an_item_of_several_parts_has_their_mean(tmp_path):
    """As the instructions of one prompt of IFEval."""
    code = "def score(row, results):\n    return {'followed': [True, False, True, True]}\n"
    scored = {
        "functions": {"process_results": "score"},
        "metric_list": metric_list("followed", aggregation="bypass"),
    }
    _, _, items = chosen(calling(tmp_path, code, ROWS[:2], **scored))
    assert [item.score for item in items] == [0.75, 0.75]


def test_items_of_labels_are_right_or_wrong(tmp_path):
    keys = {**CHOOSING, "metric_list": metric_list("f1", aggregation="f1")}
    _, _, items = chosen(
        made(tmp_path, CHOICES, **keys), likelihood=lambda prompt, text: float(text == " up")
    )
    assert [(item.response, item.score) for item in items] == [("on", 0.0), ("up", 1.0)]


def test_a_metric_without_scores_of_items_is_refused(tmp_path):
    code = "def score(row, results):\n    return {'bleu': (row['answer'], results[0])}\n"
    entry = [{"metric": "bleu", "aggregation": "bleu", "higher_is_better": True}]
    task = calling(tmp_path, code, functions={"process_results": "score"}, metric_list=entry)
    samples = ask(task, lambda prompt: "3")[0]["samples"]["own"]
    with pytest.raises(
        InputError, match=r"^tasks.own.metric = 'bleu': has no score of single items"
    ):
        items_of([("own", sample) for sample in samples], task, metric="bleu", seed=0)


def test_items_without_the_metric_are_left_out(tmp_path):
    """As the harness leaves them out of its mean."""
    code = (
        "def score(row, results):\n"
        "    return {'even': 1.0} if row['topic'] == 'even' else {'odd': 0.0}\n"
    )
    scored = {"functions": {"process_results": "score"}, "metric_list": metric_list("odd", "even")}
    metric, _, items = chosen(calling(tmp_path, code, **scored))
    assert metric == "odd"
    assert [item.id for item in items] == ["sum-1", "sum-3", "sum-5"]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["b", "a"], ["b", "a"]),
        ([7, 5], ["7", "5"]),
        (["a", "a"], ["0", "1"]),
        (["a", ""], ["0", "1"]),
        ([None, None], ["0", "1"]),
        ([None], ["0"]),
    ],
)
def test_ids_that_do_not_tell_items_apart_are_numbers(ids, expected, tmp_path):
    rows = [{**ROWS[n], "id": own} for n, own in enumerate(ids)]
    for row in rows:
        if row["id"] is None:
            del row["id"]
    _, _, items = chosen(made(tmp_path, rows))
    assert [item.id for item in items] == expected


def test_parts_of_a_group_are_named_and_may_share_ids(tmp_path):
    first = made(tmp_path / "a", ROWS[:2], name="first")
    both = group(first, made(tmp_path / "b", ROWS[:2], name="second"))
    _, _, items = chosen(both, answer=lambda prompt: "2")
    found = [(item.task, item.subtask, item.id) for item in items]
    parts = [("first", "sum-0"), ("first", "sum-1"), ("second", "sum-0"), ("second", "sum-1")]
    assert found == [("first", *part) for part in parts]
    assert category_means(items) == {"first": 0.5, "second": 0.5}


@pytest.mark.parametrize(
    ("arguments", "cut"),
    [
        ([("x" * 6, {"max_gen_toks": 4})], False),
        ([("x" * 7, {"max_gen_toks": 4})], True),
        ([("x" * 6, {"max_new_tokens": 4})], False),
        ([("x" * 7, {"max_new_tokens": 4})], True),
        # The last token is only scored: a model of ten positions reads eleven.
        ([("x" * 8, "yyy"), ("x" * 8, "yy")], False),
        ([("x" * 8, "yyy"), ("x" * 8, "yyyy")], True),
        ([("x" * 99,)], False),  # a text is read in windows
    ],
)
def test_a_prompt_that_does_not_fit_is_cut(arguments, cut):
    model = SimpleNamespace(max_length=10, tok_encode=list)
    assert is_truncated({"arguments": arguments}, model) == cut
