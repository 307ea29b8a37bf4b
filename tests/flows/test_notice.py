"""Who is told that a night has failed, and what happens where nobody can be told."""

import re
import time

import pytest
from catcher import mail_server, webhook
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Failed
from prefect_server import prefect_server
from served import served_project

from flows.notice import Mail, main, notice
from infra.services.deployments import deploy
from upcycle_core.errors import InputError

SOON = 240


@pytest.fixture
def server():
    with (
        temporary_settings({PREFECT_API_URL: prefect_server()}),
        get_client(sync_client=True) as client,
    ):
        yield client
        APILogWorker.drain_all(timeout=5)  # while the server is there


def failed_run(client):
    body = {"flow_id": str(client.create_flow_from_name("retrain")), "name": "a-night"}
    body["parameters"] = {"recipe": {"name": "pico"}}
    state = Failed(message="the remote does not answer")
    body["state"] = state.model_dump(mode="json", include={"type", "name", "message"})
    return client.request("POST", "/flow_runs/", json=body).json()["id"]


def test_a_notice_says_which_night_and_why_and_an_undelivered_one_why_not(server):
    run = failed_run(server)
    with webhook(503) as (url, received):
        Webhook(url=url).save("catcher", overwrite=True)
        refused = notice(f"prefect.flow-run.{run}", "webhook/catcher", return_state=True)
        assert (refused.type.value, refused.name) == ("FAILED", "Not delivered")
        assert refused.message == "the receiver answers 503"
        assert server.read_flow_run(refused.state_details.flow_run_id).tags == ["pico"]  # for tidy
        assert not received
        delivered = notice(run, "webhook/catcher", return_state=True)
        assert delivered.message == "delivered to webhook/catcher: a-night"
    [body] = received
    assert body["subject"] == "pico: the night ended as Failed"
    assert "the remote does not answer" in body["text"]
    gone = notice(run, "webhook/catcher", return_state=True)
    assert gone.is_failed()
    assert "secret-path" not in gone.message
    Webhook(url=url, allow_private_urls=False).save("catcher", overwrite=True)
    private = notice(run, "webhook/catcher", return_state=True)
    assert re.search(r"'http://127.0.0.1:\d+/\*\*\*' is not a valid URL", private.message)


def test_a_notice_goes_by_mail(server):
    with mail_server() as (port, received):
        Mail(url=f"mailto://127.0.0.1:{port}?from=flows@here.test&to=on-call@here.test").save(
            "catcher", overwrite=True
        )
        state = notice(failed_run(server), "mail/catcher", return_state=True)
    assert state.message == "delivered to mail/catcher: a-night"
    [mail] = received
    assert "pico: the night ended as Failed" in mail
    assert "the remote does not answer" in mail
    # Now nobody listens there.
    address = f"mailto://somebody:hush@127.0.0.1:{port}?from=flows@here.test&to=on-call@here.test"
    Mail(url=address).save("catcher", overwrite=True)
    state = notice(failed_run(server), "mail/catcher", return_state=True)
    assert "Connection" in state.message
    assert "hush" not in state.message


def test_a_block_that_is_not_there_is_said(server, capsys):
    assert main(["webhook/nobody"]) == 2
    assert "notice = 'webhook/nobody': is no block TYPE/NAME" in capsys.readouterr().err


@pytest.mark.faults
def test_a_night_that_fails_on_the_worker_is_told_though_nobody_answers_at_first(tmp_path):
    with served_project(tmp_path) as project, webhook(503) as (url, received):
        settings = project.settings
        with temporary_settings({PREFECT_API_URL: settings.prefect_api_url}):
            with pytest.raises(InputError, match="is no block TYPE/NAME of the Prefect server"):
                deploy(settings, recipe=project.recipe, notice="webhook/on-call")
            Webhook(url=url).save("on-call")
            names = deploy(settings, recipe=project.recipe, notice="webhook/on-call")
            assert "notice/pico-failed-night" in names
            with get_client(sync_client=True) as client:
                night = client.read_deployment_by_name("retrain/pico-every-night")
                run = client.create_flow_run_from_deployment(night.id)  # there is no model
                deadline = time.monotonic() + SOON
                while not received:
                    assert time.monotonic() < deadline
                    time.sleep(0.5)
                ended = client.read_flow_run(run.id)
                assert ended.state.name == "Failed"
                assert re.fullmatch(r"pico \d{4}-\d\d-\d\d: failed", ended.name)
                told = client.read_deployment_by_name("notice/pico-failed-night")
                runs = [r for r in client.read_flow_runs() if r.deployment_id == told.id]
                tries = {r.parameters.get("attempt", 1): r.state for r in runs}
                assert f"notice of {ended.name}" in {r.name for r in runs}
    assert received[0]["subject"] == "pico: the night ended as Failed"
    assert "holds no model; run flows.dume" in received[0]["text"]
    assert tries[1].name == "Not delivered yet"
    assert "the receiver answers 503; again at" in tries[1].message
