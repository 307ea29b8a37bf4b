"""Straight-line compositions of stages, as Prefect flows."""

from infra import settings

# Before any module of this package imports prefect, ray or mlflow: they read the environment once.
settings.configure()
