"""The HF Trainer as this library uses it: silent, in the dataset's order, safe against kills.

What is overridden is what the stock Trainer gets wrong for us: it fills checkpoints in place with
no sign that they are whole, loses fused expert weights on resume, hides a diverged gradient, and
lets accelerate copy bf16 logits to fp32 a second time.
"""

import time
from collections.abc import Sized
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from upcycle_core.progress import Progress
from upcycle_core.training.checkpoints import (
    Checkpoint,
    keep_newest,
    mark_complete,
    newest_complete,
)
from upcycle_core.training.config import TrainingConfig

KEPT_CHECKPOINTS = 2


class CausalTrainer(Trainer):
    """Next-token training of a causal language model on rows of token ids.

    Args:
        model: In fp32; trained in place.
        args: Settings of the HF Trainer.
        dataset: Row i, a LongTensor[S], is read at place i of the training, and only there.
        config: What ``args`` was made from.
        record: What every checkpoint's marker holds beside ``loss`` (the last point of the curve,
            nats a token) and ``seconds`` (spent on its steps, those before a kill included).
        progress: Where loss, speed and curves go.
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
    ) -> None:
        super().__init__(
            model,
            args,
            data_collator=lambda rows: {"input_ids": torch.stack(rows)},
            train_dataset=dataset,
            callbacks=[_Reporter(progress, tokens_per_step(config))],
        )
        self.remove_callback(PrinterCallback)
        self._network = model
        self._bf16 = config.precision == "bf16"
        self._record = record
        self._started = time.perf_counter()
        self._seconds_before = 0.0

    def run(self, resume: Checkpoint | None) -> Checkpoint:
        """Train to the last step, from ``resume`` where there is one; return its checkpoint."""
        self._started = time.perf_counter()
        self._seconds_before = resume.record["seconds"] if resume else 0.0
        self.train(resume_from_checkpoint=str(resume.directory) if resume else None)
        last = newest_complete(Path(str(self.args.output_dir)))
        assert last is not None  # the Trainer saves at its last step
        return last

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SequentialSampler:
        # On resume accelerate drops the indices already seen, without reading their rows.
        return SequentialSampler(cast(Sized, self.train_dataset))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Mean loss of one batch, nats a token; rows are equally long: batches weigh the same."""
        ids = inputs["input_ids"]
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._bf16):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm = super()._clip_grad_norm(model)
        if not torch.isfinite(norm):
            step, args = self.state.global_step + 1, self.args
            raise FloatingPointError(
                f"The gradient of step {step} is not finite. Lower learning_rate (now "
                f"{args.learning_rate:g}), raise warmup_steps (now {args.warmup_steps:g}) or set "
                "precision to fp32, and train with an empty checkpoint directory."
            )
        return norm

    def floating_point_ops(self, inputs: dict[str, Tensor]) -> int:
        """Not counted: the count walks all parameters at every step."""
        return 0

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        directory = Path(str(output_dir))
        directory.mkdir(parents=True, exist_ok=True)
        save_model(self._network, str(directory / "model.safetensors"))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        load_weights(self._network, Path(resume_from_checkpoint))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        checkpoints = Path(str(self.args.output_dir))
        directory = checkpoints / f"checkpoint-{self.state.global_step}"
        seconds = self._seconds_before + time.perf_counter() - self._started
        loss = next(entry["loss"] for entry in reversed(self.state.log_history) if "loss" in entry)
        mark_complete(directory, {**self._record, "loss": loss, "seconds": seconds})
        keep_newest(checkpoints, count=KEPT_CHECKPOINTS)


def tokens_per_step(config: TrainingConfig) -> int:
    """Tokens of one optimizer step."""
    return config.batch_size * config.gradient_accumulation * config.sequence_length


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Fill ``model`` from a checkpoint of ``CausalTrainer``; every tensor must find its place."""
    load_model(model, checkpoint / "model.safetensors", strict=True)


class _Reporter(TrainerCallback):
    """Hands the Trainer's steps and logs to ``Progress``."""

    def __init__(self, progress: Progress, tokens_per_step: int) -> None:
        self._progress = progress
        self._tokens_per_step = tokens_per_step
        self._last_step = 0
        self._last_time = 0.0

    def on_train_begin(self, args, state, control, **_):
        self._last_step, self._last_time = state.global_step, time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        # A stretch of the curve never spans a checkpoint, so a resumed curve has the same points.
        control.should_log = control.should_log or control.should_save
        if not control.should_log:
            self._progress.advance()

    def on_log(self, args, state, control, **event):
        logs = event["logs"]
        if "loss" not in logs:
            return
        now = time.perf_counter()
        tokens = (state.global_step - self._last_step) * self._tokens_per_step
        speed = tokens / (now - self._last_time)
        self._last_step, self._last_time = state.global_step, now
        self._progress.advance(loss=logs["loss"], tokens_per_second=speed)
        values = {
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "gradient_norm": logs["grad_norm"],
            "tokens_per_second": speed,
        }
        self._progress.metrics(values, state.global_step)
