"""What the report of joined strangers scores, before any of it is."""

from pathlib import Path

import pytest

from tasks.recipes import validate
from tasks.symphony.report import _dense_pieces
from upcycle_core.evaluation.text.scores import Score

NAMES = ("code", "law", "physics")
EVERY = (*NAMES, "medicine")


def pieces(nll=1.0, **evaluation):
    text = {"files": ["text.txt"]}
    values = {
        "name": "strangers",
        "domains": {name: {"train": text} for name in NAMES},
        "outside": {"medicine": text},
        "symphony": {"anchor": "law"},
        "moe": {"top_k": 2},
        "evaluation": evaluation,
    }

    class Run:
        recipe = validate(values)

        def path(self, name):
            return Path(name)

        def device(self, kind):
            return "cpu"

    heldout = {
        text: Score(nll, 5, 10.0 + place, (nll,), (5,), (3,)).to_dict()
        for place, text in enumerate(EVERY)
    }
    return {piece.name: piece for piece in _dense_pieces(Run(), heldout)}


@pytest.mark.parametrize("word", ["auto", "all"])
def test_few_strangers_are_scored_on_every_text(word):
    found = pieces(cross_scores=word)
    assert list(found) == [f"expert_{name}" for name in NAMES]
    assert all(piece.keys == list(EVERY) for piece in found.values())


def test_strangers_may_be_scored_on_their_own_text_and_that_from_outside():
    for name, piece in pieces(cross_scores="own").items():
        own = name.removeprefix("expert_")
        assert piece.keys == [own, "medicine"]
        for part in piece.each:
            assert list(piece.arguments[part]) == [own, "medicine"]
        assert piece.arguments["model"] == Path(f"experts/{own}")
        counted = Score(0.0, 5, 10.0 + EVERY.index(own), (0.0,), (5,), (3,))
        assert piece.arguments["reference"][own] == counted.to_dict()


def test_what_is_trained_elsewhere_scores_no_stranger_again():
    """Neither another average nor new text to train on is among what decides its scores."""
    assert pieces(nll=1.0) == pieces(nll=2.0)
    [own, *_] = pieces().values()
    assert own.arguments["documents"] == {
        **{name: Path(f"documents/{name}/heldout.parquet") for name in NAMES},
        "medicine": Path("outside/medicine/documents/heldout.parquet"),
    }
