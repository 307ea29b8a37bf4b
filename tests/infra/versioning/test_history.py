"""The Git history of a workspace: small files alone, whatever the user's Git is like."""

import shutil
import subprocess

import pytest

from infra.versioning.history import History


@pytest.fixture
def history(tmp_path):
    history = History(tmp_path / "pico")
    (history.root / "model").mkdir(parents=True)
    (history.root / "model" / "model.safetensors").write_bytes(b"x" * 1000)
    (history.root / "summary.txt").write_text("long")
    (history.root / "metrics.json").write_text("{}")
    history.prepare()
    return history


def git(history, *words):
    done = subprocess.run(["git", *words], cwd=history.root, capture_output=True, text=True)
    return done.stdout.splitlines()


def test_weights_never_get_into_it(history):
    assert history.commit("dume pico") is None
    assert git(history, "ls-files") == [".gitignore", "metrics.json"]
    assert git(history, "status", "--porcelain") == []
    subprocess.run(["git", "add", "--all"], cwd=history.root, check=True)  # by hand, neither
    assert git(history, "status", "--porcelain") == []


@pytest.mark.parametrize("lock", ["index.lock", "HEAD.lock", "refs/heads/main.lock"])
def test_a_flow_that_was_killed_does_not_stop_the_next_one(history, lock):
    history.commit("first")
    (history.root / ".git" / lock).touch()
    history.prepare()
    assert history.commit("second") is None
    assert git(history, "log", "--format=%s") == ["second", "first"]


def test_a_user_who_signs_has_hooks_and_no_name_has_a_history_too(history, tmp_path, monkeypatch):
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "pre-commit").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "pre-commit").chmod(0o755)
    settings = f"[commit]\n gpgSign = true\n[core]\n hooksPath = {hooks}\n"
    (tmp_path / "gitconfig").write_text(settings)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other"))
    assert history.commit("dume pico") is None
    monkeypatch.delenv("GIT_DIR")
    assert git(history, "log", "--format=%s by %an") == ["dume pico by upcycle"]
    assert not (tmp_path / "other").exists()


def test_without_git_there_is_no_history_and_no_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    history = History(tmp_path)
    history.prepare()
    assert not history.is_there
    assert history.commit("dume pico") is None


@pytest.mark.parametrize("cut", ["init", "init HEAD.lock", "init config.lock", "head"])
def test_a_repository_that_a_kill_left_half_made_is_made_and_its_parent_is_left_alone(
    history, tmp_path, cut
):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    (tmp_path / "own.txt").write_text("not to be committed")
    if cut.startswith("init"):
        shutil.rmtree(history.root / ".git")
        (history.root / ".git").mkdir()
        for lock in cut.split()[1:]:
            (history.root / ".git" / lock).touch()
    else:
        (history.root / ".git" / "HEAD").write_bytes(b"")
    assert "not a git repository" in history.commit("before it is prepared")
    history.prepare()
    assert history.commit("retrain pico") is None
    assert git(history, "ls-files") == [".gitignore", "metrics.json"]
    others = subprocess.run(["git", "log"], cwd=tmp_path, capture_output=True, text=True)
    assert "does not have any commits" in others.stderr


def test_a_repository_that_is_damaged_is_said(history):
    (history.root / ".git" / "HEAD").write_text("x")
    assert "not a git repository" in history.commit("dume pico")
