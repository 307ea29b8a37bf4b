"""Branch-Train-Merge (Li et al., arXiv 2208.03306): dense experts as one ensemble, nothing merged.

Section 2.2, Eqs. 1 to 3: p(x_t | x_<t) = sum_j p(x_t | x_<t, D=j) p(D=j | x_<t), and the domain
posterior by Bayes' rule from the likelihoods of what was read so far and a prior p(D=j).

D experts, P paragraphs, G runs of tokens, N tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from upcycle_core.corpora.batches import Paragraphs
from upcycle_core.corpora.reader import TokenCorpus
from upcycle_core.errors import Fault, raise_faults
from upcycle_core.evaluation.text.config import EvaluationConfig
from upcycle_core.evaluation.text.perplexity import score_of, scored_paragraphs, token_losses
from upcycle_core.evaluation.text.pieces import Scores, load_scored
from upcycle_core.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRIOR_PARAGRAPHS = 100
"""Sequences that a prior is estimated on (the paper's N)."""
PRIOR_DECAY = 0.3
"""Weight of the newest posterior in the moving average (the paper's lambda)."""


def evaluate_ensemble(
    experts: Mapping[str, Path],
    corpora: Mapping[str, Path],
    *,
    config: EvaluationConfig,
    prior_corpora: Mapping[str, Path] | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Scores:
    """Score the ensemble on the same paragraphs and the same tokens as ``score_model``.

    One expert is in memory at a time. In each paragraph the posterior starts from the prior. The
    paper estimates the prior on development text of the very domain that it then tests on; that
    tells the ensemble the domain, which no other row is told. So the prior is uniform by default.

    Args:
        experts: Domain to its dense expert; all of one vocabulary.
        corpora: {domain: its held-out split's directory}, tokenised for these experts.
        config: What is scored, and in which arithmetic.
        prior_corpora: {domain: split whose first paragraphs its prior is estimated on}, for every
            domain of ``corpora``; uniform without.
        device: Where the experts run.
        progress: Told of tokens as they are scored, D times in all.

    Returns:
        {domain: score}.

    Raises:
        InputError: No expert; a domain without text for its prior; a checkpoint or a corpus
            that cannot be used.
    """
    raise_faults(_faults(experts, corpora, prior_corpora))
    texts = {name: _Text(path, config) for name, path in corpora.items()}
    prior_texts = {
        name: _Text(path, config, PRIOR_PARAGRAPHS) for name, path in (prior_corpora or {}).items()
    }
    for expert, path in experts.items():
        model = load_scored(path, config, device)
        for kind, chosen in (("", texts), ("prior of ", prior_texts)):
            for name, text in chosen.items():
                text.read(model, config, progress, f"evaluating {expert} on {kind}{name}")
        del model
    scores: Scores = {}
    for name, text in texts.items():
        log_prior_D = torch.full((len(experts),), -np.log(len(experts)), dtype=torch.float64)
        if prior_texts:
            log_prior_D = estimate_prior(prior_texts[name].log_likelihoods_DP()).log()
        nll = -mixed_log_likelihood(text.log_likelihoods_DG(), text.runs, log_prior_D)
        scores[name] = score_of(nll, text.corpus, text.pieces, config).to_dict()
    return scores


def mixed_log_likelihood(log_likelihoods_DG: Tensor, runs: "Runs", log_prior_D: Tensor) -> float:
    """Log-likelihood of the counted tokens under the ensemble, whose posterior reads all of them.

    With Bayes' posterior p(D=j | x_<t) ~ p(D=j) prod_{s<t} p(x_s | x_<s, D=j), Eq. 1's factor for
    token t is sum_j p(D=j) prod_{s<=t} p(x_s | ., j) over the same sum up to t - 1. Multiplied over
    a run of tokens, all but the first and the last sum cancel.

    Args:
        log_likelihoods_DG: [D, G] fp64, each expert's of each run.
        runs: Where they stand.
        log_prior_D: [D] fp64, log p(D=j), normalised.

    Returns:
        Of all paragraphs, in nats.
    """
    count = int(runs.paragraph_G.max(initial=-1)) + 1
    joint_DP = log_prior_D[:, None].repeat(1, count)
    before_P = torch.zeros(count, dtype=torch.float64)
    found = 0.0
    for rank in range(int(runs.rank_G.max(initial=-1)) + 1):
        chosen = np.flatnonzero(runs.rank_G == rank)
        places = torch.from_numpy(runs.paragraph_G[chosen])
        joint_DP[:, places] += log_likelihoods_DG[:, torch.from_numpy(chosen)]
        after = torch.logsumexp(joint_DP[:, places], dim=0)
        counted = torch.from_numpy(runs.counted_G[chosen])
        found += (after - before_P[places])[counted].sum().item()
        before_P[places] = after
    return found


def estimate_prior(log_likelihoods_DP: Tensor) -> Tensor:
    """The domain prior: an exponential moving average of posteriors (arXiv 2208.03306, Eq. 3).

    It starts with the first paragraph's posterior, then average <- (1 - PRIOR_DECAY) average +
    PRIOR_DECAY posterior. Every posterior is that of the whole paragraph, from a uniform prior.
    (The authors' evaluation code averages over a paragraph's positions and uses the average so far
    as prior. With a prior so updated, an expert that loses the first paragraph by 750 nats is out
    for good.)

    Args:
        log_likelihoods_DP: [D, P] fp64, each expert's, of P paragraphs in their order.

    Returns:
        p(D=j) [D] fp64.
    """
    posteriors_DP = torch.softmax(log_likelihoods_DP, dim=0)
    average_D = posteriors_DP[:, 0]
    for posterior_D in posteriors_DP.T[1:]:
        average_D = (1 - PRIOR_DECAY) * average_D + PRIOR_DECAY * posterior_D
    return average_D


@dataclass(frozen=True)
class Runs:
    """Stretches of a paragraph's predicted tokens that are all counted, or none of them.

    Args:
        run_N: [N] int64, the run of each token, in the order in which ``token_losses`` has them.
        paragraph_G: [G] int64, each run's paragraph.
        rank_G: [G] int64, which of its paragraph's runs it is.
        counted_G: [G] bool, whether its tokens are scored.
    """

    run_N: np.ndarray
    paragraph_G: np.ndarray
    rank_G: np.ndarray
    counted_G: np.ndarray

    @classmethod
    def of(cls, corpus: TokenCorpus, pieces: Paragraphs, config: EvaluationConfig) -> "Runs":
        """Those of the paragraphs of a split."""
        # Batches hold long paragraphs first, equally long ones in their order.
        order_P = np.argsort(-pieces.rows[:, 2], kind="stable")
        paragraph_N = np.repeat(order_P, pieces.rows[order_P, 2] - 1)
        counted_N = np.ones(len(paragraph_N), bool)
        if config.loss == "responses":
            spans = [pieces[int(place)] for place in order_P]
            firsts = [int(corpus.offsets[span.document]) + span.start for span in spans]
            marks = [
                corpus.responses[first + 1 : first + span.length]
                for first, span in zip(firsts, spans, strict=True)
            ]
            counted_N = np.concatenate(marks).astype(bool)
        is_first_N = np.ones(len(paragraph_N), bool)
        is_first_N[1:] = np.diff(paragraph_N) != 0
        starts_N = is_first_N.copy()
        starts_N[1:] |= counted_N[1:] != counted_N[:-1]
        firsts_G = is_first_N[starts_N]
        places_G = np.arange(len(firsts_G))
        rank_G = places_G - np.maximum.accumulate(np.where(firsts_G, places_G, 0))
        return cls(np.cumsum(starts_N) - 1, paragraph_N[starts_N], rank_G, counted_N[starts_N])


class _Text:
    """Paragraphs, and what each expert that has read them makes of them."""

    def __init__(self, path: Path, config: EvaluationConfig, first: int | None = None) -> None:
        self.corpus = TokenCorpus(path)
        self.pieces: Paragraphs = scored_paragraphs(self.corpus, config)[:first]
        self.runs = Runs.of(self.corpus, self.pieces, config)
        self._found: list[Tensor] = []

    def log_likelihoods_DG(self) -> Tensor:
        """[D, G] fp64 on the CPU, of each run."""
        return torch.stack(self._found)

    def log_likelihoods_DP(self) -> Tensor:
        """[D, P] fp64 on the CPU, of each paragraph's tokens, counted or not."""
        found_DP = torch.zeros(len(self._found), len(self.pieces), dtype=torch.float64)
        places = torch.from_numpy(self.runs.paragraph_G)
        return found_DP.index_add(1, places, self.log_likelihoods_DG())

    def read(
        self,
        model: "PreTrainedModel",
        config: EvaluationConfig,
        progress: Progress | None,
        what: str,
    ) -> None:
        """Add one expert's log-likelihoods, of prompts too: the posterior reads them."""
        losses = token_losses(
            model,
            self.corpus,
            self.pieces,
            config=replace(config, loss="all"),
            progress=progress,
            what=what,
        )
        found_N = -torch.cat([losses_N.cpu() for _, losses_N in losses])
        found_G = torch.zeros(len(self.runs.rank_G), dtype=torch.float64)
        self._found.append(found_G.index_add(0, torch.from_numpy(self.runs.run_N), found_N))


def _faults(
    experts: Mapping[str, Path],
    corpora: Mapping[str, Path],
    prior_corpora: Mapping[str, Path] | None,
) -> list[Fault]:
    faults = []
    if not experts:
        faults.append(Fault("experts", {}, "there is none; give at least one checkpoint"))
    missing = sorted(set(corpora) - set(prior_corpora or corpora))
    if missing:
        faults.append(Fault("prior_corpora", missing, "no text to estimate these priors on"))
    return faults
