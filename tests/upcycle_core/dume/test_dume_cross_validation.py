"""Cross-validation from sums, against features that are really held back."""

import math

import pytest
import torch

from tests.upcycle_core.dume.synthetic import random_domains, stacked, statistics_of
from upcycle_core.dume import cross_validation
from upcycle_core.dume.config import RouterConfig
from upcycle_core.dume.cross_validation import best, cross_validate, held_out_losses
from upcycle_core.dume.router import choose_lambda, solve_routers
from upcycle_core.errors import InputError

GRID = RouterConfig().lambda_grid


def fold_of(features: dict, folds: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return stacked({name: [parts[f] for f in folds] for name, parts in features.items()})


def plain_loss(features: dict, ridge_lambda: float, folds: int) -> float:
    """Fit on all folds but one, predict each token of that one, average the squared errors."""
    errors = []
    for held_out in range(folds):
        x_TH, y_TD = fold_of(features, [f for f in range(folds) if f != held_out])
        system = x_TH.T @ x_TH + ridge_lambda * torch.eye(x_TH.shape[1], dtype=torch.float64)
        weights_HD = torch.linalg.solve(system, x_TH.T @ y_TD)
        x_TH, y_TD = fold_of(features, [held_out])
        errors.append((x_TH @ weights_HD - y_TD).square().sum(1))
    return torch.cat(errors).mean().item()


def planted(domains: int = 2, tokens: int = 5, size: int = 24) -> dict:
    """Few tokens in many noisy dimensions: too little lambda overfits, too much forgets."""
    return random_domains(domains=domains, folds=4, tokens=tokens, size=size, seed=3)


@pytest.mark.parametrize("ridge_lambda", [1e-6, 0.01, 1.0, 1e4])
def test_held_out_loss_in_closed_form_equals_predicting_each_token(tmp_path, ridge_lambda):
    features = random_domains()
    (loss,) = held_out_losses(statistics_of(tmp_path, features), 0, grid=[ridge_lambda])
    assert loss == pytest.approx(plain_loss(features, ridge_lambda, 4), rel=1e-9)


def test_weights_of_domains_count_in_the_loss_too(tmp_path):
    features = random_domains()
    twice = {**features, "domain1": [torch.cat([x, x]) for x in features["domain1"]]}
    statistics = statistics_of(tmp_path, features)
    (loss,) = held_out_losses(statistics, 0, grid=[0.1], domain_weights={"domain1": 2.0})
    assert loss == pytest.approx(plain_loss(twice, 0.1, 4), rel=1e-9)


def test_the_chosen_lambda_is_beaten_by_neither_extreme_on_a_planted_case(tmp_path):
    features = planted()
    choice = choose_lambda(
        statistics_of(tmp_path, features), config=RouterConfig(ridge_lambda="cross-validate")
    )
    true_losses = {value: plain_loss(features, value, 4) for value in GRID}
    assert choice.ridge_lambda == min(true_losses, key=true_losses.__getitem__)
    assert true_losses[choice.ridge_lambda] < 0.8 * true_losses[1e-6]
    assert true_losses[choice.ridge_lambda] < 0.8 * true_losses[1e6]
    assert [candidate.ridge_lambda for candidate in choice.table] == list(GRID)


def test_a_held_back_fold_never_enters_what_is_solved(tmp_path, monkeypatch):
    summed = []
    original = cross_validation.normal_equations

    def watched(*args, folds, **kwargs):
        summed.append(list(folds))
        return original(*args, folds=folds, **kwargs)

    monkeypatch.setattr(cross_validation, "normal_equations", watched)
    held_out_losses(statistics_of(tmp_path, random_domains(folds=3)), 0, grid=[1.0])
    assert sorted(summed) == [[0], [0, 1], [0, 2], [1], [1, 2], [2]]


def test_a_fold_of_huge_numbers_leaves_no_trace_in_the_others_solution(tmp_path):
    # subtracting it from the total instead would leave its rounding errors behind
    features = random_domains(folds=2)
    huge = {name: [parts[0] * 1e9, parts[1]] for name, parts in features.items()}
    x_TH, y_TD = fold_of(huge, [1])
    system = x_TH.T @ x_TH + torch.eye(x_TH.shape[1], dtype=torch.float64)
    weights_HD = torch.linalg.solve(system, x_TH.T @ y_TD)
    x_TH, y_TD = fold_of(huge, [0])
    expected = (x_TH @ weights_HD - y_TD).square().sum()
    x_TH, y_TD = fold_of(huge, [0])
    system = x_TH.T @ x_TH + torch.eye(x_TH.shape[1], dtype=torch.float64)
    weights_HD = torch.linalg.solve(system, x_TH.T @ y_TD)
    x_TH, y_TD = fold_of(huge, [1])
    expected += (x_TH @ weights_HD - y_TD).square().sum()
    tokens = sum(len(part) for parts in huge.values() for part in parts)
    (loss,) = held_out_losses(statistics_of(tmp_path, huge), 0, grid=[1.0])
    assert loss == pytest.approx(expected.item() / tokens, rel=1e-6)


def test_the_loss_is_the_mean_over_layers(tmp_path):
    statistics = statistics_of(tmp_path, random_domains(), layers=2)
    (candidate,) = cross_validate(statistics, grid=[0.5])
    each = [held_out_losses(statistics, layer, grid=[0.5])[0] for layer in (0, 1)]
    assert candidate.losses == dict(enumerate(each))
    assert candidate.loss == pytest.approx(sum(each) / 2)


def test_a_lambda_that_cannot_be_factorised_is_never_chosen(tmp_path):
    features = random_domains()
    for folds in features.values():
        for x_TH in folds:
            x_TH[:, 9] = x_TH[:, 8]
    statistics = statistics_of(tmp_path, features)
    table = cross_validate(statistics, grid=[0.0, 1.0])
    assert math.isinf(table[0].loss)
    assert best(table).ridge_lambda == 1.0
    with pytest.raises(InputError, match="add larger ones"):
        best(cross_validate(statistics, grid=[0.0]))


def test_other_faults_are_not_taken_for_a_bad_lambda(tmp_path):
    with pytest.raises(InputError, match="0 or more"):
        cross_validate(statistics_of(tmp_path, random_domains()), grid=[-1.0, 1.0])


def test_one_fold_with_tokens_is_not_enough(tmp_path):
    features = {name: [x, x[:0]] for name, (x, _) in random_domains(folds=2).items()}
    with pytest.raises(InputError, match="1 of 2 folds"):
        held_out_losses(statistics_of(tmp_path, features), 0, grid=[1.0])


def test_a_fold_without_tokens_changes_nothing(tmp_path):
    features = random_domains(folds=3)
    (loss,) = held_out_losses(statistics_of(tmp_path, features), 0, grid=[1.0])
    longer = {name: [*folds, folds[0][:0]] for name, folds in features.items()}
    (same,) = held_out_losses(statistics_of(tmp_path, longer), 0, grid=[1.0])
    assert loss == same


def test_the_final_router_is_solved_from_all_folds(tmp_path):
    statistics = statistics_of(tmp_path, planted())
    chosen = solve_routers(statistics, config=RouterConfig(ridge_lambda="cross-validate"))
    given = solve_routers(statistics, config=RouterConfig(ridge_lambda=chosen.ridge_lambda))
    assert torch.equal(chosen.weights[0], given.weights[0])


def test_a_domain_of_one_document_is_not_judged_by_who_never_saw_it(tmp_path):
    features = random_domains()
    whole = torch.cat(features["domain1"])
    features["domain1"] = [whole, *(whole[:0] for _ in range(3))]
    with pytest.raises(InputError, match="all tokens of domain1 lie in one fold"):
        held_out_losses(statistics_of(tmp_path, features), 0, grid=[0.1])
