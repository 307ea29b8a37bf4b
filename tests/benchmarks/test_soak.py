"""The record of a long measurement, which is gone on with."""

import json
import resource

import pytest

from benchmarks.soak import Soak


def test_a_disk_that_is_full_leaves_the_samples_of_before(tmp_path, monkeypatch):
    record = tmp_path / "samples.json"
    record.write_text(json.dumps([{"rows": 1.0}]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def sample(soak):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        return {"rows": 2.0}

    monkeypatch.setattr(Soak, "scheduled", lambda soak: None)
    monkeypatch.setattr(Soak, "_sample", sample)
    try:
        with pytest.raises(OSError, match="File too large"):
            Soak(tmp_path).run(2, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert json.loads(record.read_text()) == [{"rows": 1.0}]
