"""Copies of versions whose files are elsewhere: there while somebody reads them, and then gone."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infra.settings import read
from infra.tracking import copies
from infra.tracking.records import Version
from tests.disk import shares_blocks

READER = """
import sys, time
from infra.settings import read
from infra.tracking import copies
copies._hold(copies._folder(read({"UPCYCLE_HOME": sys.argv[1]})) / sys.argv[2])
print("reads", flush=True)
time.sleep(600)
"""
MOE = Version("moe", 1, "run", "m", "", aliases=(), tags={}, params={}, metrics={})


class Elsewhere:
    """A registry whose files come from elsewhere."""

    def __init__(self):
        self.downloads = []

    def download(self, reference, destination):
        self.downloads.append(reference)
        destination.mkdir(parents=True)
        (destination / "config.json").write_text(reference)

    def fetch(self, reference, folder):
        self.download(reference, folder / "fetched")
        return folder / "fetched"


@pytest.fixture
def settings(tmp_path):
    yield read({"UPCYCLE_HOME": str(tmp_path)})
    for place in [*copies._held]:
        copies._held.pop(place).close()


@pytest.fixture
def registry():
    return Elsewhere()


def fetched(registry, settings, name, *numbers):
    """Copies that nobody holds any more, read in this order."""
    made = []
    for number in numbers:
        version = replace(MOE, name=name, number=number)
        place = copies.all_files(version, registry, settings).parent
        copies._held.pop(place).close()
        os.utime(copies._mark(place), (len(made), len(made)))
        made.append(place)
    return made


def test_of_each_model_the_versions_that_were_read_last_stay(settings, registry):
    first, second, third = fetched(registry, settings, "moe", 3, 2, 1)
    [other] = fetched(registry, settings, "moe-1", 7)
    assert copies.unused(settings) == [first]
    assert first.is_dir()
    copies.remove_unused(settings)
    stay = (second, third, other)
    left = {path.name for path in first.parent.iterdir()}
    assert left == {f"{place.name}{end}" for place in stay for end in ("", ".held", ".lock")}
    assert copies.unused(settings) == []


def test_what_an_earlier_release_has_fetched_is_not_fetched_again(settings, registry, tmp_path):
    name = MOE.folder(settings.mlflow_tracking_uri)
    earlier = settings.home / "models" / "registered" / name
    earlier.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        (earlier / file).write_text(file)
    copy = copies.checkpoint(MOE, registry, settings)
    assert registry.downloads == []
    assert copy == settings.home / "models" / "served" / name
    assert {path.name: path.read_text() for path in copy.iterdir()} == {
        file.name: file.name for file in earlier.iterdir()
    }
    weights = "model.safetensors"
    assert shares_blocks(tmp_path) or (copy / weights).samefile(earlier / weights)
    assert copies._is_held(copy)


def test_a_copy_may_go_while_it_is_looked_at(settings, registry, monkeypatch):
    _, copy, _ = fetched(registry, settings, "moe", 1, 2, 3)
    mark, stat = copies._mark(copy), Path.stat

    def before_it_goes(path, **options):
        found = stat(path, **options)
        if path == mark:
            path.unlink()  # by another process
        return found

    monkeypatch.setattr(Path, "stat", before_it_goes)
    assert copies._last_read(copy) == 1.0
    assert copies._last_read(copy) == 0.0
    with mark.open("a+") as file:
        assert copies._is_named(file, mark)
        assert not copies._is_named(file, mark)


def test_what_another_process_reads_stays_until_it_has_ended(settings, registry):
    first, *_ = fetched(registry, settings, "moe", 1, 2, 3)
    command = [sys.executable, "-c", READER, str(settings.home), first.name]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert reader.stdout.readline() == "reads\n"
        os.utime(copies._mark(first), (0, 0))
        copies.keep("moe", {3})
        copies.remove_unused(settings)
        copies._remove(first)  # as where it was found unused, and is read only now
        assert (first / "files" / "config.json").is_file()
        assert copies.unused(settings) == []
    finally:
        reader.kill()
        reader.wait()
        reader.stdout.close()
    copies.remove_unused(settings)
    assert not first.exists()


def test_half_of_a_copy_goes_as_well_and_is_fetched_anew(settings, registry):
    first, *_ = fetched(registry, settings, "moe", 1, 2, 3)
    half = first.rename(first.with_name(f"{first.name}.partial"))
    assert copies.unused(settings) == [first]
    copies.remove_unused(settings)
    assert not half.exists()
    assert fetched(registry, settings, "moe", 1) == [first]
    assert registry.downloads == [f"models:/moe/{number}" for number in (1, 2, 3, 1)]


def test_who_begins_to_read_while_a_copy_is_removed_has_a_new_one(settings, registry, monkeypatch):
    first, *_ = fetched(registry, settings, "moe", 1, 2, 3)
    flock = copies.fcntl.flock

    def late(file, how):
        if how == copies.fcntl.LOCK_SH:
            monkeypatch.setattr(copies.fcntl, "flock", flock)
            copies.remove_unused(settings)  # by another process, which holds the mark first
        flock(file, how)

    monkeypatch.setattr(copies.fcntl, "flock", late)
    os.utime(copies._mark(first), (0, 0))
    copies.all_files(replace(MOE, number=1), registry, settings)
    assert registry.downloads.count("models:/moe/1") == 2
    assert copies._is_held(first)
