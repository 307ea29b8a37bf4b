"""Settings from the environment: the only place that reads it and sets quiet, closed defaults.

``configure`` runs before prefect, ray or mlflow is imported: they read the environment on import.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from infra.disk import full_home, is_full_disk
from infra.permissions import permission_faults
from infra.recipe.names import masked
from infra.services.ports import HOST
from infra.services.processes import find, read_records
from upcycle_core.errors import Fault, InputError, raise_faults

REPOSITORY = Path(__file__).resolve().parent.parent

# Nothing reports home, nothing listens beyond loopback, and a busy machine gets time. A value that
# the user has set stays.
DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "GIT_PYTHON_REFRESH": "quiet",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # Every try of a hub that does not answer is a warning, which Prefect says once more. What came
    # of them is one fault of ours.
    "HF_HUB_VERBOSITY": "error",
    # torch keeps what it has prepared for each of the last 1024 shapes of a product on a CPU, and
    # oneDNN a kernel, some 300 kB each. Experts of a MoE are sent another number of tokens in every
    # batch, and no such shape comes again; a layer's other shapes come again within sixteen.
    "LRU_CACHE_CAPACITY": "16",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MPLBACKEND": "Agg",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Left alone, a call of Ray that comes after its end starts another one.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray's socket paths stay below 108 characters: neither TMPDIR nor the workspace will do.
    "RAY_TMPDIR": "/tmp",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Pieces are the work. At Ray's default, 15, the services beside them slow two threads that
    # wait for each other: training ran at 11,000 tokens/s instead of 17,000 on two cores.
    "RAY_worker_niceness": "0",
    # A piece that meets no memory is begun anew; by default Ray never gives it up.
    "RAY_task_oom_retries": "2",
    # Ray would start its workers before it lets the flow in, and wait for ever for one that dies
    # meanwhile; so they start with the first pieces.
    "RAY_prestart_worker_first_driver": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # A line for each request would fill the disk.
    "UVICORN_ACCESS_LOG": "false",
    # GB for keys and values. Left alone vLLM wants 0.92 of a machine without GPU at once, and ends
    # where another program holds some of it.
    "VLLM_CPU_KVCACHE_SPACE": "4",
}


PROXIES = ("http_proxy", "https_proxy", "all_proxy")
NO_PROXY = ("NO_PROXY", "no_proxy")
"""Some programs read the one, some the other first."""
LOOPBACK = (HOST, "localhost")

# Which process a child works for, so that one that outlives it can be told.
OWNER = "UPCYCLE_OWNER"
# Of a command that another one runs, which says for both that they stop.
INNER = "UPCYCLE_INNER_COMMAND"


@dataclass(frozen=True)
class Settings:
    """Where everything lies and who answers where.

    Args:
        home: All databases, logs and workspaces (``UPCYCLE_HOME``; ``workspace/`` in the checkout).
        prefect_home: Prefect's database and profiles (``PREFECT_HOME``).
        prefect_api_url: The server that ``make up`` started while it runs, or else the user's
            ``PREFECT_API_URL``; ``None`` means that a flow brings its own on the same database.
        prefect_port: Where ``make up`` puts the Prefect server (``UPCYCLE_PREFECT_PORT``).
        mlflow_url: The server that ``make up`` started, while it runs.
        mlflow_tracking_uri: MLflow's database (``MLFLOW_TRACKING_URI``).
        mlflow_artifacts: Folder of the runs' files and of registered models.
        mlflow_port: Where ``make up`` puts the MLflow server (``UPCYCLE_MLFLOW_PORT``).
        ray_address: The cluster that the user named (``RAY_ADDRESS``), or ``local``.
        ray_sessions: Where local Rays put their sockets and logs (``RAY_TMPDIR``).
        flows_at_once: Which the worker of ``make up`` runs (``UPCYCLE_FLOWS_AT_ONCE``).
    """

    home: Path
    prefect_home: Path
    prefect_api_url: str | None
    prefect_port: int
    mlflow_url: str | None
    mlflow_tracking_uri: str
    mlflow_artifacts: Path
    mlflow_port: int
    ray_address: str
    ray_sessions: Path
    flows_at_once: int = 1

    @property
    def prefect_pages(self) -> str | None:
        """Where a run's page will be that had no server which stays: where ``make up`` puts one.

        ``None`` where such a server is at hand: it says itself where its pages are.
        """
        return None if self.prefect_api_url else f"http://{HOST}:{self.prefect_port}"

    @property
    def mlflow_pages(self) -> str | None:
        """Where MLflow's pages are while ``make up`` runs; ``None`` of a database elsewhere."""
        own = self.mlflow_tracking_uri == f"sqlite:///{self.home / 'mlflow' / 'mlflow.db'}"
        return self.mlflow_url or (f"http://{HOST}:{self.mlflow_port}" if own else None)

    @property
    def services(self) -> Path:
        """Logs and the state file of what ``make up`` started."""
        return self.home / "services"

    @property
    def services_state(self) -> Path:
        """Which processes ``make up`` started."""
        return self.services / "state.json"


def configure(environment: MutableMapping[str, str] = os.environ) -> Settings:
    """Read the settings and complete ``environment`` with them and with ``DEFAULTS``.

    Calling it again changes nothing, unless ``make up`` or ``make down`` ran in between.

    Args:
        environment: What is read and completed; the process's own unless a test gives another.

    Returns:
        The settings.

    Raises:
        InputError: A port is not a port, the home is a file, a URL or another user's, this user
            has no home of the system's, or MLflow's address holds a secret.
    """
    with permission_faults("UPCYCLE_HOME"):
        settings = read(environment)
    own = settings.prefect_home == settings.home / "prefect"
    with permission_faults("UPCYCLE_HOME" if own else "PREFECT_HOME"):
        settings.prefect_home.mkdir(parents=True, exist_ok=True)  # Prefect makes no parents
        if own:
            _close(settings.prefect_home)
        if not os.access(settings.prefect_home, os.R_OK | os.W_OK | os.X_OK):
            why = os.strerror(errno.EACCES)
            raise PermissionError(errno.EACCES, why, str(settings.prefect_home))
    for name, value in (DEFAULTS | _derived(settings)).items():
        environment.setdefault(name, value)
    if "DVC_SITE_CACHE_DIR" not in environment:
        with permission_faults("UPCYCLE_HOME"):
            environment["DVC_SITE_CACHE_DIR"] = str(_own_cache(environment, settings.services))
    if settings.prefect_api_url is not None:
        environment["PREFECT_API_URL"] = settings.prefect_api_url
    _pass_proxies_by(environment)
    environment[OWNER] = str(os.getpid())
    return settings


def read(environment: Mapping[str, str]) -> Settings:
    """Read the settings from ``environment`` without changing anything.

    Raises:
        InputError: As ``configure``.
    """
    raise_faults(_user_faults())
    home = _home(environment)
    raise_faults(_faults(environment, home))
    prefect = _own_server(home, "prefect")
    own_prefect = f"{prefect}/api" if prefect else None
    return Settings(
        home=home,
        prefect_home=Path(environment.get("PREFECT_HOME") or home / "prefect").expanduser(),
        prefect_api_url=own_prefect or environment.get("PREFECT_API_URL") or None,
        prefect_port=_port(environment, "UPCYCLE_PREFECT_PORT"),
        mlflow_url=_own_server(home, "mlflow"),
        mlflow_tracking_uri=environment.get("MLFLOW_TRACKING_URI")
        or f"sqlite:///{home / 'mlflow' / 'mlflow.db'}",
        mlflow_artifacts=home / "mlflow" / "artifacts",
        mlflow_port=_port(environment, "UPCYCLE_MLFLOW_PORT"),
        ray_address=environment.get("RAY_ADDRESS") or "local",
        ray_sessions=Path(environment.get("RAY_TMPDIR") or DEFAULTS["RAY_TMPDIR"]) / "ray",
        flows_at_once=int(environment.get("UPCYCLE_FLOWS_AT_ONCE") or 1),
    )


@contextmanager
def full_disk_faults(environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Turn a full disk meanwhile into an error that names the home, where the databases are.

    Raises:
        InputError: The disk is full.
    """
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise InputError(full_home(_home(environment))) from error


def environment_of(settings: Settings, **changes: str) -> dict[str, str]:
    """Return the environment of a program that shares ``settings``, with ``changes``."""
    return {**DEFAULTS, **os.environ, **_derived(settings), **changes}


def dvc_environment(workspace: Path) -> dict[str, str]:
    """Return the environment of DVC in ``workspace``: of a machine of a cluster, which has none of
    this flow's, with what it remembers of files where nobody else writes.
    """
    variables = {**DEFAULTS, **os.environ}
    if "DVC_SITE_CACHE_DIR" not in variables:
        variables["DVC_SITE_CACHE_DIR"] = str(_own_cache(variables, workspace.parent / "services"))
    return variables


def program_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a program that has nothing to do with ours, with ``changes``."""
    return {**DEFAULTS, **os.environ, **changes}


@contextmanager
def ray_token(environment: MutableMapping[str, str] = os.environ) -> Iterator[str]:
    """Give the local Rays of this process a token of their own, meanwhile.

    A local Ray listens at ports of this machine. Who does not know the token cannot run code
    through it; Ray's own way is one for all of a user's Rays, in a file at home.
    """
    own = "RAY_AUTH_TOKEN" not in environment
    if own:
        environment["RAY_AUTH_TOKEN"] = _own_token()
    try:
        yield environment["RAY_AUTH_TOKEN"]
    finally:
        if own:
            del environment["RAY_AUTH_TOKEN"]


@cache
def _own_token() -> str:
    """One a process: Ray reads it once."""
    return secrets.token_hex(32)


def is_inner() -> bool:
    """Whether another command runs this one."""
    return INNER in os.environ


def _home(environment: Mapping[str, str]) -> Path:
    named = environment.get("UPCYCLE_HOME") or REPOSITORY / "workspace"
    return Path(named).expanduser().absolute()


_DEFAULT_PORTS = {"UPCYCLE_PREFECT_PORT": "4200", "UPCYCLE_MLFLOW_PORT": "5000"}


def _derived(settings: Settings) -> dict[str, str]:
    return {
        "UPCYCLE_HOME": str(settings.home),
        "PREFECT_HOME": str(settings.prefect_home),
        "MLFLOW_TRACKING_URI": settings.mlflow_tracking_uri,
    }


def _pass_proxies_by(environment: MutableMapping[str, str]) -> None:
    """Let no proxy of the user's be asked for this machine's own servers, which it cannot reach."""
    if not any(environment.get(n) or environment.get(n.upper()) for n in PROXIES):
        return
    there = {name: environment.get(name) for name in NO_PROXY}
    for name in NO_PROXY:
        value = there[name] or next(filter(None, there.values()), "")
        hosts = [host.strip() for host in value.split(",") if host.strip()]
        if "*" not in hosts:
            environment[name] = ",".join([*hosts, *(h for h in LOOPBACK if h not in hosts)])


def _own_cache(environment: Mapping[str, str], services: Path) -> Path:
    """Where DVC remembers files, as pickles, for this user alone; in the home if that has no cache.

    What DVC makes, there or where it would itself, is open to everybody.
    """
    folder = Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "upcycle" / "dvc"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError:
        folder = services / "dvc"
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    return folder


def _close(folder: Path) -> None:
    """Keep others out of a folder of ours: Prefect's database holds secrets and their key."""
    found = folder.stat()
    if found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) != 0o700:
        with suppress(OSError):  # a file system without modes
            folder.chmod(0o700)


def _port(environment: Mapping[str, str], name: str) -> int:
    return int(environment.get(name) or _DEFAULT_PORTS[name])


def _user_faults() -> Iterator[Fault]:
    try:
        Path.home()
    except RuntimeError:
        remedy = f"is not set, and the system knows no home of user {os.getuid()}; set it to a "
        yield Fault("HOME", None, remedy + "folder that this user may write to")


def _faults(environment: Mapping[str, str], home: Path) -> list[Fault]:
    faults = []
    for name, default in _DEFAULT_PORTS.items():
        value = environment.get(name) or default
        if not (value.isascii() and value.isdigit() and 0 < int(value) < 65536):
            faults.append(Fault(name, value, "not a port; give a number from 1 to 65535"))
    count = environment.get("UPCYCLE_FLOWS_AT_ONCE") or "1"
    if not (count.isascii() and count.isdigit() and int(count) > 0):
        faults.append(Fault("UPCYCLE_FLOWS_AT_ONCE", count, "give a whole number from 1"))
    address = environment.get("MLFLOW_TRACKING_URI") or ""
    if address.startswith("http") and masked(address) != address:
        remedy = "MLflow repeats it in its errors, which others read; write it without, and give "
        remedy += "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN)"
        faults.append(Fault("MLFLOW_TRACKING_URI", masked(address), remedy))
    if "://" in (named := environment.get("UPCYCLE_HOME") or ""):
        remedy = "a URL; name a folder of a file system, with locks and renames (docs/cluster.md). "
        remedy += "What lies on S3 is the DVC remote: versions.remote"
        faults.append(Fault("UPCYCLE_HOME", masked(named), remedy))
    if home.exists() and not home.is_dir():
        faults.append(Fault("UPCYCLE_HOME", str(home), "not a folder; name another one"))
    return faults


def _own_server(home: Path, name: str) -> str | None:
    record = read_records(home / "services" / "state.json").get(name)
    return record.url if record is not None and find(record) else None
