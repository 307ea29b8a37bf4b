"""A project with servers and a worker of its own, as `make up` starts them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect_server import free_port
from project import Project
from texts import pico_recipe, save_recipe, write_texts

from infra.settings import Settings, read

DOMAINS = ("letters", "numbers")


class Served(Project):
    """A project with servers on free ports."""

    ports: dict[str, str]

    def environment(self, **more: str) -> dict[str, str]:
        return super().environment(**self.ports, PREFECT_WORKER_QUERY_SECONDS="1", **more)

    @property
    def settings(self) -> Settings:
        """Where its servers are."""
        return read(self.environment())


@contextmanager
def served_project(folder: Path) -> Iterator[Served]:
    """A pico recipe of two domains, and everything up; it is stopped afterwards."""
    texts = write_texts(folder / "texts", domains=DOMAINS)
    values = pico_recipe(texts, domains=DOMAINS)
    values["evaluation"] |= {"sweep_top_k": [], "sweep_ridge_lambda": [], "sweep_window": []}
    project = Served(folder, save_recipe(folder / "recipe.yaml", values), own_server=True)
    project.ports = {
        "UPCYCLE_PREFECT_PORT": str(free_port()),
        "UPCYCLE_MLFLOW_PORT": str(free_port()),
    }
    try:
        project.run(sys.executable, "-m", "infra.services", "up")
        yield project
    finally:
        project.run(sys.executable, "-m", "infra.services", "down")
