"""What a flow publishes, recorded by DVC."""

import subprocess
import sys

import pytest

from flows.running.recording import record_published
from infra.versioning.versions import Versions
from tasks.engine.workspace import Workspace

PIPELINE = """stages:
  documents: {cmd: 'true', outs: [documents]}
  corpora: {cmd: 'true', deps: [documents], outs: [corpora]}
"""


@pytest.fixture
def place(tmp_path):
    """A workspace with text, and what was made of it, recorded."""
    workspace, versions = Workspace(tmp_path), Versions(tmp_path)
    versions.prepare(pipeline=PIPELINE, params="")
    publish(workspace, "documents", "a text", {})
    publish(workspace, "corpora", "tokens", {"documents": workspace.digest("documents")})
    record_published(workspace, versions, {name: name for name in ("documents", "corpora")})
    assert changed(workspace) == ""
    return workspace, versions


def publish(workspace, artifact, content, inputs, **more):
    staged = workspace.stage(artifact)
    (staged / "file").write_text(content)
    workspace.publish(staged, artifact, {"inputs": inputs, **more})


def changed(workspace):
    """What DVC finds changed."""
    words = [sys.executable, "-m", "dvc", "status", "-q"]
    status = subprocess.run(words, cwd=workspace.root, capture_output=True, text=True)
    if not status.returncode:
        return ""
    return subprocess.run(words[:-1], cwd=workspace.root, capture_output=True, text=True).stdout


@pytest.mark.parametrize("published", [("documents", "corpora"), ("corpora",)])
def test_what_stays_has_read_the_same_bytes_whatever_else_is_recorded_of_them(place, published):
    """As where an expert that is given beside the text has changed; a kill comes in between."""
    workspace, versions = place
    publish(workspace, "documents", "a text", {}, packages="newer")
    if "documents" not in published:
        record_published(workspace, versions, {"documents": "documents"})
    assert "corpora" in changed(workspace)
    record_published(workspace, versions, {name: name for name in published})
    assert changed(workspace) == ""


def test_what_was_made_of_other_bytes_is_not_called_current(place):
    """As of an expert whose text is newer, and that is not trained again."""
    workspace, versions = place
    publish(workspace, "documents", "another text", {})
    record_published(workspace, versions, {name: name for name in ("documents", "corpora")})
    assert "corpora" in changed(workspace)
