"""The lm-evaluation-harness as a library.

Prompts, stop strings, filters and metrics are the harness's. What is ours: the model is loaded
strictly, the batch fits the memory, programs run confined, progress leaves through one door, and
every item's prompt, answer and score is kept.
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

from upcycle_core.checkpoints.load import load_causal_lm
from upcycle_core.checkpoints.tokenizer import load_tokenizer
from upcycle_core.corpora.chat_template import on_one_day
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.encoding import answer_ends, with_prefix
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.evaluation.tasks.config import TaskEvaluationConfig
from upcycle_core.evaluation.tasks.items import Item
from upcycle_core.evaluation.tasks.memory import fitting_batch_size
from upcycle_core.evaluation.tasks.samples import (
    category_means,
    chosen_metric,
    is_truncated,
    items_of,
)
from upcycle_core.evaluation.tasks.score import TaskScore
from upcycle_core.evaluation.tasks.tasks import HarnessTask
from upcycle_core.evaluation.text.pieces import Variant
from upcycle_core.moe.inspect import force_expert, set_routers, set_top_k
from upcycle_core.precision import weights_type
from upcycle_core.progress import Progress, Silent


def evaluate_tasks(
    directory: Path,
    task_sets: Mapping[str, Path],
    *,
    config: TaskEvaluationConfig,
    bos: Bos = "auto",
    variant: Variant | None = None,
    experts: Mapping[str, int] | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
    finished: Callable[[str, TaskScore, list[Item]], object] = lambda task, score, items: None,
) -> tuple[dict[str, TaskScore], list[Item]]:
    """Score a checkpoint on tasks.

    Args:
        directory: The checkpoint, dense or MoE, with its tokenizer.
        task_sets: {task: what ``definitions.write_task`` wrote}.
        config: Seeds, batch size, chat template, whether programs may run.
        bos: Whether a beginning-of-sequence token stands before each prompt.
        variant: Other routers, or another k, than a MoE was saved with.
        experts: {task: index of the expert of a MoE that all its tokens go to}.
        device: Where the model runs; ``auto`` is all GPUs that this process sees, its layers
            divided among them.
        progress: Told of requests as they are answered.
        finished: Given each task, its score and its items, before the next is asked.

    Returns:
        {task: its score}, one value a seed; and every item of every task and seed.

    Raises:
        InputError: A task's data are missing, a metric is unknown, an answer leaves no room for
            its prompt, or the tokenizer has no chat template; a router, a k or an expert does not
            fit the MoE. Tasks are loaded before the model.
    """
    with tempfile.TemporaryDirectory() as cache:
        tasks = [
            HarnessTask(name, path, code=config.code, cache=Path(cache))
            for name, path in task_sets.items()
        ]
        model = _load_model(directory, config, bos, device, variant)
        raise_faults(fault for task in tasks for fault in task.room_faults(model.max_length))
        scores: dict[str, TaskScore] = {}
        items: list[Item] = []
        for task in tasks:
            with _forced(model, (experts or {}).get(task.name)):
                runs = [_run(model, task, config, s, progress or Silent()) for s in config.seeds]
            own = [item for _, found in runs for item in found]
            scores[task.name] = replace(
                runs[0][0],
                values=tuple(value for score, _ in runs for value in score.values),
                categories=category_means(own),
            )
            finished(task.name, scores[task.name], own)
            items += own
    return scores, items


def _run(
    model: Any, task: HarnessTask, config: TaskEvaluationConfig, seed: int, progress: Progress
) -> tuple[TaskScore, list[Item]]:
    """One task with one seed: its score, without categories, and its items."""
    from lm_eval import evaluate

    transformers.set_seed(seed)
    for part in task.tasks.values():
        part.set_fewshot_seed(seed)
    model.set_cache_hook(_Counter(task, progress))
    results: Any = evaluate(
        model,
        task.loaded,
        limit=task.settings["limit"],
        bootstrap_iters=0,
        apply_chat_template=config.chat_template,
        fewshot_as_multiturn=config.chat_template,
    )
    metric, chosen = chosen_metric(task, results["samples"])
    samples = [
        (subtask, sample)
        for subtask, found in results["samples"].items()
        for sample in found
        if sample["filter"] == chosen
    ]
    items = items_of(samples, task, metric=metric, seed=seed)
    score = TaskScore(
        metric=metric,
        higher_is_better=results["higher_is_better"][samples[0][0]].get(metric) is not False,
        values=(value_of(task, results, f"{metric},{chosen}", items),),
        items=len(items),
        truncated=sum(is_truncated(sample, model) for _, sample in samples),
    )
    return score, items


def value_of(task: HarnessTask, results: Any, key: str, items: list[Item]) -> float:
    """The harness's own figure; of a group that defines none, the mean over its items."""
    own = task.settings["harness"]
    figures = [results.get("groups", {}).get(own, {})]  # not those of groups within it
    if len(task.tasks) == 1:
        figures += [results["results"][name] for name in task.tasks]
    known = [float(found[key]) for found in figures if key in found]
    return known[0] if known else sum(item.score for item in items) / len(items)


class _Counter:
    """Counts answers: the harness tells them to whoever would keep them in a cache."""

    def __init__(self, task: HarnessTask, progress: Progress) -> None:
        self.progress = progress
        progress.start(f"answering {task.name}", task.requests, "requests")

    def add_partial(self, kind: str, request: object, answer: object) -> None:
        """One more request is answered."""
        self.progress.advance(1)


def _forced(model: Any, expert: int | None) -> AbstractContextManager[None]:
    return nullcontext() if expert is None else force_expert(model.model, expert)


def _load_model(
    directory: Path,
    config: TaskEvaluationConfig,
    bos: Bos,
    device: str,
    variant: Variant | None = None,
) -> Any:
    """The harness's own class for Hugging Face models, around a model that is loaded strictly."""
    from lm_eval.models.huggingface import HFLM

    tokenizer = load_tokenizer(directory)
    if config.chat_template and tokenizer.chat_template is None:
        remedy = f"the tokenizer of {directory} has no chat template; set it to false"
        raise InputError(Fault("task_evaluation.chat_template", True, remedy))
    if config.chat_template:
        tokenizer.chat_template = on_one_day(tokenizer.get_chat_template())
    model: Any = load_causal_lm(
        directory, dtype=weights_type(config.precision, device), device=device
    )
    if variant is not None and variant.routers:
        set_routers(model, variant.routers)
    if variant is not None and variant.top_k is not None:
        set_top_k(model, variant.top_k)
    # A checkpoint's own lengths, sampling and penalties would win over the task's. A MoE names the
    # end of its template's turns, asked in it or not; experts and seed may not.
    ends = answer_ends(tokenizer, model, chat=bool(tokenizer.chat_template))
    model.generation_config = GenerationConfig(eos_token_id=ends or None)
    if (tokenizer.pad_token_id or 0) >= model.config.vocab_size:
        # One that settings alone name stands behind all rows of the embedding.
        tokenizer.pad_token_id = next(iter(ends), 0)
    kind = _rolling(HFLM)
    kind = _prompted(kind) if hasattr(model, "coefficients") else kind
    # What stands before a chat is the template's to say, as in training.
    before = "never" if config.chat_template and bos == "auto" else bos
    return kind(
        pretrained=model,
        tokenizer=with_prefix(tokenizer, before),
        batch_size=config.batch_size or fitting_batch_size(model, device),
        softmax_dtype=torch.float32,  # a sum in bf16 has eight bits: likelihoods of choices tie
    )


def _rolling(base: Any) -> Any:
    """The harness's class, with one beginning before a text whose likelihood is asked.

    The harness puts it there itself, before what may be the tokenizer's own.
    """

    class Rolling(base):
        add_bos_token: bool | None

        def loglikelihood_rolling(self, *args: Any, **kwargs: Any) -> list[float]:
            own, self.add_bos_token = self.add_bos_token, False
            try:
                return super().loglikelihood_rolling(*args, **kwargs)
            finally:
                self.add_bos_token = own

    return Rolling


def _prompted(base: Any) -> Any:
    """The harness's class for models that look at the prompt alone before they answer (SIMoE).

    Of a likelihood request the prompt is its context: requests whose contexts are equally long are
    asked together, and the model is told that length.
    """

    class Prompted(base):
        _prompt_length = 1

        def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> list[Any]:
            places: dict[int, list[int]] = {}
            for place, (_, context, answer) in enumerate(requests):
                kept = min(len(context), self.max_length + 1 - len(answer))
                places.setdefault(max(1, kept), []).append(place)
            found: list[Any] = [None] * len(requests)
            for length, own in places.items():
                self._prompt_length = length
                asked = [requests[place] for place in own]
                answers = super()._loglikelihood_tokens(asked, *args, **kwargs)
                for place, answer in zip(own, answers, strict=True):
                    found[place] = answer
            return found

        def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            lengths = torch.full((len(inps),), self._prompt_length, device=inps.device)
            with torch.inference_mode():
                return self.model(inps, prompt_lengths=lengths).logits

    return Prompted
