"""Deployments: which flows the server offers by hand and on a schedule, and with which recipe."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import yaml

from infra.recipe.reading import load_recipe
from infra.recipe.schema import Recipe, resolve
from infra.services.api import DeploymentError, asked, changed, filled, server_of
from infra.services.checking import check_recipe
from infra.services.pools import Pool
from infra.services.standing import TAG, Chosen, Standing, choose, deployed, recipe_tags
from infra.settings import REPOSITORY, Settings, environment_of
from upcycle_core.errors import Fault, InputError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

DEFAULT, MAKER = "recipes/demo.yaml", "flows/dume.py:dume"
ANY_MAKER = "flows/make.py:make"
LIFE = ("retrain", "notice", "grow", "shrink")
"""Flows of models that learn, and of their nights."""
PREFECT_FILE = REPOSITORY / "infra" / "services" / "deploy" / "prefect.yaml"
BRACES = {"UPCYCLE_BRACES": "{{ $UPCYCLE_BRACES_AT_LAST }}", "UPCYCLE_BRACES_AT_LAST": "{{"}
"""What `prefect deploy`, which fills places twice, is told of double braces."""
LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "less than {}",
}
"""JSON schema's limits of numbers, as people say them."""


def deploy(
    settings: Settings,
    *,
    prefect_file: Path = PREFECT_FILE,
    recipe: Path | None = None,
    added: Sequence[Path] = (),
    changes: Sequence[str] = (),
    notice: str | None = None,
    pool: str | None = None,
    job_variables: Mapping[str, str] | None = None,
    schedule: str | None = None,
    timezone: str | None = None,
) -> list[str]:
    """Register the deployments of ``prefect_file`` with the server, under their recipe's name.

    Where it names a recipe's path (with files of baselines or tasks after it, and settings under
    ``set``), the server gets the resolved recipe: it checks the values, and its pages show them as
    a form. What was deployed of the same recipe before, and is not in the file, goes; what was
    deployed of other recipes stays.

    Args:
        settings: Where the server is.
        prefect_file: Deployments, in Prefect's format. Paths in it are seen from the checkout;
            ``{name}`` and ``{model}`` stand for the names of the recipe and its registered model,
            ``{notice}``, ``{schedule}`` and ``{timezone}`` for what is given here; what names a
            notice is left out without one.
        recipe: A recipe to deploy in place of the embedded default, where that is named.
        added: Files of tasks or rows beside ``recipe``, as flows take them.
        changes: ``dotted.key=value`` settings of ``recipe``.
        notice: The block of Prefect, ``TYPE/NAME``, through which a failed night is told, or
            ``none``; by default what was said when the recipe was deployed before.
        pool: The work pool whose worker runs the flows; by default the one that ran them before, at
            first that of ``make up``.
        job_variables: Of the pool, what differs: ``image``, ``image_pull_policy``.
        schedule: When a night is, as cron has it; by default as before, at first at three.
        timezone: Whose hours those are, as the IANA calls it; likewise, at first UTC.

    Returns:
        Their names (``dume/demo``). A flow is named after its module.

    Raises:
        InputError: There is no server, no such block, pool or schedule, the pool's template lacks
            what flows need, or a recipe is faulty.
        DeploymentError: Prefect refused, or the flows would refuse the recipe.
    """
    api = server_of(settings)
    name = load_recipe(recipe or REPOSITORY / DEFAULT, changes, added=added).name
    told = Standing(notice, pool, job_variables, schedule, timezone)
    chosen = choose(api, name, told, home=settings.home)
    lives = True if recipe is None else _check(settings, recipe, added, changes, chosen.pool)
    content = yaml.safe_load(prefect_file.read_text())
    said = _said(content["deployments"], chosen, lives)
    own = [_moved(each, chosen.pool) for each in offered(said, recipe, changes, added)]
    _register(settings, api, content, own, chosen.pool)
    names = [_full_name(deployment) for deployment in own]
    with asked(api) as client:
        _remove_others(client, TAG + name, names)
        for deployment in own:
            _complete(client, deployment)
    return names


def undeploy(settings: Settings, name: str) -> list[str]:
    """Take away all deployments of a recipe, with their schedules, triggers and runs to come.

    Args:
        settings: Where the server is.
        name: The recipe's.

    Returns:
        What is deployed no more.

    Raises:
        InputError: There is no server, or nothing of the recipe is deployed.
        DeploymentError: Prefect refused.
    """
    with asked(server_of(settings)) as client:
        found = deployed(client)
        names = [full for full, own in found.items() if TAG + name in recipe_tags(own)]
        if not names:
            tags = {tag for deployment in found.values() for tag in recipe_tags(deployment)}
            known = ", ".join(sorted(tag.removeprefix(TAG) for tag in tags)) or "nothing"
            remedy = f"no recipe of this name is deployed; deployed: {known}"
            raise InputError(Fault("name", name, remedy))
        for full_name in names:
            _remove(client, found[full_name].id)
    return names


def offered(
    deployments: Sequence[dict[str, Any]],
    recipe: Path | None,
    changes: Sequence[str],
    added: Sequence[Path] = (),
) -> Iterator[dict[str, Any]]:
    """Each with its resolved recipe and names; where one is given, those of the default alone, of
    which the first is what makes a model of such a recipe."""
    default = load_recipe(recipe or REPOSITORY / DEFAULT, changes, added=added)
    for deployment in deployments:
        if recipe is not None and deployment["entrypoint"] == MAKER:
            deployment = {**_maker(deployments, default), "parameters": deployment["parameters"]}
        parameters = dict(deployment.get("parameters", {}))
        loaded, files = default, parameters.get("recipe", DEFAULT)
        if recipe is not None and files != DEFAULT:
            continue
        if files != DEFAULT:
            first, *others = [REPOSITORY / path for path in files.split()]
            loaded = load_recipe(first, parameters.pop("set", []), added=others)
        named = {"{name}": loaded.name, "{model}": loaded.registered_name}
        found = filled({**deployment, "parameters": parameters}, named)
        if "recipe" in parameters:
            found["parameters"]["recipe"] = resolve(loaded)
        yield {**found, "tags": [*found.get("tags", ()), TAG + loaded.name]}


def _maker(deployments: Sequence[dict[str, Any]], recipe: Recipe) -> dict[str, Any]:
    """The deployment whose flow makes the recipe's model: it is called as its section is, or as its
    method; a method without a flow of its own is made by ``flows.make``."""
    own = {Path(d["entrypoint"].partition(":")[0]).stem: d for d in deployments}
    asked = [d for flow, d in own.items() if getattr(recipe, flow, None) is not None]
    if asked or recipe.method in ("", *own):
        return asked[0] if asked else own[recipe.method or "dume"]
    made = {"entrypoint": ANY_MAKER, "tags": [recipe.method]}
    return {**own["dume"], **made, "description": f"{{name}}: a model made by {recipe.method}."}


def _moved(deployment: dict[str, Any], pool: Pool | None) -> dict[str, Any]:
    """The deployment with the pool that was asked for in place of its own."""
    if pool is None:
        return deployment
    work_pool = {**deployment["work_pool"], "name": pool.name}
    if pool.job_variables is not None:
        work_pool["job_variables"] = dict(pool.job_variables)
    return {**deployment, "work_pool": work_pool}


def _register(
    settings: Settings, api: str, content: Any, own: Sequence[dict[str, Any]], pool: Pool | None
) -> None:
    """Let the server have ``own`` in the place of the deployments of ``content``."""
    resolved = {**content, "deployments": [_with_recipe(each, _hidden) for each in own]}
    checkout = str(REPOSITORY if pool is None else pool.checkout)
    ours = {"PYTHONPATH": str(REPOSITORY), "UPCYCLE_CHECKOUT": checkout, **BRACES}
    settings.services.mkdir(parents=True, exist_ok=True)
    prefect_deploy(resolved, settings, environment_of(settings, PREFECT_API_URL=api, **ours))


def _check(
    settings: Settings,
    recipe: Path,
    added: Sequence[Path],
    changes: Sequence[str],
    pool: Pool | None,
) -> bool:
    """Whether the recipe's models live on; texts are looked for where this machine has them."""
    is_here = pool is None or pool.job_variables is None
    if pool is not None and not is_here:
        print(f"Texts and models of {recipe} are not looked at: the pool {pool.name} has its own.")
    lives = check_recipe(settings, recipe, added, changes, sees_paths=is_here)
    loaded = load_recipe(recipe, changes, added=added)
    if lives and loaded.compute.limit_hours is None:
        said = "a night that hangs would keep all later ones waiting, and nobody is told"
        print(f"{loaded.name} has no compute.limit_hours: {said}.")
    return lives


def _said(
    deployments: Sequence[dict[str, Any]], chosen: Chosen, lives: bool
) -> list[dict[str, Any]]:
    """The deployments with what was said in its places; without a notice, none that gives one, and
    of models that do not live on, none that would have them do so."""
    said = {"{schedule}": chosen.schedule, "{timezone}": chosen.timezone}
    said["{notice}"] = chosen.notice or ""
    left = [d for d in deployments if chosen.notice is not None or not _names_notice(d)]
    kept = [d for d in left if lives or Path(d["entrypoint"].partition(":")[0]).stem not in LIFE]
    return [filled(each, said) for each in kept]


def _names_notice(deployment: Mapping[str, Any]) -> bool:
    return "{notice}" in deployment.get("parameters", {}).values()


def _full_name(deployment: Mapping[str, Any]) -> str:
    module = Path(deployment["entrypoint"].partition(":")[0]).stem
    return f"{module}/{deployment['name']}"


def _remove_others(client: "SyncPrefectClient", tag: str, names: Collection[str]) -> None:
    """Delete what has this recipe's tag, and another name."""
    for name, deployment in deployed(client).items():
        if tag in recipe_tags(deployment) and name not in names:
            _remove(client, deployment.id)


def _remove(client: "SyncPrefectClient", deployment: UUID) -> None:
    """Delete a deployment and what starts it: Prefect leaves its triggers."""
    client.delete_resource_owned_automations(f"prefect.deployment.{deployment}")
    client.delete_deployment(deployment)


def prefect_deploy(content: Any, settings: Settings, environment: Mapping[str, str]) -> None:
    """Let Prefect register what ``content`` says, in the format of its prefect.yaml.

    Raises:
        DeploymentError: It refused.
    """
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    # A file of its own: another recipe may be deployed at the same time.
    with tempfile.TemporaryDirectory(dir=settings.services, prefix="deploy-") as folder:
        resolved = Path(folder, "prefect.yaml")
        resolved.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
        done = subprocess.run(
            [*command, "--prefect-file", str(resolved)],
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


def _complete(client: "SyncPrefectClient", given: Mapping[str, Any]) -> None:
    """Give a deployment its recipe as it is, and put every limit into the description beside it:
    Prefect's form shows that alone."""
    from prefect.client.schemas.actions import DeploymentUpdate

    deployment = client.read_deployment_by_name(_full_name(given))
    schema = with_limits(deployment.parameter_openapi_schema)
    recipe = {key: own for key, own in given["parameters"].items() if key == "recipe"}
    parameters = {**deployment.parameters, **recipe}
    update = DeploymentUpdate(parameter_openapi_schema=schema, parameters=parameters)
    client.update_deployment(deployment.id, update)


def _with_recipe(deployment: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The deployment with every text of its recipe changed."""
    parameters = deployment["parameters"]
    recipe = {"recipe": changed(parameters["recipe"], change)} if "recipe" in parameters else {}
    return {**deployment, "parameters": {**parameters, **recipe}}


def _hidden(text: str) -> str:
    """Text whose double braces `prefect deploy` finds in its environment, and not before its end.

    It takes ``{{answer}}``, wherever it stands, for a place of its own, and leaves it empty.
    """
    return text.replace("{{", "{{ $UPCYCLE_BRACES }}")


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
