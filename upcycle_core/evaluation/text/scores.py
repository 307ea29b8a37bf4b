"""From measured losses to comparable scores: pure arithmetic, no model in sight."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from upcycle_core.errors import Fault, raise_faults
from upcycle_core.plain import Plain


@dataclass(frozen=True)
class Score(Plain):
    """The loss of one model on one text.

    Args:
        nll: Negative log-likelihood of the scored tokens, in nats, summed in fp64.
        tokens: Scored tokens: all but the first of each paragraph, which nothing predicts.
        bytes: UTF-8 bytes of the scored tokens: each document's bytes times the share of its tokens
            that are scored. A beginning-of-sequence token has no bytes and no part in the share.
            Not whole if a document is cut short.
        document_nll: ``nll`` document by document, of those with a scored token; empty if unknown.
        document_tokens: ``tokens`` of the same documents.
        document_indices: Their places in the split.
    """

    nll: float
    tokens: int
    bytes: float
    document_nll: tuple[float, ...] = ()
    document_tokens: tuple[int, ...] = ()
    document_indices: tuple[int, ...] = ()
    written = (
        *("nll", "tokens", "bytes", "document_nll", "document_tokens", "document_indices"),
        *("perplexity", "bits_per_byte"),
    )

    @property
    def perplexity(self) -> float:
        """exp of the mean loss of a token; inf where that exceeds what fp64 holds."""
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits a byte of text: comparable between tokenizers."""
        return self.nll / math.log(2) / self.bytes

    @property
    def documents(self) -> dict[int, tuple[float, int]]:
        """{place in the split: nll, tokens}"""
        values = zip(self.document_nll, self.document_tokens, strict=True)
        return dict(zip(self.document_indices, values, strict=True))


def normalised(values: Mapping[str, float], experts: Mapping[str, float]) -> dict[str, float]:
    """Scores in percent of what each domain's own dense expert reaches (DUME, section 3.1).

    Args:
        values: One model's perplexity by domain.
        experts: That of each domain's own expert on its domain.

    Returns:
        100 expert/value; above 100 means better than the expert. In the order of ``experts``.

    Raises:
        InputError: the domains differ, or a number is not finite and positive.
    """
    raise_faults([*_domain_faults(values, experts), *_number_faults({**experts, **values})])
    return {domain: 100 * (experts[domain] / values[domain]) for domain in experts}


def normalised_average(values: Mapping[str, float], experts: Mapping[str, float]) -> float:
    """The mean of ``normalised`` over domains: 100/D sum_d p_expert_d / p_d."""
    return average(normalised(values, experts))


def average(scores: Mapping[str, float]) -> float:
    """The mean over domains, each counting the same."""
    return math.fsum(scores.values()) / len(scores)


def loss_error(score: Score, reference: Score | None = None) -> tuple[float, int] | None:
    """How far the mean loss of a token would be off on other documents of the same kind.

    Documents are the units that are drawn: tokens of one are alike. The mean is a ratio of two sums
    over them, and its variance the usual one of a ratio (Cochran, Sampling Techniques, 6.13).

    Args:
        score: The model's.
        reference: Another model's on the same text, for the error of the difference of the two on
            the documents that both know.

    Returns:
        The standard error in nats a token, and its degrees of freedom; None for fewer than two
        documents, or where the two do not count the same tokens of one.
    """
    own = score.documents
    others = {place: (0.0, count) for place, (_, count) in own.items()}
    if reference is not None:
        others = reference.documents
    shared = [place for place in own if place in others]
    if len(shared) < 2 or any(own[place][1] != others[place][1] for place in shared):
        return None
    count, tokens = len(shared), [own[place][1] for place in shared]
    losses = [own[place][0] - others[place][0] for place in shared]
    mean = math.fsum(losses) / sum(tokens)
    squares = ((loss - mean * n) ** 2 for loss, n in zip(losses, tokens, strict=True))
    variance = count / (count - 1) * math.fsum(squares) / sum(tokens) ** 2
    return math.sqrt(variance), count - 1


def intervals(
    rows: Mapping[str, Mapping[str, Score]], experts: Mapping[str, Score]
) -> dict[str, dict[str, tuple[float, float]]]:
    """95 % intervals of normalised scores, for other documents of the same kind.

    Model and expert are compared document by document, so that what is hard for both cancels.

    Args:
        rows: {row: {domain: score}}.
        experts: {domain: score of its own dense expert}.

    Returns:
        {row: {domain or "average": low and high in percent}}; rows without what it takes are left
        out. The average's takes domains as they are: their errors are independent.
    """
    from scipy.special import stdtrit  # a tenth of a second, which a refused recipe need not

    found = {}
    for row, own in rows.items():
        errors = {d: loss_error(own[d], expert) for d, expert in experts.items() if d in own}
        known = {domain: error for domain, error in errors.items() if error is not None}
        if known.keys() != experts.keys():
            continue
        table, margins = {}, []
        for domain, (error, freedom) in known.items():
            score = 100 * experts[domain].perplexity / own[domain].perplexity
            half = error * float(stdtrit(freedom, 0.975))
            table[domain] = (score * math.exp(-half), score * math.exp(half))
            margins.append(score * half)
        centre = average({d: 100 * e.perplexity / own[d].perplexity for d, e in experts.items()})
        half = math.sqrt(math.fsum(margin**2 for margin in margins)) / len(margins)
        found[row] = {**table, "average": (centre - half, centre + half)}
    return found


def worst_domain(scores: Mapping[str, float]) -> tuple[str, float]:
    """The domain with the lowest normalised score, and that score; the first of equals."""
    domain = min(scores, key=lambda name: scores[name])
    return domain, scores[domain]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1; 0 for a single value)."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def mean_perplexity(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One perplexity a domain for several repeats: their harmonic mean.

    Its normalised score is the mean of the repeats' normalised scores, so a table that shows either
    shows the same thing.
    """
    return {d: len(runs) / math.fsum(1 / run[d] for run in runs) for d in runs[0]}


def across_runs(
    runs: Sequence[Mapping[str, Mapping[str, float]]],
) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean and deviation of every cell of tables that were measured several times.

    Args:
        runs: One table a seed: {row: {column: value}}, all with the same rows and columns.

    Returns:
        {row: {column: (mean, sample standard deviation)}} in the first table's order.
    """
    return {
        row: {column: mean_and_deviation([run[row][column] for run in runs]) for column in columns}
        for row, columns in runs[0].items()
    }


def perplexity_per_reference_token(other: Score, reference: Score) -> float:
    """A model's perplexity on the scale of another tokenizer, so that the two can be compared.

    ``exp(nll_other / bytes_other * bytes_reference / tokens_reference)``: the other model's loss a
    byte of text, over the bytes that a token of the reference has on average. For scores of
    the same text with the same tokenizer it is ``other.perplexity``.

    Args:
        other: Score under the model's own tokenizer.
        reference: Score of any model with the reference tokenizer on the same text; only its
            tokens and bytes are used.
    """
    return per_reference_token(other, reference).perplexity


def per_reference_token(other: Score, reference: Score) -> Score:
    """A score as it were in another tokenizer's tokens; see ``perplexity_per_reference_token``.

    Args:
        other: Score under the model's own tokenizer.
        reference: Of any model with the reference tokenizer on the same text.

    Returns:
        The reference's tokens and bytes with the other's losses, of the whole and of each document
        that both know.
    """
    share = reference.bytes / other.bytes
    losses, counted = other.documents, reference.documents
    shared = [place for place in losses if place in counted]
    return Score(
        nll=other.nll * share,
        tokens=reference.tokens,
        bytes=reference.bytes,
        document_nll=tuple(losses[place][0] * share for place in shared),
        document_tokens=tuple(counted[place][1] for place in shared),
        document_indices=tuple(shared),
    )


def _domain_faults(values: Iterable[str], experts: Iterable[str]) -> list[Fault]:
    missing, unknown = sorted(set(experts) - set(values)), sorted(set(values) - set(experts))
    faults = []
    if missing:
        faults.append(Fault("scores", missing, "not measured on these domains; evaluate there too"))
    if unknown:
        faults.append(Fault("scores", unknown, "no dense expert to normalise by in these domains"))
    return faults


def _number_faults(values: Mapping[str, float]) -> list[Fault]:
    return [
        Fault(f"scores.{domain}", value, "not a finite positive number; the model is broken")
        for domain, value in values.items()
        if not (math.isfinite(value) and value > 0)
    ]
