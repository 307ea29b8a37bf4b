"""Copies of a checkpoint's files: whole, and a change of one is never a change of the user's."""

import json
import os
from pathlib import Path

import pytest
from disk import shares_blocks

from upcycle_core.checkpoints.copy import copy_checkpoint, copy_file, link_file, place_files

CONTENT = os.urandom(300_000)
OTHER_DISK = Path("/dev/shm")


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(CONTENT)
    return file


def test_a_copy_changes_alone(source, tmp_path):
    target = tmp_path / "copy"
    copy_file(source, target)
    assert target.read_bytes() == CONTENT
    with source.open("r+b") as opened:
        opened.write(b"another content")
    assert target.read_bytes() == CONTENT
    assert source.stat().st_nlink == 1


def test_a_file_with_a_second_place_is_on_the_disk_once(source, tmp_path):
    target = tmp_path / "second"
    link_file(source, target)
    assert target.read_bytes() == CONTENT
    assert target.stat().st_ino == source.stat().st_ino or shares_blocks(tmp_path)
    source.unlink()
    assert target.read_bytes() == CONTENT


def test_what_a_link_stands_for_is_linked(source, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(source)
    link_file(link, tmp_path / "second")
    assert not (tmp_path / "second").is_symlink()
    assert (tmp_path / "second").read_bytes() == CONTENT


@pytest.mark.skipif(not os.access(OTHER_DISK, os.W_OK), reason="there is no other disk here")
def test_on_another_disk_a_second_place_is_a_copy(source, tmp_path):
    target = OTHER_DISK / f"upcycle-{os.getpid()}-{source.stat().st_ino}"
    try:
        link_file(source, target)
        assert target.read_bytes() == CONTENT
    finally:
        target.unlink(missing_ok=True)


def test_a_linked_checkpoint_s_weights_are_the_same_files_and_nothing_else_is(source, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    copy_checkpoint(tmp_path, tmp_path / "linked", link=True)
    copy_checkpoint(tmp_path, tmp_path / "copied")
    linked, copied = tmp_path / "linked" / source.name, tmp_path / "copied" / source.name
    assert linked.read_bytes() == copied.read_bytes() == CONTENT
    assert linked.samefile(source) or shares_blocks(tmp_path)
    assert not copied.samefile(source)
    assert not (tmp_path / "linked" / "config.json").samefile(tmp_path / "config.json")


@pytest.mark.parametrize(
    "copy",
    [
        lambda source, out: place_files(source.parent, out, [source.name]),
        lambda source, out: copy_checkpoint(source.parent, out, link=True),
        lambda source, out: copy_checkpoint(source.parent, out),  # over links of an earlier try
    ],
    ids=["placed", "linked", "copied"],
)
def test_a_copy_that_is_tried_again_leaves_the_source_whole(source, tmp_path, copy):
    (tmp_path / "config.json").write_text("{}")
    place_files(tmp_path, tmp_path / "out", [source.name])
    copy(source, tmp_path / "out")
    assert source.read_bytes() == (tmp_path / "out" / source.name).read_bytes() == CONTENT


def test_a_checkpoint_is_copied_without_what_is_not_its_own(source, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "optimizer.pt").write_bytes(b"state")
    copy_checkpoint(tmp_path, tmp_path / "out")
    assert {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": CONTENT,
    }


def test_templates_that_are_asked_for_by_name_come_along_and_folders_of_tokenizers_do_not(
    source, tmp_path
):
    (tmp_path / "config.json").write_text("{}")
    for folder in ("additional_chat_templates", "tokenizer", "tokenizer_backup"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tool_use.jinja").write_text("{{ tools }}")
    copy_checkpoint(tmp_path, tmp_path / "out")
    named = "additional_chat_templates/tool_use.jinja"
    files = {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    names = {path.relative_to(tmp_path / "out").as_posix() for path in files}
    assert names == {"config.json", "model.safetensors", named}
    assert (tmp_path / "out" / named).read_text() == "{{ tools }}"


def test_weights_in_another_form_stay_behind(source, tmp_path):
    """What Mistral publishes beside its shards, and shards of an earlier save."""
    (tmp_path / "config.json").write_text("{}")
    for name in ("consolidated.safetensors", "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_bytes(CONTENT)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "old"}}')
    copy_checkpoint(tmp_path, tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


def test_shards_are_those_that_the_index_names(tmp_path):
    parts = [f"model-{i}-of-00002.safetensors" for i in ("00001", "00002", "00003")]
    for name in parts:
        (tmp_path / name).write_bytes(CONTENT)
    index = {"weight_map": {"a": parts[0], "b": parts[1], "c": parts[0]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    copy_checkpoint(tmp_path, tmp_path / "out")
    kept = {"config.json", "model.safetensors.index.json", *parts[:2]}
    assert {f.name for f in (tmp_path / "out").iterdir()} == kept
