"""What flows that change a model show: every domain's score before and after, and how long it took.

The scores before are kept in the workspace until the change is done, so that a flow that was killed
still knows them when it is run again.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from prefect.artifacts import create_markdown_artifact

from flows.running.command_line import SUMMARY
from flows.running.session import FlowSession
from infra.durable import SEAL, is_whole, sealed, write_atomically
from infra.recipe.schema import Recipe
from tasks.engine.artifacts import INSTRUCTIONS
from tasks.engine.stage import Session
from tasks.engine.workspace import Workspace, fingerprint
from tasks.living.lineage import averaged_in, check_built_upon, life_of
from tasks.methods import METHODS
from tasks.release.versions import Outcome
from upcycle_core.checkpoints.hashing import sha256_file, tree_digest
from upcycle_core.errors import Fault, InputError, raise_faults
from upcycle_core.evaluation.report.numbers import number, signed, slug
from upcycle_core.evaluation.report.parts import Notes, Section, Table
from upcycle_core.evaluation.report.text import markdown, terminal

UNFINISHED = ".change.json"
OTHER_TEXT = (
    "The held-out text of {} has changed: before and after are not of the same text there. Give a "
    "domain `heldout` text of its own to see what a model gains."
)
OTHER_QUESTIONS = "The {} questions are others: before and after are not of the same ones there."
QUESTIONS = {f"{INSTRUCTIONS}/{split}.jsonl": split for split in ("seen", "unseen")}
"""Artifact's file to what the instructions in it are called, which models are judged by."""


@dataclass(frozen=True)
class Change:
    """A change at work.

    Args:
        what: ``grow law``, ``shrink law``, ``retrain python``.
        before: {domain: perplexity} of the model before it.
        texts: {domain: digest} of the held-out text that it was measured on, and {file: digest} of
            ``QUESTIONS``.
        waiting: ``grow law`` that was stopped before, and that this change does not end.
        rebuild: Whether the backbone is averaged anew.
    """

    what: str
    before: Mapping[str, float]
    texts: Mapping[str, str] = field(default_factory=dict)
    waiting: Sequence[str] = ()
    rebuild: bool = False

    @property
    def coming(self) -> tuple[str, ...]:
        """The domains whose adding has not ended."""
        changes = (what.partition(" ") for what in (self.what, *self.waiting))
        return tuple(domain for kind, _, domain in changes if kind == "grow")


def deploy_again(chosen: argparse.Namespace) -> str:
    """What to do after a domain came or left, of a recipe, the files beside it and its changes.

    What make is told has no changes, and no names with blanks.
    """
    files = [str(path) for path in (chosen.recipe, *chosen.add)]
    named, said = " ".join(files), "Deployments hold the recipe as it was: if it is deployed"
    if chosen.set or shlex.join(files) != named:
        options = [word for change in chosen.set for word in ("--set", change)]
        command = [sys.executable, "-m", "infra.services", "deploy", *files, *options]
        return f"{said}: {shlex.join(command)}"
    quoted = f'"{named}"' if chosen.add else named
    return f"{said}, make deploy RECIPE={quoted}."


def begin_change(
    session: FlowSession, what: str, begun: Recipe, *, rebuild: bool = False
) -> Change:
    """Remember the model's scores before it changes.

    Args:
        session: At work, on the recipe of before.
        what: As in ``Change``.
        begun: The recipe that the session is to adopt.
        rebuild: As in ``Change``.

    Raises:
        InputError: It has none: the flow that built it did not end. Or what it is to be built upon
            is not what the recipe asks for.
    """
    check_built_upon(Session(begun, session.workspace, log=session.stages.log))
    known = unfinished(session.workspace)
    if known is None or known.what != what:
        waiting = [each for each in _waiting(begun, session.workspace) if each != what]
        change = Change(what, _scores(session), _texts(session), waiting, rebuild)
    else:
        change = replace(known, rebuild=rebuild)
    if change != known:
        _write(session.workspace, change)
    return change


def _waiting(recipe: Recipe, workspace: Workspace) -> list[str]:
    """Growings that were stopped, of domains that the model still lacks."""
    change, known = unfinished(workspace), life_of(recipe).modelled(workspace)
    return [f"grow {d}" for d in (change.coming if change else ()) if d not in known]


def _write(workspace: Workspace, change: Change) -> None:
    write_atomically(workspace.root / UNFINISHED, json.dumps(sealed(asdict(change)), indent=1))


def going_on(recipe: Recipe, workspace: Workspace) -> Change | None:
    """The change that was not finished, if a night of this recipe is to finish it.

    The model is what the change makes of it already, or is to learn: a domain that it lacks still
    waits for ``flows.grow``, one that it has still for ``flows.shrink``, and a backbone that was
    to be averaged anew for either.
    """
    change = unfinished(workspace)
    if change is None:
        return None
    kind, _, domain = change.what.partition(" ")
    has = domain in life_of(recipe).modelled(workspace)
    averages = domain in averaged_in(workspace)
    is_done = {
        "grow": has and (averages or not change.rebuild),
        "shrink": not has and not (averages and change.rebuild),
    }
    return change if is_done.get(kind, True) else None


def unfinished(workspace: Workspace) -> Change | None:
    """The change that was not finished, if there is one."""
    path = workspace.root / UNFINISHED
    try:
        values = json.loads(path.read_text())
        whole = is_whole(values)
        return Change(**{k: v for k, v in values.items() if k != SEAL}) if whole else None
    except (OSError, ValueError, TypeError, AttributeError):  # none, or a disk has damaged it
        return None


def finish_change(
    session: FlowSession, change: Change, outcome: Outcome, *, notes: tuple[str, ...] = ()
) -> None:
    """Show the table in Prefect, MLflow and the terminal.

    Args:
        session: The model is registered.
        change: What was begun.
        outcome: What became of the model.
        notes: Sentences under the table.
    """
    seconds = time.time() - session.began
    life, texts = life_of(session.recipe), _texts(session)
    table = change_table(change.before, _scores(session), percent=life.percent)
    notes = (*notes, *other_texts(change.texts, texts))
    verdict = f"`{outcome.version.reference}`: {outcome.verdict}"
    text = markdown([Section("", [table, *notes, verdict, f"{change.what}: {seconds:.0f} s."])])
    session.run.set_tags({"upcycle.change": change.what})
    session.run.log_metrics({f"before/{name}": value for name, value in change.before.items()})
    session.run.log_text(text, "change.md")
    create_markdown_artifact(
        key=slug(f"{session.recipe.name}-change"),
        markdown=f"# {change.what}\n\n{text}",
        description="Every score before and after.",
    )
    path = session.workspace.root / SUMMARY
    heading = f"{change.what}: {life.measure}"
    path.write_text(f"{path.read_text()}\n{terminal([Section(heading, [table, Notes(notes)])])}")
    _forget(session, change.waiting)


def end_change(session: FlowSession) -> None:
    """Remember no change of a model that has been made again as a whole, but what still waits."""
    if METHODS[session.recipe.method].life is not None:
        _forget(session, _waiting(session.recipe, session.workspace))


def _forget(session: FlowSession, waiting: Sequence[str]) -> None:
    """Remember no change any more, but for one that waits, of the model as it is now."""
    if not waiting:
        (session.workspace.root / UNFINISHED).unlink(missing_ok=True)
        return
    *others, what = waiting
    _write(session.workspace, Change(what, _scores(session), _texts(session), others))


def other_texts(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Sentences that say which scores before and after are not of the same texts.

    Args:
        before: As ``Change.texts``.
        after: The same of now.
    """
    other = [name for name, digest in before.items() if after.get(name, digest) != digest]
    domains = [name for name in other if name not in QUESTIONS]
    splits = [split for name, split in QUESTIONS.items() if name in other]
    if domains:
        yield OTHER_TEXT.format(", ".join(domains))
    if splits:
        yield OTHER_QUESTIONS.format(" and ".join(splits))


def change_table(
    before: Mapping[str, float], after: Mapping[str, float], *, percent: bool = True
) -> Table:
    """Every score before and after, with its change in percent, or else in points.

    A domain has a dash where it was not in the model.
    """
    rows = []
    for name in sorted({*before, *after}):
        old, new, change = before.get(name), after.get(name), None
        if old is not None and new is not None:
            change = f"{signed(100 * (new / old - 1))} %" if percent else signed(new - old)
        rows.append([name, number(old, digits=2), number(new, digits=2), change])
    return Table(["domain" if percent else "score", "before", "after", "change"], rows)


def rebuild_faults(recipe: Recipe, rebuild: bool) -> list[Fault]:
    """``--rebuild``, where there is no average to make anew."""
    if not rebuild or life_of(recipe).averages:
        return []
    method = METHODS[recipe.method]
    remedy = f"{method.title} keeps no average of experts: leave it out; all anew: {method.flow} "
    return [Fault("--rebuild", True, f"{remedy}--rebuild")]


def modelled_in(recipe: Recipe, workspace: Workspace) -> tuple[str, ...]:
    """Domains of the workspace's model, or what else its parts are.

    Raises:
        InputError: It holds none. Who lost a workspace would train all anew where it can be
            restored.
    """
    known = life_of(recipe).modelled(workspace)
    if not known:
        remedy = f"holds no model; run {METHODS[recipe.method].flow}"
        if not workspace.path("sources").exists():
            remedy += "; or, if one was registered and is lost here: flows.restore "
            remedy += f"{recipe.registered_name} champion"
        raise_faults([Fault("workspace", str(workspace.root), remedy)])
    return known


def domain_faults(
    where: str, given: Any, wanted: Any, *, joining: str | None = None
) -> list[Fault]:
    """Where the recipe's domains are not those that the change is about; ``joining`` is new too."""
    given, wanted = set(given), set(wanted)
    found = []
    for name in sorted(given - wanted):
        remedy = "is in the recipe and not in the model; add it first: python -m flows.grow RECIPE "
        remedy += f"{name}; or take it out of the recipe"
        if joining is not None:
            remedy = "is not in the model either, and one joins at a time: take it out of the "
            remedy += f"recipe until {joining} has joined"
        found.append(Fault(f"{where}.{name}", name, remedy))
    for name in sorted(wanted - given):
        remedy = "is in the model and not in the recipe; name it there too (a deployment holds the "
        remedy += "recipe as it was: make deploy RECIPE=...); or, if it is to leave the model: "
        found.append(
            Fault(f"{where}.{name}", name, f"{remedy}python -m flows.shrink RECIPE {name}")
        )
    return found


def _scores(session: FlowSession) -> dict[str, float]:
    path, method = session.workspace.path("report") / "metrics.json", session.recipe.method
    try:
        scores = life_of(session.recipe).scores(json.loads(path.read_text()), method)
        return dict(scores)
    except (FileNotFoundError, ValueError, KeyError) as error:
        remedy = "the model's scores are not there: the flow that built it did not end; end it "
        remedy += f"first: {METHODS[method].flow}"
        raise InputError(Fault("workspace", str(path), remedy)) from error


def _texts(session: FlowSession) -> dict[str, str]:
    """As ``Change.texts``, of as much as there is yet."""
    workspace = session.workspace
    folders = {d: workspace.path(f"corpora/{d}") / "heldout" for d in session.recipe.domains}
    found = {
        domain: fingerprint(tree_digest(folder))
        for domain, folder in folders.items()
        if folder.is_dir()
    }
    files = {name: workspace.path(name) for name in QUESTIONS}
    return found | {name: sha256_file(path) for name, path in files.items() if path.is_file()}
