"""SIMoE's training (arXiv 2506.12597): from a dense checkpoint to a pruned model of experts."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AutoConfig

from upcycle_core.allocator import trim
from upcycle_core.checkpoints.writer import sync_directory
from upcycle_core.errors import raise_faults
from upcycle_core.precision import DTYPES, arithmetic
from upcycle_core.progress import Progress, Silent
from upcycle_core.simoe.checks import division_faults, fit_faults, pull_faults
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.simoe.model import gated_modules
from upcycle_core.simoe.objective import SimoeObjective
from upcycle_core.simoe.prune import MAX_SHARD_BYTES, save_pruned
from upcycle_core.simoe.sparsity import overlap, realised_sparsity
from upcycle_core.simoe.standardise import common_states
from upcycle_core.simoe.upcycle import (
    bases_to_narrow,
    narrow_base,
    restore_base,
    upcycle_in_memory,
)
from upcycle_core.training import sharding, workers
from upcycle_core.training.arguments import checked_shape
from upcycle_core.training.config import Sharding, TrainingConfig
from upcycle_core.training.groups import Trainable
from upcycle_core.training.resume import kept_step, training_record
from upcycle_core.training.trainer import Subject, TrainingResult, train_subject


@dataclass(frozen=True)
class SimoeResult:
    """What a training came to. M experts.

    Args:
        training: Curves and counts of the whole training; its parameters are those before pruning.
        kept_step: The step whose weights were pruned and written.
        sparsity_mean: Share of expert parameters there whose mask is exactly zero, over experts.
        sparsity_union: Share that no expert uses, which pruning removed.
        sparsity_use: As ``sparsity_mean``, experts counted by use; None where that is not followed.
        sparsity_unsettled: What it was, in the way that tau is about, before the last tenth of the
            steps closed what lambda had not; None if lambda alone closes, or one before is kept.
        overlap: Pairwise overlap of the masks there, M rows of M, Jaccard's index.
        multiplier: lambda after the last step.
        common: Share of the routing states' energy that all training prompts have in common; None
            where routing goes by task.
    """

    training: TrainingResult
    kept_step: int
    sparsity_mean: float
    sparsity_union: float
    sparsity_use: float | None
    sparsity_unsettled: float | None
    overlap: tuple[tuple[float, ...], ...]
    multiplier: float
    common: float | None


def train_simoe(
    model: Path,
    dataset: Dataset,
    out: Path,
    *,
    config: TrainingConfig,
    simoe: SimoeUpcyclingConfig,
    seed: int,
    checkpoints: Path,
    progress: Progress,
    device: str | None = None,
    validation: Dataset | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    tasks: Sequence[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    divided: Sharding = "none",
) -> SimoeResult:
    """Upcycle a dense model, train its experts, prune them. After a kill it goes on bit for bit.

    In bf16 arithmetic the pre-trained linear layers are held so, and written as they were given.
    The last checkpoint as sparse as tau is kept, or the best.

    Args:
        model: Dense checkpoint with its tokenizer.
        dataset, out: As ``InstructionRows`` makes it; directory to write: the pruned model.
        config, simoe: The training, its learning rate that of the deltas, and the upcycling.
        seed: Of the initial masks and router, and of all else that is random.
        checkpoints: Directory for checkpoints; the last two and the one kept so far stay.
        progress, device, validation, fingerprint: As for ``training.trainer.train``.
        tasks, max_shard_bytes: Names, where routing goes by task; size of one safetensors file.
        divided: Whether workers divide all but gates and router; all must call.

    Raises:
        InputError: What does not fit, before the first step; no checkpoint is sparse enough.
        FloatingPointError: Loss, gradient, mask or lambda is not finite.
    """
    raise_faults([*simoe.faults("simoe"), *fit_faults(simoe, config)])
    if divided == "full":
        raise_faults(division_faults(simoe, is_encoder_decoder=_is_encoder_decoder(model)))
    shape = checked_shape(model, dataset, validation, config, None, divided=divided)
    upcycled = partial(upcycle_in_memory, model, simoe, seed=seed, tasks=tasks)
    write = partial(_write_all, upcycled=upcycled, source=model, out=out, size=max_shard_bytes)
    begin = partial(_begin, dataset=dataset, config=config, progress=progress)
    made = _Upcycled(shape, config, simoe, partial(upcycled, divided=divided), begin, write)
    found = train_subject(
        made.load,
        dataset,
        shape=shape,
        config=config,
        record=_record(config, simoe, seed, tasks, fingerprint or {}),
        seed=seed,
        checkpoints=checkpoints,
        progress=progress,
        device=device,
        validation=validation,
        divided=divided,
    )
    return _result(found, made.subject, made.common, config)


@dataclass
class _Upcycled:
    """What is trained, made when it is known that its checkpoints fit.

    Args:
        shape: The dense model's configuration.
        config, simoe: The training and the upcycling.
        upcycle: Makes the network on a device.
        begin: Looks at it before the first step.
        write: Writes it.

    Attributes:
        subject, common: The training's subject, and what ``begin`` said.
    """

    shape: Any
    config: TrainingConfig
    simoe: SimoeUpcyclingConfig
    upcycle: Callable[..., Any]
    begin: Callable[..., float | None]
    write: Callable[[Any], None]
    subject: Subject = field(init=False)
    common: float | None = field(init=False)

    def load(self, device: str) -> Subject:
        network = self.upcycle(device=device)
        raise_faults(pull_faults(self.simoe, self.config, _gates(network)))
        network.config.use_cache = self.shape.use_cache  # the Trainer does it only if it trains
        narrow = DTYPES[arithmetic(self.config.precision, device)]
        # Weak, for each is freed as it is divided.
        bases = WeakTensorKeyDictionary({base.weight: narrow for base in bases_to_narrow(network)})
        small = (n for n, _ in network.named_parameters() if n.endswith(".log_phi"))
        router = (f"router.{n}" for n, _ in network.router.named_parameters())
        sizes = [(p.numel(), p.requires_grad) for p in network.parameters()]
        trained = sum(size for size, is_trained in sizes if is_trained)
        self.subject = Subject(
            network,
            Trainable(trained, sum(size for size, _ in sizes), frozenset()),
            partial(self.write, network),
            SimoeObjective(network, self.simoe, self.config),
            kind=lambda parameter: bases.get(parameter, torch.float32),
            whole=frozenset([*small, *router]),
            begin=partial(self._begun, network, narrow),
        )
        return self.subject

    def _begun(self, network: Any, narrow: torch.dtype) -> None:
        self.common = self.begin(network, narrow=narrow)


def _is_encoder_decoder(model: Path) -> bool:
    config = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    return bool(config.is_encoder_decoder)


def _begin(
    network: Any,
    *,
    dataset: Dataset,
    config: TrainingConfig,
    progress: Progress,
    narrow: torch.dtype,
) -> float | None:
    """Look at the router's states, if it reads any, and hold what is frozen as it is computed.

    Of a network that is divided that is held so already, and its states are those of ``narrow``.
    """
    common = None
    divided = sharding.is_sharded(network)
    if network.config.routing != "task":
        told = progress if workers.rank() == 0 else Silent()
        kind, is_narrow = network.device.type, divided and narrow != torch.float32
        with (
            sharding.gathering(network, "coefficients"),
            torch.autocast(kind, narrow if is_narrow else None, enabled=is_narrow),
        ):
            common = common_states(network, dataset, batch_size=config.batch_size, progress=told)
    if not divided:
        narrow_base(network, narrow)
    trim()  # what loading and rounding have freed; steps allocate other sizes
    return common


def _gates(network: Any) -> list[tuple[int, int]]:
    """Of each layer: parameters that a gate decides about, and how many gates an expert has."""
    return [(m.weights_per_gate, m.log_phi[0].numel()) for m in gated_modules(network).values()]


def _record(
    config: TrainingConfig,
    simoe: SimoeUpcyclingConfig,
    seed: int,
    tasks: Sequence[str],
    fingerprint: Mapping[str, Any],
) -> dict[str, Any]:
    """What decides the training."""
    settings = {"simoe": asdict(simoe), "tasks": list(tasks)}
    return training_record(config, seed, None, fingerprint, settings)


def _write_all(
    network: Any, *, upcycled: Callable[..., Any], source: Path, out: Path, size: int
) -> None:
    """Prune and write; a network that is divided is put together by worker 0, on the CPU.

    No delta is whole there but the one that is being pruned.
    """
    trim()
    if not sharding.is_sharded(network):
        restore_base(network, source)
        _write(network, source, out, size)
        return
    modules = gated_modules(network)
    if workers.rank() != 0:
        for module in modules.values():
            workers.whole(module.delta.detach())
        return
    whole = upcycled(device="cpu", divided="full")
    whole.config.use_cache = network.config.use_cache
    whole.router.load_state_dict(network.router.state_dict())
    names = {}
    for name, module in gated_modules(whole).items():
        module.log_phi.data.copy_(modules[name].log_phi)
        names[module] = name

    def delta(module: Any) -> Tensor:
        found = workers.whole(modules[names[module]].delta.detach()).cpu()
        return found.T if getattr(module, "is_transposed", False) else found

    _write(whole.float(), source, out, size, delta=delta)


def _write(network: Any, source: Path, out: Path, max_shard_bytes: int, **how: Any) -> None:
    """Prune and write, over what an earlier call wrote."""
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    save_pruned(network, source, unfinished, max_shard_bytes=max_shard_bytes, **how)
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(unfinished.iterdir()):
        if path.is_dir():
            shutil.rmtree(out / path.name, ignore_errors=True)
        path.replace(out / path.name)
    sync_directory(out)
    unfinished.rmdir()


def _result(
    result: TrainingResult, subject: Subject, common: float | None, config: TrainingConfig
) -> SimoeResult:
    kept = kept_step(result.curves, config, subject.extension)
    assert kept is not None  # the training ended with it
    sparsity = realised_sparsity(subject.network)
    multipliers = [point["lambda"] for point in result.curves if "lambda" in point]
    return SimoeResult(
        training=result,
        kept_step=kept,
        sparsity_mean=sparsity.mean,
        sparsity_union=sparsity.union,
        sparsity_use=_at(result.curves, "sparsity/use", kept),
        sparsity_unsettled=_at(result.curves, "sparsity/unsettled", kept),
        overlap=tuple(map(tuple, overlap(subject.network).tolist())),
        multiplier=multipliers[-1] if multipliers else 0.0,
        common=common,
    )


def _at(curves: list[dict[str, float]], name: str, step: int) -> float | None:
    """What a curve says at a step that has a point."""
    return next((point[name] for point in curves if point["step"] == step and name in point), None)
