"""Straight-line compositions of stages, as Prefect flows."""

import gc
import sys

from infra import settings
from infra.services import stopping
from upcycle_core.errors import InputError

if sys.argv[0] == "-m":  # Python looks for one of these modules, to run it as a program
    stopping.end_at_once()
    gc.disable()  # a tenth of what the imports take; ``run_stoppable`` enables it again

# Before any module of this package imports prefect, ray or mlflow: they read the environment once.
try:
    settings.configure()
except InputError as error:
    print(error, file=sys.stderr)
    raise SystemExit(2) from None

if sys.argv[0] == "-m":
    from flows.running.arguments import look_first

    look_first(sys.orig_argv)
