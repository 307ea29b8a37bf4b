"""Deployments: which flows the server offers by hand and on a schedule, and with which recipe."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from infra.recipe.reading import load_recipe
from infra.recipe.schema import resolve
from infra.settings import REPOSITORY, Settings, environment_of
from upcycle_core.errors import Fault, InputError

DEFAULT = "recipes/demo.yaml"
PREFECT_FILE = REPOSITORY / "infra" / "services" / "deploy" / "prefect.yaml"
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
}
"""JSON schema's limits of numbers, as people say them."""


class DeploymentError(RuntimeError):
    """Prefect refused a deployment; the message is what it printed."""


def deploy(
    settings: Settings,
    *,
    prefect_file: Path = PREFECT_FILE,
    recipe: Path | None = None,
    changes: Sequence[str] = (),
) -> list[str]:
    """Register the deployments of ``prefect_file`` with the server.

    Where it names a recipe's path (with files of baselines or tasks after it, and settings under
    ``set``), the server gets the resolved recipe: it checks the values, and its pages show them as
    a form.

    Args:
        settings: Where the server is.
        prefect_file: Deployments, in Prefect's format. Paths in it are seen from the checkout.
        recipe: A recipe to deploy in place of the embedded default, where that is named.
        changes: ``dotted.key=value`` settings of ``recipe``.

    Returns:
        Their names (``dume/nightly``). A flow is named after its module.

    Raises:
        InputError: There is no server, or a recipe is faulty.
        DeploymentError: Prefect refused.
    """
    api = settings.prefect_api_url
    if api is None:
        raise InputError(Fault("server", None, "no Prefect server is running; start it: make up"))
    content = yaml.safe_load(prefect_file.read_text())
    if recipe is not None:
        content["deployments"] = list(_with_recipe(content["deployments"], recipe, changes))
    names = []
    for deployment in content["deployments"]:
        parameters = deployment.get("parameters", {})
        if isinstance(parameters.get("recipe"), str):
            first, *others = [REPOSITORY / path for path in parameters["recipe"].split()]
            own = parameters.pop("set", [])
            parameters["recipe"] = resolve(load_recipe(first, own, added=others))
        module = Path(deployment["entrypoint"].partition(":")[0]).stem
        names.append(f"{module}/{deployment['name']}")
    resolved = settings.services / "prefect.yaml"
    resolved.parent.mkdir(parents=True, exist_ok=True)
    resolved.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    _prefect_deploy(
        resolved,
        environment_of(
            settings,
            PREFECT_API_URL=api,
            PYTHONPATH=str(REPOSITORY),
            UPCYCLE_CHECKOUT=str(REPOSITORY),
        ),
    )
    _show_limits(api, names)
    return names


def _with_recipe(
    deployments: Sequence[dict[str, Any]], recipe: Path, changes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Those of the embedded default, with ``recipe`` in its place, and those of no recipe."""
    loaded = load_recipe(recipe, changes)
    names = {"name": loaded.registered_name}
    for deployment in deployments:
        parameters = deployment.get("parameters", {})
        if parameters.get("recipe") == DEFAULT:
            yield {**deployment, "parameters": {**parameters, "recipe": resolve(loaded)}}
        elif "recipe" not in parameters:
            yield {**deployment, "parameters": {**parameters, **names}}


def _prefect_deploy(prefect_file: Path, environment: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    done = subprocess.run(
        [*command, "--prefect-file", str(prefect_file)],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise DeploymentError(f"prefect deploy failed:\n{done.stdout}")


def _show_limits(api: str, names: Sequence[str]) -> None:
    """Put every limit into the description beside it: Prefect's form shows that alone."""
    # These take a second, which `make up` and the others do without.
    from httpx import HTTPError
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentUpdate

    try:
        with SyncPrefectClient(api) as client:
            for name in names:
                deployment = client.read_deployment_by_name(name)
                schema = with_limits(deployment.parameter_openapi_schema)
                update = DeploymentUpdate(parameter_openapi_schema=schema)
                client.update_deployment(deployment.id, update)
    except HTTPError as error:
        message = f"the server at {api} did not take the forms ({error}); deploy once more"
        raise DeploymentError(message) from error


def with_limits(schema: Any) -> Any:
    """A JSON schema whose descriptions say the limits of what they describe."""
    if isinstance(schema, list):
        return [with_limits(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: with_limits(value) for key, value in schema.items()}
    limits = [
        words.format(kind[limit])
        for kind in (schema, *schema.get("anyOf", ()))
        for limit, words in LIMITS.items()
        if limit in kind
    ]
    if limits and isinstance(schema.get("description"), str):
        found["description"] = f"{schema['description']} {', '.join(limits).capitalize()}."
    return found
