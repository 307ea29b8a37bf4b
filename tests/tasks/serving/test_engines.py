"""How engines are started: without a line for each request, or a copy of a model at each start."""

import asyncio
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
import uvicorn
from click.testing import CliRunner
from databases import home_with_database

from flows import serve as flow
from infra import logs
from infra.serving import engine as module
from infra.serving.engine import Engine, Launch
from infra.settings import DEFAULTS, read
from infra.tracking import copies
from infra.tracking.records import Registration, Version
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tasks.serving.engines import EngineChoice, _command, _context, clear_folder, launcher
from tests import warm


@pytest.mark.parametrize("value", [None, DEFAULTS["UVICORN_ACCESS_LOG"]])
def test_servers_that_uvicorn_s_own_command_starts_log_no_requests(monkeypatch, value):
    """Prefect's, MLflow's, and MLflow's engine: they inherit the settings' environment."""
    started = []
    monkeypatch.setattr(uvicorn.main, "callback", lambda **options: started.append(options))
    done = CliRunner(env={"UVICORN_ACCESS_LOG": value}).invoke(uvicorn.main, ["some:app"])
    assert done.exit_code == 0, done.output
    assert started[0]["access_log"] is (value is None)


def test_transformers_engine_logs_no_requests():
    script = (
        "import logging, uvicorn\n"
        "from tasks.serving import transformers_engine\n"
        "transformers_engine.log_no_requests()\n"
        "uvicorn.Config('some:app', log_level='info')\n"
        "print(logging.getLogger('uvicorn.access').hasHandlers())\n"
        "print(logging.getLogger('uvicorn').hasHandlers())"
    )
    done = warm.run(["-c", script], cwd=warm.ROOT, env=os.environ, timeout=warm.TIMEOUT)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_vllm_is_told_to_log_no_requests():
    choice = EngineChoice("vllm", "cpu", "fp32", python=Path("python"))
    assert "--disable-uvicorn-access-log" in _command(Path("moe"), "moe-1", 8000, choice)[0]


def test_a_server_has_the_context_of_a_stretched_rope():
    """As vLLM counts it, which would serve no prompt beyond what the server lets through."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    said = {"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "default"}}
    stretched = {**said, "rope_parameters": yarn}
    assert [*map(_context, [said, stretched])] == [32768, 131072]
    assert [*map(_context, [{"dense": stretched}, {}])] == [131072, None]


class Remote:
    """A registry whose files a server elsewhere has."""

    def __init__(self, directory):
        self.directory, self.downloads = directory, 0

    def referenced(self, reference):
        number = int(reference.rpartition("/")[2])
        return Version("moe", number, "run", "m", "", aliases=(), tags={}, params={}, metrics={})

    def place(self, reference):
        return None

    def download(self, reference, destination):
        self.downloads += 1
        return shutil.copytree(self.directory, destination)


@pytest.mark.parametrize("checkpoint", [".", "model"])
def test_mlflow_s_engine_opens_files_that_were_copied_once(tmp_path, checkpoint):
    source = tmp_path / "source"
    for file in ("MLmodel", "code/loader.py", f"{checkpoint}/config.json"):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text("{}")
    registry, settings = Remote(source), read({"UPCYCLE_HOME": str(tmp_path / "home")})
    choice = EngineChoice("mlflow", "cpu", "fp32")
    launch = launcher(settings, registry, "moe", choice, folder=tmp_path / "served")
    for _ in range(2):
        command = launch(1).command
        opened = Path(command[command.index("-m", 2) + 1])
        assert (opened / "code" / "loader.py").is_file()
        assert (opened / "MLmodel").is_file()
    assert registry.downloads == 1


def test_copies_of_versions_that_a_server_has_left_behind_are_removed(tmp_path):
    (tmp_path / "source").mkdir()
    for file in ("MLmodel", "config.json"):
        (tmp_path / "source" / file).write_text("{}")
    registry = Remote(tmp_path / "source")
    settings = read({"UPCYCLE_HOME": str(tmp_path / "home")})
    choice = EngineChoice("mlflow", "cpu", "fp32")
    launch = launcher(settings, registry, "moe", choice, folder=tmp_path / "served")
    models = settings.home / "models" / "served"
    numbers = range(1, 6)
    for number in numbers:
        launch(number)
        copies.keep("moe", {1, number - 1, number})  # an engine still is at the first
        copies.remove_unused(settings)
    kept = {path.name.split("-")[1] for path in models.iterdir()}
    assert kept == {"1", "4", "5"}
    copies.keep("moe", {5, 4})
    copies.remove_unused(settings)
    assert {path.name.split("-")[1] for path in models.iterdir()} == {"4", "5"}
    launch(4)
    assert registry.downloads == len(numbers)  # to go back fetches nothing


def test_a_version_that_is_served_where_it_lies_is_held_until_the_server_has_left_it(tmp_path):
    settings = home_with_database(tmp_path / "home")
    registry, source = Registry(settings), tmp_path / "source"
    source.mkdir()
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (source / file).write_text("{}")
    with Tracker(settings, "moe").start_run("flow") as run:
        for _ in range(2):
            registry.register("moe", source, Registration(), run=run)
    choice = EngineChoice("transformers", "cpu", "fp32")
    launch = launcher(settings, registry, "moe", choice, folder=tmp_path / "served")
    places = [registry.place(f"models:/moe/{number}") for number in (1, 2)]

    def are_held():
        for place in places:
            with copies.unread(place) as is_free:
                yield not is_free

    assert list(are_held()) == [False, False]
    launch(1)
    launch(1)
    assert list(are_held()) == [True, False]
    launch(2)
    assert list(are_held()) == [True, True]
    copies.keep("moe", {2})
    assert list(are_held()) == [False, True]
    copies.keep("moe", ())


def test_an_engine_s_log_goes_on_until_it_is_large(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOG_BYTES", 5)
    launch = Launch(
        number=1,
        command=(sys.executable, "-c", "print('more')"),
        environment=os.environ,
        folder=tmp_path,
        log=tmp_path / "moe-1.log",
        port=1,
        health="",
        trial=("", {}),
        model=None,
        tokenizer=tmp_path,
        context=None,
        chats=False,
        weights=0,
    )

    async def run():
        engine = Engine(launch, client=None)
        ended = asyncio.Event()
        await engine.start(on_end=ended.set)
        await ended.wait()
        return engine.tail()

    assert asyncio.run(run()) == "more"
    assert asyncio.run(run()) == "more\nmore"
    assert asyncio.run(run()) == "more"
    assert (tmp_path / "moe-1.log.1").read_text() == "more\nmore\n"


def test_logs_and_folders_of_versions_that_are_served_no_more_are_removed(tmp_path):
    """Those of another model too, which this port served before."""
    for name in ("moe-1", "moe-2", "moe-12", "other-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        for ending in ("log", "log.1"):
            (tmp_path / f"{name}.{ending}").write_text("said")
    clear_folder(tmp_path, "moe", {2, 3})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moe-2", "moe-2.log", "moe-2.log.1"]
    clear_folder(tmp_path / "none", "moe", {2})


@pytest.mark.parametrize(
    ("engine", "precision"), [("transformers", "auto"), ("transformers", "fp32"), ("vllm", "auto")]
)
def test_a_device_that_there_is_not_is_refused_in_words(
    tmp_path, monkeypatch, capsys, engine, precision
):
    settings = read({"UPCYCLE_HOME": str(tmp_path / "home")})
    monkeypatch.setattr(flow.environment, "configure", lambda: settings)
    choice = ("--engine", engine, "--device", "abacus", "--precision", precision)
    assert flow.main(["moe@champion", "--port", "0", *choice]) == 2
    assert "--device = 'abacus'" in capsys.readouterr().err


def test_logs_of_engines_are_cut_as_they_grow(tmp_path, monkeypatch):
    """While they are written, by engines that run for months."""
    settings = home_with_database(tmp_path / "home")
    monkeypatch.setattr(logs, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(flow.environment, "configure", lambda: settings)
    monkeypatch.setattr(flow, "engine_faults", lambda choice: ())
    monkeypatch.setattr(flow.Registry, "referenced", lambda *_: None)
    sizes = []

    def grow(follow, naming, listening):
        listening.close()
        [folder] = settings.services.glob("serve-*")
        log = folder / "moe-1.log"
        log.write_bytes(b"x" * (logs.LOG_BYTES + 1))
        deadline = time.monotonic() + 30
        while log.stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
        sizes.extend([log.stat().st_size, (folder / "moe-1.log.1").stat().st_size])

    monkeypatch.setattr(flow, "serve", grow)
    assert flow.main(["moe@champion", "--port", "0", "--device", "cpu"]) == 0
    assert sizes == [0, logs.LOG_BYTES]
