"""What a SIMoE's card says, and how sure its scores are."""

from types import SimpleNamespace

import pytest
import yaml

from infra.recipe.schema import resolve
from tasks.recipes import validate
from tasks.release.gate import Decision
from tasks.simoe.card import RECIPE, interval, tuned_card
from tests.tasks.simoe.test_simoe_faults import VALID


def split(*categories):
    own = {
        str(i): {"exact_match": {"mean": share}, "count": count}
        for i, (share, count) in enumerate(categories)
    }
    mean = sum(share for share, _ in categories) / len(categories)
    return {"categories": own, "exact_match": {"mean": mean}}


@pytest.mark.parametrize("categories", [[(1.0, 1), (0.0, 1)], [(0.0, 10)], [(1.0, 40)]])
def test_few_or_equal_answers_are_not_sure(categories):
    low, high = interval(split(*categories))
    mean = 100 * split(*categories)["exact_match"]["mean"]
    assert low <= mean <= high
    assert high - low > 5


def test_of_many_answers_it_is_the_binomial_s():
    low, high = interval(split((0.3, 10_000)))
    assert (low, high) == pytest.approx((29.1, 30.9), abs=0.01)
    assert interval(split((0.3, 10_000), (0.3, 10_000)))[0] > low


def test_the_card_of_a_version_says_how_it_was_made_and_asked(tmp_path):
    """The checkpoint's own says what decided the training alone."""
    for folder, file, text in (
        ("report", "table.md", "## Models\n"),
        ("instructions", "manifest.json", '{"files": {}}'),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text(text)
    recipe = validate(VALID)
    workspace = SimpleNamespace(path=lambda name: tmp_path / name)
    metrics = {"rows": {"simoe": {"seen": None, "unseen": None}}}
    decision = Decision(True, "", "the first", 1.0, None)
    text = tuned_card(SimpleNamespace(recipe=recipe, workspace=workspace), metrics, decision)
    quoted = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    whole = resolve(recipe)
    assert quoted == {key: whole[key] for key in RECIPE}
    assert quoted["tuning"]["max_new_tokens"] == VALID["tuning"]["max_new_tokens"]
