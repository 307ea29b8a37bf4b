"""Routers from sums, against ridge regression on the features themselves."""

import json
import pickle

import pytest
import torch
from torch import Tensor

from tests.upcycle_core.dume.synthetic import (
    random_domains,
    stacked,
    statistics_of,
    write_statistics,
)
from upcycle_core.dume.config import RouterConfig
from upcycle_core.dume.ridge import normal_equations, ridge
from upcycle_core.dume.router import (
    save_routers,
    solve,
    solve_routers,
    solve_sequentially,
    solve_with_bias,
)
from upcycle_core.dume.router_reader import LambdaChoice, load_routers
from upcycle_core.errors import InputError


def plain_ridge(x_TH: Tensor, y_TD: Tensor, ridge_lambda: float) -> Tensor:
    """argmin sum ||W^T x - y||^2 + lambda ||W||^2 as least squares on lengthened data."""
    size, domains = x_TH.shape[1], y_TD.shape[1]
    long_x = torch.cat([x_TH, ridge_lambda**0.5 * torch.eye(size, dtype=torch.float64)])
    long_y = torch.cat([y_TD, torch.zeros(size, domains, dtype=torch.float64)])
    weights_HD = torch.linalg.lstsq(long_x, long_y).solution
    return weights_HD / weights_HD.norm(dim=0)


@pytest.mark.parametrize("ridge_lambda", [1e-6, 0.01, 100.0])
def test_router_is_the_normalised_ridge_solution(tmp_path, ridge_lambda):
    features = random_domains()
    found = solve(statistics_of(tmp_path, features), 0, ridge_lambda=ridge_lambda)
    assert found.dtype == torch.float64
    expected = plain_ridge(*stacked(features), ridge_lambda)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_each_layer_has_its_own_router(tmp_path):
    features = random_domains()
    solution = solve_routers(statistics_of(tmp_path, features, layers=2), config=RouterConfig())
    x_TH, y_TD = stacked(features)
    assert list(solution.weights) == [0, 1]
    for layer, weights_HD in solution.weights.items():
        expected = plain_ridge((layer + 1) * x_TH, y_TD, 0.01)
        torch.testing.assert_close(weights_HD, expected, rtol=1e-9, atol=1e-10)
    assert solution.domains == ("domain0", "domain1", "domain2")
    assert (solution.ridge_lambda, solution.choice.chosen_by) == (0.01, "given")


def test_a_subset_of_domains_is_solved_in_the_order_asked_for(tmp_path):
    features = random_domains()
    statistics = statistics_of(tmp_path, features)
    chosen = {name: features[name] for name in ("domain2", "domain0")}
    expected = plain_ridge(*stacked(chosen), 0.01)
    found = solve({name: statistics[name] for name in chosen}, 0, ridge_lambda=0.01)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


TWICE = RouterConfig(domain_weights={"domain1": 2.0})


def test_a_domain_of_weight_two_counts_twice(tmp_path):
    features = random_domains()
    twice = {**features, "domain1": features["domain1"] * 2}
    statistics = statistics_of(tmp_path, features)
    found = solve(statistics, 0, ridge_lambda=0.01, config=TWICE)
    expected = plain_ridge(*stacked(twice), 0.01)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    assert torch.equal(solve_routers(statistics, config=TWICE).weights[0], found)


def test_rows_of_means_are_each_domains_mean(tmp_path):
    features = random_domains()
    statistics = statistics_of(tmp_path, features)
    found = solve(statistics, 0, ridge_lambda=0.01, config=RouterConfig(rows="means"))
    means = torch.stack([torch.cat(folds).mean(0) for folds in features.values()], 1)
    torch.testing.assert_close(found, means / means.norm(dim=0), rtol=1e-9, atol=1e-10)


def test_a_solution_as_it_is_keeps_what_the_regression_chose(tmp_path):
    features = random_domains()
    statistics = statistics_of(tmp_path, features)
    solution = ridge(normal_equations(statistics, 0), 0.01, layer=0)
    config = RouterConfig(normalise="none", scale=4.0)
    found = solve(statistics, 0, ridge_lambda=0.01, config=config)
    torch.testing.assert_close(found, 4 * solution)
    x_TH = stacked(features)[0]
    assert torch.equal((x_TH @ found).argmax(1), (x_TH @ solution).argmax(1))
    columns = solve(statistics, 0, ridge_lambda=0.01, config=RouterConfig(scale=2.0))
    torch.testing.assert_close(columns.norm(dim=0), torch.full((len(features),), 2.0).double())


def test_chosen_folds_alone_are_used(tmp_path):
    features = random_domains()
    equations = normal_equations(statistics_of(tmp_path, features), 0, folds=[0, 3])
    weights_HD = ridge(equations, 0.01, layer=0)
    found = weights_HD / weights_HD.norm(dim=0)
    chosen = {name: [folds[0], folds[3]] for name, folds in features.items()}
    expected = plain_ridge(*stacked(chosen), 0.01)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_biased_router_is_ridge_with_a_ones_feature(tmp_path):
    features = random_domains()
    weights_HD, bias_D = solve_with_bias(statistics_of(tmp_path, features), 0, ridge_lambda=0.5)
    x_TH, y_TD = stacked(features)
    long_x = torch.cat([x_TH, torch.ones(len(x_TH), 1, dtype=torch.float64)], 1)
    system = long_x.T @ long_x + 0.5 * torch.eye(long_x.shape[1], dtype=torch.float64)
    expected = torch.linalg.solve(system, long_x.T @ y_TD)
    norms_D = expected[:-1].norm(dim=0)
    torch.testing.assert_close(weights_HD, expected[:-1] / norms_D, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(bias_D, expected[-1] / norms_D, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("ridge_lambda", [0.0, 1e-8])
@pytest.mark.parametrize("seed", [0, 53, 247, 258])  # rounding makes a factor of some of them
def test_singular_system_names_layer_lambda_and_condition_number(tmp_path, seed, ridge_lambda):
    torch.manual_seed(seed)
    x_TH = torch.randn(50, 10, dtype=torch.float64) * 1e6
    x_TH[:, 9] = x_TH[:, 8]
    statistics = {"law": write_statistics(tmp_path / "law.safetensors", [x_TH], layers=2)}
    with pytest.raises(InputError) as caught:
        solve(statistics, 1, ridge_lambda=ridge_lambda)
    (fault,) = caught.value.faults
    assert (fault.field, fault.value) == ("router.ridge_lambda", ridge_lambda)
    assert "layer 1" in fault.remedy
    assert "condition number" in fault.remedy
    remedy = float(fault.remedy.split("ridge_lambda >= ")[1].split()[0])
    assert torch.isfinite(solve(statistics, 1, ridge_lambda=remedy)).all()


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"ridge_lambda": -1.0}, "router.ridge_lambda", "0 or more"),
        (
            {"ridge_lambda": 1.0, "config": RouterConfig(domain_weights={"tax": 1.0})},
            "router.domain_weights.tax",
            "no",
        ),
        (
            {"ridge_lambda": 1.0, "config": RouterConfig(domain_weights={"domain0": 0.0})},
            "router.domain_weights.domain0",
            "above 0",
        ),
        ({"ridge_lambda": 1.0, "window": 16}, "statistics.position_buckets", "keep apart"),
    ],
)
def test_what_cannot_be_solved_is_refused_by_name(tmp_path, arguments, field, words):
    statistics = statistics_of(tmp_path, random_domains())
    with pytest.raises(InputError, match=words) as caught:
        solve(statistics, 0, **arguments)
    assert caught.value.faults[0].field == field


def test_a_layer_without_statistics_is_refused(tmp_path):
    statistics = statistics_of(tmp_path, random_domains(domains=2))
    with pytest.raises(InputError, match=r"hold layers \[0\]") as caught:
        solve(statistics, 5, ridge_lambda=1.0)
    assert len(caught.value.faults) == 2


def test_statistics_that_hold_nan_are_refused(tmp_path):
    features = random_domains(domains=2)
    features["domain1"][0][0, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        solve(statistics_of(tmp_path, features), 0, ridge_lambda=1.0)


def test_a_domain_without_tokens_is_named(tmp_path):
    features = random_domains(domains=2)
    features["domain1"] = [x_TH[:0] for x_TH in features["domain1"]]
    with pytest.raises(InputError, match="no tokens") as caught:
        solve(statistics_of(tmp_path, features), 0, ridge_lambda=1.0)
    assert caught.value.faults[0].value == "domain1"


def test_statistics_of_different_models_are_refused(tmp_path):
    statistics = statistics_of(tmp_path, random_domains(domains=1))
    other = torch.randn(9, 4, dtype=torch.float64)
    statistics["other"] = write_statistics(tmp_path / "other.safetensors", [other] * 4)
    with pytest.raises(InputError, match="one hidden size"):
        solve(statistics, 0, ridge_lambda=1.0)


def test_errors_survive_a_move_between_processes(tmp_path):
    x_TH = torch.zeros(3, 4, dtype=torch.float64)
    statistics = {"law": write_statistics(tmp_path / "law.safetensors", [x_TH])}
    with pytest.raises(InputError) as caught:
        solve(statistics, 0, ridge_lambda=0.0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)


def test_routers_are_read_back_as_they_were_written(tmp_path):
    statistics = statistics_of(tmp_path, random_domains(), layers=2)
    config = RouterConfig(ridge_lambda="cross-validate", lambda_grid=(1e-3, 1.0))
    solution = solve_routers(statistics, config=config)
    assert solution.choice.chosen_by == "cross-validation"
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        save_routers(solution, path)
    again = load_routers(paths[0])
    assert (again.domains, again.choice) == (solution.domains, solution.choice)
    for layer, weights_HD in solution.weights.items():
        assert torch.equal(again.weights[layer], weights_HD)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_lambda_without_solution_is_saved_as_valid_json(tmp_path):
    features = random_domains(domains=2)
    for x_TH in (x_TH for folds in features.values() for x_TH in folds):
        x_TH[:, 9] = x_TH[:, 8]
    config = RouterConfig(ridge_lambda="cross-validate", lambda_grid=(0.0, 1e6))
    solution = solve_routers(statistics_of(tmp_path, features), config=config)
    path = tmp_path / "routers.safetensors"
    save_routers(solution, path)
    header = path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    table = json.loads(json.loads(header)["__metadata__"]["routers"])["table"]
    assert [row["losses"]["0"] is None for row in table] == [True, False]
    assert load_routers(path).choice == solution.choice
    assert solution.ridge_lambda == 1e6


def test_other_files_are_no_routers(tmp_path):
    features = random_domains(domains=1)
    statistics_of(tmp_path, features)
    with pytest.raises(InputError, match="give a routers file"):
        load_routers(tmp_path / "domain0.safetensors")
    with pytest.raises(InputError, match="cannot be read"):
        load_routers(tmp_path / "missing.safetensors")


def test_sequential_solving_hands_each_layer_the_routers_before_it(tmp_path):
    statistics = statistics_of(tmp_path, random_domains(), layers=2)
    asked = []

    def gather(layer, routers):
        asked.append((layer, sorted(routers)))
        return statistics

    choice = LambdaChoice(0.1)
    solution = solve_sequentially([0, 1], gather, choice=choice)
    assert asked == [(0, []), (1, [0])]
    assert solution.choice == choice
    for layer, weights_HD in solution.weights.items():
        assert torch.equal(weights_HD, solve(statistics, layer, ridge_lambda=0.1))
