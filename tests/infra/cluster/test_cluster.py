"""The user's own Ray: a second head in another folder, which has only the code that it is sent."""

import dataclasses
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest
from pico import save_pico
from prefect_server import free_port
from project import ROOT, Project
from texts import pico_recipe, save_recipe, write_texts

from infra.cluster.compute import cluster
from infra.services.processes import stop
from infra.settings import read
from upcycle_core.backbone.average import write_backbone
from upcycle_core.checkpoints.reader import CheckpointReader
from upcycle_core.corpora.shards import write_split
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.statistics import domain_statistics
from upcycle_core.errors import InputError
from upcycle_core.progress import Silent

SHARDS = 2
CONFIG = {"sequence_length": 16, "batch_size": 4, "shards": SHARDS, "folds": 2}
RAY = Path(sys.executable).with_name("ray")
START_SECONDS = 300
ACCESS = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
# Ships with the checkout below, and is nowhere else.
PROBE = """
import os, time

def sleep(*, out, progress):
    time.sleep(600)

def where(*, out, progress):
    import infra.cluster.worker, tasks, upcycle_core

    modules = [infra.cluster.worker, tasks, upcycle_core]
    return {
        "folder": os.getcwd(),
        "files": sorted(os.listdir()),
        "modules": [module.__file__ for module in modules],
        "python_path": os.environ.get("PYTHONPATH", ""),
        "plots": os.environ["MPLBACKEND"],
        "hub": os.environ["HF_HUB_OFFLINE"],
    }

def ranks(*, out, progress):
    import torch.distributed as together

    gathered = [None] * together.get_world_size()
    together.all_gather_object(gathered, together.get_rank())
    return gathered
"""
DRIVER = """
import json, sys
import psutil
from infra import settings

place = settings.configure()

from pathlib import Path

from infra.cluster.compute import cluster, run_pieces
from infra.cluster.pieces import Piece
from infra.recipe.resources import Resources
from tasks.probe import ranks, where
from upcycle_core.dume.config import StatisticsConfig
from upcycle_core.dume.statistics import domain_statistics
from upcycle_core.errors import InputError

def run(*pieces, **resources):
    resources = Resources(**resources)
    return run_pieces(pieces, directory=pieces_folder, resources=resources, label="test")

def shard(i):
    config = StatisticsConfig(**json.loads(sys.argv[3]))
    paths = {name: inputs / name for name in ("backbone", "expert", "corpus")}
    arguments = {**paths, "config": config, "device": "cpu", "shard": i}
    return Piece(name=f"shard-{i}", function=domain_statistics, arguments=arguments)

inputs, pieces_folder, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[4:]
refused = []
try:
    with cluster(place, 2, Path.cwd()):
        found = run(shard(0), shard(1), Piece(name="where", function=where))["where"].result
        if "together" in what:
            found["ranks"] = run(Piece(name="ranks", function=ranks, workers=2))["ranks"].result
            found["retries"] = [
                process.environ().get("RAY_task_oom_retries")
                for process in psutil.process_iter(["cmdline"])
                if "--mode=specific-server" in (process.info["cmdline"] or ())
            ]
        for asked in ({"cpus": 3}, {"gpus": 1}):
            try:
                run(Piece(name="much", function=where), **asked)
            except InputError as error:
                refused.append(str(error))
    print(json.dumps({**found, "refused": refused}))
except InputError as error:
    sys.exit(str(error))
"""

# One CPU here, two there; the second machine is lost while a piece that needs both computes, and
# comes back, as another one, when what is asked next has waited for it.
LOST_MACHINE = """
import dataclasses, sys
from infra import settings

place = settings.configure()

from functools import partial
from pathlib import Path

from ray.cluster_utils import Cluster

from infra.cluster import compute, waiting
from infra.recipe.resources import Resources
from tasks.probe import sleep, where
from upcycle_core.errors import InputError

waiting.ROOM_SECONDS = 2
folder = Path(sys.argv[2])
here = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100_000_000}
machines = Cluster(initialize_head=True, head_node_args=here)
add = partial(machines.add_node, num_cpus=2, object_store_memory=100_000_000)
there = [add()]

def lose():
    if there and (folder / "long.lock").exists():
        machines.remove_node(there.pop(), allow_graceful=False)

def say(text):
    print(text, flush=True)
    if text.startswith("short"):
        add()

def run(label, function, cpus):
    piece, needs = compute.Piece(name=label, function=function), Resources(cpus=cpus)
    how = {"directory": folder, "resources": needs, "label": label, "watch": lose, "log": say}
    try:
        print(f"{label} done:", len(compute.run_pieces([piece], **how)), flush=True)
    except InputError as error:
        print(error, flush=True)

place = dataclasses.replace(place, ray_address=machines.address)
with compute.cluster(place, None, Path.cwd()):
    run("large", sleep, 3)
    run("long", sleep, 2)
    waiting.ROOM_SECONDS = 60
    run("short", where, 2)
machines.shutdown()
"""


@contextmanager
def started(folder: Path, *, cpus: int = 2):
    """A Ray head that knows nothing of the checkout; its address and that for clients."""
    port, client, agent = free_port(), free_port(), free_port()
    ours = ("PYTHON", "UPCYCLE_", "RAY_task_", "HF_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment = {
        **inherited,
        # Ray's sockets want a short path, and who looks for a Ray "anywhere" should not find this.
        "RAY_TMPDIR": str(Path(os.environ["RAY_TMPDIR"]) / "head"),
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": str(START_SECONDS),
        **ACCESS,
    }
    Path(environment["RAY_TMPDIR"]).mkdir(exist_ok=True)
    command = [RAY, "start", "--head", "--block", "--include-dashboard=false"]
    places = [f"--port={port}", f"--ray-client-server-port={client}"]
    places.append(f"--dashboard-agent-listen-port={agent}")
    sizes = [f"--num-cpus={cpus}", "--num-gpus=0", "--object-store-memory=100000000"]
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(
            [*command, *places, *sizes], cwd=folder, env=environment, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while "This command will now block" not in (folder / "head.log").read_text():
            assert head.poll() is None, (folder / "head.log").read_text()
            assert time.monotonic() < deadline, (folder / "head.log").read_text()
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", f"ray://127.0.0.1:{client}"
    finally:
        if head.poll() is None:
            stop(psutil.Process(head.pid), grace=2)
            head.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def head(folder):
    with started(folder) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def inputs(folder):
    """What the statistics of one domain read."""
    experts = [save_pico(folder / name, seed=i) for i, name in enumerate(("expert", "other"))]
    readers = [CheckpointReader(path) for path in experts]
    write_backbone(readers, folder / "backbone", max_shard_bytes=10**9)
    documents = [([(7 * i + j) % 90 for j in range(20 + i)], 20 + i) for i in range(40)]
    write_split(folder / "corpus", documents, eos_id=0, vocabulary_size=96)
    return folder


@pytest.fixture(scope="module")
def checkout(folder):
    """A checkout with a module that is nowhere else, and with all that lies about in one."""
    checkout = folder / "checkout"
    for package in ("infra", "tasks", "upcycle_core"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, checkout / package, ignore=ignore)
    (checkout / "tasks" / "probe.py").write_text(PROBE)
    storage = checkout / "infra" / "cluster" / "shared_storage.py"
    patient = storage.read_text()
    assert "WAIT_SECONDS = 40.0" in patient
    storage.write_text(patient.replace("WAIT_SECONDS = 40.0", "WAIT_SECONDS = 1.0"))
    for name in (".venv/big", ".git/big", ".dvc/cache/big", "workspace/big", "models/big", "big"):
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.truncate(600 * 2**20)  # more than Ray takes; sparse
    return checkout


def drive(checkout, inputs, out, *more, address, home, script=DRIVER, check=True):
    environment = {**os.environ, "UPCYCLE_HOME": str(home), "PREFECT_HOME": str(home / "prefect")}
    environment |= {"RAY_ADDRESS": address, "PYTHONPATH": str(checkout), **ACCESS}
    done = subprocess.run(
        [sys.executable, "-c", script, str(inputs), str(out), json.dumps(CONFIG), *more],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def shards_of(pieces):
    return [(pieces / f"shard-{i}").read_bytes() for i in range(SHARDS)]


@pytest.mark.faults
def test_the_same_pieces_make_the_same_bytes_there_with_nothing_but_the_code_sent(
    head, checkout, inputs, folder
):
    address, _ = head
    done = drive(checkout, inputs, folder / "there", address=address, home=folder / "home")
    found = json.loads(done.stdout)
    sent = Path(found["folder"])
    assert sent.parent.name == "working_dir_files"
    assert found["files"] == ["infra", "tasks", "upcycle_core"]
    assert all(Path(module).is_relative_to(sent) for module in found["modules"])
    assert sum(path.stat().st_size for path in sent.rglob("*.py")) < 10 * 2**20
    assert str(checkout) not in found["python_path"]
    assert found["plots"] == "Agg"
    assert found["hub"] == "1"  # as it is set here
    cpus, gpus = found["refused"]
    assert "compute cpus = 3: Ray has 2 in all" in cpus
    assert "compute gpus = 1: Ray has 0 in all" in gpus
    assert not list((folder / "home").glob(".token*"))

    (folder / "here").mkdir()
    for i in range(SHARDS):
        paths = {name: inputs / name for name in ("backbone", "expert", "corpus")}
        out, config = folder / "here" / f"shard-{i}", StatisticsConfig(**CONFIG)
        more = {"config": config, "shard": i, "device": "cpu", "progress": Silent()}
        domain_statistics(out=out, **paths, **more)  # in one thread, as everywhere in tests
    assert shards_of(folder / "there") == shards_of(folder / "here")


@pytest.mark.faults
def test_a_machine_with_another_folder_under_the_same_path_is_named(head, checkout, inputs, folder):
    address, _ = head
    # Everyone's own current folder: what is here is not there, under the same path.
    home = Path("/proc/self/cwd/home")
    done = drive(checkout, inputs, folder / "never", address=address, home=home, check=False)
    assert done.returncode == 1
    assert "workspace = '/proc/self/cwd/home'" in done.stderr
    assert "the Ray node 127.0.0.1 (" in done.stderr
    assert "UPCYCLE_HOME=FOLDER" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "never").exists()
    assert not list((checkout / "home").glob(".token*"))


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1:{port}", "Connection refused"), ("nonsense", "Invalid address format")],
)
def test_an_address_without_a_ray_is_told_at_once(address, reason):
    named = address.format(port=free_port())
    place = dataclasses.replace(read(os.environ), ray_address=named)
    with (
        pytest.raises(InputError, match=rf"RAY_ADDRESS = '{named}': no connection .*{reason}"),
        cluster(place, None, ROOT),
    ):
        pass


@pytest.mark.parametrize("refusals", [2, 3])
def test_a_head_that_is_too_busy_to_take_a_client_in_is_asked_again(monkeypatch, refusals):
    asked = []

    def init(**settings):
        asked.append(settings["address"])
        if len(asked) <= refusals:
            raise ConnectionAbortedError("Initialization failure from server: too slow")

    monkeypatch.setattr("infra.cluster.connection.ray.init", init)
    monkeypatch.setattr("infra.cluster.compute._check_machines", lambda address, folder: None)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"ray://127.0.0.1:{listening.getsockname()[1]}"
        place = dataclasses.replace(read(os.environ), ray_address=address)
        refused = pytest.raises(InputError, match=r"no connection .*Initialization failure")
        with nullcontext() if refusals < 3 else refused, cluster(place, None, ROOT):
            pass
    assert asked == [address] * 3


@pytest.mark.faults
def test_a_client_of_the_head_and_pieces_of_several_workers(head, checkout, inputs, folder):
    _, client = head
    drive(checkout, inputs, folder / "local", address="local", home=folder / "home")
    out, home = folder / "client", folder / "home"
    done = drive(checkout, inputs, out, "together", address=client, home=home)
    found = json.loads(done.stdout)
    assert found["ranks"] == [0, 1]
    assert found["retries"] == ["2"]  # of pieces that run out of memory; without a limit otherwise
    assert shards_of(folder / "client") == shards_of(folder / "local")


@pytest.mark.faults
def test_a_piece_whose_machine_is_lost_waits_and_ends_with_what_it_needs(checkout, tmp_path):
    home = tmp_path / "home"
    done = drive(checkout, "", tmp_path, address="local", home=home, script=LOST_MACHINE)
    # Ray says where it listens.
    said = [line for line in done.stdout.splitlines() if line.startswith(("compute", *"ls"))]
    large, lost = "Ray has 3 in all, but no machine more than 2", "Ray has 1 in all"
    assert [re.split(", and |; ", line)[0] for line in said] == [
        f"compute cpus = 3: {large}",  # which none has ever had
        f"long waits up to 2 s for a machine: compute cpus = 2: {lost}",
        f"compute cpus = 2: {lost}",
        f"short waits up to 60 s for a machine: compute cpus = 2: {lost}",
        "short done: 1",
    ], done.stderr


class OnCluster(Project):
    """A project whose user has named a Ray."""

    address = "local"

    def environment(self, **more):
        own = {"UPCYCLE_TEST_READS": str(self.home.with_name("reads")), **ACCESS, **more}
        return super().environment(RAY_ADDRESS=self.address, **own)

    def reads(self):
        """What flows and the commands that they ran have read of weights, here and not on Ray."""
        file = self.home.with_name("reads")
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if "/router.safetensors " not in line]  # small; for pages


@pytest.mark.faults
def test_the_same_flow_makes_the_same_files_on_it(head, tmp_path):
    domains = ("letters", "numbers")
    values = pico_recipe(write_texts(tmp_path / "texts", domains=domains), domains=domains)
    recipe = save_recipe(tmp_path / "recipe.yaml", values)
    digests, calls = [], []
    for name, address in (("there", head[0]), ("client", head[1]), ("here", "local")):
        project = OnCluster(tmp_path / name, recipe)
        project.address = address
        project.flow()
        digests.append(project.digests())
        calls.append(project.calls()["domain_statistics"])
        # Hashed, summed, recorded by DVC and pushed on the cluster; a local Ray is this machine.
        reads = project.reads()
        assert bool(reads) == (address == "local"), "\n".join(reads)
    assert digests[0] == digests[1] == digests[2]
    # Only a local Ray has the flow's environment, and so the watcher that counts.
    assert calls == [0, 0, 4]
