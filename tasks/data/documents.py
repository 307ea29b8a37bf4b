"""Stage ``documents``: a domain's text, deduplicated and split by document."""

from collections.abc import Iterator, Mapping
from typing import Any

from infra.recipe.schema import Recipe
from tasks.engine.params import document_keys, draws_text
from tasks.engine.stage import StageRun, stage
from upcycle_core.corpora.documents import write_documents


@stage(
    "documents/{domain}", lambda recipe, domain: [f"sources/{domain}.json"], params=document_keys
)
def documents(run: StageRun) -> None:
    """Write ``SPLIT.parquet`` and a manifest."""
    run.run_one(
        write_documents,
        "corpora",
        domain=run.recipe.domains[run.domain],
        config=run.recipe.corpus,
        seed=run.recipe.seed if draws_text(run.recipe, run.domain) else 0,
        folder=run.recipe.text_folder,
        name=f"domains.{run.domain}",
    )
    before = run.session.workspace.record(run.stage.artifact(run.domain)) or {}
    for said in drawn_anew(run.recipe, run.domain, before.get("params", {})):
        run.session.log(f"{run.stage.label(run.domain)}: {said}")


def drawn_anew(recipe: Recipe, domain: str, made: Mapping[str, Any]) -> Iterator[str]:
    """What to say where a model goes on and its held-out text may be what it has learnt.

    Of a harvest whole files are set aside, drawn from all that there are; of other text each
    document for good, by the seed and the share.

    Args:
        recipe: At work.
        domain: Whose text is read.
        made: What the recipe said as it was read before, by dotted keys; nothing the first time.
    """
    own = recipe.domains[domain]
    if recipe.lineage is None or own.train is None or own.heldout is not None:
        return
    now, share = recipe.corpus.heldout_share, made.get("corpus.heldout_share")
    if own.train.harvest is not None:
        why = "the installation's files are others than before"
    elif made.get("seed", recipe.seed) != recipe.seed:
        why = f"seed is {recipe.seed}, and was {made['seed']}"
    elif share is not None and share < now:
        why = f"corpus.heldout_share is {now:g}, and was {share:g}"
    else:
        return
    yield (
        f"{why}, and its held-out text is drawn anew: a continued expert may have learnt some of "
        f"it, and be judged too well; to judge it by text of its own: domains.{domain}.heldout"
    )
