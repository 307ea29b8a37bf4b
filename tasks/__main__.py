"""``python -m tasks STAGE [DOMAIN, BASELINE or MODEL]`` in a workspace: how DVC runs a stage.

``python -m tasks why STAGE [...]`` says what it would run for, and why, and runs nothing.

The recipe is the workspace's params.yaml, so DVC and the flows read the same values.
"""

import argparse
import sys
from pathlib import Path

from infra import settings as environment
from infra.services.stopping import run_stoppable


def main(arguments: list[str] | None = None) -> int:
    """Run one stage, or all that it runs for, unless it is up to date."""
    parser = argparse.ArgumentParser(prog="python -m tasks", description=__doc__)
    parser.add_argument(
        "stage",
        nargs="+",
        help="a stage of dvc.yaml and what it runs for, all by default; before it `why` to hear "
        "what would run; or `sweep` to delete what stages have that did not end",
    )
    parser.add_argument("--workspace", type=Path, default=Path.cwd(), help="the current folder")
    chosen = parser.parse_args(arguments)
    asks_why = chosen.stage[0] == "why"
    name, *rest = chosen.stage[asks_why:] or [""]
    settings = environment.configure()

    from infra.cluster.compute import cluster
    from tasks.engine.headline import write_headline
    from tasks.engine.sources import CODE
    from tasks.engine.stage import Session
    from tasks.engine.workspace import Workspace
    from tasks.living.freshness import explained
    from tasks.methods import stages_of
    from upcycle_core.errors import Fault, InputError

    workspace = Workspace(chosen.workspace)
    try:
        recipe = recipe_of(workspace)
        stages = {stage.name: stage for stage in stages_of(recipe)}
        if name not in (*stages, "sweep") or len(rest) > 1:
            raise InputError(
                Fault("stage", " ".join(chosen.stage), f"not a stage; use one of {list(stages)}")
            )
        with workspace.lock(f"python -m tasks {' '.join(chosen.stage)}"):
            if name == "sweep":
                print(f"{workspace.sweep() / 1e6:.1f} MB freed")
                return 0
            stage = stages[name]
            session = Session(recipe, workspace, log=lambda text: print(text, flush=True))
            items = chosen_items(stage.name, list(stage.items(recipe)), rest)
            if asks_why:
                print("\n".join(explained(session, stages_of(recipe), stage, items)))
                return 0
            dashboard = session.log if recipe.compute.dashboard else None
            with cluster(
                settings,
                recipe.compute.cpus,
                CODE,
                workspace=workspace.root,
                dashboard=dashboard,
            ):
                for item in items:
                    stage.ensure(session, item)
            write_headline(recipe, workspace)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def chosen_items(name: str, there: list[str], asked: list[str]) -> list[str]:
    """The items of a stage that are asked for; all by default.

    Raises:
        InputError: It has no such item.
    """
    for item in asked:
        if item not in there:
            from upcycle_core.errors import Fault, InputError

            remedy = f"is no item of {name}; those are {', '.join(there) or 'none'}"
            raise InputError(Fault("stage", item, remedy))
    return asked or there


def recipe_of(workspace):
    """The recipe that a workspace's params.yaml resolves."""
    import yaml

    from tasks.recipes import validate
    from upcycle_core.errors import Fault, InputError

    path = workspace.root / "params.yaml"
    if not path.exists():
        remedy = "no params.yaml there; run the flow once, or change to a workspace"
        raise InputError(Fault("workspace", str(workspace.root), remedy))
    values = yaml.safe_load(path.read_text())
    for generated in ("code", "packages"):
        values.pop(generated, None)
    return validate(values)


if __name__ == "__main__":
    sys.exit(run_stoppable(main))
