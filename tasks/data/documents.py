"""Stage ``documents``: a domain's text, deduplicated and split by document."""

from collections.abc import Iterator, Mapping
from typing import Any

from infra.durable import read_json
from infra.recipe.schema import Recipe
from tasks.engine.params import document_keys, draws_text
from tasks.engine.stage import StageRun, stage
from upcycle_core.corpora.documents import write_documents

MANIFEST = "manifest.json"


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
    workspace, artifact = run.session.workspace, run.stage.artifact(run.domain)
    before = workspace.record(artifact) or {}
    read, reads = (read_json(place / MANIFEST) for place in (workspace.path(artifact), run.out))
    for said in (
        *drawn_anew(run.recipe, run.domain, before.get("params", {})),
        *gone_files(read, reads),
    ):
        run.session.log(f"{run.stage.label(run.domain)}: {said}")


def gone_files(before: Any, now: Any) -> Iterator[str]:
    """What to say of files that were read before and are not any more: what a pattern stands for
    grows less without a word where a disk is not mounted or a folder closed.

    Args:
        before: The manifest of the documents that are replaced; None if there is none.
        now: That of those in their place.
    """
    known = before.get("sources", {}) if isinstance(before, dict) else {}
    for split, source in now["sources"].items():
        had, has = (text.get("files", {}) for text in (known.get(split, {}), source))
        gone = sorted(had.keys() - has.keys())
        if gone and not {*map(had.get, gone)} <= {*has.values()}:  # else they were renamed
            files = f"{len(gone)} of its {len(had)} files of before, {gone[0]!r} the first"
            yield f"{split} is read without {files}: see that they are to be gone"


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
