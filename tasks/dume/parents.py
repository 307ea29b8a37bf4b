"""Stage ``parents``: an expert as it was before it learnt new text, which it is continued from."""

from tasks.engine.stage import StageRun, stage
from upcycle_core.checkpoints.copy import copy_checkpoint
from upcycle_core.errors import Fault, InputError


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
        remedy += "it back (dvc pull --force, or flows.restore), or build all anew: flows.dume "
        remedy += "--rebuild"
        raise InputError(Fault(f"lineage.parents.{domain}", named, remedy))
    copy_checkpoint(workspace.path(expert), run.out)
