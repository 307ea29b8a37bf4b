"""Stages ``baselines`` and ``model``: one model tuned on the instructions; a row of their table."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.recipe.schema import Recipe, recipe_yaml
from tasks.baselines.rows import train_row
from tasks.baselines.start import start_of
from tasks.engine.artifacts import INSTRUCTIONS, SUMMARY, TRAINING
from tasks.engine.stage import StageRun, stage
from tasks.simoe.checks import is_tied, tied_head
from tasks.simoe.labels import labels_of
from tasks.simoe.prepared import prepared_faults
from tasks.simoe.rows import section
from tasks.training import (
    Instructions,
    row_counts,
    train_one,
    trained_rows,
    training_piece,
)
from upcycle_core.checkpoints.card import write_model_card
from upcycle_core.corpora.config import Bos
from upcycle_core.corpora.plain_chat import form_in_words
from upcycle_core.errors import InputError, raise_faults
from upcycle_core.progress import Progress
from upcycle_core.simoe.config import SimoeUpcyclingConfig
from upcycle_core.training.config import Sharding, TrainingConfig

if TYPE_CHECKING:
    from upcycle_core.simoe.train import SimoeResult

TRAIN = f"{INSTRUCTIONS}/train"
INPUTS = (TRAIN, "seed")
"""What is held out, and where records lay, trains nothing."""
DECIDING = (
    "name",
    "seed",
    "instructions.too_long",
    "simoe",
    "tuning.training",
    "moe.max_shard_bytes",
    "corpus.bos",
)
"""What decides the model's training beside its inputs. How models answer does not."""
KEPT = "training.checkpoint_steps"
"""Of a SIMoE it decides the result: the model that is kept is that of a checkpoint."""

LEAST_CLOSED = 0.8
"""Of tau: what lambda is to have closed before gates are closed for it."""
MOSTLY = 0.5
"""Common energy of a router's states from which on it is said what helps."""
MANY = 0.1
"""Share of the instructions above which it is said that they were left out."""


def _row_params(recipe: Recipe, name: str) -> Iterator[str]:
    yield from ("seed", "instructions.too_long", "corpus.bos")
    yield from ("baselines.{baseline}", "moe.max_shard_bytes")
    if recipe.baselines[name].method == "btx":
        yield "experts.training"
    if recipe.baselines[name].method == "simoe":
        yield f"baselines.{{baseline}}.{KEPT}"


@stage("baselines/{baseline}", lambda recipe, name: INPUTS, each=trained_rows, params=_row_params)
def baselines(run: StageRun) -> None:
    """Write a rival's or an ablation's checkpoint, and beside it what its training came to."""
    raise_faults(prepared_faults(run.recipe, _prepared(run)))
    row = run.recipe.baselines[run.item]
    if row.method == "simoe":
        try:
            tune_simoe(run, row.simoe or SimoeUpcyclingConfig(), row.training, "baselines")
        except InputError as error:  # of masks that did not close: said of the row
            own = [replace(f, field=f"baselines.{run.item}.{f.field}") for f in error.faults]
            raise InputError(*own) from None
        return
    labels = labels_of(_prepared(run))
    experts = _experts(run, labels) if row.method == "btx" else {}
    parts = {"experts": experts, "seed_model": run.path("seed")}
    start = start_of(run, row, "baselines", domains=len(labels), **parts)
    train_row(run, start, domains=len(labels), data=_data(run))


@stage(
    "model",
    lambda recipe, item: INPUTS,
    params=(*DECIDING, f"tuning.{KEPT}"),
    lasting=lambda recipe, item: True,
)
def model(run: StageRun) -> None:
    """Write the recipe's model: the seed, with the sparse experts that tuning has found."""
    recipe = run.recipe
    raise_faults(prepared_faults(recipe, _prepared(run)))
    tune_simoe(run, section(recipe), recipe.tuning.training, "post_training")
    write_model_card(
        run.out,
        title=recipe.name,
        recipe_text=recipe_yaml(recipe, DECIDING),
        method="SIMoE",
        form=form_in_words(run.out),
    )


def tune_simoe(
    run: StageRun, config: SimoeUpcyclingConfig, training: TrainingConfig, kind: str
) -> None:
    """Write a SIMoE's checkpoint into ``run.out``, with what its training came to.

    Raises:
        InputError: Experts of a head that the seed does not have; masks that did not close.
    """
    if config.lm_head and is_tied(run.path("seed")):
        raise InputError(tied_head("simoe"))
    for warning in _of_tasks(config, _files(_prepared(run))):
        run.session.log(f"{run.stage.label(run.item)}: {warning}")
    train_one(
        run,
        simoe_piece,
        kind,
        start=run.path("seed"),
        instructions=_prepared(run),
        cuts=_cuts(run),
        bos=run.recipe.corpus.bos,
        config=training,
        simoe=config,
        seed=run.recipe.seed,
        max_shard_bytes=run.recipe.moe.max_shard_bytes,
        device=run.device(kind),
    )
    summary = json.loads((run.out / SUMMARY).read_text())
    for warning in _warnings(summary, config):
        run.session.log(f"{run.stage.label(run.item)}: {warning}")
    if run.recorder is not None:
        run.recorder.log_artifacts(run.out / TRAINING, TRAINING)


def _warnings(summary: Mapping[str, Any], config: SimoeUpcyclingConfig) -> Iterator[str]:
    """What its training came to and nobody would expect."""
    common = summary["common"]
    if common is not None and config.routing == "instance":
        share = f"{100 * common:.1f} % of what the router reads is common to all prompts"
        if config.standardise:
            yield f"{share}, and is taken away"
        elif common > MOSTLY:
            yield (
                f"{share} and tells it nothing: one expert may win them all; what helps is "
                "simoe.standardise: true (docs/simoe.md, Choices)"
            )
    found = summary["sparsity_unsettled"]
    if found is not None and found < LEAST_CLOSED * config.tau:
        yield (
            f"lambda had closed {100 * found:.1f} % until the last tenth of the steps, of the "
            f"{100 * config.tau:g} % that tau asks for; the rest was closed at once, whatever it "
            "had learnt: raise multiplier_learning_rate, mask_learning_rate or steps"
        )
    left_out, given = summary["left_out"], summary["left_out"] + summary["records"]
    if left_out > MANY * given:
        yield (
            f"{left_out:,} of {given:,} instructions are longer than "
            "tuning.training.sequence_length and were left out (instructions.too_long)"
        )


def _of_tasks(config: SimoeUpcyclingConfig, files: Sequence[Path]) -> Iterator[str]:
    """One task alone, and tasks of two categories that coefficients by task take for one."""
    categories: dict[str, set[str]] = defaultdict(set)
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                categories[row["task"]].add(row["category"])
    if len(categories) == 1:
        (task,) = categories
        by_task = "every prompt gets the same mixture of experts; simoe.routing: instance, or "
        by_prompt = "no table can say whether the router tells kinds of prompts apart; "
        yield (
            f"all instructions are of one task, {task}: "
            f"{by_task if config.routing == 'task' else by_prompt}name their kinds in the files' "
            "field `task`"
        )
    for task, own in sorted(categories.items()):
        if config.routing == "task" and len(own) > 1:
            yield f"the task {task} is in {' and '.join(sorted(own))}, and has one mixture in all"


def _experts(run: StageRun, labels: list[str]) -> dict[str, Path]:
    """Branch-Train-MiX's experts, one a label, from the seed."""
    seed, training = run.path("seed"), run.recipe.experts.training
    pieces = {
        label: training_piece(
            run, f"expert-{label}", seed, _data(run, label), training, kind="experts"
        )
        for label in labels
    }
    done = run.run(list(pieces.values()), "experts")
    return {label: done[piece.name].path for label, piece in pieces.items()}


def _data(run: StageRun, label: str = "*") -> Instructions:
    files = _files(_prepared(run), label)
    return Instructions(files=files, cuts=_cuts(run), bos=run.recipe.corpus.bos)


def _cuts(run: StageRun) -> bool:
    return run.recipe.instructions.too_long == "cut"


def simoe_piece(
    *,
    out: Path,
    progress: Progress,
    start: Path,
    instructions: Path,
    cuts: bool,
    bos: Bos,
    config: TrainingConfig,
    simoe: SimoeUpcyclingConfig,
    seed: int,
    max_shard_bytes: int,
    device: str,
    divided: Sharding = "none",
) -> dict[str, Any]:
    """The piece, in each of its workers: experts are found, and what no expert uses is pruned."""
    from upcycle_core.simoe.train import train_simoe  # imports models of transformers
    from upcycle_core.training import workers

    tasks: tuple[str, ...] = ()
    if simoe.routing == "task":
        tasks = _tasks(_files(instructions))
    data = Instructions(files=_files(instructions), tasks=tasks, cuts=cuts, bos=bos)
    rows = data.rows(start, config=config, seed=seed)
    result = train_simoe(
        start,
        rows,
        out,
        config=config,
        simoe=simoe,
        seed=seed,
        checkpoints=out.with_suffix(".checkpoints"),
        progress=progress,
        device=device,
        tasks=tasks,
        max_shard_bytes=max_shard_bytes,
        divided=divided,
    )
    if workers.rank() == 0:
        (out / TRAINING).mkdir()
        summary = _summary(result) | row_counts(rows)
        (out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")
        data.name_form(out)
    return {"loss": result.training.final_loss, "seconds": result.training.seconds}


def _prepared(run: StageRun) -> Path:
    return run.path(TRAIN).parent


def _tasks(files: list[Path]) -> tuple[str, ...]:
    """Those of the training instructions, by name."""
    found = set[str]()
    for file in files:
        with file.open(encoding="utf-8") as lines:
            found |= {json.loads(line)["task"] for line in lines}
    return tuple(sorted(found))


def _files(instructions: Path, label: str = "*") -> list[Path]:
    """The training instructions of a label, or of all."""
    return sorted((instructions / "train").glob(f"{label}.jsonl"))


def _summary(result: "SimoeResult") -> dict[str, Any]:
    """What the training came to; nothing that depends on the machine's speed."""
    found = asdict(result)
    training = found.pop("training")
    own = {
        "loss": training["final_loss"],
        "tokens": training["tokens"],
        "trained_parameters": training["trained_parameters"],
    }
    return {**own, **found}
