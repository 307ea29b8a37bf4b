"""Lay out text for a model's first night: what it is built from, and one file that is tonight's.

``python -m flows.first_night [FOLDER]``

The folder is what ``recipes/nightly.yaml`` reads: ``python/`` and ``heldout/``, of this Python's
own library. ``tonight/asyncio.txt`` is read by nobody until it is moved to ``python/``.
"""

import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from flows.running.arguments import parser_of
from infra.services.stopping import run_stoppable
from upcycle_core.corpora.harvest import harvest_documents

PACKAGE = "asyncio"
"""What comes tonight."""
HELD_OUT = 20
"""Of as many documents one judges the others."""
BYTES = 2_000_000
"""Of the library: what the other domains of the recipe have."""
SEPARATOR = "\n<|doc|>\n"
NEXT = """\
A first night, with text that is new:
  {python} -m flows.dume recipes/nightly.yaml --set folder={folder}
  mv {folder}/tonight/{package}.txt {folder}/python/
  {python} -m flows.retrain recipes/nightly.yaml --set folder={folder}"""


def lay_out(folder: Path) -> None:
    """Write the folder, whole or not at all; one that is there stays as it is."""
    if folder.exists():
        return
    documents = list(harvest_documents("python", seed=0))
    tonight = [d.text for d in documents if f"/{PACKAGE}/" in d.file]
    library = [d.text for d in documents if f"/{PACKAGE}/" not in d.file]
    library = list(_first(library, BYTES))
    texts = {
        f"tonight/{PACKAGE}": tonight,
        "heldout/library": library[::HELD_OUT],
        "python/library": [text for i, text in enumerate(library) if i % HELD_OUT],
    }
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name, parts in texts.items():
        file = partial / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SEPARATOR.join(parts))
    partial.rename(folder)


def _first(texts: Iterable[str], size: int) -> Iterator[str]:
    """The first of ``texts``, about ``size`` bytes of them."""
    for text in texts:
        if size <= 0:
            return
        size -= len(text.encode())
        yield text


def main(arguments: list[str] | None = None) -> int:
    """Lay it out, and say what to type."""
    folder = parser_of("first_night").parse_args(arguments).folder
    lay_out(folder)
    print(NEXT.format(python=_shown(Path(sys.executable)), folder=folder, package=PACKAGE))
    return 0


def _shown(path: Path) -> Path:
    """As people type it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


if __name__ == "__main__":
    sys.exit(run_stoppable(main))
