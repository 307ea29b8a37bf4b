import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.pico import VOCABULARY, save_pico
from upcycle_core.baselines.ensemble import estimate_prior, evaluate_ensemble
from upcycle_core.corpora.chat_template import Encoded
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.corpora.shards import write_split
from upcycle_core.errors import InputError
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.pieces import evaluate_checkpoint

CONFIG = EvaluationConfig(sequence_length=16, batch_size=3)
EXPERTS = ("law", "code", "history")


def write_text(directory: Path, lengths: tuple[int, ...], seed: int) -> Path:
    draw = np.random.default_rng(seed)
    documents = [(draw.integers(2, VOCABULARY, n), 3 * n) for n in lengths]
    write_split(directory, documents, eos_id=0, vocabulary_size=VOCABULARY)
    return directory


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experts")
    # Much alike, so that posteriors take some tokens to make up their mind.
    found = {}
    for seed, name in enumerate(EXPERTS):
        found[name] = save_pico(folder / name, seed=0)
        model = AutoModelForCausalLM.from_pretrained(found[name])
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("texts")
    return {
        "law": write_text(folder / "law", (40, 9, 3, 21), 1),
        "code": write_text(folder / "code", (12, 33), 2),
    }


def token_probabilities(path: Path, texts: list[np.ndarray]) -> list[list[float]]:
    """p(x_t | x_<t) of every token but the first of each text, from the model's own logits."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    found = []
    for text in texts:
        ids = torch.from_numpy(text.astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0].double()
        found.append(
            [float(torch.softmax(logits[t - 1], dim=0)[ids[t]]) for t in range(1, len(ids))]
        )
    return found


def paragraph_texts(directory: Path, length: int = 16) -> list[np.ndarray]:
    corpus = TokenCorpus(directory)
    return [
        corpus.document(i)[start : start + length]
        for i in range(len(corpus))
        for start in range(0, len(corpus.document(i)), length)
        if len(corpus.document(i)) - start >= 8
    ]


def slow_loss(probabilities: list[list[float]], prior: list[float]) -> tuple[float, list[float]]:
    """Loss of one paragraph, token by token (Eqs. 1 and 2), and the posterior after it.

    Args:
        probabilities: [D][tokens].
        prior: [D].
    """
    posterior, loss = list(prior), 0.0
    for step in zip(*probabilities, strict=True):
        mixed = sum(p * w for p, w in zip(step, posterior, strict=True))
        loss -= math.log(mixed)
        posterior = [p * w / mixed for p, w in zip(step, posterior, strict=True)]
    return loss, posterior


def by_paragraph(experts: dict[str, Path], texts: list[np.ndarray]) -> list[list[list[float]]]:
    """[paragraph][D][tokens]."""
    return list(zip(*(token_probabilities(p, texts) for p in experts.values()), strict=True))


def test_the_loss_equals_the_recursion_over_tokens(experts, corpora):
    found = evaluate_ensemble(experts, corpora, config=CONFIG)
    for name, directory in corpora.items():
        paragraphs = by_paragraph(experts, paragraph_texts(directory))
        expected = sum(slow_loss(p, [1 / 3] * 3)[0] for p in paragraphs)
        # fp32 models in other batches: 1e-7 a token.
        assert found[name]["nll"] == pytest.approx(expected, rel=1e-6)
    # The posterior moves: neither the mean of the probabilities nor one expert would do.
    mean = sum(-math.log(sum(step) / 3) for p in paragraphs for step in zip(*p, strict=True))
    assert found["code"]["nll"] != pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_posterior_reads_prompts_whose_loss_is_not_counted(experts, tmp_path, batch_size):
    draw = np.random.default_rng(3)
    marks = [[False] * 9 + [True] * 5, [True, False, True, True] * 3, [False] * 10 + [True]]
    documents = [(draw.integers(2, VOCABULARY, len(own)), 3, own) for own in marks]
    chats = tmp_path / "chats"
    write_split(chats, [Encoded(*own) for own in documents], eos_id=0, vocabulary_size=VOCABULARY)
    config = replace(CONFIG, loss="responses", batch_size=batch_size)
    found = evaluate_ensemble(experts, {"law": chats}, config=config)["law"]
    expected = 0.0
    for probabilities, own in zip(
        by_paragraph(experts, paragraph_texts(chats)), marks, strict=True
    ):
        posterior = [1 / 3] * 3
        for step, is_counted in zip(zip(*probabilities, strict=True), own[1:], strict=True):
            mixed = sum(p * w for p, w in zip(step, posterior, strict=True))
            expected -= math.log(mixed) if is_counted else 0.0
            posterior = [p * w / mixed for p, w in zip(step, posterior, strict=True)]
    assert found["nll"] == pytest.approx(expected, rel=1e-6)
    single = evaluate_checkpoint(experts["law"], {"law": chats}, config=config)["law"]
    assert (found["tokens"], found["bytes"]) == (single["tokens"], single["bytes"])


def test_the_same_tokens_and_bytes_are_scored_as_for_a_model(experts, corpora):
    found = evaluate_ensemble(experts, corpora, config=CONFIG)
    single = evaluate_checkpoint(experts["law"], corpora, config=CONFIG)
    for name in corpora:
        assert found[name].keys() == single[name].keys()
        assert found[name]["tokens"] == single[name]["tokens"]
        assert found[name]["bytes"] == single[name]["bytes"]


def test_one_expert_or_the_same_several_times_is_that_expert(experts, corpora):
    single = evaluate_checkpoint(experts["law"], corpora, config=CONFIG)
    one = {"law": experts["law"]}
    three = dict.fromkeys(EXPERTS, experts["law"])
    for ensemble in (one, three):
        found = evaluate_ensemble(ensemble, corpora, config=CONFIG)
        for name in corpora:
            assert found[name]["nll"] == pytest.approx(single[name]["nll"], rel=1e-12)


def test_neither_batches_nor_the_order_of_experts_matter(experts, corpora):
    first = evaluate_ensemble(experts, corpora, config=CONFIG)
    config = EvaluationConfig(sequence_length=16, batch_size=1)
    turned = dict(reversed(experts.items()))
    second = evaluate_ensemble(turned, corpora, config=config)
    for name in corpora:
        assert second[name]["nll"] == pytest.approx(first[name]["nll"], rel=1e-6)


def slow_prior(paragraphs: list[list[list[float]]]) -> list[float]:
    """The moving average of posteriors."""
    average = slow_loss(paragraphs[0], [1 / 3] * 3)[1]
    for probabilities in paragraphs[1:]:
        _, posterior = slow_loss(probabilities, [1 / 3] * 3)
        average = [0.7 * a + 0.3 * p for a, p in zip(average, posterior, strict=True)]
    return average


def test_an_estimated_prior_is_the_moving_average_of_posteriors(experts, corpora, tmp_path):
    # Short paragraphs between long ones: their order decides the average.
    texts = {"law": write_text(tmp_path / "law", (9, 16, 8, 30, 11), 5)}
    found = evaluate_ensemble(experts, {"law": corpora["law"]}, config=CONFIG, prior_corpora=texts)
    prior = slow_prior(by_paragraph(experts, paragraph_texts(texts["law"])))
    assert max(prior) > 0.4
    paragraphs = by_paragraph(experts, paragraph_texts(corpora["law"]))
    expected = sum(slow_loss(p, prior)[0] for p in paragraphs)
    assert found["law"]["nll"] == pytest.approx(expected, rel=1e-6)
    uniform = evaluate_ensemble(experts, {"law": corpora["law"]}, config=CONFIG)
    assert abs(uniform["law"]["nll"] - expected) > 1e-4 * expected


def test_a_prior_reads_a_hundred_paragraphs_at_most(experts, corpora, tmp_path):
    lengths = (8,) * 130
    whole = write_text(tmp_path / "whole", lengths, 5)
    first = write_text(tmp_path / "first", lengths[:100], 5)
    scores = [
        evaluate_ensemble(
            experts, {"law": corpora["law"]}, config=CONFIG, prior_corpora={"law": text}
        )["law"]["nll"]
        for text in (whole, first)
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-9)


def test_an_expert_that_loses_a_paragraph_by_far_can_come_back():
    log_likelihoods_DP = torch.tensor([[0.0, -5000.0], [-5000.0, 0.0]], dtype=torch.float64)
    assert estimate_prior(log_likelihoods_DP).tolist() == pytest.approx([0.7, 0.3])


def test_every_expert_s_tokens_are_reported(experts, corpora):
    class Counting:
        total = done = 0

        def start(self, what, total, unit="steps"):
            self.total += total

        def advance(self, amount=1, **shown):
            self.done += amount

        def metrics(self, values, step): ...

    progress = Counting()
    found = evaluate_ensemble(experts, corpora, config=CONFIG, progress=progress)
    assert progress.done == progress.total == 3 * sum(s["tokens"] for s in found.values())


def test_missing_experts_and_missing_text_are_errors(experts, corpora):
    with pytest.raises(InputError, match="give at least one checkpoint"):
        evaluate_ensemble({}, corpora, config=CONFIG)
    prior = {"law": corpora["law"]}
    with pytest.raises(InputError, match=r"prior_corpora = \['code'\]"):
        evaluate_ensemble(experts, corpora, config=CONFIG, prior_corpora=prior)
