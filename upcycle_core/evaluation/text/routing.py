"""Which expert a domain's tokens go to: the routing table of an evaluated MoE."""

from collections.abc import Iterator, Mapping, Sequence

Counts = Sequence[Sequence[int]]
"""[L][D]: tokens that a layer sent to an expert. With top-k > 1 a token counts k times."""


def shares(counts: Counts) -> list[list[float]]:
    """Share of the tokens that each layer sent to each expert: [L][D], every row sums to 1."""
    return [[count / sum(layer) for count in layer] for layer in counts]


def mean_shares(counts: Counts) -> list[float]:
    """The shares of ``shares``, averaged over layers: [D]."""
    rows = shares(counts)
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def agreement(routing: Mapping[str, Counts]) -> list[float]:
    """How often the router agrees with the domain label.

    Args:
        routing: {domain: counts}, in the order of the experts.

    Returns:
        [L]: the share of a domain's tokens that went to its own expert, mean over domains, each
        counting the same. 1/D is chance.
    """
    own = [
        [layer[expert] for layer in shares(counts)]
        for expert, counts in enumerate(routing.values())
    ]
    return [sum(column) / len(routing) for column in zip(*own, strict=True)]


def records(routing: Mapping[str, Counts]) -> Iterator[tuple[str, int, str, int, float]]:
    """One (domain, layer, expert, tokens, share) a cell, for a CSV."""
    for domain, counts in routing.items():
        for layer, (row, share) in enumerate(zip(counts, shares(counts), strict=True)):
            for expert, name in enumerate(routing):
                yield domain, layer, name, row[expert], share[expert]
