import json
import random
import shutil

import pytest

from upcycle_core.training.checkpoints import (
    MARKER,
    discard_incomplete,
    keep_newest,
    mark_complete,
    newest_complete,
)


def _fill(checkpoints, step, *, marked):
    directory = checkpoints / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    (directory / "weights").write_bytes(b"w")
    (directory / "state.json").write_text('{"step": 2}')
    if marked:
        mark_complete(directory, {"at": step})
    return directory


def test_a_folder_without_a_marker_does_not_count(tmp_path):
    _fill(tmp_path, 2, marked=True)
    _fill(tmp_path, 4, marked=False)
    newest = newest_complete(tmp_path)
    assert (newest.step, newest.record) == (2, {"at": 2})


def test_the_newest_is_the_one_with_the_most_steps_not_the_last_name(tmp_path):
    for step in (1000, 200, 30):
        _fill(tmp_path, step, marked=True)
    assert newest_complete(tmp_path).step == 1000


def test_an_empty_or_missing_directory_has_no_checkpoint(tmp_path):
    discard_incomplete(tmp_path / "missing")
    assert newest_complete(tmp_path / "missing") is None
    assert newest_complete(tmp_path) is None


def test_discard_incomplete_deletes_unmarked_folders_only(tmp_path):
    whole = _fill(tmp_path, 2, marked=True)
    half = _fill(tmp_path, 4, marked=False)
    (half / f"{MARKER}.tmp").write_text("{")
    other = tmp_path / "notes"
    other.mkdir()
    discard_incomplete(tmp_path)
    assert set(tmp_path.iterdir()) == {whole, other}


@pytest.mark.parametrize(("damaged", "left"), [(6, 4), (4, 2), (2, None)])
def test_what_a_disk_has_cut_off_does_not_count_nor_what_came_after(tmp_path, damaged, left):
    for step in (2, 4, 6):
        _fill(tmp_path, step, marked=True)
    (tmp_path / f"checkpoint-{damaged}" / "weights").write_bytes(b"")
    discard_incomplete(tmp_path)
    newest = newest_complete(tmp_path)
    assert (newest.step if newest else None) == left
    kept = {f"checkpoint-{step}" for step in (2, 4, 6) if left and step <= left}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_where_the_last_is_kept_an_older_one_that_is_damaged_takes_no_other_along(tmp_path):
    for step in (2, 4, 6):
        _fill(tmp_path, step, marked=True)
    (tmp_path / "checkpoint-2" / "weights").write_bytes(b"")
    discard_incomplete(tmp_path, one_is_kept=False)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-4", "checkpoint-6"}


def test_a_training_ends_with_its_last_checkpoint_whatever_became_of_older_ones(tmp_path):
    for step in (2, 4, 6):
        _fill(tmp_path, step, marked=True)
    (tmp_path / "checkpoint-4" / "weights").write_bytes(b"")
    assert newest_complete(tmp_path).step == 6


def test_a_checkpoint_that_lost_a_file_does_not_count(tmp_path):
    (_fill(tmp_path, 2, marked=True) / "weights").unlink()
    assert newest_complete(tmp_path) is None


FORMS = {
    "empty": b"",
    "torn": b'{"at": 4, "si',
    "no text": b"\xff\xfe",
    "list": b"[]",
    "null": b"null",
    "folder": None,
}


@pytest.mark.parametrize("file", [MARKER, "state.json"])
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_whose_json_a_disk_has_damaged_does_not_count(tmp_path, form, file):
    for step in (2, 4):
        _fill(tmp_path, step, marked=True)
    path = tmp_path / "checkpoint-4" / file
    path.unlink()
    path.mkdir() if FORMS[form] is None else path.write_bytes(FORMS[form])
    assert newest_complete(tmp_path).step == 2
    discard_incomplete(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize("file", [MARKER, "state.json"])
def test_a_checkpoint_with_any_flipped_bit_in_its_json_does_not_count(tmp_path, file):
    path = _fill(tmp_path, 2, marked=True) / file
    before, draw = path.read_bytes(), random.Random(0)
    for _ in range(200):
        place = draw.randrange(8 * len(before))
        damaged = bytearray(before)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        newest = newest_complete(tmp_path)
        # The name of the seal itself may be hit: then all that it sealed is there as it was.
        assert newest is None or newest.record.items() >= {"at": 2}.items()
        assert newest is None or (file == MARKER and b'"seal"' not in damaged)


def test_a_checkpoint_of_before_there_were_seals_counts(tmp_path):
    marker = _fill(tmp_path, 2, marked=True) / MARKER
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps({"at": 2, "sizes": content["sizes"]}))
    assert newest_complete(tmp_path).record == {"at": 2}


def test_keep_newest_keeps_by_steps(tmp_path):
    for step in (8, 10, 9, 100):
        _fill(tmp_path, step, marked=True)
    keep_newest(tmp_path, count=2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-10", "checkpoint-100"}


def test_a_checkpoint_half_deleted_no_longer_counts(tmp_path, monkeypatch):
    _fill(tmp_path, 1, marked=True)
    _fill(tmp_path, 2, marked=True)

    def killed(_directory):
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        keep_newest(tmp_path, count=1)
    assert not (tmp_path / "checkpoint-1" / MARKER).exists()
    assert newest_complete(tmp_path).step == 2


def test_everything_is_on_the_disk_before_the_marker_has_its_name(tmp_path, monkeypatch):
    directory = _fill(tmp_path, 2, marked=False)
    (directory / "folder").mkdir()
    (directory / "folder" / "inner").write_bytes(b"i")
    synced = []

    def record(path):
        assert not (directory / MARKER).exists() or path == directory
        synced.append(path)

    monkeypatch.setattr("upcycle_core.training.checkpoints.sync_file", record)
    monkeypatch.setattr("upcycle_core.training.checkpoints.sync_directory", record)
    mark_complete(directory, {})
    inner = {directory / name for name in ("weights", "state.json", "folder", "folder/inner")}
    assert inner <= set(synced)
    assert synced[-2:] == [directory / f"{MARKER}.tmp", directory]
