"""Stages ``vocabulary`` and ``tokenizer``: what models that are trained here share, and the union.

The union of all models' tokenizers stands in the place of the one that experts of a seed share.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.recipe.schema import Recipe
from tasks.engine.stage import StageRun, each, stage
from tasks.symphony.variants import section
from upcycle_core.backbone.vocabulary import Union, unite_vocabularies, write_union_tokenizer
from upcycle_core.corpora.config import Origin
from upcycle_core.corpora.tokenizer import train_tokenizer
from upcycle_core.errors import Fault, InputError
from upcycle_core.progress import Progress
from upcycle_core.symphony.config import MergeConfig
from upcycle_core.symphony.merge import write_merged_backbone


def sharing(recipe: Recipe) -> tuple[str, ...]:
    """Domains whose models begin with random weights and say nothing of their vocabulary."""
    return tuple(
        name
        for name, domain in recipe.domains.items()
        if domain.expert is None
        and (origin := domain.origin or Origin()).model is None
        and origin.vocabulary_size is None
    )


def _texts(recipe: Recipe) -> dict[str, str]:
    """{domain: its training text, below the workspace}; a ready model need not have any."""
    domains = recipe.domains.items()
    return {n: f"documents/{n}/train.parquet" for n, own in domains if own.train is not None}


@stage(
    "vocabulary",
    lambda recipe, item: _texts(recipe).values(),
    params=("tokenizer",),
    each=lambda recipe: [""] if sharing(recipe) else [],
)
def vocabulary(run: StageRun) -> None:
    """Write the tokenizer of the models that share one, trained on all domains."""
    run.run_one(
        train_tokenizer,
        "corpora",
        documents={name: run.path(text) for name, text in _texts(run.recipe).items()},
        config=run.recipe.tokenizer,
    )


@stage(
    "tokenizer",
    lambda recipe, item: each(recipe, "experts/{domain}"),
    params=("symphony.segmentation",),
)
def tokenizer(run: StageRun) -> None:
    """Write the union's tokenizer."""
    run.run_one(union_piece, "assembly", **union_arguments(run))


def union_arguments(run: StageRun) -> dict[str, Any]:
    """What ``union_of`` takes."""
    recipe = run.recipe
    return {
        "models": {name: run.path(f"experts/{name}") for name in recipe.domains},
        "segmentation": section(recipe).segmentation,
    }


def union_piece(
    *, out: Path, progress: Progress, models: Mapping[str, Path], segmentation: str | None
) -> None:
    """The piece."""
    progress.start("uniting the vocabularies", 1, "vocabularies")
    write_union_tokenizer(union_of(models, segmentation), out)
    progress.advance()


def union_of(models: Mapping[str, Path], segmentation: str | None) -> Union:
    """All tokens of all models; their rows in the models' order.

    Raises:
        InputError: The models cut text by different rules, and ``segmentation`` names none.
    """
    ruling = None if segmentation is None else list(models).index(segmentation)
    try:
        return unite_vocabularies(list(models.values()), ruling=ruling)
    except InputError as error:
        raise InputError(*(_named(fault, list(models)) for fault in error.faults)) from None


def merged_backbone(
    run: StageRun, name: str, models: Mapping[str, Path], *, config: MergeConfig, anchor: str
) -> Path:
    """Merge what is no FFN over the union's vocabulary, as a piece; returns where it lies."""
    done = run.done(
        name,
        write_merged_backbone,
        "assembly",
        models=models,
        union=union_of(**union_arguments(run)),
        config=config,
        anchor=anchor,
        max_shard_bytes=run.recipe.moe.max_shard_bytes,
    )
    for key, value in done.result.items():
        run.session.log(f"{key} {value} is no token of the union: it is left out")
    return done.path


def segmentation_faults(models: Mapping[str, Path], segmentation: str | None) -> list[Fault]:
    """What keeps the tokenizers of ``models`` from becoming one."""
    try:
        union_of(models, segmentation)
    except InputError as error:
        return list(error.faults)
    return []


def _named(fault: Fault, names: list[str]) -> Fault:
    """``fault`` with the recipe's words for models and for the choice among them."""
    field, remedy = fault.field, fault.remedy.replace("(ruling)", "(symphony.segmentation)")
    for index, name in enumerate(names):
        field = field.replace(f"models[{index}]", f"domains.{name}")
        remedy = remedy.replace(f"models[{index}]", f"domains.{name}")
    return Fault(field, fault.value, remedy)
