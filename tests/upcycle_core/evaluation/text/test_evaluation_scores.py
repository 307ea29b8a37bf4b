import math
from dataclasses import replace

import numpy as np
import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.text import scores
from upcycle_core.evaluation.text.scores import Score

EXPERTS = {"law": 10.0, "code": 4.0}


def test_normalised_perplexity_is_the_paper_s_formula():
    found = scores.normalised({"law": 12.5, "code": 5.0}, EXPERTS)
    assert found == {"law": pytest.approx(80.0), "code": pytest.approx(80.0)}
    # 100/2 (10/20 + 4/4): not 100 times the ratio of mean perplexities (58.3).
    assert scores.normalised_average({"code": 4.0, "law": 20.0}, EXPERTS) == pytest.approx(75.0)


def test_an_expert_scores_exactly_100_on_its_own_domain():
    for perplexity in (2.74, 11.21, 42.48):  # 100 p / p is not 100 here in floating point
        assert scores.normalised({"law": perplexity}, {"law": perplexity}) == {"law": 100.0}


def test_normalising_names_every_missing_domain_and_bad_number():
    with pytest.raises(InputError) as caught:
        scores.normalised({"law": math.nan, "history": 3.0}, EXPERTS)
    message = str(caught.value)
    assert "code" in message
    assert "history" in message
    assert "law" in message


def test_worst_domain_is_the_lowest_normalised_score():
    assert scores.worst_domain({"a": 90.0, "b": 70.0, "c": 110.0}) == ("b", 70.0)


def test_deviation_is_the_sample_s():
    mean, deviation = scores.mean_and_deviation([1.0, 2.0, 6.0])
    assert mean == pytest.approx(3.0)
    assert deviation == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert scores.mean_and_deviation([5.0]) == (5.0, 0.0)


def test_mean_perplexity_normalises_to_the_mean_of_normalised_scores():
    runs = [{"law": 11.0, "code": 5.0}, {"law": 17.0, "code": 9.0}]
    mean = scores.normalised(scores.mean_perplexity(runs), EXPERTS)
    for domain in EXPERTS:
        each = [scores.normalised(run, EXPERTS)[domain] for run in runs]
        assert mean[domain] == pytest.approx(sum(each) / 2, rel=1e-14)


def test_across_runs_keeps_cells_apart():
    runs = [{"dume": {"law": 1.0, "code": 5.0}}, {"dume": {"law": 3.0, "code": 5.0}}]
    assert scores.across_runs(runs) == {
        "dume": {"law": (2.0, pytest.approx(math.sqrt(2))), "code": (5.0, 0.0)}
    }


def test_score_survives_json_and_knows_perplexity_and_bits():
    score = Score(nll=20 * math.log(8), tokens=20, bytes=80.0)
    assert score.perplexity == pytest.approx(8.0)
    assert score.bits_per_byte == pytest.approx(20 * 3 / 80)
    assert Score.from_dict(score.to_dict()) == score


def test_a_hopeless_model_s_perplexity_is_infinite_not_an_error():
    assert Score(nll=1e6, tokens=10, bytes=10.0).perplexity == math.inf


def test_perplexity_on_another_tokenizer_s_scale():
    reference = Score(nll=1.0, tokens=100, bytes=400.0)  # four bytes a token
    same_tokenizer = Score(nll=230.0, tokens=100, bytes=400.0)
    assert scores.perplexity_per_reference_token(same_tokenizer, reference) == pytest.approx(
        same_tokenizer.perplexity
    )
    # Half as many tokens, each twice as hard: the same loss a byte.
    coarser = Score(nll=230.0, tokens=50, bytes=400.0)
    assert scores.perplexity_per_reference_token(coarser, reference) == pytest.approx(
        same_tokenizer.perplexity
    )
    # The same loss a byte measured on half of the text.
    shorter = Score(nll=115.0, tokens=25, bytes=200.0)
    assert scores.perplexity_per_reference_token(shorter, reference) == pytest.approx(
        same_tokenizer.perplexity
    )


def test_losses_of_documents_go_along_to_another_tokenizer_s_scale():
    reference = Score(1.0, 100, 400.0, (1.0, 0.0), (70, 30), (0, 3))
    half = Score(115.0, 25, 200.0, (80.0, 35.0), (20, 5), (0, 3))
    found = scores.per_reference_token(half, reference)
    assert found == Score(230.0, 100, 400.0, (160.0, 70.0), (70, 30), (0, 3))
    # As many documents, of which one is another: those that both know are compared.
    others = Score(115.0, 25, 200.0, (15.0, 100.0), (5, 20), (2, 3))
    found = scores.per_reference_token(others, reference)
    assert found == Score(230.0, 100, 400.0, (200.0,), (30,), (3,))


def test_errors_are_of_the_documents_that_both_models_know():
    mine = Score(0.0, 1, 1.0, (50.0, 3.0, 9.0, 4.0), (7, 2, 5, 4), (0, 1, 5, 6))
    other = Score(0.0, 1, 1.0, (2.0, 8.0, 1.0, 60.0), (2, 5, 4, 9), (1, 5, 6, 7))
    alike = [Score(0.0, 1, 1.0, losses, (2, 5, 4), (1, 5, 6)) for losses in ((3, 9, 4), (2, 8, 1))]
    assert scores.loss_error(mine, other) == scores.loss_error(*alike)
    # Differences 1, 1, 3 of 2, 5, 4 tokens: mean 5/11; sum of squares (1/11, -14/11, 13/11).
    error, freedom = scores.loss_error(mine, other)
    assert error == pytest.approx(math.sqrt(3 / 2 * (1 + 196 + 169) / 121 / 121))
    assert freedom == 2
    assert scores.loss_error(mine, replace(other, document_tokens=(2, 5, 3, 9))) is None


def drawn(draw, documents, *, shift=0.0, common=None):
    """A score of documents of 50 to 150 tokens; ``common`` is what is hard for everybody."""
    tokens = draw.integers(50, 150, documents) if common is None else common[0]
    hard = draw.normal(2.0, 0.5, documents) if common is None else common[1]
    losses = tokens * (hard + shift + draw.normal(0, 0.02, documents))
    each = tuple(losses), tuple(tokens.tolist()), tuple(range(documents))
    score = Score(losses.sum(), int(tokens.sum()), 1.0, *each)
    return score, (tokens, hard)


def test_intervals_hold_the_true_score_19_times_in_20():
    draw, held, count = np.random.default_rng(0), 0, 400
    for _ in range(count):
        expert, common = drawn(draw, 12)
        mine, _ = drawn(draw, 12, shift=0.1, common=common)
        low, high = scores.intervals({"dume": {"law": mine}}, {"law": expert})["dume"]["law"]
        held += low < 100 * math.exp(-0.1) < high
    # 95 % of 400, within three standard deviations of a binomial count (4.4).
    assert abs(held - 380) <= 13


def test_intervals_compare_document_by_document_and_the_average_is_narrower():
    draw = np.random.default_rng(1)
    law, common = drawn(draw, 30)
    code, other = drawn(draw, 30)
    mine = {"law": drawn(draw, 30, common=common)[0], "code": drawn(draw, 30, common=other)[0]}
    experts = {"law": law, "code": code}
    found = scores.intervals({"dume": mine, "law expert": {"law": law}}, experts)
    assert set(found) == {"dume"}
    widths = {name: high - low for name, (low, high) in found["dume"].items()}
    assert max(widths.values()) < 3  # what is hard for both cancels: alone it is off by 10 %
    assert widths["average"] < min(widths["law"], widths["code"])
    single = Score(10.0, 5, 1.0, (10.0,), (5,), (0,))
    assert scores.intervals({"dume": {"law": single}}, {"law": single}) == {}
