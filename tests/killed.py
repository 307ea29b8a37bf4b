"""A regression that goes layer by layer, killed in one of them and called again.

Every layer is recorded, however little it took.
"""

import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from upcycle_core.activations import resume
from upcycle_core.activations.stream import LayerStream


def killed_at(monkeypatch, layer, call, out):
    """Call it whole, then killed as ``layer`` begins, then again.

    Args:
        monkeypatch: pytest's.
        layer: Its index.
        call: Called with the path that it writes.
        out: Where the second and third call write; the first beside it.

    Returns:
        The layers that the last call has gone through, and both results' files by name.
    """
    passed, entered = [], LayerStream.layer

    @contextmanager
    def entering(stream, index):
        if index in fatal:
            raise KeyboardInterrupt
        passed.append(index)
        with entered(stream, index) as block:
            yield block

    monkeypatch.setattr(LayerStream, "layer", entering)
    monkeypatch.setattr(resume, "APART_SECONDS", 0)
    monkeypatch.setattr(resume, "APART_TIMES", 0)
    fatal = []
    whole = out.with_name("undisturbed")
    call(whole)
    fatal.append(layer)
    with pytest.raises(KeyboardInterrupt):
        call(out)
    fatal.clear()
    passed.clear()
    shutil.rmtree(out, ignore_errors=True)  # as before a piece begins again
    call(out)
    assert not list(out.parent.glob("*.layers"))
    return sorted(set(passed)), files(whole), files(out)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
