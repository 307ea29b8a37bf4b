"""Readers that crash, hang or are not installed: each is a sentence, and nothing stays behind."""

import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from infra.readers.reader import READERS, Reader, ReaderError, ask
from infra.readers.to_gguf import pre_tokenizer


def reader(folder, program):
    path = folder / "program.py"
    path.write_text(program)
    return Reader("other", str(path), None, "torch")


def asked(folder, program, seconds=60.0):
    request = {"prompts": [[1]], "tokens": 1}
    place = folder / "place"
    return ask(
        reader(folder, program), {"as-it-is": folder}, request, folder=place, seconds=seconds
    )


def test_a_reader_that_crashes_is_quoted(tmp_path):
    program = "print('loading')\nraise KeyError('model.layers.0.experts.1.w1')"
    with pytest.raises(ReaderError) as caught:
        asked(tmp_path, program)
    assert str(caught.value) == (
        "at the model as-it-is: exit code 1: KeyError: 'model.layers.0.experts.1.w1'"
    )


def test_a_reader_that_dies_of_a_signal_is_told(tmp_path):
    with pytest.raises(ReaderError, match="killed by signal 11: half a line"):
        asked(tmp_path, "import os\nprint('half a line', flush=True)\nos.kill(os.getpid(), 11)")


def test_a_reader_that_hangs_is_ended_with_all_it_started(tmp_path):
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'made')!r}, 'w').write(str(child.pid))\n"
        f"os.rename({str(tmp_path / 'made')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(600)"
    )
    for seconds in (3, 30):  # on a busy machine it may not have started anything within three
        with pytest.raises(ReaderError, match=f"did not answer within {seconds} s"):
            asked(tmp_path, program, seconds=seconds)
        if (tmp_path / "pid").exists():
            break
    child = int((tmp_path / "pid").read_text())
    wait_for(lambda: gone(child), seconds=10)


def test_a_reader_ends_with_a_certificate_that_is_killed(tmp_path):
    hangs = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    (tmp_path / "program.py").write_text(f"{hangs}time.sleep(600)")
    asks = (
        "import sys; from pathlib import Path; from infra.readers.reader import run_apart\n"
        "log = Path(sys.argv[1], 'log')\n"
        "run_apart([sys.executable, str(log.with_name('program.py'))], log=log, seconds=600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", asks, str(tmp_path)])
    reader_id = wait_for(lambda: int((tmp_path / "pid").read_text()))
    owner.kill()
    owner.wait()
    wait_for(lambda: gone(reader_id))


def wait_for(find, seconds=30.0):
    """What ``find`` returns as soon as that is true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError, ValueError):
            if found := find():
                return found
        time.sleep(0.05)
    raise AssertionError("it did not come")


def gone(process_id):
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_every_reader_has_a_version_that_was_tried():
    for one in READERS.values():
        assert one.pinned[0].isdigit()


def test_what_is_not_installed_says_how_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("infra.readers.environments.FOLDER", tmp_path)
    assert READERS["transformers"].missing is None
    assert READERS["vllm"].missing == "not installed: make readers (vllm)"
    assert READERS["llama.cpp"].missing == "not installed: make readers (llama_cpp, converter)"


SMOLLM = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        ({"pre_tokenizer": SMOLLM}, "smollm"),
        ({"pre_tokenizer": SMOLLM["pretokenizers"][1]}, "gpt-2"),
        ({"pre_tokenizer": {**SMOLLM["pretokenizers"][1], "add_prefix_space": True}}, None),
        ({"pre_tokenizer": SMOLLM["pretokenizers"][1], "normalizer": {"type": "NFC"}}, None),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
        ({"pre_tokenizer": None}, None),
    ],
)
def test_a_tokenizer_says_itself_how_it_splits_text(tokenizer, name):
    assert pre_tokenizer(tokenizer) == name
