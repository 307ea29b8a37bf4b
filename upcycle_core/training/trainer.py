"""Language-model training, dense or Mixture-of-Experts, that continues bit for bit after a kill.

After a kill, at whatever moment, the same call continues from the newest whole checkpoint. On a CPU
with the same number of threads and workers it ends with the same bytes as a call never killed.

Where ``torch.distributed`` is initialised, each of its W processes makes the same call and computes
1 / W of a step's micro-batches: a step has the same rows whatever W is. Worker 0 alone reports and
writes. The processes need RANK, LOCAL_RANK and WORLD_SIZE in the environment, as torchrun and Ray
Train set them, and a directory of checkpoints that all of them see.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from upcycle_core.allocator import all_kept
from upcycle_core.checkpoints.load import load_causal_lm, quiet_loading, stored_type
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.precision import arithmetic, chosen
from upcycle_core.progress import Progress, Silent
from upcycle_core.training import sharding, workers
from upcycle_core.training.arguments import checked_shape, training_arguments
from upcycle_core.training.causal_trainer import CausalTrainer
from upcycle_core.training.checkpoints import PREFIX, Checkpoint
from upcycle_core.training.config import MoEObjective, Sharding, TrainingConfig
from upcycle_core.training.extension import Extension
from upcycle_core.training.gathered import write_gathered
from upcycle_core.training.groups import Trainable, select_trainable
from upcycle_core.training.head import sliced_head
from upcycle_core.training.resume import (
    checkpoint_to_resume,
    kept_step,
    read_curves,
    training_record,
    validation_loss,
)
from upcycle_core.training.rows import tokens_read

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class TrainingResult:
    """What a training came to.

    Args:
        steps: Optimizer steps.
        final_loss: Mean loss over the last stretch of the loss curve, nats a token.
        tokens: Tokens trained on, without the padding that the dataset knows of.
        seconds: Time spent on the steps; those repeated after a kill count once.
        tokens_per_second: ``tokens / seconds``.
        trained_parameters: Parameters that were not frozen.
        total_parameters: Parameters of the model; tied ones count once.
        curves: Points in the order of ``step``, each with what was measured there: ``loss`` (of the
            text), ``learning_rate``, ``gradient_norm``; or ``validation_loss``. With an objective
            also ``loss/balance``, ``loss/z``, and what ``watch.Watch`` lists.
        validation_loss: Loss of ``out`` on the validation rows, nats a token; None without them.
    """

    steps: int
    final_loss: float
    tokens: int
    seconds: float
    tokens_per_second: float
    trained_parameters: int
    total_parameters: int
    curves: list[dict[str, float]]
    validation_loss: float | None


def train(
    model: Path,
    dataset: Dataset,
    out: Path,
    *,
    config: TrainingConfig,
    seed: int,
    checkpoints: Path,
    progress: Progress,
    device: str | None = None,
    objective: MoEObjective | None = None,
    validation: Dataset | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    divided: Sharding = "none",
) -> TrainingResult:
    """Train on rows of token ids, in order; after the end the same call only writes ``out`` again.

    Args:
        model: Checkpoint directory with its tokenizer.
        dataset: Map-style; at least ``steps * gradient_accumulation * batch_size`` rows, each a
            LongTensor[sequence_length], or a mapping of ``input_ids``, ``labels`` (-100 is not
            predicted) and maybe ``attention_mask``. Row i must depend on i alone. Where it has
            ``tokens``, these are all rows' without padding.
        out: Directory to write: weights, configuration, generation configuration, tokenizer.
        config: What to do. Weights and optimizer are fp32; so is ``out``.
        seed: Seed of what is random in the model (dropout). Seeds the global generators.
        checkpoints: Directory of this training's checkpoints; the last two and the best are kept.
        progress: Told of every step, and of the curves.
        device: "cpu" or "cuda" (the worker's own); None takes CUDA where there is one.
        objective: What is trained, the routers' losses, the watch; None: everything, text, nothing.
        validation: Rows like ``dataset``'s, measured at ``evaluation_steps`` and at the end.
        fingerprint: What ``dataset`` is made from, JSON values, kept in the checkpoints.
        divided: Whether workers divide weights, gradients and moments among them; all must call.

    Raises:
        InputError: Before weights are read: what does not fit, ``checkpoints`` of another training.
        FloatingPointError: A loss or gradient is not finite; names step and tensor.
    """
    shape = checked_shape(model, dataset, validation, config, objective, divided=divided)

    def load(device: str) -> Subject:
        network = load_to_train(model, torch.float32, config, device, divided)
        trainable = select_trainable(network, objective.trainable if objective else ("all",))
        return Subject(network, trainable, write=lambda: write_network(network, model, out))

    return train_subject(
        load,
        dataset,
        shape=shape,
        config=config,
        record=training_record(config, seed, objective, fingerprint or {}),
        seed=seed,
        checkpoints=checkpoints,
        progress=progress,
        device=device,
        objective=objective,
        validation=validation,
        divided=divided,
    )


def load_to_train(
    model: Path, dtype: torch.dtype, config: TrainingConfig, device: str, divided: Sharding
) -> "PreTrainedModel":
    """Load what is to be trained.

    Args:
        model: Checkpoint directory.
        dtype: Of its weights.
        config: Its arithmetic.
        device: Where it is trained.
        divided: With ``full`` it stays on the CPU, in the type of its file, which is mapped, or, of
            several, in one that holds them all, in which every worker then holds the whole model
            for a while: types and places are those that ``sharding.shard`` gives it.
    """
    precision = arithmetic(config.precision, device)
    if divided == "full":
        dtype, device = stored_type(model), "cpu"
    return load_causal_lm(model, dtype=dtype, device=device, precision=precision, training=True)


def all_fp32(_parameter: nn.Parameter) -> torch.dtype:
    """The type of every weight."""
    return torch.float32


@dataclass(frozen=True)
class Subject:
    """What is trained, in memory.

    Args:
        network: In fp32; what is not trained needs no gradient. As its file has it, where it is
            going to be divided.
        trainable: What is trained of it.
        write: Writes ``network``, which then holds the weights to end with, whole. Called by worker
            0, or by all where they hold parts.
        extension: What a paper adds to the training.
        kind: The type of each parameter once it is divided.
        whole: Names of small parameters that each worker has whole then.
        begin: Called once the network is divided, if it is to be, before the first step.
    """

    network: "PreTrainedModel"
    trainable: Trainable
    write: Callable[[], None]
    extension: Extension | None = None
    kind: Callable[[nn.Parameter], torch.dtype] = all_fp32
    whole: frozenset[str] = frozenset()
    begin: Callable[[], None] | None = None


def train_subject(
    load: Callable[[str], Subject],
    dataset: Dataset,
    *,
    shape: Any,
    config: TrainingConfig,
    record: dict[str, Any],
    seed: int,
    checkpoints: Path,
    progress: Progress,
    device: str | None,
    objective: MoEObjective | None = None,
    validation: Dataset | None = None,
    divided: Sharding = "none",
) -> TrainingResult:
    """Train what ``load`` makes, as ``train`` does; the settings were checked before.

    Args:
        load: Makes the subject on a device, once it is known that its checkpoints fit; the same
            on every worker and after every kill.
        dataset: As for ``train``, and so are the arguments that are not named here.
        shape: The model's configuration.
        record: ``training_record`` of this training.

    Raises:
        InputError: ``checkpoints`` of another training; no checkpoint that may be kept.
        FloatingPointError: As ``train``.
    """
    found = checkpoint_to_resume(checkpoints, record)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = training_arguments(shape, config, seed=seed, checkpoints=checkpoints, device=device)
    subject = load(device)
    progress = progress if workers.rank() == 0 else Silent()
    # Experts are sent other numbers of tokens at every step: a tenth more memory would be held.
    is_steady = divided == "none" and objective is None
    with sliced_head(subject.network), all_kept() if is_steady else nullcontext():
        if divided == "full":
            halves, whole = subject.trainable.undecayed, subject.whole
            sharding.shard(subject.network, subject.kind, halves=halves, device=device, whole=whole)
        if subject.begin is not None:
            subject.begin()
        progress.start(f"training{chosen(config.precision, device)}", config.steps)
        progress.advance(found.step if found else 0)
        if found is None or found.step < config.steps:
            trainer = CausalTrainer(
                subject.network,
                settings,
                dataset=dataset,
                config=config,
                record=record,
                progress=progress,
                objective=objective,
                undecayed=subject.trainable.undecayed,
                validation=validation,
                extension=subject.extension,
            )
            found = trainer.run(found)
    return _finish(subject, config, found, tokens=tokens_read(dataset, config))


def _finish(
    subject: Subject, config: TrainingConfig, last: Checkpoint, *, tokens: int
) -> TrainingResult:
    """Write the weights to end with, whole, and say what the training came to."""
    curves = read_curves(last)
    kept = kept_step(curves, config, subject.extension)
    if kept is None:
        assert subject.extension is not None  # without one every checkpoint may be kept
        point = next(point for point in reversed(curves) if "loss" in point)
        raise subject.extension.nothing_to_keep(point)
    sharding.load_weights(subject.network, last.directory.with_name(f"{PREFIX}{kept}"))
    if workers.rank() == 0 or sharding.is_sharded(subject.network):
        subject.write()
    workers.wait()
    seconds = last.record["seconds"]
    return TrainingResult(
        steps=config.steps,
        final_loss=last.record["loss"],
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        trained_parameters=subject.trainable.trained,
        total_parameters=subject.trainable.total,
        curves=curves,
        validation_loss=validation_loss(curves, kept),
    )


def write_network(network: "PreTrainedModel", source: Path, out: Path) -> None:
    """Write a trained model with the tokenizer of ``source``."""
    if sharding.is_sharded(network):
        write_gathered(network, out)
    else:
        with quiet_loading():
            network.save_pretrained(out)
    if workers.rank() == 0:
        copy_tokenizer(source, out)
