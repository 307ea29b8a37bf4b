"""Stage ``parents``: an expert as it was before it learnt new text, which it is continued from."""

from tasks.stage import StageRun, stage
from upcycle_core.checkpoints.copy import copy_checkpoint
from upcycle_core.errors import Fault, InputError


@stage(
    "parents/{parent}",
    inputs=lambda recipe, domain: (),
    params=("lineage.parents.{parent}",),
    sources=(),
)
def parents(run: StageRun) -> None:
    """Write a copy of the expert that the lineage names.

    Raises:
        InputError: It is there no more.
    """
    domain, named = run.item, run.recipe.parents[run.item]
    expert = f"experts/{domain}"
    if run.session.workspace.digest(expert) != named:
        remedy = "is the expert that is continued, and it is not in the workspace; bring it back "
        remedy += "(dvc pull --force, or flows.restore), or build all anew: flows.dume --rebuild"
        raise InputError(Fault(f"lineage.parents.{domain}", named, remedy))
    copy_checkpoint(run.path(expert), run.out)
