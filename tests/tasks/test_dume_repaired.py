"""What the log says of a repair: what is left, and whether more text may mend more."""

from types import SimpleNamespace

import pytest
from texts import pico_recipe

from tasks.dume.repaired import repaired
from tasks.recipes import validate

NEURONS = 1536


class Run:
    """A run of the stage whose piece is done already."""

    domain, out = "law", None

    def __init__(self, recipe, layers):
        self.recipe, self.layers, self.said = recipe, layers, []
        self.session = SimpleNamespace(log=self.said.append)

    def path(self, artifact):
        return artifact

    def device(self, kind):
        return "cpu"

    def run_one(self, function, kind, **arguments):
        return self.layers


def said(folder, drifts, tokens):
    counts = {"tokens": tokens, "tokens_a_neuron": tokens / NEURONS}
    layers = [{"layer": n, "lambda": 1.0, "drift": d, **counts} for n, d in enumerate(drifts)]
    run = Run(validate(pico_recipe(folder)), layers)
    repaired.function(run)
    return run.said


FAR, NEAR = (0.9, 0.8, 0.7, 0.2), (0.9, 0.8, 0.2, 0.1)


def test_few_tokens_that_leave_much_are_said_with_as_many_as_are_enough(tmp_path):
    left, more = said(tmp_path, FAR, 16_384)
    assert left.endswith(
        "leaves 65 % of the drift, mean of layers, by 11 calibration tokens a neuron"
    )
    assert more.startswith("law: more than half of the drift is left in 3 of 4 layers, and 11 ")
    assert "39,936 (statistics.tokens) may leave less" in more


@pytest.mark.parametrize(("drifts", "tokens"), [(NEAR, 16_384), (FAR, 40_960), ((0.0,) * 4, 3100)])
def test_more_text_is_worth_no_word_where_little_is_left_or_tokens_are_many(
    tmp_path, drifts, tokens
):
    assert len(said(tmp_path, drifts, tokens)) == 1
