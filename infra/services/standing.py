"""What was said of a recipe's deployments when they were deployed before, which need not be said
again: notice, work pool, and when its nights are."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from infra.services.api import asked
from infra.services.pools import LOCAL, Pool, find_pool
from upcycle_core.errors import Fault, InputError, raise_faults

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

NO_NOTICE = "none"
GIVEN = ("image", "image_pull_policy")
"""What a deployment is told of its pool's variables."""
TAG = "recipe:"
"""Before the recipe's name: the tag of its deployments, and of their runs."""
PAGE = 200
AT_THREE, UTC = "0 3 * * *", "UTC"
"""When a night is, where nobody has said."""
OTHER = {
    "notice": "--notice none",
    "pool": "--pool local",
    **dict.fromkeys(GIVEN, "--pool local"),
    "schedule": f'--schedule "{AT_THREE}"',
    "timezone": f"--timezone {UTC}",
}
"""What takes the place of what was said before."""


@dataclass(frozen=True)
class Standing:
    """What is said of a recipe's deployments, now or when they were deployed before.

    Args:
        notice: The block through which a failed night is told.
        pool: The work pool that runs them; None for that of ``make up``.
        job_variables: What differs there from the pool's defaults.
        schedule: When a night is, as cron has it.
        timezone: Whose hours those are.
        homes: Where its flows work, on this machine or on another that shares the server.
        is_orphaned: Its pool, of containers, has been deleted since: Prefect forgets the name.
    """

    notice: str | None = None
    pool: str | None = None
    job_variables: Mapping[str, str] | None = None
    schedule: str | None = None
    timezone: str | None = None
    homes: frozenset[str] = frozenset()
    is_orphaned: bool = False


@dataclass(frozen=True)
class Chosen:
    """What holds of a recipe's deployments from now on, and has been looked at.

    Args:
        notice: As in ``Standing``.
        pool: Found on the server; None for that of ``make up``.
        schedule: As in ``Standing``.
        timezone: Likewise.
    """

    notice: str | None
    pool: Pool | None
    schedule: str
    timezone: str


def choose(api: str, name: str, told: Standing, *, home: Path) -> Chosen:
    """What is told, or else what was told when the recipe was deployed before.

    Args:
        api: Of the server.
        name: The recipe's.
        told: Now.
        home: Whose deployments these are to be.

    Raises:
        InputError: There is no such block, pool or time zone, no such cron expression, the pool of
            before has been deleted, or the recipe is deployed from another home.
        DeploymentError: Prefect refused.
    """
    standing = _standing(api, name)
    others = [own for own in standing.homes if Path(own).resolve() != home.resolve()]
    if others:
        remedy = (
            f"{name} is deployed for the home {others[0]}, whose nights would end without a "
            f"word; give this recipe another name, or, if that home has moved here: "
            f"make undeploy NAME={name}"
        )
        raise InputError(Fault("UPCYCLE_HOME", str(home), remedy))
    with _said_before(() if told.notice else ("notice",)):
        notice = _notice(api, told.notice or standing.notice)
    is_told = told.pool is not None or bool(told.job_variables)
    if standing.is_orphaned and not is_told:
        remedy = "the pool that ran this recipe in containers has been deleted; name another: "
        raise InputError(Fault("pool", None, f"{remedy}--pool NAME, or --pool {LOCAL}"))
    with _said_before(() if is_told else ("pool", *GIVEN)):
        own = told if is_told else standing
        pool = _pool(api, own.pool, own.job_variables or {})
    kept = [key for key in ("schedule", "timezone") if getattr(told, key) is None]
    schedule = told.schedule or standing.schedule or AT_THREE
    timezone = told.timezone or standing.timezone or UTC
    with _said_before(kept):
        raise_faults(_schedule_faults(schedule, timezone))
    return Chosen(notice, pool, schedule, timezone)


def deployed(client: "SyncPrefectClient") -> dict[str, "DeploymentResponse"]:
    """Every deployment of a recipe, by its full name."""
    found: list[DeploymentResponse] = []
    while page := client.read_deployments(limit=PAGE, offset=len(found)):
        found += page
    flows = {flow: client.read_flow(flow).name for flow in {each.flow_id for each in found}}
    return {f"{flows[each.flow_id]}/{each.name}": each for each in found if recipe_tags(each)}


def recipe_tags(deployment: "DeploymentResponse") -> set[str]:
    """The tags of a deployment that name recipes."""
    return {tag for tag in deployment.tags or () if tag.startswith(TAG)}


def _standing(api: str, name: str) -> Standing:
    """Of the recipe of that name: whoever deploys it again need not say it again."""
    from prefect.client.schemas.schedules import CronSchedule

    found = Standing()
    with asked(api) as client:
        for full_name, deployment in deployed(client).items():
            if TAG + name not in recipe_tags(deployment):
                continue
            if full_name.startswith("notice/"):
                found = replace(found, notice=deployment.parameters.get("block"))
            if deployment.work_pool_name not in (None, LOCAL):
                variables = deployment.job_variables.items()
                own = {k: v for k, v in variables if k in GIVEN}
                found = replace(found, pool=deployment.work_pool_name, job_variables=own)
            # What runs on this machine is told its home.
            environment = deployment.job_variables.get("env", {})
            if deployment.work_pool_name is None and "env" not in deployment.job_variables:
                found = replace(found, is_orphaned=True)
            own_home = {environment["UPCYCLE_HOME"]} if "UPCYCLE_HOME" in environment else set()
            found = replace(found, homes=found.homes | own_home)
            for each in deployment.schedules:
                if isinstance(each.schedule, CronSchedule):  # Prefect's pages make others too
                    found = replace(
                        found, schedule=each.schedule.cron, timezone=each.schedule.timezone
                    )
    return found


@contextmanager
def _said_before(fields: Collection[str]) -> Iterator[None]:
    """Say of faults in ``fields`` that nobody has given these now."""
    try:
        yield
    except InputError as error:
        raise InputError(
            *(_hinted(fault) if fault.field in fields else fault for fault in error.faults)
        ) from None


def _hinted(fault: Fault) -> Fault:
    hint = f" (from when it was deployed before; other: {OTHER[fault.field]})"
    return replace(fault, remedy=fault.remedy + hint)


def _pool(api: str, name: str | None, job_variables: Mapping[str, str]) -> Pool | None:
    """The pool that was asked for; ``None`` for that of ``make up``."""
    if name is not None:
        return find_pool(api, name, job_variables)
    remedy = "name the pool that runs it: --pool NAME"
    raise_faults(Fault(key, value, remedy) for key, value in job_variables.items())
    return None


def _notice(api: str, name: str | None) -> str | None:
    """The block that was asked for, or none."""
    if name is None or name == NO_NOTICE:
        return None
    _check_block(api, name)
    return name


def _check_block(api: str, name: str) -> None:
    """Refuse a block that is not there; what it is of is seen when it is used."""
    from prefect.exceptions import ObjectNotFound

    kind, _, own = name.partition("/")
    with asked(api) as client:
        try:
            client.read_block_document_by_name(own, kind)
        except ObjectNotFound:
            remedy = "is no block TYPE/NAME of the Prefect server; make one: docs/operations.md, "
            fault = Fault("notice", name, f"{remedy}A notice of a failed night")
            raise InputError(fault) from None


def _schedule_faults(schedule: str, timezone: str) -> Iterator[Fault]:
    """What Prefect says against a schedule: its own words are pages long."""
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    remedies = {
        "cron": ("schedule", 'is no cron expression that Prefect knows; such as "0 3 * * *"'),
        "timezone": ("timezone", "is no time zone of the IANA's; such as Europe/Berlin, or UTC"),
    }
    given = {"cron": schedule, "timezone": timezone}
    try:
        CronSchedule(cron=schedule, timezone=timezone)
    except ValidationError as error:
        for problem in error.errors():
            key = str(problem["loc"][0])
            field, remedy = remedies[key]
            yield Fault(field, given[key], remedy)
