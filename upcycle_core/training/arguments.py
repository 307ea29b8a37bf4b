"""What the HF Trainer is told, and what is looked at before a weight is read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset
from transformers import AutoConfig, TrainingArguments

from upcycle_core.errors import Fault, raise_faults
from upcycle_core.training import workers
from upcycle_core.training.checks import objective_faults, routing_faults, training_faults
from upcycle_core.training.config import MoEObjective, Sharding, TrainingConfig
from upcycle_core.training.rows import row_faults
from upcycle_core.training.sharding import sharding_faults

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def checked_shape(
    model: Path,
    dataset: Dataset,
    validation: Dataset | None,
    config: TrainingConfig,
    objective: MoEObjective | None,
    *,
    divided: Sharding = "none",
) -> Any:
    """The configuration of ``model``, once nothing is found wrong with what it is trained with.

    Raises:
        InputError: Settings, groups, k, number of experts or rows that do not fit each other.
    """
    raise_faults([*training_faults(config), *(objective_faults(objective) if objective else ())])
    shape = AutoConfig.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    faults = [*routing_faults(shape, objective), *_data_faults(dataset, validation, config)]
    if divided == "full":
        faults += sharding_faults(shape)
    raise_faults(faults)
    return shape


def training_arguments(
    shape: Any, config: TrainingConfig, *, seed: int, checkpoints: Path, device: str
) -> TrainingArguments:
    """Settings of the HF Trainer.

    Args:
        shape: The model's configuration.
        config: What to do; its ``gradient_accumulation`` is divided among the workers.
        seed: Seed of what is random in the model.
        checkpoints: Where they go.
        device: "cpu" or "cuda".

    Raises:
        RuntimeError: The environment does not name this process's place among the workers.
    """
    several = workers.count() > 1
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        use_cpu=device == "cpu",
        ddp_backend="gloo" if several and device == "cpu" else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation // workers.count(),
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
        use_cache=shape.use_cache,  # the Trainer writes it into the configuration
        remove_unused_columns=False,
        dataloader_pin_memory=device != "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # several visible GPUs would mean DataParallel
    if arguments.world_size != workers.count():
        raise RuntimeError(
            f"torch.distributed has {workers.count()} processes, the environment of this one says "
            f"{arguments.world_size}: set RANK, LOCAL_RANK and WORLD_SIZE as torchrun does"
        )
    return arguments


def _data_faults(
    dataset: Dataset, validation: Dataset | None, config: TrainingConfig
) -> Iterator[Fault]:
    if config.gradient_accumulation % workers.count():
        remedy = f"is divided among workers: choose a multiple of {workers.count()}"
        yield Fault("training.gradient_accumulation", config.gradient_accumulation, remedy)
    if validation is None and config.evaluation_steps is not None:
        remedy = "there are no validation rows; give some, or leave it out"
        yield Fault("training.evaluation_steps", config.evaluation_steps, remedy)
    length = config.sequence_length
    rows = config.steps * config.gradient_accumulation * config.batch_size
    yield from row_faults(dataset, rows=rows, sequence_length=length)
    if validation is not None:
        yield from row_faults(validation, rows=1, sequence_length=length, field="validation")
