"""Stages ``baselines`` and ``model``: joined strangers, trained on all domains' text."""

from collections.abc import Iterator
from pathlib import Path

from infra.recipe.schema import Recipe, recipe_yaml
from tasks.baselines.rows import train_row
from tasks.engine.stage import StageRun, each, stage
from tasks.symphony.variants import SYMPHONY, chosen_of, section
from tasks.training import train_from, trained_rows
from upcycle_core.checkpoints.card import write_model_card
from upcycle_core.checkpoints.copy import copy_checkpoint
from upcycle_core.progress import Progress

DECIDING = ("name", "seed", "symphony", "moe", "post_training")
"""What the model card quotes, and no more: it is written by the training, whose inputs stand for
texts, experts and routers, and which nothing may start again that has no part in it."""


def _trained_keys(recipe: Recipe, name: str) -> Iterator[str]:
    """What a row says of its training."""
    yield from ("seed", f"baselines.{name}.training", f"baselines.{name}.objective")
    if recipe.baselines[name].tuned != "full":
        yield from (f"baselines.{name}.tuned", f"baselines.{name}.lora")


def _texts(recipe: Recipe, validated: bool) -> Iterator[str]:
    yield from each(recipe, "corpora/{domain}/train")
    if validated:
        yield from each(recipe, "corpora/{domain}/calibration")


def _row_inputs(recipe: Recipe, name: str) -> Iterator[str]:
    yield f"starts/{name}"
    validated = recipe.baselines[name].training.evaluation_steps is not None
    yield from _texts(recipe, validated)


@stage(
    "baselines/{baseline}",
    _row_inputs,
    each=trained_rows,
    params=_trained_keys,
)
def baselines(run: StageRun) -> None:
    """Write a row's trained checkpoint, and beside it what its training came to."""
    start = run.path(f"starts/{run.item}")
    train_row(run, start, domains=len(run.recipe.domains))


def _inputs(recipe: Recipe, item: str) -> Iterator[str]:
    yield f"starts/{SYMPHONY}"
    if recipe.post_training is not None:
        validated = recipe.post_training.training.evaluation_steps is not None
        yield from _texts(recipe, validated)


@stage(
    "model",
    _inputs,
    params=DECIDING,
    lasting=lambda recipe, item: recipe.post_training is not None,
)
def model(run: StageRun) -> None:
    """Write the recipe's model: trained, or as it was joined where the recipe trains nothing."""
    recipe, start = run.recipe, run.path(f"starts/{SYMPHONY}")
    if recipe.post_training is None:
        run.run_one(copy_piece, "assembly", start=start)
    else:
        post = recipe.post_training
        train_from(
            run, start, training=post.training, objective=post.objective, kind="post_training"
        )
    write_model_card(
        run.out,
        title=recipe.name,
        recipe_text=recipe_yaml(recipe, DECIDING),
        method="Symphony-MoE",
        experts=list(chosen_of(recipe, section(recipe))),
    )


def copy_piece(*, out: Path, progress: Progress, start: Path) -> None:
    """The piece: nothing is trained."""
    out.mkdir()
    copy_checkpoint(start, out)
