"""The first line of a flow: what all of it will need, said before anything of it is made."""

from collections.abc import Callable, Iterator

from infra.cluster.capacity import named_faults
from infra.cluster.memory import held_bytes
from infra.recipe.schema import Recipe
from infra.settings import Settings
from tasks.engine.unread import unread
from tasks.engine.workspace import Workspace
from tasks.living.lineage import with_lineage
from tasks.methods import stages_of
from tasks.planning.machine import Machine, remote_directory
from tasks.planning.made import EVERYTHING, Aim
from tasks.planning.plan import plan
from tasks.planning.speed import known_rates
from upcycle_core.errors import InputError, raise_faults

Begun = Callable[[Recipe, Workspace], Recipe]
"""From what a recipe says to what a flow will build of it."""


def anew_if(rebuild: bool) -> Begun:
    """What a flow builds that makes a whole model: with its lineage, unless it makes all anew."""
    return (lambda recipe, workspace: recipe) if rebuild else with_lineage


def in_vain(recipe: Recipe) -> Iterator[str]:
    """A line about what a recipe sets and nothing reads; none where there is no such thing."""
    if keys := unread(recipe, stages_of(recipe)):
        yield f"Nothing that this recipe makes reads {', '.join(keys)}, which it sets."


def say_plan(
    recipe: Recipe,
    settings: Settings,
    say: Callable[[str], object],
    *,
    aim: Aim = EVERYTHING,
) -> None:
    """Say the plan of a recipe in a line, and what it sets in vain, and refuse what cannot be.

    Of what no plan can be made (a method of one's own, a model that is read when it is needed)
    nothing is said. Of a cluster the machines are not asked, but its disk is.

    Args:
        recipe: What is about to be made, with its lineage.
        settings: Where it is kept, and where it runs.
        say: Takes the line.
        aim: What is brought up to date of it.

    Raises:
        InputError: With every limit that is exceeded, and the setting that helps.
    """
    for line in in_vain(recipe):
        say(line)
    remote = remote_directory(recipe.versions.remote, settings.home)
    machine = Machine.here(settings.home, recipe.compute.cpus, remote)
    rates = known_rates(settings.home)
    try:
        made = plan(recipe, settings.home, machine, base=held_bytes(), rates=rates, aim=aim)
    except InputError:
        return
    say(made.line())
    is_local = settings.ray_address == "local"
    named = named_faults(recipe.compute) if is_local else ()
    raise_faults([*made.faults(is_local=is_local), *named])
