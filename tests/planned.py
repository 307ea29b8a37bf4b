"""A plan beside what a flow has left on the disk."""

from pathlib import Path

from tasks.engine.workspace import Workspace
from tasks.living.lineage import with_lineage
from tasks.methods import stages_of
from tasks.planning.machine import Machine
from tasks.planning.plan import plan
from tasks.recipes import load_recipe

ROOMY = Machine(memory=10**12, cpus=8, disk=10**13)
HELD = (".safetensors",)


def kept(recipe: Path, home: Path, *added: Path) -> dict[str, tuple[int, int]]:
    """{stage: bytes planned, bytes there} of stages that keep weights or sums.

    Tokenizers, curves and records are left out: beside pico models they are large.
    """
    loaded = load_recipe(recipe, added=added)
    loaded = with_lineage(loaded, Workspace(home / loaded.name))
    made = plan(loaded, home, ROOMY, base=0)
    assert all(row.is_done for row in made.rows)
    found = {}
    for stage in stages_of(loaded):
        folders = [home / loaded.name / stage.artifact(item) for item in stage.items(loaded)]
        files = [file for folder in folders for file in folder.rglob("*") if file.suffix in HELD]
        size = sum(file.stat().st_size for file in files)
        if size > 10_000:
            [row] = [row for row in made.rows if row.stage == stage.name]
            found[stage.name] = row.kept, size
    return found
