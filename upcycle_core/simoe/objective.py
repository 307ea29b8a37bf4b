"""Objective of SIMoE's training: orthogonality of the masks, and sparsity held by a multiplier.

M experts, I inputs of a layer.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from upcycle_core.errors import Fault, InputError
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model.gates_simoe import median
from upcycle_core.simoe.sparsity import (
    Sparsity,
    close_deficit,
    expected_sparsity,
    gate_stacks,
    keep_near,
    mean_overlap,
    open_surplus,
    realised_sparsity,
)
from upcycle_core.training import workers
from upcycle_core.training.config import TrainingConfig
from upcycle_core.training.extension import ParameterGroup

MEMORY = 0.95
"""What a step leaves of the running mean of the coefficients."""
SETTLING = 0.1
"""Share of the steps, the last ones, in which gates that came back have others closed at once."""


def orthogonality(model: nn.Module, config: SimoeUpcyclingConfig) -> Tensor:
    """||Z Z^T - I||_F of each layer's masks Z [M, I] (Section 3.1.2), a mean over layers.

    With ``offdiagonal`` only the entries off the diagonal are measured. Masks with an entry a
    parameter are flattened. A layer at distance zero has gradient zero.

    Returns:
        A scalar fp32.
    """
    distances = []
    for _, trained in gate_stacks(model):
        masks = median(trained) if config.is_constrained else trained
        apart = masks @ masks.mT - torch.eye(masks.shape[1], device=masks.device)
        if config.orthogonality == "offdiagonal":
            apart = apart - torch.diag_embed(apart.diagonal(dim1=1, dim2=2))
        square = apart.square().sum((1, 2))
        # The root has no slope at zero; such a layer is left out of the graph.
        distances.append(torch.where(square > 0, square.clamp(min=1e-30).sqrt(), 0.0))
    return torch.cat(distances).mean()


class SimoeObjective:
    """The ``Extension`` that makes a training SIMoE's (Eq. 3, 11 to 13).

    Added to the text's loss: beta x orthogonality + lambda (tau - expected sparsity). After each
    optimizer step, gates that are closed beyond tau are opened (``open_surplus``), and then
    lambda <- max(0, lambda + rate (tau - realised sparsity)), or 0 where the constraint holds.

    A gate that is zero gets no gradient from the text, so nothing but lambda's end would keep gates
    that are on their way from closing, and noise would close more of them ever after. Opening the
    surplus is a projection: sparsity stays at tau once it is reached.

    Gradients of the masks are clipped by their own norm: lambda's would shrink all others.

    With ``closing`` tau rises from 0 over that share of the steps. Until the first gate is zero
    lambda ascends by what the expected sparsity lacks: no gate can be zero before it has gone the
    way there, and a lambda that meanwhile grew by the realised one would close all at once.

    With ``reopen`` gates come back, and lambda closes others for them: it falls where more are
    closed than asked for, and is not reset. In the last tenth of the steps sparsity is held at tau
    from both sides, so that the training ends with it.

    With ``balance`` the loss has balance x (log M - H(mean alpha of the batch)) as well.

    With ``sparsity: use`` an expert counts by the running mean of its coefficients, which is part
    of the state. In the constraint it is a constant: it pulls at masks, never at the router. As it
    moves, sparsity that was tau falls below it, with no gate opened: in the last tenth of the steps
    gates are closed for that as well, where tau had been reached.

    Args:
        model: Upcycled; every parameter that has gradients is trained.
        config: Of the upcycling.
        training: Of the training.

    Attributes:
        multiplier: lambda, 0 or more.
        use: Running mean of each expert's coefficients over steps, of sum one; 1 / M at the start.
        reached: Whether sparsity by use has been tau.
        unsettled: Sparsity before gates were first closed for what lambda had not; None until then.
    """

    def __init__(
        self, model: nn.Module, config: SimoeUpcyclingConfig, training: TrainingConfig
    ) -> None:
        self._model, self._config, self._training = model, config, training
        self.multiplier = 0.0
        self.use = [1 / config.experts] * config.experts
        self.reached = False
        self.unsettled: float | None = None
        self._sparsity: Sparsity | None = None
        self._alpha: Tensor | None = None
        self._attended_BS: Tensor | None = None
        self._seen: list[Tensor] = []
        if config.balance or config.sparsity == "use":
            model.register_forward_pre_hook(self._note_rows, with_kwargs=True)
            model.get_submodule("router").register_forward_hook(self._note)

    def _note_rows(self, _model: nn.Module, _given: Any, named: dict[str, Any]) -> None:
        self._attended_BS = named.get("attention_mask")

    def _note(self, _router: nn.Module, _given: Any, alpha: Tensor) -> None:
        if not alpha.requires_grad:
            return
        if alpha.dim() == 3 and self._attended_BS is not None:
            alpha = alpha[self._attended_BS.bool()]  # one a token: padding is none
        if self._config.balance:
            self._alpha = alpha
        if self._config.sparsity == "use":
            self._seen.append(alpha.detach().double())

    @property
    def _use_M(self) -> list[float] | None:
        """What sparsity is counted by, where it is counted by use."""
        return self.use if self._config.sparsity == "use" else None

    def _follow_use(self) -> None:
        """Take the step's coefficients, those of all workers, into the running mean."""
        if not self._seen:
            return
        alpha_BM = torch.cat(self._seen)
        self._seen.clear()
        counted = torch.cat([alpha_BM.sum(0), alpha_BM.new_tensor([len(alpha_BM)])])
        *sums, prompts = workers.total(counted).tolist()
        self.use = [
            MEMORY * before + (1 - MEMORY) * own / prompts
            for before, own in zip(self.use, sums, strict=True)
        ]

    def penalty(self) -> Tensor:
        """beta x orthogonality + lambda (tau - expected sparsity), a scalar."""
        config = self._config
        loss = config.beta * orthogonality(self._model, config)
        if self.multiplier:
            expected = self._expected(rooted=True)
            loss = loss + self.multiplier * (config.tau - expected)
        if self._alpha is not None:
            mean_M = self._alpha.flatten(0, -2).mean(0)
            entropy = -(mean_M * mean_M.clamp(min=1e-12).log()).sum()
            loss = loss + config.balance * (math.log(len(mean_M)) - entropy)
            self._alpha = None
        return loss

    def _expected(self, *, rooted: bool = False) -> Tensor:
        return expected_sparsity(
            self._model, self._config.sparsity, rooted=rooted, use_M=self._use_M
        )

    def groups(self) -> list[ParameterGroup]:
        """Deltas, router and masks."""
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        masks = frozenset(name for name in names if name.endswith(".log_phi"))
        router = frozenset(name for name in names if name.startswith("router."))
        return [
            ParameterGroup(names=frozenset(names) - masks - router),
            ParameterGroup(names=router, learning_rate=self._config.router_learning_rate),
            ParameterGroup(
                names=masks,
                learning_rate=self._config.mask_learning_rate,
                decays=False,
                clipped_apart=True,
            ),
        ]

    def after_step(self, step: int) -> None:
        """Open the surplus and move lambda (Eq. 13).

        Raises:
            FloatingPointError: A mask or lambda is not finite.
        """
        config = self._config
        tau = self.tau_at(step)
        self._follow_use()
        try:
            if config.is_constrained:
                self._hold(tau, settles=step > (1 - SETTLING) * self._training.steps)
            self._sparsity = realised_sparsity(self._model, self._use_M)
            if config.is_constrained:
                found = getattr(self._sparsity, config.sparsity)
                self.reached |= config.sparsity == "use" and found >= config.tau
                if config.closing is not None and not found:
                    with torch.no_grad():
                        expected = self._expected()
                    found = max(found, expected.item())
                self._ascend(tau - found)
        except FloatingPointError as error:
            raise FloatingPointError(
                f"After step {step} {error}. The last checkpoint before it is kept. Lower "
                f"mask_learning_rate (now {config.mask_learning_rate:g}) or "
                f"multiplier_learning_rate (now {config.multiplier_learning_rate:g}), and train "
                "with an empty checkpoint directory."
            ) from None

    def _hold(self, tau: float, *, settles: bool) -> None:
        """Open the surplus, and towards the end close what is missing."""
        config, use_M = self._config, self._use_M
        if config.reopen:
            keep_near(self._model)
        if settles or not config.reopen:
            open_surplus(self._model, tau, config.sparsity, use_M=use_M)
        if settles and (config.reopen or self.reached):
            if self.unsettled is None:
                self.unsettled = getattr(realised_sparsity(self._model, use_M), config.sparsity)
            close_deficit(self._model, tau, config.sparsity, use_M=use_M)

    def tau_at(self, step: int) -> float:
        """What sparsity is asked for after a step."""
        config = self._config
        if config.closing is None:
            return config.tau
        return config.tau * min(1.0, step / (config.closing * self._training.steps))

    def _ascend(self, gap: float) -> None:
        moved = self.multiplier + self._config.multiplier_learning_rate * gap
        if not math.isfinite(moved):
            raise FloatingPointError(f"lambda is not finite: it is {moved}")
        is_reset = gap <= 0 and not self._config.reopen
        self.multiplier = 0.0 if is_reset else max(0.0, moved)

    @torch.no_grad()
    def point(self) -> dict[str, float]:
        """As they are after the last step: ``lambda``, ``loss/orthogonality``, ``sparsity`` (in the
        way that tau is about), ``sparsity/mean``, ``sparsity/union``, ``sparsity/use`` where it
        counts, ``sparsity/expected``, towards the end ``sparsity/unsettled``, and ``overlap``."""
        found = self._sparsity or realised_sparsity(self._model, self._use_M)
        values = {
            "loss/orthogonality": orthogonality(self._model, self._config).item(),
            "sparsity/mean": found.mean,
            "sparsity/union": found.union,
            "overlap": mean_overlap(self._model),
        }
        if self._use_M:
            values["sparsity/use"] = found.use
        if self._config.is_constrained:
            values["lambda"] = self.multiplier
            values["sparsity"] = getattr(found, self._config.sparsity)
            values["sparsity/expected"] = self._expected().item()
        if self.unsettled is not None:
            values["sparsity/unsettled"] = self.unsettled
        return values

    def state(self) -> dict[str, Any]:
        """lambda, where it counts the use of experts and whether tau was reached by it, and towards
        the end ``unsettled``."""
        by_use = {"use": self.use, "reached": self.reached} if self._use_M else {}
        settled = {} if self.unsettled is None else {"unsettled": self.unsettled}
        return {"lambda": self.multiplier, **by_use, **settled}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on with a checkpoint's lambda and use."""
        self.multiplier = float(state["lambda"])
        self.use = list(state.get("use", self.use))
        self.reached = state.get("reached", self.reached)
        self.unsettled = state.get("unsettled")

    def may_keep(self, point: Mapping[str, float]) -> bool:
        """Whether the constraint holds at a checkpoint."""
        return not self._config.is_constrained or point["sparsity"] >= self._config.tau

    def nothing_to_keep(self, point: Mapping[str, float]) -> InputError:
        """The error of a training in which no checkpoint is sparse enough."""
        config, steps = self._config, self._training.steps
        remedy = (
            f"no checkpoint of the {steps} steps is as sparse: the last has "
            f"{point['sparsity']:.4f}; raise mask_learning_rate (now "
            f"{config.mask_learning_rate:g}), steps or multiplier_learning_rate (now "
            f"{config.multiplier_learning_rate:g}), or lower tau; the checkpoints stay"
        )
        return InputError(Fault("simoe.tau", config.tau, remedy))
