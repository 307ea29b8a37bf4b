"""Prove that a registered model arrives: ``python -m flows.certify NAME@champion``.

Each reader opens it with its own loader, in a process of its own; the table says what it made of
it, and is kept with the version. ``make readers`` installs readers beside transformers and MLflow.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.running.arguments import parser_of
from flows.running.command_line import command
from infra import settings as environment
from infra.tracking.registry import Registry
from upcycle_core.errors import Fault, InputError


@command
def main(arguments: list[str] | None = None) -> None:
    """Ask the readers and print the table; a fault of any of them is an error."""
    chosen = parser_of("certify").parse_args(arguments)
    if not {"@", "/"} & set(chosen.model):
        remedy = f"names no version; write {chosen.model}@champion or {chosen.model}/1"
        raise InputError(Fault("model", chosen.model, remedy))
    registry = Registry(environment.configure())
    reference = f"models:/{chosen.model.removeprefix('models:/')}"
    version = registry.referenced(reference)

    from infra.readers.reader import READERS  # torch
    from tasks.release.certificate import certify_version
    from tasks.release.certify import TOLERANCES, as_table

    unknown = sorted(set(chosen.forms or ()) - set(TOLERANCES))
    if unknown:
        raise InputError(Fault("forms", unknown[0], f"choose of {', '.join(TOLERANCES)}"))
    with _files(registry, version.reference) as files:
        rows = certify_version(
            registry,
            version,
            files,
            readers=chosen.readers or tuple(READERS),
            forms=chosen.forms or tuple(TOLERANCES),
            seconds=chosen.seconds,
        )
    print(f"\n{version.reference}\n\n{as_table(rows)}")
    failed = sorted({f"{row.reader} {row.form}" for row in rows if row.verdict == "failed"})
    if failed:
        remedy = "did not arrive; the table says what it lost"
        raise InputError(*(Fault("certificate", name, remedy) for name in failed))


@contextmanager
def _files(registry: Registry, reference: str) -> Iterator[Path]:
    """All files of a version: where they lie, or a copy for a while."""
    here = registry.place(reference)
    if here is not None:
        yield here
        return
    with tempfile.TemporaryDirectory(prefix="certificate-") as folder:
        yield registry.download(reference, Path(folder) / "version")


if __name__ == "__main__":
    sys.exit(main())
