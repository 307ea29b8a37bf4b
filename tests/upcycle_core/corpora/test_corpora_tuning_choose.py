"""Which record is judged by and which is trained on, against a slow draw in plain words."""

import hashlib

import pytest

from upcycle_core.corpora.tuning.choose import choose
from upcycle_core.corpora.tuning.config import InstructionsConfig, InstructionSource
from upcycle_core.corpora.tuning.records import Record


def config_of(*, most=None, **settings):
    source = InstructionSource(files=("x",), max_per_task=most)
    return InstructionsConfig(sources={"s": source}, unseen=("u",), **settings)


def plain(*prompts, category="c"):
    return [Record(category, category, None, prompt, ("a",)) for prompt in prompts]


def prompts_of(records):
    return [record.prompt for record in records]


def slow_order(prompts, seed):
    """By hand: sha256 of the seed and of the first half of the prompt's own sha256."""

    def number(prompt):
        words = " ".join(prompt.casefold().split()).encode()
        key = bytes.fromhex(hashlib.sha256(words).hexdigest()[:32])
        return hashlib.sha256(str(seed).encode() + key).hexdigest()

    return sorted(prompts, key=number)


@pytest.mark.parametrize("seed", [0, 7])
def test_the_hash_of_seed_and_prompt_is_the_order(seed):
    asked = [f"Q {i}" for i in range(50)]
    records = plain(*asked) + plain("u 1", "u 2", "u 3", category="u")
    config = config_of(most=30, train_per_task=12, test_per_task=8)
    choice = choose({"s": records}, config, seed=seed)
    order = slow_order(asked, seed)
    assert prompts_of(choice.seen) == order[:8]
    assert prompts_of(choice.train) == order[8:20]
    assert prompts_of(choice.unseen) == slow_order(["u 1", "u 2", "u 3"], seed)
    assert choice.left_out["over max_per_task"] == 20


def test_more_questions_of_unseen_tasks_take_nothing_from_training():
    asked, held = [f"Q {i}" for i in range(50)], [f"u {i}" for i in range(70)]
    records = {"s": plain(*asked) + plain(*held, category="u")}
    settings = {"most": 20, "train_per_task": 12, "test_per_task": 8}
    before = choose(records, config_of(**settings), seed=0)
    more = choose(records, config_of(**settings, unseen_per_task=60), seed=0)
    assert prompts_of(before.unseen) == slow_order(held, 0)[:8]
    assert prompts_of(more.unseen) == slow_order(held, 0)[:60]
    assert (more.train, more.seen) == (before.train, before.seen)
    fewer = choose(records, config_of(**settings, unseen_per_task=3), seed=0)
    assert prompts_of(fewer.unseen) == slow_order(held, 0)[:3]


def test_what_was_trained_on_is_never_judged_by_as_data_grows():
    config, before = config_of(train_per_task=None), None
    for count in (1200, 1210, 2000):
        records = plain(*(f"q {i}" for i in range(count)))
        records += plain(*(f"u {i}" for i in range(count // 6)), category="u")
        now = choose({"s": records}, config, seed=0)
        if before is not None:
            assert not set(prompts_of(before.train)) & set(prompts_of(now.seen))
            # The same questions, but for those that new ones push out.
            kept = set(prompts_of(before.unseen)) & set(prompts_of(now.unseen))
            assert len(kept) >= 20
        before = now


def test_a_task_of_two_sources_has_one_order():
    """A source that comes before another takes no places from what was judged by."""
    old, new = plain(*(f"q {i}" for i in range(60))), plain(*(f"n {i}" for i in range(40)))
    judged = plain("u", category="u")
    both = {name: InstructionSource(files=("x",)) for name in ("new", "old")}
    config = InstructionsConfig(sources=both, unseen=("u",), test_per_task=8)
    choice = choose({"new": new, "old": [*old, *judged]}, config, seed=0)
    assert prompts_of(choice.seen) == slow_order(prompts_of([*old, *new]), 0)[:8]


def test_where_a_record_stands_in_a_file_does_not_matter():
    asked = [f"q {i}" for i in range(100)]
    config = config_of(train_per_task=30, test_per_task=10)
    records = plain("u", category="u")
    forwards = choose({"s": plain(*asked) + records}, config, seed=3)
    backwards = choose({"s": plain(*reversed(asked)) + records}, config, seed=3)
    assert (forwards.train, forwards.seen) == (backwards.train, backwards.seen)


def talk(system, *questions, category="c"):
    messages = [{"role": "system", "content": system}] if system else []
    for question in questions:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": "a"}]
    prompt = "\n\n".join(m["content"] for m in messages[: 2 if system else 1])
    return Record(category, category, None, prompt, ("a",), None, tuple(messages))


def users(records, *, turns=None):
    """What users say, in their first ``turns`` turns."""
    return {
        " ".join(text.split()).casefold()
        for record in records
        for text in [m["content"] for m in record.messages if m["role"] == "user"][:turns]
        or [record.prompt]
    }


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda i: talk("Be long.", f"question {i}"), id="another system message"),
        pytest.param(lambda i: plain(f"Question  {i}")[0], id="none"),
        pytest.param(lambda i: talk(None, f"more {i}", f"question {i}"), id="a later turn"),
    ],
)
@pytest.mark.parametrize("category", ["c", "u"])
def test_what_is_judged_by_under_one_system_message_is_trained_on_under_none(other, category):
    records = [talk("Be short.", f"question {i}", category=category) for i in range(60)]
    records += [other(i) for i in range(70)] + plain("held out", category="u")
    choice = choose({"s": records}, config_of(test_per_task=20), seed=0)
    judged = users([*choice.seen, *choice.unseen], turns=1)
    assert len(judged) > 15
    assert choice.train
    assert not judged & users(choice.train)


def test_a_question_that_a_task_asks_again_keeps_all_right_answers():
    answers = ("yes", "no", "yes", "maybe")
    records = [Record("c", "c", None, f"q {i}", (a,)) for i in range(30) for a in answers]
    records += [Record("u", "u", None, "held  out", (a, "b")) for a in answers]
    choice = choose({"s": records}, config_of(test_per_task=10), seed=0)
    assert (len(choice.seen), len(choice.train), len(choice.unseen)) == (10, 20, 1)
    assert {record.references for record in choice.seen} == {("yes", "no", "maybe")}
    assert choice.unseen[0].references == ("yes", "b", "no", "maybe")
    assert choice.left_out["the same prompt"] == 30 * 3 + 3
