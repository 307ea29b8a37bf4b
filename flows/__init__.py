"""Straight-line compositions of stages, as Prefect flows."""

import sys

from infra import settings
from upcycle_core.errors import InputError

# Before any module of this package imports prefect, ray or mlflow: they read the environment once.
try:
    settings.configure()
except InputError as error:
    print(error, file=sys.stderr)
    raise SystemExit(2) from None
