"""DeRS: experts of a finished model as one shared base and light deltas, the smallest registered.

``python -m flows.ders RECIPE COMPRESSION [ROWS ...] [--set dotted.key=value ...] [--out FOLDER]``

The first file is the recipe of ``flows.dume``; what has been made is used again. Another holds
``compression:``, the ways to store deltas, and maybe ``baselines:``, models to compress as well.
"""

import argparse
import json
import sys
from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from flows.artifacts import folder_faults, key_of, publish_links, publish_pictures
from flows.compression_page import write_page
from flows.session import THREADS, FlowSession, open_session
from infra import settings as environment
from infra.reading import load_recipe, validate
from infra.recipe import Recipe, resolve
from tasks import pipeline
from tasks.compression import MODEL, REPORT, row_title
from tasks.register import Outcome, register_compressed
from tasks.sources import check
from tasks.workspace import Workspace
from upcycle_core.errors import Fault, InputError, raise_faults

SUMMARY = "compression.txt"


@flow(name="ders", task_runner=THREADS)
def ders(recipe: Recipe) -> str | None:
    """Store the experts of the recipe's model as a base and deltas; register the smallest.

    Args:
        recipe: What to make; ``compression`` says in which ways, and how much may be lost.

    Returns:
        The registered version, ``models:/NAME/NUMBER``; None if no way is good enough.
    """
    recipe = validate(resolve(recipe))
    raise_faults(_faults(recipe))
    with open_session("ders", recipe) as session:
        for stage in pipeline.ORDER:
            if stage is pipeline.baselines:
                session.ensure(stage, [row for row in recipe.compressed if row in recipe.baselines])
            elif stage not in (*pipeline.ON_TASKS, pipeline.comparison):
                session.ensure(stage)
        session.finish()
        outcome = register_compressed(
            session.stages, session.registry, session.versions, session.run
        )
        _publish(session, outcome)
        session.workspace.sweep()
    return None if outcome is None else outcome.version.reference


def _faults(recipe: Recipe) -> list[Fault]:
    if recipe.compression is not None:
        return []
    remedy = "says how deltas are stored; add a file that does, e.g. recipes/compression.yaml"
    return [Fault("compression", None, remedy)]


def _publish(session: FlowSession, outcome: Outcome | None) -> None:
    """Show the table and the pictures in Prefect and MLflow, and leave a summary for people."""
    recipe, run = session.recipe, session.run
    folder = session.workspace.path("compression")
    report = folder / REPORT
    metrics = json.loads((report / "metrics.json").read_text())
    table = (report / "table.md").read_text()
    for row in recipe.compressed:
        for name, point in metrics["sweeps"][row_title(recipe, row)]["points"].items():
            for figure in ("normalised_average", "percent_of_original"):
                run.log_metrics({f"{figure}/{row}/{name}": point[figure]})
    run.log_artifacts(report, "compression")
    verdict = _verdict(outcome)
    run.describe(f"{table}\n{verdict}")
    create_markdown_artifact(
        key=key_of(f"{recipe.name}-compression"),
        markdown=f"{table}\n{verdict}",
        description="Size and quality of every way to store the experts' deltas.",
    )
    publish_pictures(f"{recipe.name}-compression", sorted(report.glob("*.png")))
    if outcome is not None:
        publish_links(session, outcome.version)
    text = f"{table}\n{verdict}\n\nReport    {report / 'report.html'}\n"
    if outcome is not None:
        text += f"Model     {folder / MODEL}\n\nGenerate text:  .venv/bin/python -m flows.generate "
        text += f'{outcome.version.name}/{outcome.version.number} "The first"\n'
    (session.workspace.root / SUMMARY).write_text(text)


def _verdict(outcome: Outcome | None) -> str:
    if outcome is None:
        return "No way to store the deltas is within the tolerance; nothing is registered."
    aliases = ", ".join(outcome.version.aliases) or "no alias"
    return f"`{outcome.version.reference}` ({aliases}): {outcome.decision}."


def main(arguments: list[str] | None = None) -> int:
    """Run the flow on recipe files; bad input ends with exit code 2 and every fault named."""
    parser = argparse.ArgumentParser(prog="python -m flows.ders", description=__doc__)
    parser.add_argument("recipe", type=Path, nargs="+", help="YAML files; the first is the recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="write a page of the results into this folder")
    chosen = parser.parse_args(arguments)
    home = environment.configure().home
    try:
        recipe = load_recipe(chosen.recipe[0], chosen.set, added=chosen.recipe[1:])
        raise_faults([*_faults(recipe), *folder_faults(chosen.out)])
        check(recipe, home / "models")
        workspace = home / recipe.name
        with Workspace(workspace).lock("the start of a flow"):
            pass  # said here in one line, before Prefect records a run that cannot begin
        ders(recipe)
        print((workspace / SUMMARY).read_text())
        if chosen.out is not None:
            files = [str(path) for path in chosen.recipe]
            write_page(recipe, files, chosen.set, workspace=workspace, out=chosen.out)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
