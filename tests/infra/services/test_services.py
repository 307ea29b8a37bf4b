"""Real servers on free ports, once for the whole file; the last test stops them."""

import dataclasses
import errno
import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import psutil
import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect_server import free_port, with_tables

from flows.announce import main
from infra import settings
from infra.logs import LOG_BYTES
from infra.services import servers
from infra.services.deployments import PREFECT_FILE, deploy
from infra.services.processes import find, launch, read_records, stop, write_records
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from upcycle_core.errors import InputError

FLOW = '''
from infra import settings

SETTINGS = settings.configure()

from pathlib import Path

from prefect import flow

from infra.recipe.schema import Recipe
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker


@flow
def hello(recipe: Recipe | None = None, name: str = ""):
    """A flow that does nothing but register its own source."""
    workspace = SETTINGS.home / recipe.name
    with Tracker(SETTINGS, "hello").start_run(recipe.name, workspace=workspace) as run:
        registration = Registration(params={"api": SETTINGS.prefect_api_url, "cwd": Path.cwd()})
        version = Registry(SETTINGS).register("hello", FOLDER, registration, run=run)
    Registry(SETTINGS).set_alias(version, "champion")


FOLDER = Path(__file__).parent
if __name__ == "__main__":
    from tasks.recipes import load_recipe

    hello(load_recipe(settings.REPOSITORY / "recipes" / "demo.yaml"))
'''
OFFERED = {"dume": "{name}", "retrain": "{name}-every-night"}
"""The flows that are deployed here, all of them as ``hello``."""


def environment_for(home: Path) -> dict[str, str]:
    """The session's environment with a home of its own, so that nothing else shares its servers."""
    ours = ("PREFECT_", "MLFLOW_TRACKING_URI", "UPCYCLE_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {
        **inherited,
        "UPCYCLE_HOME": str(home),
        "UPCYCLE_PREFECT_PORT": str(free_port()),
        "UPCYCLE_MLFLOW_PORT": str(free_port()),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PYTHONPATH": str(settings.REPOSITORY),
    }


def python(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=settings.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
    )


def service(
    command: str, environment: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    return python("-m", "infra.services", command, *arguments, environment=environment)


def ask(url: str, body: object = None) -> object:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A home in which one flow of an earlier version ran, and then everything was started."""
    folder = tmp_path_factory.mktemp("services")
    environment = environment_for(folder / "home")
    with_tables(settings.read(environment).prefect_home)
    (folder / "flow").mkdir()
    (folder / "flow" / "hello.py").write_text(FLOW)
    try:
        alone = python(str(folder / "flow" / "hello.py"), environment=environment)
        assert alone.returncode == 0, alone.stderr
        artifacts = settings.read(environment).mlflow_artifacts
        with sqlite3.connect(artifacts.parent / "mlflow.db") as database:
            folder_of = "UPDATE experiments SET artifact_location = ? WHERE name = 'hello'"
            database.execute(folder_of, ((artifacts / "hello").as_uri(),))
        started = service("up", environment)
        assert started.returncode == 0, started.stderr
        said = "hello: its files in MLflow are found from other machines too now\n"
        assert started.stdout.startswith(said)
        yield environment
    finally:
        service("down", environment)


@pytest.fixture
def place(environment):
    return settings.read(environment)


@pytest.fixture
def prefect(environment):
    return f"http://127.0.0.1:{environment['UPCYCLE_PREFECT_PORT']}"


@pytest.fixture
def mlflow(environment):
    return f"http://127.0.0.1:{environment['UPCYCLE_MLFLOW_PORT']}"


def test_servers_of_another_machine_are_left_alone(tmp_path, capsys):
    """A home that two machines share: two servers would write into one database."""
    own = settings.read({"UPCYCLE_HOME": str(tmp_path)})
    started = launch(
        [sys.executable, "-c", ""],
        log=tmp_path / "log",
        directory=tmp_path,
        environment={},
        url="http://127.0.0.1:1",
    )
    there = dataclasses.replace(started, boot="another", host="node-7", machine="its")
    write_records(own.services_state, {"prefect": there})
    for command in (servers.up, servers.down):
        with pytest.raises(InputError, match="started on the machine node-7; use them there"):
            command(own)
    assert not servers.status(own)
    assert "started on the machine node-7" in capsys.readouterr().out
    assert read_records(own.services_state) == {"prefect": there}
    write_records(
        own.services_state, {"prefect": dataclasses.replace(there, machine=started.machine)}
    )
    servers.down(own)  # this machine has been started again since
    assert "Nothing is running." in capsys.readouterr().out


def test_a_server_that_cannot_be_recorded_is_stopped(tmp_path, monkeypatch):
    """Nobody would know of it, and its port would be in use."""
    own, started = settings.read({"UPCYCLE_HOME": str(tmp_path)}), []

    def write(path, records):
        started.extend(records.values())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(servers, "write_records", write)
    idle = servers.Service("prefect", ("-c", "import time; time.sleep(600)"), lambda: True)
    with pytest.raises(OSError, match="No space left"):
        servers._start(own, [idle])
    [process] = map(find, started)
    if process is not None:
        stop(process, grace=0)
    assert process is None


def test_what_ran_before_the_servers_is_in_them_afterwards(prefect, mlflow):
    (flow_run,) = ask(f"{prefect}/api/flow_runs/filter", {})
    assert flow_run["state_type"] == "COMPLETED"
    experiment = ask(f"{mlflow}/api/2.0/mlflow/experiments/get-by-name?experiment_name=hello")
    assert experiment["experiment"]["artifact_location"] == "mlflow-artifacts:/hello"
    runs = ask(
        f"{mlflow}/api/2.0/mlflow/runs/search",
        {"experiment_ids": [experiment["experiment"]["experiment_id"]]},
    )
    assert [run["info"]["status"] for run in runs["runs"]] == ["FINISHED"]
    alias = ask(f"{mlflow}/api/2.0/mlflow/registered-models/alias?name=hello&alias=champion")
    assert int(alias["model_version"]["version"]) == 1


def test_starting_again_says_so_and_starts_nothing(environment, place, prefect, mlflow):
    before = read_records(place.services_state)
    again = service("up", environment)
    assert again.returncode == 0
    assert again.stdout.splitlines()[0] == "Already up."
    models = f"{mlflow}/#/models?workflowType=machine_learning"
    assert again.stdout.splitlines()[-2:] == [f"Prefect {prefect}", f"MLflow  {models}"]
    assert read_records(place.services_state) == before
    healthy = service("status", environment)
    assert healthy.returncode == 0
    assert healthy.stdout.splitlines()[-2:] == [f"Prefect {prefect}", f"MLflow  {models}"]


def answer_to(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(
    "path",
    [
        "ajax-api/3.0/mlflow/assistant/config",
        "ajax-api/3.0/mlflow/assistant/providers",
        "ajax-api/3.0/jobs/1",
        "api/3.0/mlflow/gateway/endpoints/list",
        "ajax-api/2.0/mlflow/gateway-proxy?gateway_path=api/2.0/endpoints",
        "gateway/mlflow/v1/models",
    ],
)
def test_mlflow_answers_for_runs_and_models_alone(mlflow, path):
    status, said = answer_to(f"{mlflow}/{path}")
    assert (status, said) == (404, "This server answers for runs and models alone.\n")
    assert answer_to(f"{mlflow}/version")[0] == 200


def listening_addresses(pids: set[int]) -> set[str]:
    """Addresses, in the kernel's hexadecimal, of the sockets on which ``pids`` listen."""
    inodes = set()
    for pid in pids:
        with suppress(FileNotFoundError):  # it has ended
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # it was closed
                    found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
                    inodes |= {found[1]} if found else set()
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    listen = "0A"
    return {line[1].partition(":")[0] for line in lines if line[3] == listen and line[9] in inodes}


def test_everything_listens_on_loopback_only(place):
    processes = [psutil.Process(r.pid) for r in read_records(place.services_state).values()]
    family = {child.pid for p in processes for child in [p, *p.children(recursive=True)]}
    assert listening_addresses(family) == {"0100007F"}


def offering(place, names):
    """A file of deployments. Each takes seconds; all of them are read beside the files."""
    content = yaml.safe_load(PREFECT_FILE.read_text())
    deployments = []
    for deployment in content["deployments"]:
        name = names.get(Path(deployment["entrypoint"].partition(":")[0]).stem)
        if name is not None:
            source = place.home.parent / "flow" / "hello.py"
            deployments.append({**deployment, "name": name, "entrypoint": f"{source}:hello"})
    file = place.home.parent / "prefect.yaml"
    file.write_text(yaml.safe_dump({**content, "deployments": deployments}))
    return file


def test_a_deployed_flow_reaches_the_registry_through_the_worker(environment, place, prefect):
    assert deploy(place, prefect_file=offering(place, OFFERED)) == [
        "hello/demo",
        "hello/demo-every-night",
    ]
    command = ("-m", "prefect", "deployment", "run", "hello/demo", "--watch")
    done = python(*command, environment={**environment, "PREFECT_API_URL": f"{prefect}/api"})
    assert done.returncode == 0, done.stdout + done.stderr
    version = Registry(place).find("hello", "champion")
    assert version.number == 2
    assert version.params == {"api": f"{prefect}/api", "cwd": str(settings.REPOSITORY)}


def test_the_nightly_deployment_has_a_schedule_and_no_slot_that_could_be_lost(prefect):
    nightly = ask(f"{prefect}/api/deployments/name/hello/demo-every-night")
    (schedule,) = nightly["schedules"]
    assert schedule["active"]
    assert schedule["schedule"]["cron"] == "0 3 * * *"
    assert nightly["global_concurrency_limit"] is None
    assert nightly["parameters"]["recipe"]["router"]["ridge_lambda"] == 0.01
    deadline = time.monotonic() + 300
    query = {
        "deployments": {"id": {"any_": [nightly["id"]]}},
        "flow_runs": {"state": {"type": {"any_": ["SCHEDULED"]}}},
    }
    while not ask(f"{prefect}/api/flow_runs/filter", query):
        assert time.monotonic() < deadline, "the scheduler made no run"
        time.sleep(0.5)


def nights(prefect):
    """{deployment: its recipe, whether it is scheduled, how many events start it}."""
    found = {}
    for deployment in ask(f"{prefect}/api/deployments/filter", {}):
        if deployment["schedules"]:
            resource = f"prefect.deployment.{deployment['id']}"
            started_by = ask(f"{prefect}/api/automations/related-to/{resource}")
            [schedule] = deployment["schedules"]
            recipe = deployment["parameters"]["recipe"]["name"]
            names = [automation["name"] for automation in started_by]
            found[deployment["name"]] = (recipe, schedule["active"], names)
    return found


@pytest.mark.faults
def test_two_models_have_nights_side_by_side_until_one_is_taken_away(environment, place, prefect):
    deploy(place, prefect_file=offering(place, OFFERED))
    other = place.home.parent / "other.yaml"
    other.write_text((settings.REPOSITORY / "recipes" / "nightly.yaml").read_text())
    demo = {"demo-every-night": ("demo", True, ["demo: new data"])}
    assert nights(prefect) == demo
    file = offering(place, {"dume": "{name}", "retrain": "{name}-every-evening"})
    texts = place.home.parent / "texts"
    for name in ("python", "heldout"):
        (texts / name).mkdir(parents=True)
        (texts / name / "one.txt").write_text(f"Text of {name}. " * 40)
    changes = ["name=other", f"folder={texts}"]
    deployed = deploy(place, prefect_file=file, recipe=other, changes=changes)
    assert deployed == ["hello/other", "hello/other-every-evening"]
    evening = ("other", True, ["other: new data"])
    assert nights(prefect) == {**demo, "other-every-evening": evening}
    # What is offered by default may hold one deployment of that recipe, and takes none away.
    content = yaml.safe_load(file.read_text())
    [made] = [d for d in content["deployments"] if d["name"] == "{name}"]
    parameters = {"recipe": str(other), "set": changes}
    file.write_text(
        yaml.safe_dump({**content, "deployments": [{**made, "parameters": parameters}]})
    )
    assert deploy(place, prefect_file=file) == ["hello/other"]
    assert nights(prefect)["other-every-evening"] == evening
    tags = ask(f"{prefect}/api/deployments/name/hello/other-every-evening")["tags"]
    assert tags == ["retrain", "night", "recipe:other"]
    deploy(place, prefect_file=offering(place, OFFERED))  # that file offered none of the demo's

    # Again: what is offered no more goes, and nothing of the other recipe.
    file = offering(place, {"retrain": "{name}-every-night"})
    deploy(place, prefect_file=file, recipe=other, changes=changes)
    assert nights(prefect) == {**demo, "other-every-night": evening}
    # A deployment of before had a slot, which a power cut kept for good.
    address = f"{prefect}/api/deployments/name/hello/other-every-night"
    with SyncPrefectClient(f"{prefect}/api") as client:
        slot = DeploymentUpdate(concurrency_limit=1)
        client.update_deployment(UUID(ask(address)["id"]), slot)
    assert ask(address)["global_concurrency_limit"]["limit"] == 1
    deploy(place, prefect_file=file, recipe=other, changes=changes)
    assert ask(address)["global_concurrency_limit"] is None
    unknown = service("undeploy", environment, "othre")
    assert unknown.returncode == 1
    assert unknown.stderr == (
        "name = 'othre': no recipe of this name is deployed; deployed: demo, other\n"
    )
    gone = service("undeploy", environment, "other")
    assert (gone.returncode, gone.stdout) == (0, "Deployed no more: hello/other-every-night\n")
    assert nights(prefect) == demo
    automations = ask(f"{prefect}/api/automations/filter", {})
    assert [automation["name"] for automation in automations] == ["demo: new data"]


def test_the_form_says_what_a_value_means_and_its_limits(prefect):
    schema = ask(f"{prefect}/api/deployments/name/hello/demo")["parameter_openapi_schema"]
    training = schema["definitions"]["TrainingConfig"]["properties"]
    assert training["steps"]["description"] == "Optimizer steps. At least 1."
    assert training["adam_beta2"]["description"].endswith("moment. At least 0, less than 1.")
    assert training["evaluation_steps"]["description"].endswith("`checkpoint_steps`. At least 1.")
    assert training["schedule"]["description"] == "What the learning rate does after warm-up."


def test_new_data_starts_the_retraining(environment, prefect):
    nightly = ask(f"{prefect}/api/deployments/name/hello/demo-every-night")
    sent = python("-m", "flows.announce", "a file of law", environment=environment)
    assert sent.returncode == 0, sent.stderr
    assert "what waits for it starts within seconds" in sent.stdout
    query = {"deployments": {"id": {"any_": [nightly["id"]]}}}
    deadline = time.monotonic() + 300
    while True:
        runs = ask(f"{prefect}/api/flow_runs/filter", query)
        started = [run for run in runs if run["created_by"]["type"] == "AUTOMATION"]
        if [run["state_type"] for run in started] == ["COMPLETED"]:
            break
        assert time.monotonic() < deadline, "the automation brought no run to its end"
        time.sleep(0.5)
    assert started[0]["parameters"]["recipe"]["name"] == "demo"


def test_new_data_without_a_server_is_said_in_one_line(capsys):
    assert main([]) == 2
    expected = "server = None: no Prefect server is running; start it: make up\n"
    assert capsys.readouterr().err == expected


def test_runs_and_registry_work_through_a_server_too(place, mlflow, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    remote = dataclasses.replace(place, mlflow_tracking_uri=mlflow)
    with Tracker(remote, "remote").start_run("flow") as run:
        # One more than a server takes in one call.
        run.log_metrics({f"metric{i}": i for i in range(1001)})
        run.log_params({f"param{i}": i for i in range(101)})
        registration = Registration(metrics={"score": 0.5})
        version = Registry(remote).register("remote", tmp_path / "model", registration, run=run)
    Registry(remote).set_alias(version, "champion")
    assert Registry(remote).find("remote", "champion").metrics == {"score": 0.5}
    folder = Registry(remote).download("models:/remote@champion", tmp_path / "back")
    assert (folder / "config.json").read_text() == "{}"


def test_logs_are_cut_while_the_services_run(place):
    log = place.services / "another.log"
    log.write_bytes(b"first" + bytes(LOG_BYTES))
    deadline = time.monotonic() + 120
    while log.stat().st_size:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (place.services / "another.log.1").read_bytes() == bytes(LOG_BYTES)


def test_down_stops_all_of_it(environment, place):
    records = read_records(place.services_state)
    leaders = [psutil.Process(record.pid) for record in records.values()]
    family = [child for p in leaders for child in [p, *p.children(recursive=True)]]
    assert len(leaders) == 3
    stopped = service("down", environment)
    assert (stopped.returncode, stopped.stdout) == (0, "Stopped worker, prefect, mlflow.\n")
    assert not any(process.is_running() for process in family)
    for port in (place.prefect_port, place.mlflow_port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
    again = service("down", environment)
    assert (again.returncode, again.stdout) == (0, "Nothing is running.\n")
    with pytest.raises(InputError, match="make up"):
        deploy(settings.read(environment))


def test_a_port_in_use_is_told_before_anything_starts(tmp_path):
    environment = environment_for(tmp_path / "home")
    port = environment["UPCYCLE_MLFLOW_PORT"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(port)))
        other.listen()
        refused = service("up", environment)
    assert refused.returncode == 1
    assert f"UPCYCLE_MLFLOW_PORT = {port}: in use" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert [path.name for path in (tmp_path / "home" / "services").iterdir()] == ["lock"]


def test_status_is_a_health_check(tmp_path, monkeypatch, capsys):
    """A server whose process is there and that answers nobody is as bad as one that is gone."""
    place = settings.read(environment_for(tmp_path / "home"))
    process = launch(
        (sys.executable, "-c", "import time; time.sleep(60)"),
        log=tmp_path / "log",
        directory=tmp_path,
        environment={},
        url="http://127.0.0.1:1",
    )
    monkeypatch.setattr(servers, "worker_is_online", lambda api, pool: True)
    monkeypatch.setattr(servers, "answers", lambda url: True)
    try:
        all_of_it = dict.fromkeys(("prefect", "mlflow", "worker"), process)
        write_records(place.services_state, all_of_it)
        assert servers.status(place)
        monkeypatch.setattr(servers, "answers", lambda url: not url.endswith(":1/health"))
        assert not servers.status(place)
        assert "MLflow  runs, and does not answer" in capsys.readouterr().out
        monkeypatch.setattr(servers, "answers", lambda url: True)
        write_records(place.services_state, {"prefect": process})
        assert not servers.status(place)
        assert "Worker  not running" in capsys.readouterr().out
    finally:
        psutil.Process(process.pid).kill()


def test_status_of_what_is_down_is_code_1(tmp_path):
    nothing = service("status", environment_for(tmp_path / "home"))
    said = "Nothing is running. Start it: make up\n"
    assert (nothing.returncode, nothing.stdout) == (1, said)


def test_down_leaves_a_stranger_with_the_same_process_id_alone(tmp_path):
    environment = environment_for(tmp_path / "home")
    place = settings.read(environment)
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    stranger = launch(
        command, log=tmp_path / "log", directory=tmp_path, environment=os.environ, url=""
    )
    earlier = dataclasses.replace(stranger, started=stranger.started - 3600)
    write_records(place.services_state, {"prefect": earlier})
    try:
        assert service("down", environment).stdout == "Nothing is running.\n"
        assert find(stranger) is not None
    finally:
        psutil.Process(stranger.pid).kill()


def test_a_service_that_does_not_start_takes_the_others_with_it(tmp_path, monkeypatch):
    place = settings.read(environment_for(tmp_path / "home"))
    sleeping = servers.Service("prefect", ("-c", "import time; time.sleep(60)"), lambda: True)
    broken = servers.Service("mlflow", ("-c", "raise SystemExit('no luck')"), lambda: False)
    seen = []

    def start(settings, wanted, original=servers._start):
        try:
            original(settings, wanted)
        finally:
            seen.extend(read_records(settings.services_state).values())

    monkeypatch.setattr(servers, "_prefect", lambda settings: sleeping)
    monkeypatch.setattr(servers, "_mlflow", lambda settings: broken)
    monkeypatch.setattr(servers, "_start", start)
    with pytest.raises(servers.ServiceError, match=r"mlflow ended while(.|\n)*no luck"):
        servers.up(place)
    assert [record.command[-1] for record in seen] == [sleeping.arguments[-1], broken.arguments[-1]]
    assert [find(record) for record in seen] == [None, None]
    assert not place.services_state.exists()


def sleepers(monkeypatch, **arguments):
    """Three services that only sleep."""
    for name in ("prefect", "mlflow", "worker"):
        command = ("-c", f"import time; time.sleep(60)  # {name} {arguments.get(name, '')}")
        made = servers.Service(name, command, lambda: True)
        monkeypatch.setattr(servers, f"_{name}", lambda settings, made=made: made)


@pytest.fixture
def bereft(tmp_path, monkeypatch):
    """Where three services have run, of which one has died, and what was noted of them."""
    place = settings.read(environment_for(tmp_path / "home"))
    sleepers(monkeypatch)
    servers.up(place)
    before = read_records(place.services_state)
    try:
        stop(find(before["mlflow"]), grace=5)
        yield place, before
    finally:
        servers.down(place)


def test_up_starts_again_what_has_died_and_leaves_the_rest_alone(bereft, monkeypatch):
    """A night may be running under the worker."""
    place, before = bereft
    servers.up(place)
    after = read_records(place.services_state)
    for name in ("prefect", "worker"):
        assert after[name] == before[name]
        assert find(after[name]) is not None
    assert after["mlflow"] != before["mlflow"]
    assert find(after["mlflow"]) is not None
    sleepers(monkeypatch, worker="--limit 2")
    with pytest.raises(InputError, match="runs with other settings: make down, then make up"):
        servers.up(place)
    assert read_records(place.services_state) == after
    servers.down(place)
    assert [find(record) for record in after.values()] == [None, None, None]


def test_what_runs_for_another_database_is_refused_and_for_other_keys_said(
    bereft, monkeypatch, capsys
):
    """Flows that are started here would write to another place than those that nights start."""
    place, _ = bereft
    servers.up(place)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a new one")
    monkeypatch.setenv("AWS_REGION", "where")
    capsys.readouterr()
    servers.up(place)
    said = capsys.readouterr().out
    names = "AWS_REGION, AWS_SECRET_ACCESS_KEY"
    assert f"\nWorker  has other values of {names}; make down, then make up\n" in said
    assert "a new one" not in said
    elsewhere = dataclasses.replace(place, mlflow_tracking_uri="sqlite:////elsewhere/mlflow.db")
    with pytest.raises(InputError) as raised:
        servers.up(elsewhere)
    assert [fault.field for fault in raised.value.faults] == ["prefect", "mlflow", "worker"]
    assert f"MLFLOW_TRACKING_URI={place.mlflow_tracking_uri}" in str(raised.value)


def test_one_that_does_not_start_again_takes_nothing_else_with_it(bereft, monkeypatch):
    place, before = bereft
    broken = servers.Service("mlflow", ("-c", "raise SystemExit('no luck')"), lambda: False)
    monkeypatch.setattr(servers, "_mlflow", lambda settings: broken)
    with pytest.raises(servers.ServiceError, match=r"mlflow ended while(.|\n)*no luck"):
        servers.up(place)
    rest = {name: before[name] for name in ("prefect", "worker")}
    assert servers.running(place) == rest == read_records(place.services_state)
