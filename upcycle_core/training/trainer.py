"""Language-model training that continues bit for bit after a kill."""

from collections.abc import Iterator, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainingArguments

from upcycle_core.checkpoints.load import load_causal_lm, quiet_loading
from upcycle_core.checkpoints.tokenizer import copy_tokenizer
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.progress import Progress
from upcycle_core.training.causal_trainer import CausalTrainer, load_weights, tokens_per_step
from upcycle_core.training.checkpoints import Checkpoint, discard_incomplete, newest_complete
from upcycle_core.training.config import TrainingConfig

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


@dataclass(frozen=True)
class TrainingResult:
    """What a training came to.

    Args:
        steps: Optimizer steps.
        final_loss: Mean loss over the last stretch of the loss curve, nats a token.
        tokens: Tokens trained on.
        seconds: Time spent on the steps; those repeated after a kill count once.
        tokens_per_second: ``tokens / seconds``.
    """

    steps: int
    final_loss: float
    tokens: int
    seconds: float
    tokens_per_second: float


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
) -> TrainingResult:
    """Train a causal language model on rows of token ids, in the dataset's order.

    The same call after a kill, at whatever moment, continues from the newest whole checkpoint; on
    a CPU with the same number of threads it ends with the same bytes as a call never killed. After
    the end it only writes ``out`` again. Weights and optimizer are fp32; so is ``out``. Seeds the
    global random generators.

    Args:
        model: Checkpoint directory with its tokenizer.
        dataset: Map-style; at least ``steps * gradient_accumulation * batch_size`` rows, each a
            LongTensor[sequence_length]. Row i must depend on i alone.
        out: Directory to write: weights, configuration, generation configuration, tokenizer.
        config: What to do.
        seed: Seed of what is random in the model (dropout).
        checkpoints: Directory of this training's checkpoints; the last two are kept.
        progress: Told of every step, and of the loss curve every ``log_steps``.
        device: "cpu" or "cuda" (the first); None takes CUDA where there is one.

    Raises:
        InputError: Too few rows; settings that do not fit; ``checkpoints`` of another training.
        FloatingPointError: A gradient is not finite; names the step.
    """
    raise_faults(_faults(config, dataset))
    record = {"config": asdict(config), "seed": seed}
    found = _whole_checkpoint(checkpoints, record)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    network = load_causal_lm(model, device=device, precision=config.precision)
    progress.start("training", config.steps)
    progress.advance(found.step if found else 0)
    if found is None or found.step < config.steps:
        arguments = _arguments(network, config, seed=seed, checkpoints=checkpoints, device=device)
        trainer = CausalTrainer(
            network, arguments, dataset=dataset, config=config, record=record, progress=progress
        )
        found = trainer.run(found)
    else:
        load_weights(network, found.directory)
    _write(network, model, out)
    return _result(config, found)


def _faults(config: TrainingConfig, dataset: Dataset) -> Iterator[Fault]:
    assert isinstance(dataset, Sized), "a map-style dataset has a length"
    rows = config.steps * config.gradient_accumulation * config.batch_size
    if len(dataset) < rows:
        remedy = f"the training reads {rows} rows; give more, or lower steps or batch_size"
        yield Fault("dataset", f"{len(dataset)} rows", remedy)
    elif len(dataset[0]) != config.sequence_length:
        remedy = f"the dataset's rows have {len(dataset[0])} tokens; both must be the same"
        yield Fault("training.sequence_length", config.sequence_length, remedy)


def _whole_checkpoint(checkpoints: Path, record: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint to continue from; what a kill left half-written is deleted."""
    discard_incomplete(checkpoints)
    found = newest_complete(checkpoints)
    other = {key: found.record[key] for key in record} if found else record
    if other != record:
        remedy = f"holds checkpoints of another training ({other}); give an empty directory"
        raise InputError(Fault("checkpoints", str(checkpoints), remedy))
    return found


def _arguments(
    network: PreTrainedModel,
    config: TrainingConfig,
    *,
    seed: int,
    checkpoints: Path,
    device: str,
) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        use_cpu=device == "cpu",
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        optim="adamw_torch_fused",
        learning_rate=config.learning_rate,
        lr_scheduler_type=SCHEDULES[config.schedule],
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        max_grad_norm=config.max_gradient_norm,
        logging_steps=config.log_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # a diverged training is an error, not a smoothed curve
        save_strategy="steps",
        save_steps=config.checkpoint_steps,
        seed=seed,
        use_cache=network.config.use_cache,  # the Trainer writes it into the configuration
        remove_unused_columns=False,
        dataloader_pin_memory=device != "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several visible GPUs would mean DataParallel
    return arguments


def _write(network: PreTrainedModel, source: Path, out: Path) -> None:
    with quiet_loading():
        network.save_pretrained(out)
    copy_tokenizer(source, out)


def _result(config: TrainingConfig, last: Checkpoint) -> TrainingResult:
    tokens = config.steps * tokens_per_step(config)
    seconds = last.record["seconds"]
    return TrainingResult(config.steps, last.record["loss"], tokens, seconds, tokens / seconds)
