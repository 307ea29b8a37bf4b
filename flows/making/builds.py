"""How each method's model is brought up to date: for flows that work on models of any method."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from flows.making import ders, dume, simoe
from flows.making.building import Build, build_stages, built
from flows.running.command_line import SUMMARY
from flows.running.session import FlowSession
from infra.recipe.schema import Recipe
from tasks.engine.stage import Stage
from tasks.methods import COMPRESSION, METHODS
from tasks.planning.made import Aim
from tasks.release.versions import Outcome

BUILDS: Mapping[str, Build] = MappingProxyType({"dume": dume.build, "simoe": simoe.build})
"""Methods whose build is more than its stages in a row."""


def build(session: FlowSession, *, changed: Collection[str] | None = None) -> Outcome:
    """Bring the recipe's model up to date, and its compressed form where it asks for one.

    Both are registered, each under its name.

    Args:
        session: The recipe at work.
        changed: Domains whose text and experts are looked at; all by default.

    Returns:
        What became of the model.
    """
    own = BUILDS.get(session.recipe.method, build_stages)
    if not COMPRESSION.asked(session.recipe):
        return own(session, changed=changed)
    outcome = own(session, changed=changed, also=ders.compress)
    smaller = ders.verdict_of(ders.offer(session))
    path = session.workspace.root / SUMMARY
    path.write_text(f"{path.read_text()}Compressed {smaller}\n")
    return outcome


def updated(recipe: Recipe) -> dict[Stage, list[str]]:
    """What ``build`` brings up to date: stages, and their items."""
    return built(recipe) | (ders.compressed(recipe) if COMPRESSION.asked(recipe) else {})


def aim(recipe: Recipe, *, changed: Collection[str] | None = None) -> Aim:
    """What ``build`` is about to do, for its plan.

    Args:
        recipe: With the same method.
        changed: As of ``build``.
    """
    asks_all = METHODS[recipe.method].has_labels  # instructions are tuned on together
    return Aim(updated, None if asks_all else changed)


def whole(recipe: Recipe) -> Build:
    """What makes all of a recipe, rows to compare with included."""
    return simoe.build if METHODS[recipe.method].has_labels else build_stages
