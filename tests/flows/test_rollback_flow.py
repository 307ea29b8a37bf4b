"""`flows.rollback`, done again because nobody has seen how it ended."""

import httpx
import pytest
from databases import home_with_database

from flows import rollback as module
from infra.tracking.records import Registration
from infra.tracking.registry import Registry
from infra.tracking.runs import Tracker
from tasks.release.history import PENDING_TAG, ROLLED_BACK_TAG, roll_back
from tasks.release.versions import with_aliases

NAME = "upcycle-pico"
LOST = httpx.ConnectError("refused", request=httpx.Request("GET", "http://127.0.0.1:1/api"))


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Of three versions that became champion one after the other; no Prefect server is asked."""
    settings = home_with_database(tmp_path / "home")
    registry = Registry(settings)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with Tracker(settings, "flows").start_run("pico") as run:
        for _ in range(3):
            made = Registration(marks={PENDING_TAG: "champion"})
            with_aliases(registry, registry.register(NAME, folder, made, run=run))
    monkeypatch.setattr(module, "configure", lambda: settings)
    monkeypatch.setattr(module, "close_rollbacks", lambda *_: None)
    monkeypatch.setattr(module, "reach_server", lambda _: None)
    monkeypatch.setattr(module, "create_markdown_artifact", lambda **_: None)
    return registry


@pytest.fixture
def lost(registry, monkeypatch):
    """Prefect's server is lost before or after the alias has moved."""

    def lose(when):
        def run(name, because, version):
            if when == "after":
                roll_back(registry, name, because, only=version)
            raise LOST

        monkeypatch.setattr(module, "rollback", run)

    return lose


def champion(registry):
    return registry.pointed(NAME, "champion")


def test_a_command_that_has_lost_its_server_after_the_alias_moved_says_that_it_is_done(
    registry, lost, capsys
):
    """Told to run again, a person would take the next version back as well."""
    lost("after")
    assert module.main([NAME, "--because", "bad answers"]) == 0
    said = capsys.readouterr()
    assert f"champion: models:/{NAME}/2" in said.out
    assert f"models:/{NAME}/3 is champion no more" in said.out
    assert "run the same command" not in said.out + said.err
    assert champion(registry) == 2


def test_a_command_that_has_lost_its_server_before_the_alias_moved_may_be_run_again(
    registry, lost, capsys
):
    lost("before")
    assert module.main([NAME]) == 2
    assert "run the same command again" in capsys.readouterr().err
    assert champion(registry) == 3


def test_a_run_for_a_version_that_was_taken_back_says_so_and_takes_back_no_other(registry):
    first = module.rollback.fn(NAME, "bad answers", 3)
    assert first.message == "version 2 is champion again, 3 is no more"
    again = module.rollback.fn(NAME, "bad answers", 3)
    assert again.is_completed()
    assert again.message == "version 3 was taken back before; version 2 is champion"
    assert champion(registry) == 2


def test_a_run_that_is_told_no_version_means_the_champion_of_its_start(registry, monkeypatch):
    """Not who is champion when another rollback, which it waited for, has ended."""
    wait = registry.__class__.alone

    def waited(self, name):
        monkeypatch.setattr(registry.__class__, "alone", wait)
        roll_back(registry, NAME, "somebody else's")
        return wait(self, name)

    monkeypatch.setattr(registry.__class__, "alone", waited)
    assert module.rollback.fn(NAME).is_completed()
    assert champion(registry) == 2
    assert module.rollback.fn(NAME).is_completed()
    assert champion(registry) == 1


def test_a_page_that_prefect_cannot_keep_fails_no_rollback(registry, monkeypatch, caplog):
    def lose(**_):
        raise LOST

    monkeypatch.setattr(module, "create_markdown_artifact", lose)
    assert module.rollback.fn(NAME, "bad answers").is_completed()
    assert champion(registry) == 2
    assert "Prefect keeps no page" in caplog.text


def test_the_command_takes_the_version_that_it_is_told(registry, monkeypatch):
    given = []
    monkeypatch.setattr(module, "rollback", lambda *arguments: given.append(arguments))
    assert module.main([NAME]) == 0
    assert module.main([NAME, "3"]) == 0
    assert given == [(NAME, "", 3)] * 2
    assert not any(ROLLED_BACK_TAG in version.tags for version in registry.versions(NAME))
