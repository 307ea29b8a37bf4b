"""What calibration text lacks is said before anything is trained on the rest."""

from dataclasses import replace

import numpy as np
import pytest
from pico import save_pico
from texts import pico_recipe, write_texts

from flows.running.session import FlowSession
from tasks.data.seed import seed
from tasks.dume.prepared import text_faults
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace
from tasks.recipes import validate
from upcycle_core.corpora.chat_template import Encoded
from upcycle_core.corpora.shards import write_split
from upcycle_core.errors import InputError

DOMAINS = ("letters", "numbers")
REPAIRED = {"experts": {"repair": "down"}}
CHOSEN = {"router": {"ridge_lambda": "cross-validate"}}
DIVIDED = [REPAIRED, {"backbone": {"merge": {"attention": "regmean"}}}]
ENOUGH = [48, 48]
"""Lengths of documents: two tokens for each of 48 activations."""


@pytest.fixture(params=["trained", "given"])
def started(request, tmp_path):
    """What begins a flow up to the seed, of texts whose documents have these lengths."""

    def start(lengths, changes, **more):
        values = pico_recipe(write_texts(tmp_path / "texts", domains=DOMAINS), domains=DOMAINS)
        values["experts"] |= changes.get("experts", {})
        values["statistics"] |= more
        values |= {name: own for name, own in changes.items() if name != "experts"}
        if request.param == "given":
            del values["seed_model"], values["tokenizer"], values["experts"]["training"]
            for domain in DOMAINS:
                expert = save_pico(tmp_path / domain, intermediate_size=48)
                values["domains"][domain]["expert"] = str(expert)
        workspace = Workspace(tmp_path / "home" / "pico")
        for domain, own in zip(DOMAINS, lengths, strict=True):
            texts = [(np.full(length, 3), length) for length in own]
            folder = workspace.path(f"corpora/{domain}/calibration")
            write_split(folder, texts, eos_id=0, vocabulary_size=96)
        stages = Session(validate(values), workspace, log=print)
        session = FlowSession(None, stages, run=None, registry=None, versions=None)
        session._submit = lambda stage, items: []
        return session

    return start


@pytest.mark.parametrize(
    ("lengths", "changes", "said"),
    [
        (([40, 40], [95]), REPAIRED, ["letters.calibration = '80 tokens'", "numbers", "least 96"]),
        (([99], [64] * 5), CHOSEN, ["letters.calibration = '96 tokens': all lie in one", "= 4"]),
        (([99, 5], [9]), CHOSEN, ["letters.calibration", "numbers.calibration", "documents"]),
    ],
    ids=["repair", "one document", "a short rest"],
)
def test_text_that_falls_short_is_said_before_the_seed_is_trained(started, lengths, changes, said):
    session = started(lengths, changes)
    with pytest.raises(InputError) as error:
        session.ensure(seed)
    session.close()
    assert all(part in str(error.value) for part in said)
    assert ("numbers" in str(error.value)) == (said[-1] != "= 4")


@pytest.mark.parametrize("changes", [REPAIRED, CHOSEN, REPAIRED | CHOSEN, {}])
def test_text_that_is_enough_passes(started, changes):
    session = started([ENOUGH, ENOUGH] if changes else [[9], [9]], changes)
    session.ensure(seed)
    session.close()


@pytest.mark.parametrize("changes", DIVIDED)
def test_text_of_one_paragraph_is_said_before_the_seed_is_trained(started, changes):
    """What is solved on one half of it is judged on the other."""
    session = started([[99], [99, 9]], changes, sequence_length=128)
    with pytest.raises(InputError, match=r"letters\.calibration = '99 tokens': .* one paragraph"):
        session.ensure(seed)
    session.close()


@pytest.mark.parametrize("changes", DIVIDED)
def test_a_document_of_two_paragraphs_passes(started, changes):
    session = started([[99], [99]], changes, sequence_length=64)
    session.ensure(seed)
    session.close()


def test_tokens_that_are_not_counted_repair_nothing(started):
    session = started([ENOUGH, [32] * 99], REPAIRED, window=24)
    with pytest.raises(InputError, match=r"letters\.calibration = '80 tokens'") as error:
        session.ensure(seed)
    session.close()
    assert "numbers" not in str(error.value)


TOLD = Encoded([5] * 40, 40, [False] * 20 + [True] * 20)
UNREAD = Encoded([5] * 36, 36, [False] * 35 + [True])
"""Its response stands in a rest that is too short to be read."""


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([TOLD, TOLD], ""),
        ([TOLD, UNREAD], ""),
        ([TOLD, Encoded([5] * 40, 40)], "1 of its 2 documents do not say"),
        ([UNREAD, UNREAD], "token"),
    ],
    ids=["told", "told of one", "not told of one", "not read"],
)
@pytest.mark.parametrize("split", ["calibration", "heldout"])
def test_responses_that_are_not_told_are_said_before_the_seed_is_trained(
    started, split, documents, said
):
    """The first chats alone are written before; one of many thousand may have no responses."""
    session = started([ENOUGH, ENOUGH], {})
    stages, counts = session.stages, {"calibration": "count", "heldout": "loss"}[split]
    section = {"calibration": "statistics", "heldout": "evaluation"}[split]
    counting = replace(getattr(stages.recipe, section), **{counts: "responses"})
    stages.recipe = replace(stages.recipe, **{section: counting})
    for domain in DOMAINS:
        folder = stages.workspace.path(f"corpora/{domain}/{split}")
        own = documents if domain == "numbers" else [TOLD]
        write_split(folder, own, eos_id=0, vocabulary_size=96)
    faults = [f"{fault.field} {fault.value} {fault.remedy}" for fault in text_faults(stages)]
    assert len(faults) == bool(said)
    assert all("numbers" in fault and said in fault for fault in faults)
    session.close()
