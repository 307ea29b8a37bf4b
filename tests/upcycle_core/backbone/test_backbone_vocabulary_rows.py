from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.vocabularies import three_vocabularies
from upcycle_core.backbone import vocabulary as module
from upcycle_core.backbone.vocabulary import merge_rows, unite_vocabularies
from upcycle_core.errors import InputError


def mean_by_hand(union, matrices: list[Tensor], weights: list[float]) -> Tensor:
    rows = []
    for token in range(len(union.tokens)):
        owners = [m for m in range(len(matrices)) if union.rows[m, token] >= 0]
        parts = [matrices[m][union.rows[m, token]] for m in owners]
        total = sum(weights[m] * p.double() for m, p in zip(owners, parts, strict=True))
        rows.append(total / sum(weights[m] for m in owners) if len(owners) > 1 else parts[0])
    return torch.stack([row.to(matrices[0].dtype) for row in rows])


@pytest.fixture
def three(tmp_path) -> list[Path]:
    return three_vocabularies(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weights", [None, [0.2, 0.5, 0.3], [3.0, 0.0, 0.0]])
def test_shared_rows_are_averaged_and_the_others_kept(three, dtype, weights, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 50)  # many pieces
    union = unite_vocabularies(three, ruling=0)
    torch.manual_seed(0)
    # Longer than the tokenizers, each by another number of rows, with what must not be read.
    matrices = []
    for index, row in enumerate(union.rows):
        padding = torch.full((index + 2, 6), torch.nan)
        matrices.append(torch.cat([torch.randn(int(row.max()) + 1, 6), padding]).to(dtype))
    result = merge_rows(union, matrices, weights=weights)
    given = weights or [1.0] * 3
    if weights and 0.0 in weights:  # models of no weight count where no other has the token
        given = [3.0, 1e-30, 1e-30]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float64: 1e-15}[dtype]
    expected = mean_by_hand(union, matrices, given)
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    alone = (union.rows >= 0).sum(dim=0) == 1
    assert alone.any()
    assert torch.equal(result[alone], expected[alone])


def test_the_naive_mean_counts_missing_rows_as_zeros(three):
    union = unite_vocabularies(three, ruling=0)
    matrices = [torch.randn(int(row.max()) + 1, 6) for row in union.rows]
    padded = torch.zeros(3, len(union.tokens), 6)
    for table, matrix, row in zip(padded, matrices, union.rows, strict=True):
        table[row >= 0] = matrix[row[row >= 0]]
    naive = merge_rows(union, matrices, naive=True)
    torch.testing.assert_close(naive, padded.mean(dim=0), rtol=0, atol=1e-6)
    weighed = merge_rows(union, matrices, naive=True, weights=[0.5, 0.25, 0.25])
    expected = (padded * torch.tensor([0.5, 0.25, 0.25])[:, None, None]).sum(dim=0)
    torch.testing.assert_close(weighed, expected, rtol=0, atol=1e-6)


def test_matrices_that_do_not_fit_are_refused_together(three):
    union = unite_vocabularies(three, ruling=0)
    sizes = [int(row.max()) + 1 for row in union.rows]
    bad = [torch.ones(sizes[0], 4), torch.ones(sizes[1] - 1, 4), torch.ones(sizes[2], 5)]
    with pytest.raises(InputError) as error:
        merge_rows(union, bad, field="embed_tokens")
    said = [str(fault) for fault in error.value.faults]
    assert f"has no row for token {sizes[1] - 1}" in said[0]
    assert said[0].startswith("embed_tokens[1] = ")
    assert said[1].startswith("embed_tokens[2] = ")
    with pytest.raises(InputError, match="2 matrices"):
        merge_rows(union, bad[:2])
    fitting = [torch.ones(size, 4) for size in sizes]
    with pytest.raises(InputError, match=r"rows\.weights"):
        merge_rows(union, fitting, weights=[1.0, -1.0, 1.0])
