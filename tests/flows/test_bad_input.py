"""Bad input through the command line: named, with what to do, before anything is written."""

from dataclasses import replace

import pytest
from forms import change_json, save_adapter
from pico import save_pico
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_DATABASE_CONNECTION_URL,
    temporary_settings,
)
from prefect_server import free_port
from project import Project
from texts import pico_recipe, save_recipe, write_texts

from flows.running.command_line import reach_server
from infra import settings
from infra.services.processes import ProcessRecord, write_records
from tasks.planning.machine import Machine
from upcycle_core.errors import InputError

DOMAINS = ("letters", "numbers")


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts", domains=DOMAINS)


def refused(tmp_path, values, *arguments):
    """The message of a refused run, which has left no artifact behind."""
    project = Project(tmp_path, save_recipe(tmp_path / "recipe.yaml", values))
    said = project.refused(*arguments)
    assert not project.workspace.exists()
    return said


def test_all_faults_of_a_recipe_come_at_once(tmp_path, texts):
    values = pico_recipe(texts, domains=DOMAINS)
    values |= {"sed": 1, "moe": {"top_k": 3}, "name": "../out"}
    project = Project(tmp_path, save_recipe(tmp_path / "recipe.yaml", values))
    done = project.flow(check=False)
    assert done.returncode == 2
    assert not project.workspace.exists()
    message = done.stderr
    assert "sed = 1: no such key; did you mean seed?" in message
    assert "moe.top_k = 3: more than the 2 experts" in message
    assert "name = '../out': names a folder in the workspace" in message


def test_what_this_machine_cannot_hold_is_refused_before_anything_is_made(
    tmp_path, texts, monkeypatch, capsys
):
    small = Machine(memory=10**6, cpus=2, disk=1000)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, *known: small))
    message = refused(tmp_path, pico_recipe(texts, domains=DOMAINS))
    assert "plan: " in capsys.readouterr().out
    for stage in ("seed", "experts", "statistics", "report"):
        assert f"'{stage}: " in message
    assert "compute.experts = 'experts: 2 x" in message
    assert "experts.training.method" not in message  # of which none fits either
    assert "disk = '" in message


def test_faults_of_texts_and_models_come_at_once(tmp_path, texts):
    values = pico_recipe(texts, domains=DOMAINS)
    (texts / "letters" / "train.txt").write_bytes(b"\xff\xfe broken")
    (texts / "letters" / "heldout.txt").write_text(" \n")
    pickled = tmp_path / "pickled"
    save_pico(pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    values["seed_model"] = {"model": str(pickled)}
    message = refused(tmp_path, values)
    assert "domains.letters.train" in message
    assert "domains.letters.heldout" in message
    assert "seed_model.model" in message
    assert "safetensors" in message


def test_experts_that_do_not_fit_are_named(tmp_path, texts):
    values = pico_recipe(texts, domains=DOMAINS)
    values["domains"]["letters"]["expert"] = str(save_pico(tmp_path / "a"))
    values["domains"]["numbers"]["expert"] = str(
        save_pico(tmp_path / "b", intermediate_size=64, rope_theta=5.0)
    )
    message = refused(tmp_path, values)
    assert "intermediate_size" in message
    assert "rope" in message


def test_faults_of_models_in_other_forms_come_at_once(tmp_path, texts):
    seed = save_pico(tmp_path / "seed")
    other = save_pico(tmp_path / "other", hidden_size=64, head_dim=16)
    adapter, _ = save_adapter(tmp_path / "adapter", other)
    change_json(adapter / "adapter_config.json", base_model_name_or_path="/gone")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    write_texts(texts, domains=("colours",))
    values = pico_recipe(texts)
    values["seed_model"] = {"model": str(seed)}
    experts = {"letters": adapter, "numbers": tmp_path / "cut.gguf", "colours": "models:/no@one"}
    for name, expert in experts.items():
        values["domains"][name]["expert"] = str(expert)
    message = refused(tmp_path, values)
    assert f"domains.letters.expert: adapter = '{adapter}': is an adapter of another" in message
    assert f"domains.numbers.expert: gguf = '{tmp_path / 'cut.gguf'}': is truncated" in message
    assert "domains.colours.expert: model = 'models:/no@one': not in the registry" in message


def test_a_prefect_server_that_does_not_answer_is_named(tmp_path, texts, monkeypatch):
    nobody = f"http://127.0.0.1:{free_port()}/api"
    monkeypatch.setattr(Project, "environment", lambda self: {"PREFECT_API_URL": nobody})
    message = refused(tmp_path, pico_recipe(texts, domains=DOMAINS))
    assert f"PREFECT_API_URL = '{nobody}': no Prefect server answers there" in message


def test_a_server_of_make_up_that_does_not_answer_is_not_one_that_the_user_has_named(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    read = settings.read({"UPCYCLE_HOME": str(tmp_path), "PREFECT_API_URL": f"{url}/api"})
    record = ProcessRecord(pid=1, started=0.0, command=("prefect",), url=url)
    write_records(read.services_state, {"prefect": record})
    with pytest.raises(InputError) as raised:
        reach_server(read)
    assert f"server = '{url}/api': what make up has started does not answer" in str(raised.value)
    assert "make down, then make up" in str(raised.value)
    assert "PREFECT_API_URL" not in str(raised.value)
    assert "unset" not in str(raised.value)


def test_databases_that_servers_on_another_machine_have_open_are_not_opened_here(tmp_path):
    """A home that two machines share: what is in SQLite's files is one machine's to write."""
    read = settings.read({"UPCYCLE_HOME": str(tmp_path)})
    record = ProcessRecord(pid=1, started=0.0, command=("prefect",), url="http://127.0.0.1:4200")
    record = replace(record, boot="another", host="node-7", machine="its")
    write_records(read.services_state, {"prefect": record, "mlflow": record})
    database = f"sqlite+aiosqlite:///{tmp_path}/prefect/prefect.db"
    here = {PREFECT_SERVER_DATABASE_CONNECTION_URL: database}
    own = temporary_settings(here, restore_defaults={PREFECT_API_URL})
    with own, pytest.raises(InputError) as raised:
        reach_server(read)
    said = "is served by the machine node-7, at http://127.0.0.1:4200 there"
    for variable in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        assert f"{variable} = None: {tmp_path} {said}" in str(raised.value)
    tunnel = f"http://127.0.0.1:{free_port()}"
    told = replace(read, prefect_api_url=f"{tunnel}/api", mlflow_tracking_uri=tunnel)
    with pytest.raises(InputError, match="no Prefect server answers there"):
        reach_server(told)


@pytest.mark.faults
def test_calibration_text_that_is_heldout_text_is_refused(tmp_path, texts):
    values = pico_recipe(texts, domains=DOMAINS)
    values["domains"]["letters"]["calibration"] = values["domains"]["letters"]["heldout"]
    project = Project(tmp_path, save_recipe(tmp_path / "recipe.yaml", values))
    done = project.flow(check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert "domains.letters.calibration = " in done.stderr
    assert not (project.workspace / "seed").exists()
