"""The objective of SIMoE: orthogonality, lambda and what they pull at."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import get_scheduler

from tests.upcycle_core.simoe.grown import all_masks, grown, save_dense, upcycled
from tests.upcycle_core.training.runs import settings
from upcycle_core.simoe.checks import balance_faults, pull_faults, reach_faults
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import gated_modules
from upcycle_core.simoe.model.gates_simoe import median
from upcycle_core.simoe.objective import SimoeObjective, orthogonality
from upcycle_core.simoe.sparsity import expected_sparsity, realised_sparsity
from upcycle_core.training.arguments import SCHEDULES
from upcycle_core.training.config import TrainingConfig


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_dense(tmp_path_factory.mktemp("dense"))


def objective(model, **changes):
    return SimoeObjective(model, SimoeUpcyclingConfig(**changes), settings())


@pytest.mark.parametrize("masks", ["neurons", "parameters", "real"])
@pytest.mark.parametrize("kind", ["full", "offdiagonal"])
def test_orthogonality_is_a_mean_over_layers_of_distances(dense, masks, kind):
    model = grown(dense, experts=3, masks=masks)
    distances = []
    for z in all_masks(model).values():
        rows, square = z.flatten(1).double(), 0.0
        for i in range(3):
            for j in range(3):
                product = sum(
                    a * b for a, b in zip(rows[i].tolist(), rows[j].tolist(), strict=True)
                )
                aim = float(i == j)
                square += (product - aim) ** 2 if kind == "full" or i != j else 0
        distances.append(math.sqrt(square))
    config = SimoeUpcyclingConfig(experts=3, masks=masks, orthogonality=kind)
    wanted = sum(distances) / len(distances)
    assert orthogonality(model, config).item() == pytest.approx(wanted, rel=1e-5)


def test_layers_whose_masks_are_orthogonal_have_finite_gradients(dense):
    """The root has no slope at distance zero: all gates closed, or experts that share nothing."""
    model = upcycled(dense, experts=2)
    for place, module in enumerate(gated_modules(model).values()):
        module.log_phi.data.fill_(-9.0)
        if place:
            half = module.log_phi.shape[1] // 2
            module.log_phi.data[0, :half] = module.log_phi.data[1, half:] = 0.3
    own = objective(model, experts=2, orthogonality="offdiagonal", beta=1.0)
    assert own.penalty().item() == 0
    own.penalty().backward()
    assert all(m.log_phi.grad.isfinite().all() for m in gated_modules(model).values())


@pytest.mark.parametrize("way", ["mean", "union"])
def test_penalty_is_beta_orthogonality_and_lambda_times_the_gap(dense, way):
    model = grown(dense, experts=3)
    own = objective(model, experts=3, beta=0.1, tau=0.9, sparsity=way)
    plain = 0.1 * orthogonality(model, SimoeUpcyclingConfig(experts=3)).item()
    assert own.penalty().item() == pytest.approx(plain, rel=1e-6)  # lambda starts at zero
    own.load_state({"lambda": 2.0})
    gap = 0.9 - expected_sparsity(model, way, rooted=True).item()
    assert own.penalty().item() == pytest.approx(plain + 2 * gap, rel=1e-5)


def test_lambda_ascends_by_realised_zeros_and_resets(dense):
    model = upcycled(dense, experts=2)
    own = objective(model, experts=2, tau=0.5, multiplier_learning_rate=0.1)
    modules = list(gated_modules(model).values())
    steps, wanted = [], 0.0
    for closed in range(0, len(modules), 3):
        for module in modules[:closed]:
            module.log_phi.data.fill_(-2.0)
        sparsity = realised_sparsity(model).mean
        wanted = 0.0 if sparsity >= 0.5 else wanted + 0.1 * (0.5 - sparsity)
        own.after_step(closed)
        steps.append(own.multiplier)
        assert own.multiplier == pytest.approx(wanted, abs=1e-12)
    assert max(steps) > 0.09
    assert steps[-1] == 0
    point = own.point()
    assert point["sparsity"] == point["sparsity/mean"] == realised_sparsity(model).mean
    assert 0.5 <= point["sparsity"] < 0.51
    assert own.may_keep(point)
    assert not own.may_keep({**point, "sparsity": 0.4999})


def test_tau_rises_and_lambda_waits_for_gates_that_are_on_their_way(dense):
    """Half of 6 steps: tau is a third, two thirds, all of itself; lambda goes by what is expected
    until there is something."""
    model = upcycled(dense, experts=2)
    own = objective(model, experts=2, tau=0.6, closing=0.5, multiplier_learning_rate=0.1)
    wanted = 0.0
    for step, log_phi in enumerate((1.3, 0.0, -1.0, -2.0), 1):
        for module in gated_modules(model).values():
            module.log_phi.data.fill_(log_phi)
        expected = 1 - 1 / (1 + math.exp(-(log_phi - 2 / 3 * math.log(0.1 / 1.1))))
        gap = 0.6 * min(1, step / 3) - (expected if step < 4 else 1)
        wanted = 0.0 if gap <= 0 else wanted + 0.1 * gap
        own.after_step(step)
        assert own.multiplier == pytest.approx(wanted, rel=1e-5), step


def test_a_lambda_of_gates_that_may_come_back_falls_and_is_not_reset(dense):
    model = upcycled(dense, experts=2)
    own = objective(
        model, experts=2, tau=0.5, closing=0.1, reopen=True, multiplier_learning_rate=0.1
    )
    own.load_state({"lambda": 2.0})
    for module in gated_modules(model).values():
        module.log_phi.data.fill_(-9.0)
    own.after_step(2)
    assert own.multiplier == pytest.approx(2.0 - 0.1 * 0.5)
    assert all(m.log_phi.min().item() == pytest.approx(-2.1) for m in gated_modules(model).values())
    assert realised_sparsity(model).mean == 1
    own.after_step(6)  # the last of six: sparsity is tau
    assert 0.5 <= realised_sparsity(model).mean < 0.51


def test_balance_is_what_the_mean_coefficients_lack_of_the_largest_entropy(dense):
    model = grown(dense, experts=3)
    own = objective(model, experts=3, beta=0.0, balance=0.5)
    batch = {"input_ids": torch.randint(2, 90, (4, 7))}
    alpha = model.coefficients(**batch)
    mean = alpha.mean(0).tolist()
    entropy = -sum(share * math.log(share) for share in mean)
    penalty = own.penalty()
    assert penalty.item() == pytest.approx(0.5 * (math.log(3) - entropy), rel=1e-5)
    penalty.backward()
    assert model.router.output.weight.grad.abs().sum() > 0
    assert own.penalty().item() == 0  # of a batch once


def test_padding_is_no_token_that_balance_counts(dense):
    model = grown(dense, experts=3, routing="token")
    own = objective(model, experts=3, beta=0.0, balance=0.5, routing="token")
    ids, found = torch.randint(2, 90, (1, 7)), []
    for padded in (0, 40):
        more = torch.full((1, padded), 5)
        mask = torch.cat([torch.ones_like(ids), torch.zeros_like(more)], dim=1)
        model(input_ids=torch.cat([ids, more], dim=1), attention_mask=mask)
        found.append(own.penalty().item())
    assert found[0] > 0
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_its_state_is_lambda(dense):
    model = upcycled(dense, experts=2)
    first, second = (objective(model, experts=2, multiplier_learning_rate=0.5) for _ in range(2))
    first.after_step(1)
    second.load_state(first.state())
    assert second.multiplier == first.multiplier == 0.375


def test_real_masks_have_no_lambda_and_no_sparsity_of_their_own(dense):
    model = upcycled(dense, experts=2, masks="real")
    own = objective(model, experts=2, masks="real")
    own.after_step(1)
    assert own.multiplier == 0
    assert not {"lambda", "sparsity", "sparsity/expected"} & own.point().keys()
    assert own.may_keep(own.point())


@pytest.mark.parametrize(("what", "value"), [("mask", math.nan), ("lambda", math.inf)])
def test_what_is_not_finite_stops_the_training(dense, what, value):
    model = upcycled(dense, experts=2)
    own = objective(model, experts=2)
    name = "model.model.layers.0.input_layernorm"
    if what == "mask":
        gated_modules(model)[name].log_phi.data[0, 0] = value
    else:
        own.load_state({"lambda": value})
    where = name if what == "mask" else "lambda is not finite"
    with pytest.raises(FloatingPointError, match=f"After step 7 .*{where}.*checkpoint before it"):
        own.after_step(7)


def test_masks_that_cannot_close_in_time_are_refused_before_anything_is_read():
    def faults(steps, **changes):
        config = settings(steps=steps)
        return list(reach_faults(SimoeUpcyclingConfig(**changes), config))

    assert [fault.field for fault in faults(150)] == ["simoe.mask_learning_rate"]
    assert not faults(300)
    assert not faults(150, mask_learning_rate=0.02)
    assert not faults(150, tau=0.0)
    assert not faults(150, masks="real")


def test_the_default_rates_are_enough_for_the_default_steps():
    assert not list(reach_faults(SimoeUpcyclingConfig(), TrainingConfig()))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_how_far_masks_can_get_is_how_far_torch_s_adam_gets(schedule, beta2):
    """For the gradient of a lambda that grows by the same each step."""
    config = TrainingConfig(steps=80, warmup_steps=10, schedule=schedule, adam_beta2=beta2)
    gate = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    adam = torch.optim.Adam([gate], lr=0.05, betas=(config.adam_beta1, beta2), eps=0)
    scheduler = get_scheduler(SCHEDULES[schedule], adam, num_warmup_steps=10, num_training_steps=80)
    for step in range(1, 81):
        gate.grad = torch.tensor(-float(step), dtype=torch.float64)
        adam.step()
        scheduler.step()
    simoe = SimoeUpcyclingConfig(mask_learning_rate=0.05)
    (fault,) = reach_faults(replace(simoe, initial_spread=9.0), config)
    assert f"moves log phi by {1.1 * gate.item():.2f} at most" in fault.remedy


def test_of_union_a_place_closes_with_the_last_of_its_gates():
    simoe = SimoeUpcyclingConfig(experts=8, tau=0.75, initial_spread=0.5, mask_learning_rate=1e-9)

    def needed(sparsity):
        (fault,) = reach_faults(replace(simoe, sparsity=sparsity), TrainingConfig())
        return float(fault.remedy.partition("tau = 0.75 needs ")[2].partition(":")[0])

    torch.manual_seed(0)
    draws = 0.5 * torch.randn(200_000, 8, dtype=torch.float64)
    for sparsity, starts in (("mean", draws[:, 0]), ("union", draws.amax(1))):
        farthest = 1.3458 + 1.5986 + starts.quantile(0.75).item()
        assert needed(sparsity) == pytest.approx(farthest, abs=0.02)


GATES = [(3072, 8192), (8192, 3072), (8192, 3072), (3072, 3072), (3072, 3072), (1024, 6144)] * 28
"""Of a model of 3 B parameters: what a gate decides about, and gates of an expert."""


@pytest.mark.parametrize("orthogonality", ["full", "offdiagonal"])
def test_how_far_lambda_pulls_is_how_far_torch_s_adam_goes_on_both_penalties(orthogonality):
    """On the slopes of one gate, of its share of the parameters, at each of its places."""
    config = TrainingConfig(steps=80, warmup_steps=5, schedule="linear")
    simoe = SimoeUpcyclingConfig(
        mask_learning_rate=0.15,
        multiplier_learning_rate=0.003,
        beta=5e-7,
        orthogonality=orthogonality,
    )
    whole = sum(weights * count for weights, count in GATES)
    log_phi = torch.nn.Parameter(torch.tensor(1.3458, dtype=torch.float64))
    start = simoe.initial_spread * torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.75))
    adam = torch.optim.AdamW([log_phi], lr=0.15, betas=(0.9, 0.95), weight_decay=0)
    scheduler = get_scheduler("linear", adam, num_warmup_steps=5, num_training_steps=80)
    multiplier = 0.0
    for _ in range(80):
        adam.zero_grad()
        is_open = torch.sigmoid(log_phi + start.double() + 1.5986)
        penalty = -multiplier * 3072 / (8 * whole) * (1 - is_open)
        if orthogonality == "full":  # of one layer of as many gates alike, a share of its norm
            z = median(log_phi + start.double()).expand(8, 512)
            apart = z @ z.mT - torch.eye(8, dtype=torch.float64)
            penalty = penalty + 5e-7 / len(GATES) * apart.norm() / 512 / 8
        penalty.backward()
        adam.step()
        scheduler.step()
        multiplier += 0.003 * 0.75
    (fault,) = pull_faults(simoe, config, GATES)
    moved = 1.3458 - log_phi.item()
    assert f"pulls the gates that decide by about {moved:.2f} in 80 steps" in fault.remedy


def test_a_lambda_too_small_for_a_model_s_size_is_refused():
    config = TrainingConfig(steps=80, warmup_steps=5, schedule="linear")
    simoe = SimoeUpcyclingConfig(mask_learning_rate=0.15, multiplier_learning_rate=0.01, beta=0.0)
    assert not list(reach_faults(simoe, config))  # of any size, its steps would be enough
    assert [fault.field for fault in pull_faults(simoe, config, GATES)] == [
        "simoe.multiplier_learning_rate"
    ]
    assert not list(pull_faults(replace(simoe, multiplier_learning_rate=0.3), config, GATES))
    assert not list(pull_faults(replace(simoe, beta=5e-6), config, GATES))  # which pulls as well
    assert not list(pull_faults(SimoeUpcyclingConfig(), TrainingConfig(), GATES))
    assert not list(pull_faults(replace(simoe, tau=0.0), config, GATES))
    tiny = [(128, 128)] * 4
    assert not list(pull_faults(simoe, config, tiny))


def test_adam_s_short_memory_of_squares_counts():
    """1,000 steps of 5e-3 end at -1.26 of -1.60 with a memory of 20 steps, and are enough with one
    of 1,000."""
    slow = SimoeUpcyclingConfig(mask_learning_rate=5e-3)
    assert list(reach_faults(slow, TrainingConfig()))
    assert not list(reach_faults(slow, TrainingConfig(adam_beta2=0.999)))


def test_a_training_that_ends_in_its_first_warm_up_step_is_refused_as_well():
    (fault,) = reach_faults(SimoeUpcyclingConfig(), TrainingConfig(steps=1))
    assert "0.00 at most in 1 steps" in fault.remedy
    assert fault.remedy.endswith("give more steps")


def test_batches_of_one_prompt_have_no_balance():
    balanced = SimoeUpcyclingConfig(balance=0.02)
    (fault,) = balance_faults(balanced, TrainingConfig(batch_size=1), "baselines.own.simoe")
    assert fault.field == "baselines.own.simoe.balance"
    assert not list(balance_faults(balanced, TrainingConfig(batch_size=2)))
    assert not list(balance_faults(replace(balanced, routing="token"), TrainingConfig()))
    assert not list(balance_faults(SimoeUpcyclingConfig(), TrainingConfig(batch_size=1)))


def test_use_is_a_running_mean_that_pulls_at_masks_alone(dense):
    """0.95 of what was and 0.05 of the mean over a step's prompts, both of its batches together;
    the constraint's gradient of a gate is lambda times its parameters and its expert's share."""
    model = grown(dense, experts=3)
    own = objective(model, experts=3, beta=0.0, tau=0.9, sparsity="use")
    use = [1 / 3] * 3
    for step, sizes in enumerate([(4, 2), (3,)], 1):
        rows = [torch.randint(2, 90, (size, 7)) for size in sizes]
        seen = torch.cat([model.coefficients(input_ids=ids) for ids in rows]).detach()
        own.after_step(step)
        use = [0.95 * u + 0.05 * a for u, a in zip(use, seen.mean(0).tolist(), strict=True)]
    assert own.use == pytest.approx(use, abs=1e-6)
    with torch.no_grad():
        model.coefficients(input_ids=rows[0])
    own.after_step(3)
    assert own.use == pytest.approx(use, abs=1e-6)  # what is not trained on does not count

    own.load_state({"lambda": 2.0, "use": [0.5, 0.25, 0.25]})
    own.penalty().backward()
    modules = gated_modules(model).values()
    total = sum(m.delta.numel() for m in modules)
    for module in modules:
        p = 1 / (1 + torch.exp(2 / 3 * math.log(0.1 / 1.1) - module.log_phi.detach()))
        share = torch.tensor([0.5, 0.25, 0.25])[:, None] * module.weights_per_gate / total
        torch.testing.assert_close(
            module.log_phi.grad, 2 * share * p * (1 - p), atol=1e-9, rtol=1e-4
        )
    assert all(p.grad is None or not p.grad.any() for p in model.router.parameters())


def test_a_constraint_by_use_holds_by_use(dense):
    model = grown(dense, experts=3)
    own = objective(model, experts=3, tau=0.6, closing=0.1, reopen=True, sparsity="use")
    state = {"lambda": 1.0, "use": [0.8, 0.1, 0.1]}
    own.load_state(state)
    for module in gated_modules(model).values():
        module.log_phi.data[0] += 1.0  # the expert that is used most is the least sparse
    own.after_step(6)  # the last of six: sparsity is tau
    point = own.point()
    assert 0.6 <= point["sparsity"] == point["sparsity/use"] < 0.62
    assert point["sparsity/mean"] > 0.65
    assert own.may_keep(point)
    assert own.state()["use"] == state["use"]


@pytest.mark.parametrize("reached", [True, False])
def test_a_use_that_drifts_at_the_end_does_not_lose_what_was_reached(dense, reached):
    """A training that never reached tau is not pruned to it."""
    model = grown(dense, experts=3)
    for module in gated_modules(model).values():
        module.log_phi.data[0] += 1.0
    first, last = (objective(model, experts=3, tau=0.3, sparsity="use") for _ in range(2))
    first.use = [0.0, 0.5, 0.5] if reached else [0.9, 0.05, 0.05]
    first.after_step(5)
    assert first.may_keep(first.point()) == reached
    last.load_state(first.state())
    last.use = [0.9, 0.05, 0.05]
    last.after_step(6)
    assert last.may_keep(last.point()) == reached
    assert last.point()["sparsity"] < 0.32
    assert (last.multiplier == 0) == reached
