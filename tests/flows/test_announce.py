"""`python -m flows.announce`: whether anything waits for what was said."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from prefect.events import DeploymentEventTrigger, EventTrigger
from prefect.events.schemas.automations import Posture

from flows import announce


def trigger(*events):
    return EventTrigger(expect=set(events), posture=Posture.Reactive, threshold=1)


OTHER, ALL = trigger("prefect.flow-run.Failed"), trigger()
NIGHT = DeploymentEventTrigger(expect={announce.NEW_DATA})
METRIC, PARTS = SimpleNamespace(metric={}), SimpleNamespace(triggers=[OTHER, NIGHT])
SENT = "Sent upcycle.new-data: what waits for it starts within seconds.\n"


@pytest.fixture
def said(monkeypatch, capsys):
    """What the command says beside a server with automations, each a trigger or a paused one."""
    sent, there = [], []

    class Client:
        async def emit(self, event):
            sent.append(event.event)

        async def read_automations(self, offset):
            return there[offset : offset + 1]

    @asynccontextmanager
    async def client(**_):
        yield Client()

    monkeypatch.setattr(announce, "configure", lambda: SimpleNamespace(prefect_api_url="http://x"))
    monkeypatch.setattr(announce, "get_events_client", client)
    monkeypatch.setattr(announce, "get_client", client)

    def run(*triggers, enabled=True):
        there[:] = [SimpleNamespace(trigger=trigger, enabled=enabled) for trigger in triggers]
        assert announce.main([]) == 0
        assert sent.pop() == announce.NEW_DATA
        return capsys.readouterr().out

    return run


def test_that_nothing_waits_is_said_with_what_to_do(said):
    nothing = said()
    assert "nothing waits for it: no night is deployed, or all are paused" in nothing
    assert "make deploy RECIPE=my.yaml" in nothing
    assert len(nothing.splitlines()) == 1
    assert said(OTHER, METRIC) == nothing
    assert said(NIGHT, enabled=False) == nothing


@pytest.mark.parametrize("waiting", [NIGHT, trigger("upcycle.*"), ALL, PARTS])
def test_what_waits_starts(said, waiting):
    assert said(OTHER, waiting) == SENT
