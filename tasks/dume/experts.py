"""Stage ``experts``: one expert a domain, trained from the seed, continued, or given."""

import shutil

import torch

from infra.cluster.calls import near
from infra.recipe.schema import Recipe
from tasks.data.asked import say_lacking
from tasks.data.given import place_given
from tasks.engine.artifacts import FORMS
from tasks.engine.params import expert_keys, is_trained
from tasks.engine.pinned import REBUILD
from tasks.engine.stage import StageRun, stage
from tasks.training import Texts, train_one, train_piece
from upcycle_core.backbone.form import Form, write_in_form
from upcycle_core.backbone.write import weights_type
from upcycle_core.checkpoints.copy import copy_checkpoint
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.errors import Fault, InputError


def _inputs(recipe: Recipe, domain: str) -> list[str]:
    if recipe.domains[domain].expert is not None:
        return [f"sources/{domain}.json", f"sources/{FORMS}/{domain}"]
    start = f"parents/{domain}" if domain in recipe.parents else "seed"
    return [f"corpora/{domain}/train", start]


@stage("experts/{domain}", _inputs, params=expert_keys, lasting=is_trained)
def experts(run: StageRun) -> None:
    """Write the expert's checkpoint."""
    recipe = run.recipe
    given = recipe.domains[run.domain].expert
    if given is not None:
        place_given(run, given, run.domain, run.out)
        return
    is_continued = run.domain in recipe.parents
    config = recipe.experts.continuing if is_continued else recipe.experts.training
    text = run.path(f"corpora/{run.domain}/train")
    say_lacking(run, {f"{run.domain}/train": text}, config.tokens, key="experts", again=True)
    train_one(
        run,
        train_piece,
        "experts",
        start=run.path(f"parents/{run.domain}" if is_continued else "seed"),
        data=Texts(train=[text]),
        config=config,
        seed=recipe.seed,
        device=run.device("experts"),
    )
    _fit_to_backbone(run)


def _fit_to_backbone(run: StageRun) -> None:
    """Round a trained expert to the type of a backbone that stays, where that holds less."""
    backbone = run.session.workspace.path("backbone")
    if "backbone" not in run.recipe.pinned or not backbone.is_dir():
        return  # the mean will have a type that holds all
    kept, trained = (weights_type(CheckpointReader(place)) for place in (backbone, run.out))
    if torch.promote_types(kept, trained) == kept:
        return
    name = str(kept).removeprefix("torch.")
    said = f"weights rounded to {name}, the type of the backbone that stays"
    run.session.log(f"{run.stage.label(run.item)}: {said}")
    whole = run.out.rename(run.out.with_suffix(".whole"))
    run.out.mkdir()
    form = Form(dtype=kept, config={"dtype": name, "torch_dtype": name}, said=(said,))
    near(write_in_form, whole, form, run.out, max_shard_bytes=run.recipe.moe.max_shard_bytes)
    shutil.rmtree(whole)


@stage(
    "parents/{parent}",
    inputs=lambda recipe, domain: (),
    each=lambda recipe: recipe.parents,
    params=("lineage.parents.{parent}",),
    once=True,  # the expert is another by the time that it has learnt
)
def parents(run: StageRun) -> None:
    """Write a copy of the expert that the lineage names.

    Raises:
        InputError: It is there no more, or damaged.
    """
    domain, named = run.item, run.recipe.parents[run.item]
    expert, workspace = f"experts/{domain}", run.session.workspace
    if not workspace.has_digest(expert, named) or workspace.provenance(expert) is None:
        remedy = "is the expert that is continued, and it is not in the workspace as it was; bring "
        remedy += f"it back (dvc pull --force, or flows.restore), {REBUILD}"
        raise InputError(Fault(f"lineage.parents.{domain}", named, remedy))
    near(copy_checkpoint, workspace.path(expert), run.out)
