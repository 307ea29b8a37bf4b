"""Stage ``documents``: a domain's text, deduplicated and split by document."""

from collections.abc import Iterator

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
    for said in drawn_anew(run.recipe, run.domain):
        run.session.log(f"{run.stage.label(run.domain)}: {said}")


def drawn_anew(recipe: Recipe, domain: str) -> Iterator[str]:
    """What to say where a model goes on and its held-out text may be what it has learnt.

    Of a harvest whole files are set aside, drawn from all that there are.
    """
    own = recipe.domains[domain]
    is_drawn = own.train is not None and own.train.harvest is not None and own.heldout is None
    if recipe.lineage is not None and is_drawn:
        yield (
            "the installation's files are others than before, and its held-out text is drawn anew "
            "from them: a continued expert may have learnt some of it, and be judged too well; to "
            f"judge it by text of its own: domains.{domain}.heldout"
        )
