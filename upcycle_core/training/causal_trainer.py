"""The HF Trainer as this library uses it: silent, in the dataset's order, safe against kills.

What is overridden is what the stock Trainer gets wrong for us: it fills checkpoints in place with
no sign that they are whole, loses fused expert weights on resume and when it reloads the best
checkpoint, hides a diverged gradient, knows one loss only, and lets accelerate copy bf16 logits to
fp32 a second time.
"""

import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from upcycle_core.errors import Fault, InputError
from upcycle_core.precision import arithmetic
from upcycle_core.progress import Progress
from upcycle_core.training import sharding, workers
from upcycle_core.training.checkpoints import (
    Checkpoint,
    keep_newest,
    mark_complete,
    newest_complete,
)
from upcycle_core.training.config import MoEObjective, TrainingConfig
from upcycle_core.training.divergence import BackwardOrder, not_finite
from upcycle_core.training.extension import (
    AfterStep,
    Extension,
    clipped_together,
    load_state,
    optimizer_groups,
    save_state,
)
from upcycle_core.training.moments import NarrowAdamW
from upcycle_core.training.objective import StepLosses
from upcycle_core.training.reporter import Reporter
from upcycle_core.training.resume import kept_step
from upcycle_core.training.rows import collate, mean_loss, targets, tokens_read

KEPT_CHECKPOINTS = 2
SCHEDULER = "scheduler.pt"


class CausalTrainer(Trainer):
    """Next-token training of a causal language model on rows of token ids.

    Args:
        model: In fp32; trained in place.
        args: Settings of the HF Trainer.
        dataset: Row i is read at place i of the training, and only there.
        config: What ``args`` was made from.
        record: What every checkpoint's marker holds beside ``loss`` (the last point of the curve,
            nats a token) and ``seconds`` (spent on its steps, those before a kill included).
        progress: Where loss, speed and curves go; only worker 0's is told.
        objective: Losses beside the text's, and what is watched.
        undecayed: Names of parameters without weight decay.
        validation: Rows whose loss is measured.
        extension: What a paper adds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        dataset: Dataset,
        config: TrainingConfig,
        record: dict[str, Any],
        progress: Progress,
        objective: MoEObjective | None = None,
        undecayed: frozenset[str] = frozenset(),
        validation: Dataset | None = None,
        extension: Extension | None = None,
    ) -> None:
        self._config = config
        self._validation = validation
        self._extension = extension
        self._losses = StepLosses(model, objective, config, extension)
        reporter = Reporter(
            progress,
            tokens_read(dataset, config) / config.steps,
            watched=self._losses.is_watched,
            validated=self._is_validated,
        )
        if config.gradient_checkpointing:
            # Reentrant checkpointing would silently drop the gradient of the routers' losses.
            model.activation_checkpointing_enable({"use_reentrant": False})
        callbacks: list[TrainerCallback] = [reporter]
        if extension is not None:
            callbacks.insert(0, AfterStep(extension))
        super().__init__(
            model,
            args,
            data_collator=collate,
            train_dataset=dataset,
            callbacks=callbacks,
            optimizer_cls_and_kwargs=_optimizer(config),
        )
        self._is_sharded = sharding.is_sharded(model)
        # The Trainer's word for a model that is divided already: it leaves it as it is.
        self.is_distributed_loading_by_transformers = self._is_sharded
        self.remove_callback(PrinterCallback)
        self._clipped = clipped_together(model, extension)
        self._network = model
        self._record = record
        self._undecayed = undecayed
        self._order = BackwardOrder(model)
        self._started = time.perf_counter()
        self._seconds_before = 0.0

    def run(self, resume: Checkpoint | None) -> Checkpoint:
        """Train to the last step, from ``resume`` where there is one; return its checkpoint."""
        self._started = time.perf_counter()
        self._seconds_before = resume.record["seconds"] if resume else 0.0
        self._losses.start(resume.step if resume else 0)
        self.train(resume_from_checkpoint=str(resume.directory) if resume else None)
        last = newest_complete(Path(str(self.args.output_dir)))
        assert last is not None  # the Trainer saves at its last step
        return last

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        # Gradients are divided after each micro-batch: kept whole they would take W times the room.
        yield

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        # On resume accelerate drops the indices already seen, without reading their rows. With W
        # workers it deals batches in turn, so that a step reads the same rows whatever W is.
        return SequentialSampler(cast(Sized, self.train_dataset))

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that decay."""
        names = super().get_decay_parameter_names(model)
        return [name for name in names if name not in self._undecayed]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer, with the extension's groups where there is one."""
        if self.optimizer is None and self._extension is not None:
            decaying = self.get_decay_parameter_names(self._network)
            groups = self._extension.groups()
            own = _optimizer(self._config)
            kind, options = own or self.get_optimizer_cls_and_kwargs(self.args, self._network)
            chosen = optimizer_groups(self._network, groups, self._config, decaying)
            self.optimizer = kind(chosen, **options)
        return super().create_optimizer(model)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | None:
        """Targets of the whole step, over all workers, for rows that say what they predict.

        None for plain rows: they are equally long, so batches weigh the same.

        Raises:
            InputError: There is none.
        """
        if not batch_samples or "labels" not in batch_samples[0]:
            return None
        own = torch.stack([targets(batch) for batch in batch_samples]).sum()
        whole = workers.total(own.to(device))
        if not whole:
            step, remedy = self.state.global_step + 1, "no label to predict; leave such rows "
            remedy += "out, or raise batch_size"
            raise InputError(Fault("dataset", f"rows of step {step}", remedy))
        return whole

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """One micro-batch's share of the step's loss, nats a token.

        Each target token of the step weighs the same, in the loss of the text; the losses of the
        routers are means over micro-batches. For plain rows it is the mean over the micro-batch,
        which the Trainer divides by the number of micro-batches.
        """
        micro_batches = self.current_gradient_accumulation_steps
        calls: dict[str, Any] = {"labels": inputs["input_ids"]} | inputs | self._options()
        if num_items_in_batch is not None:
            calls["num_items_in_batch"] = num_items_in_batch
        with self._losses.recording(inputs.get("attention_mask")), self._autocast():
            text = model(**calls).loss
        if num_items_in_batch is None:
            return self._losses.add(text, micro_batches=micro_batches)
        # A part of a sum; DDP takes the mean over workers, and curves that over micro-batches too.
        text = text * (workers.count() * micro_batches)
        return self._losses.add(text, micro_batches=micro_batches) / micro_batches

    def _autocast(self) -> torch.autocast:
        device = self.args.device
        bf16 = arithmetic(self._config.precision, device) == "bf16"
        return torch.autocast(device.type, torch.bfloat16, enabled=bf16)

    def _options(self) -> dict[str, bool]:
        """What the model is called with beside the batch."""
        if hasattr(self._network.config, "output_router_logits"):
            # With it, transformers adds a load-balancing loss of its own, pooled over layers.
            return {"use_cache": False, "output_router_logits": False}
        return {"use_cache": False}

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        self._order.first_step_is_over()
        step, limit = self.state.global_step + 1, self._config.max_gradient_norm
        loss = self._losses.end_backward(step)
        norms = [sharding.gradient_norm(own) for own in self._clipped]
        if not torch.isfinite(loss) or not all(torch.isfinite(norm) for norm in norms):
            raise not_finite(step, loss, self._order.first_not_finite(), self._config)
        for parameters, norm in zip(self._clipped, norms, strict=True):
            sharding.clip_gradients(parameters, limit, norm)
        return norms[0]

    def floating_point_ops(self, inputs: dict[str, Tensor]) -> int:
        """Not counted: the count walks all parameters at every step."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Put a point on the curves; they live in the checkpoints, and so survive a kill."""
        if "loss" in logs:
            logs["gradient_norm"] = logs.pop("grad_norm")
            logs |= self._losses.point(self.state.global_step)
        super().log(logs, start_time)

    def _is_validated(self, step: int) -> bool:
        every = self._config.evaluation_steps or self._config.steps
        return self._validation is not None and (step % every == 0 or step == self._config.steps)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Put the validation loss on the curves."""
        assert self._validation is not None
        loss = mean_loss(
            self._network,
            self._validation,
            batch_size=self._config.batch_size,
            autocast=self._autocast,
            options=self._options(),
            is_divided=self._is_sharded,
        )
        metrics = {"validation_loss": loss}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        sharding.free(self._network)
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self.args.should_save:
            return
        directory = Path(str(output_dir))
        directory.mkdir(parents=True, exist_ok=True)
        if not self._is_sharded:  # what is, is written with the optimizer
            save_model(self._network, str(directory / sharding.WEIGHTS))
        if self._extension is not None:
            save_state(self._extension, directory)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        sharding.load_weights(self._network, Path(resume_from_checkpoint))
        if self._extension is not None:
            load_state(self._extension, Path(resume_from_checkpoint))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        sharding.save_shards(self._network, self._own_optimizer, Path(output_dir))
        if self.args.should_save and self.lr_scheduler is not None:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.lr_scheduler is not None
        sharding.load_moments(self._network, self._own_optimizer, Path(checkpoint))
        self.lr_scheduler.load_state_dict(
            torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
        )

    @property
    def _own_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer itself, inside what accelerate makes of it."""
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        workers.wait()  # each worker writes its own random state
        if workers.rank() == 0:
            checkpoints = Path(str(self.args.output_dir))
            directory = checkpoints / f"checkpoint-{self.state.global_step}"
            seconds = self._seconds_before + time.perf_counter() - self._started
            points = self.state.log_history
            loss = next(point["loss"] for point in reversed(points) if "loss" in point)
            mark_complete(directory, {**self._record, "loss": loss, "seconds": seconds})
            spare = kept_step(points, self._config, self._extension)
            keep_newest(checkpoints, count=KEPT_CHECKPOINTS, spare=spare)
        workers.wait()


def _optimizer(config: TrainingConfig) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """The optimizer where it is not the arguments' own."""
    if config.optimizer_state == "fp32":
        return None
    betas = (config.adam_beta1, config.adam_beta2)
    return NarrowAdamW, {"lr": config.learning_rate, "betas": betas, "eps": 1e-8}
