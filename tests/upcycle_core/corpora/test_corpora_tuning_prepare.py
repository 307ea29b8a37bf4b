"""Which instruction stands where: held-out ones in no other place, the same ones every time."""

import hashlib
import json
from collections import Counter

import pytest

from upcycle_core.corpora.conversations import read_conversations
from upcycle_core.corpora.tuning.config import InstructionsConfig, InstructionSource
from upcycle_core.corpora.tuning.prepare import (
    instruction_faults,
    instruction_fingerprint,
    prepare_instructions,
)
from upcycle_core.errors import InputError

ROLES = ("user", "assistant", "user", "assistant")


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def prepared(out, config, *, seed=0, folder=None):
    prepare_instructions(config, out, seed=seed, folder=folder)
    train = {file.stem: lines(file) for file in sorted((out / "train").glob("*.jsonl"))}
    manifest = json.loads((out / "manifest.json").read_text())
    return train, lines(out / "seen.jsonl"), lines(out / "unseen.jsonl"), manifest


def asked(task, numbers, **fields):
    return [
        {"prompt": f"{task} of {i}?", "response": f"{i}", "task": task, **fields} for i in numbers
    ]


@pytest.fixture
def records(tmp_path):
    """Three tasks of two categories to train on, one that is held out, and shared questions."""
    return write(
        tmp_path / "a.jsonl",
        *asked("half", range(20), category="sums"),
        *asked("half", range(3), category="sums"),  # again
        *asked("twice", range(10), category="sums"),
        *asked("name", range(3), category="names"),
        *asked("place", range(12), category="places"),
        {"prompt": "PLACE  of 3?\n", "response": "x", "task": "name", "category": "names"},
    )


def config_of(records, **settings):
    settings = {"unseen": ("places",), "train_per_task": 8, "test_per_task": 5, **settings}
    return InstructionsConfig(sources={"a": InstructionSource(files=(records,))}, **settings)


def test_every_task_gives_held_out_instances_and_the_rest_is_trained_on(records, tmp_path):
    train, seen, unseen, manifest = prepared(tmp_path / "out", config_of(records))
    assert list(train) == ["all"]
    assert Counter(row["task"] for row in train["all"]) == {"half": 8, "twice": 5, "name": 2}
    # Never more than half of a task's instances are held out.
    assert Counter(row["task"] for row in seen) == {"half": 5, "twice": 5, "name": 1}
    assert Counter(row["task"] for row in unseen) == {"place": 5}
    assert manifest["train_tasks"] == ["half", "name", "twice"]
    assert manifest["counts"]["train"]["category"] == {"names": 2, "sums": 13}
    assert manifest["counts"]["unseen"]["domain"] == {"all": 5}
    for name, own in manifest["files"].items():
        text = (tmp_path / "out" / name).read_bytes()
        assert own["sha256"] == hashlib.sha256(text).hexdigest()
        assert own["instances"] == len(text.splitlines())
    assert set(train["all"][0]) == {
        "id", "task", "category", "domain", "prompt", "response", "references"
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_nothing_to_judge_by_is_trained_on_in_other_writing(records, tmp_path, seed):
    with open(records, "a") as file:
        more = {"prompt": " Half of 7?", "response": "x", "task": "twice", "category": "sums"}
        file.write(json.dumps(more) + "\n")
    config = config_of(records, train_per_task=None, test_per_task=20)
    train, seen, unseen, manifest = prepared(tmp_path / "out", config, seed=seed)
    keys = ["".join(row["prompt"].lower().split()) for row in [*train["all"], *seen, *unseen]]
    assert len(keys) == len(set(keys)) == 20 + 10 + 3 + 12
    assert len(unseen) == 12
    assert manifest["left_out"]["the same prompt"] >= 5
    ids = [row["id"] for row in [*train["all"], *seen, *unseen]]
    assert len(set(ids)) == len(ids)


def test_texts_of_an_unseen_task_are_not_trained_on_though_not_all_are_asked(records, tmp_path):
    for seed in range(6):
        config = config_of(records, test_per_task=1)
        train, seen, _, _ = prepared(tmp_path / str(seed), config, seed=seed)
        prompts = [row["prompt"] for row in [*train["all"], *seen]]
        assert "PLACE  of 3?\n" not in prompts


def test_signs_tell_questions_apart(tmp_path):
    prompts = [f"What is {a} {sign} {b}?" for a in range(3) for b in range(3) for sign in "+-*"]
    file = write(tmp_path / "a.jsonl", *({"prompt": p, "response": "x"} for p in prompts))
    train, seen, _, _ = prepared(tmp_path / "out", config_of(file, unseen=(), train_per_task=None))
    assert sorted(row["prompt"] for row in [*train["all"], *seen]) == sorted(prompts)


def test_max_per_task_and_test_per_task_are_drawn_with_the_seed(records, tmp_path):
    source = InstructionSource(files=(records,), max_per_task=6)
    config = InstructionsConfig(sources={"a": source}, unseen=("places",), test_per_task=2)
    used = []
    for seed in range(2):
        train, seen, unseen, _ = prepared(tmp_path / str(seed), config, seed=seed)
        rows = [*train["all"], *seen]
        assert Counter(row["task"] for row in rows if row["task"] != "half")["twice"] == 6
        assert 3 <= sum(row["task"] == "half" for row in rows) <= 6  # three are said twice
        assert len(unseen) == 2
        used.append({row["prompt"] for row in rows})
    assert used[0] != used[1]


def test_the_seed_alone_decides(records, tmp_path):
    def files(out, seed):
        prepare_instructions(config_of(records), tmp_path / out, seed=seed)
        found = sorted(path for path in (tmp_path / out).rglob("*") if path.is_file())
        return {path.relative_to(tmp_path / out): path.read_bytes() for path in found}

    first = files("a", 1)
    assert files("b", 1) == first
    assert (
        files("c", 2)[next(iter(first)).with_name("seen.jsonl")]
        != first[next(iter(first)).with_name("seen.jsonl")]
    )


def test_labels_make_a_file_a_domain(records, tmp_path):
    config = config_of(records, domains={"sums": "numbers", "names": "words"})
    train, seen, unseen, _ = prepared(tmp_path / "out", config)
    assert {label: {row["category"] for row in own} for label, own in train.items()} == {
        "numbers": {"sums"},
        "words": {"names"},
    }
    assert {row["domain"] for row in seen} == {"numbers", "words"}
    assert {row["domain"] for row in unseen} == {None}


def test_train_categories_leave_others_out(records, tmp_path):
    train, seen, _, manifest = prepared(
        tmp_path / "out", config_of(records, train_categories=("names",))
    )
    assert {row["category"] for row in [*train["all"], *seen]} == {"names"}
    assert manifest["left_out"]["of other categories"] == 33


def test_families_are_held_apart_by_default(tmp_path):
    config = InstructionsConfig(
        sources={"f": InstructionSource(generate="families")}, train_per_task=30, test_per_task=6
    )
    train, seen, unseen, manifest = prepared(tmp_path / "out", config, seed=3)
    assert len(train) >= 4
    held_out = {"give_number", "count_words", "word_of_number"}
    assert {row["task"] for row in unseen} == held_out
    trained = Counter(row["task"] for own in train.values() for row in own)
    assert set(trained.values()) == {30}
    assert set(manifest["train_tasks"]) == set(trained) == {row["task"] for row in seen}
    assert not held_out & set(trained)
    assert instruction_faults(config, folder=None) == []


def test_conversations_are_trained_on_whole_and_judged_by_their_first_response(tmp_path):
    said = ["Be short.", "Hi {}?", "Yo", "And?", "So"]
    roles = ["system", "user", "assistant", "user", "assistant"]
    rows = [
        {
            "messages": [
                {"role": role, "content": text.format(i)}
                for role, text in zip(roles, said, strict=True)
            ]
        }
        for i in range(2)
    ]
    file = write(tmp_path / "a.jsonl", *rows)
    config = config_of(file, unseen=())
    (tmp_path / "out").mkdir()
    train, (seen,), unseen, _ = prepared(tmp_path / "out", config)
    assert unseen == []
    (row,) = train["all"]
    (conversation,) = read_conversations([tmp_path / "out" / "train" / "all.jsonl"])
    assert [message["role"] for message in conversation.messages] == roles
    assert conversation.task == "a"
    assert row["category"] == "a"
    assert {seen["prompt"], row["prompt"]} == {f"Be short.\n\nHi {i}?" for i in range(2)}
    assert seen["response"] == "Yo"
    assert "messages" not in seen
    # Judged as trained: nobody's words are put into another's mouth.
    assert [message["role"] for message in seen["asked"]] == ["system", "user"]
    assert "asked" not in row


def test_what_is_judged_by_is_no_turn_of_a_conversation_that_is_trained_on(tmp_path):
    said = ("Hi {}", "Yo", "What is {}?", "{}")
    talks = [
        {
            "messages": [
                {"role": role, "content": text.format(i)}
                for role, text in zip(ROLES, said, strict=True)
            ]
        }
        for i in range(10)
    ]
    file = write(
        tmp_path / "a.jsonl",
        *({**talk, "category": "talk"} for talk in talks),
        *({"prompt": f"what is  {i}?", "response": "x", "category": "sums"} for i in range(5)),
    )
    train, seen, unseen, manifest = prepared(tmp_path / "out", config_of(file, unseen=("sums",)))
    assert len(unseen) == 5
    trained = {m["content"] for row in train["all"] for m in row["messages"]}
    assert not trained & {f"What is {i}?" for i in range(5)}
    assert len(seen) == 5
    assert 0 < len(train["all"]) < 6
    assert manifest["left_out"]["the same prompt"] == 5 - len(train["all"])


def test_faults_of_content_are_told_with_what_there_is(records, tmp_path):
    broken = write(tmp_path / "b.jsonl", {"prompt": "a", "response": "b"}, *[{"prompt": "a"}] * 9)
    config = InstructionsConfig(
        sources={
            "a": InstructionSource(files=(records,)),
            "b": InstructionSource(files=(broken,)),
        },
        unseen=("places",),
    )
    faults = instruction_faults(config, folder=None)
    assert len(faults) == 6
    assert str(faults[0]).startswith(f"{broken}, line 2, response")
    assert "4 more" in str(faults[-1])
    with pytest.raises(InputError) as error:
        prepare_instructions(config, tmp_path / "out", seed=0)
    assert [str(f) for f in error.value.faults] == [str(f) for f in faults]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unseen": ("place",)}, "unseen = 'place': no record .* names, places, sums"),
        ({"train_categories": ("sum",)}, "train_categories = 'sum': no record is of this"),
        ({"domains": {"sum": "a"}}, "instructions.domains = 'sum': no record"),
        ({"unseen": ("places", "sums", "names")}, "unseen = .*nothing is left to train on"),
    ],
)
def test_categories_and_labels_that_do_not_fit_are_told(records, tmp_path, settings, message):
    config = config_of(records, **settings)
    with pytest.raises(InputError, match=message) as error:
        prepare_instructions(config, tmp_path / "out", seed=0)
    faults = instruction_faults(config, folder=None)
    assert [str(fault) for fault in faults] == [str(fault) for fault in error.value.faults]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("x/y", "z", "instructions.domains = 'x/y': names a file"),
        ("x", None, "instructions.domains = ['second']: have no domain where others"),
        ("x", 3, "instructions.domains = ['second']: have no domain where others"),
        ("x", "x", "instructions.domains = ['x']: too few"),
        (None, " ", "instructions.domains = ['all']: too few"),
    ],
)
def test_labels_that_make_no_domains_matter_where_experts_need_them_alone(
    tmp_path, first, second, message
):
    file = write(
        tmp_path / "a.jsonl",
        *asked("half", range(4), category="first", domain=first),
        *asked("twice", range(4), category="second", domain=second),
    )
    config = config_of(file, unseen=())
    (fault,) = instruction_faults(config, folder=None, labels=2)
    assert str(fault).startswith(message)
    assert instruction_faults(config, folder=None) == []
    train, seen, _, _ = prepared(tmp_path / "out", config)
    assert list(train) == ["x" if first == second else "all"]
    assert (sum(map(len, train.values())), len(seen)) == (4, 4)


def test_labels_that_cover_a_part_of_the_categories_are_told_where_they_are_needed(records):
    config = config_of(records, domains={"sums": "a"})
    (fault,) = instruction_faults(config, folder=None, labels=2)
    assert str(fault).startswith("instructions.domains = ['names']: have no domain where others")
    whole = config_of(records, domains={"sums": "a", "names": "b"})
    assert instruction_faults(whole, folder=None, labels=2) == []


def test_the_fingerprint_follows_the_content(records, tmp_path):
    rows = InstructionSource(
        files=("{folder}/*.json",), form="superni", task_lists=("{folder}/list.txt",)
    )
    config = InstructionsConfig(
        sources={
            "a": InstructionSource(files=(records,)),
            "f": InstructionSource(generate="families"),
            "s": rows,
        }
    )
    (tmp_path / "list.txt").write_text("one\n")
    (tmp_path / "one.json").write_text("{}")
    first = instruction_fingerprint(config, folder=tmp_path)
    assert json.loads(json.dumps(first)) == instruction_fingerprint(config, folder=tmp_path)
    digest = hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    assert first["a"] == {"files": {records: digest}}
    assert sorted(first["s"]["files"]) == ["{folder}/list.txt", "{folder}/one.json"]
    (tmp_path / "list.txt").write_text("two\n")
    second = instruction_fingerprint(config, folder=tmp_path)
    assert [first[name] == second[name] for name in "afs"] == [True, True, False]


@pytest.mark.parametrize("most", [None, 10])
def test_more_questions_of_unseen_families_leave_training_as_it_is(tmp_path, most):
    source = InstructionSource(generate="families", max_per_task=most)
    before, after = (
        prepared(
            tmp_path / str(more),
            InstructionsConfig(
                sources={"f": source}, train_per_task=6, test_per_task=4, unseen_per_task=more
            ),
        )
        for more in (None, 30)
    )
    assert after[:2] == before[:2]
    counts = {
        name: Counter(row["task"] for row in found[2])
        for name, found in zip("ba", (before, after), strict=True)
    }
    assert set(counts["b"].values()) == {4}
    assert set(counts["a"].values()) == {30}


def test_more_questions_are_read_of_unseen_published_tasks(tmp_path):
    for name, category in (("a", "Sums"), ("b", "Held out")):
        rows = [{"input": f"{name} {i}", "output": ["x"]} for i in range(40)]
        task = {"Definition": name, "Categories": [category], "Positive Examples": []}
        (tmp_path / f"{name}.json").write_text(json.dumps({**task, "Instances": rows}))
    source = InstructionSource(
        files=(f"{tmp_path}/*.json",), form="superni", max_per_task=10, examples=0
    )
    settings = {"unseen": ("Held out",), "train_per_task": 6, "test_per_task": 4}
    config = InstructionsConfig(sources={"s": source}, **settings, unseen_per_task=25)
    train, seen, unseen, _ = prepared(tmp_path / "out", config)
    assert [len(rows) for rows in (*train.values(), seen, unseen)] == [6, 4, 25]
