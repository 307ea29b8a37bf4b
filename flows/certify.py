"""Prove that a registered model arrives: ``python -m flows.certify NAME@champion``.

Each reader opens it with its own loader, in a process of its own; the table says what it made of
it, and is kept with the version. ``make readers`` installs readers beside transformers and MLflow.
"""

import sys

from flows.running.arguments import parser_of
from flows.running.command_line import command
from infra import settings as environment
from infra.tracking.registry import Registry
from upcycle_core.errors import Fault, InputError


@command
def main(arguments: list[str] | None = None) -> None:
    """Ask the readers and print the table; a fault of any of them is an error.

    A champion that was lost on the way is none any more, if its recipe requires a certificate.
    """
    chosen = parser_of("certify").parse_args(arguments)
    registry = Registry(environment.configure())
    version = registry.referenced(chosen.model)
    if not version.model_id:
        remedy = "is files beside MLflow, not a model that it has logged: its certificate would "
        remedy += "have no place; log it and register that"
        raise InputError(Fault("model", chosen.model, remedy))

    from infra.readers.reader import READERS  # torch
    from tasks.release.certificate import certify_version, revoke, version_files
    from tasks.release.verdict import TOLERANCES, as_table

    unknown = sorted(set(chosen.forms or ()) - set(TOLERANCES))
    if unknown:
        raise InputError(Fault("forms", unknown[0], f"choose of {', '.join(TOLERANCES)}"))
    with version_files(registry, version) as files:
        rows = certify_version(
            registry,
            version,
            files,
            readers=chosen.readers or tuple(READERS),
            forms=chosen.forms or tuple(TOLERANCES),
            seconds=chosen.seconds,
        )
    print(f"\n{version.reference}\n\n{as_table(rows)}")
    failed = sorted({row.name for row in rows if row.verdict == "failed"})
    if failed:
        remedy = "did not arrive; the table says what it lost"
        faults = [Fault("certificate", name, remedy) for name in failed]
        raise InputError(*faults, *revoke(registry, version, rows))


if __name__ == "__main__":
    sys.exit(main())
