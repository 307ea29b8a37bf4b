"""Work pools of containers: their templates on the server, and deployments to them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import yaml

from infra.recipe.names import SECRET_KEY, masked
from infra.services.api import asked, filled, server_of
from infra.settings import REPOSITORY, Settings
from upcycle_core.errors import Fault, InputError, raise_faults

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import WorkPool

LOCAL = "local"
"""The pool of the worker that ``make up`` starts."""
TEMPLATES = {
    kind: REPOSITORY / "infra" / "services" / "deploy" / "pools" / f"{kind}.yaml"
    for kind in ("docker", "kubernetes")
}
"""Of each type of pool whose flows run in containers: its base job template."""
CHECKOUT = "/upcycle"
HOME = "/home/upcycle"
"""Where the checkout lies in the image of compose.yaml, and where it expects the volume."""
DERIVED = {
    "UPCYCLE_HOME": "--home PATH",
    "PREFECT_HOME": "--home PATH",
    "PYTHONPATH": "the image",
}
"""Variables that must agree with what else stands in the template, and where they come from."""
ADDRESSES = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "RAY_ADDRESS")
"""Variables without which a flow in a container would compute on servers of its own."""
LOOPBACK = re.compile(r"localhost|127(\.\d+){3}|::1|0\.0\.0\.0")


@dataclass(frozen=True)
class Pool:
    """A work pool, as a deployment names it.

    Args:
        name: Its name.
        checkout: Where flows that run there find the checkout.
        job_variables: What differs from the pool's defaults; ``None`` where flows are processes of
            this machine, for which a deployment says all.
    """

    name: str
    checkout: Path
    job_variables: dict[str, str] | None = None


def create_pool(
    settings: Settings,
    kind: str,
    *,
    name: str | None = None,
    home: str = HOME,
    changes: Sequence[str] = (),
) -> str:
    """Create a work pool on the server, or give the one that is there the template of today.

    Args:
        settings: Where the server is.
        kind: ``docker`` or ``kubernetes``.
        name: What the pool is called; its type unless given.
        home: Where containers mount the shared volume: ``UPCYCLE_HOME``.
        changes: ``variable=value`` defaults of the template's variables; ``env.NAME=value`` for one
            variable of the environment.

    Returns:
        The pool's name.

    Raises:
        InputError: There is no server, no template for the type, or a value is missing or wrong.
        DeploymentError: Prefect refused.
    """
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate

    template = template_of(kind, home=home, changes=changes)
    name = name or kind
    with asked(server_of(settings)) as client:
        known = _known(client, name)
        if known is None:
            pool = WorkPoolCreate(name=name, type=kind, base_job_template=template)
            client.create_work_pool(pool)
        elif known.type == kind:
            client.update_work_pool(name, WorkPoolUpdate(base_job_template=template))
        else:
            remedy = f"is a pool of the type {known.type}, which stays what it is; choose another: "
            raise InputError(Fault("name", name, f"{remedy}--name NAME"))
    return name


def template_of(kind: str, *, home: str = HOME, changes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the base job template of a type of pool; arguments and faults of ``create_pool``."""
    if kind not in TEMPLATES:
        raise InputError(Fault("type", kind, f"has no template; choose {_either(TEMPLATES)}"))
    place = PurePosixPath(home)
    if not place.is_absolute() or ".." in place.parts or re.search(r"[\s:]", home):
        remedy = "is no absolute path without spaces and colons; name where containers see it"
        raise InputError(Fault("home", home, remedy))
    content = yaml.safe_load(TEMPLATES[kind].read_text())
    template = filled(content, {"{home}": str(place), "{checkout}": CHECKOUT})
    properties = template["variables"]["properties"]
    faults = [fault for change in changes for fault in _changed(properties, change)]
    raise_faults([*faults, *_value_faults(properties), *_address_faults(properties)])
    return template


def find_pool(api: str, name: str, job_variables: Mapping[str, str]) -> Pool:
    """Return a pool that deployments can name.

    Args:
        api: Of the server.
        name: The pool's.
        job_variables: What differs from its defaults.

    Raises:
        InputError: There is no such pool, no template for its type, its template is not ours, or a
            job variable is missing or wrong.
        DeploymentError: Prefect refused.
    """
    with asked(api) as client:
        pool = _known(client, name)
        if pool is None:
            names = ", ".join(sorted(known.name for known in client.read_work_pools())) or "none"
            remedy = f"is no work pool of the server, which has: {names}; make one: "
            remedy += "python -m infra.services pool docker|kubernetes --name NAME"
            raise InputError(Fault("pool", name, remedy))
    if pool.type == "process":
        raise_faults(
            Fault(key, value, f"the pool {name} runs processes of this machine; leave it out")
            for key, value in job_variables.items()
        )
        return Pool(name, REPOSITORY)
    if pool.type not in TEMPLATES:
        remedy = f"is a pool of the type {pool.type}, for which there is no template; name one of "
        raise InputError(Fault("pool", name, f"{remedy}{_either(['process', *TEMPLATES])}"))
    properties = pool.base_job_template.get("variables", {}).get("properties", {})
    environment = properties.get("env", {}).get("default") or {}
    if not DERIVED.keys() <= environment.keys():
        remedy = "its template says nothing of UPCYCLE_HOME and the checkout; give it ours: "
        remedy += f"python -m infra.services pool {pool.type} --name {name}"
        raise InputError(Fault("pool", name, remedy))
    changed = [f"{key}={value}" for key, value in job_variables.items()]
    faults = [fault for change in changed for fault in _changed(properties, change)]
    raise_faults([*faults, *_value_faults(properties)])
    return Pool(name, Path(environment["PYTHONPATH"]), dict(job_variables))


def _known(client: "SyncPrefectClient", name: str) -> "WorkPool | None":
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_work_pool(name)
    except ObjectNotFound:
        return None


def _changed(properties: dict[str, Any], change: str) -> Iterator[Fault]:
    """Make a value the default of its variable; what is wrong with it is known afterwards."""
    key, equals, text = change.partition("=")
    name, _, inner = key.partition(".")
    if not equals:
        yield Fault("set", change, "is no change; write VARIABLE=VALUE")
    elif name not in properties or (inner and name != "env") or key == "env":
        known = ", ".join(name for name in properties if name != "env")
        yield Fault(key, masked(text, key), f"is no variable here; choose env.NAME, {known}")
    elif inner in DERIVED:
        yield Fault(key, text, f"comes from {DERIVED[inner]}; leave it out")
    elif inner and (SECRET_KEY.search(inner) or masked(text) != text):
        remedy = "everybody who sees the pool can read it; "
        remedy += "keep it in the Kubernetes Secret, or in a file of the volume: docs/cluster.md"
        yield Fault(key, "(hidden)", remedy)
    elif inner:
        properties["env"]["default"][inner] = text
    else:
        properties[name]["default"] = text if _takes_text(properties[name]) else _parsed(text)


def _takes_text(schema: Mapping[str, Any]) -> bool:
    return any(kind.get("type") == "string" for kind in (schema, *schema.get("anyOf", ())))


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _value_faults(properties: Mapping[str, Any]) -> Iterator[Fault]:
    """Defaults that are missing, or that their own schema refuses."""
    from prefect.utilities.schema_tools.validation import validate

    if not properties.get("image", {}).get("default"):
        remedy = "flows run in an image that holds this checkout; name it: --image NAME:TAG"
        yield Fault("image", None, f"{remedy} (docs/cluster.md, Work pools)")
    defaults = {key: found["default"] for key, found in properties.items() if found.get("default")}
    for error in validate(defaults, {"type": "object", "properties": dict(properties)}):
        key = str(error.absolute_path[0])
        about = properties[key].get("description") or properties[key].get("title", "")
        kinds = (properties[key], *properties[key].get("anyOf", ()))
        choices = [str(choice) for kind in kinds for choice in kind.get("enum", ())]
        remedy = f"choose {_either(choices)}" if choices else f"is not what is taken here: {about}"
        yield Fault(key, defaults[key], remedy)


def _address_faults(properties: Mapping[str, Any]) -> Iterator[Fault]:
    """Addresses that are missing, or that are the container itself when seen from inside it."""
    shares_network = properties.get("network_mode", {}).get("default") == "host"
    for name in ADDRESSES:
        key, value = f"env.{name}", properties["env"]["default"].get(name)
        if not value:
            yield Fault(key, value, f"say what containers call it: --set {key}=ADDRESS")
            continue
        host = urlsplit(value if "://" in value else f"//{value}").hostname or ""
        if LOOPBACK.fullmatch(host) and not shares_network:
            remedy = "is the container itself there; name the address that containers reach"
            yield Fault(key, value, f"{remedy}: --set {key}=ADDRESS")
    if properties.get("network_mode", {}).get("default") and properties["networks"]["default"]:
        remedy = "cannot be beside network_mode; set it too: --set 'networks=[]'"
        yield Fault("networks", properties["networks"]["default"], remedy)


def _either(choices: Mapping[str, Any] | Sequence[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last
