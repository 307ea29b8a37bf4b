"""Free memory where a container, a pod or a service has a limit of its own."""

import psutil
import pytest

from upcycle_core import memory

GB = 2**30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Folders of control groups, none of them with a limit; the process is in a.slice/b.service."""
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    (tmp_path / "own").write_text("0::/a.slice/b.service\n")
    monkeypatch.setattr(memory, "OWN", tmp_path / "own")
    machine = psutil.virtual_memory()._replace(total=64 * GB, available=40 * GB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)
    return tmp_path


def limit(folder, most, used, spare=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {spare}\nactive_file 7\n")


def test_without_a_limit_it_is_the_machine_s(groups):
    limit(groups, "max", GB)
    assert (memory.total_memory(), memory.free_memory()) == (64 * GB, 40 * GB)


@pytest.mark.parametrize("place", [".", "a.slice", "a.slice/b.service"])
def test_the_smallest_limit_around_a_process_counts(groups, place):
    limit(groups / "a.slice", 50 * GB, 0)
    limit(groups / place, 8 * GB, 6 * GB, spare=GB)
    limit(groups / "other.slice", GB, GB)
    assert (memory.total_memory(), memory.free_memory()) == (8 * GB, 3 * GB)


def test_a_limit_that_is_reached_leaves_nothing(groups):
    limit(groups, 4 * GB, 5 * GB)
    assert memory.free_memory() == 0


def test_control_groups_of_the_first_version_count_too(groups):
    folder = groups / "memory" / "docker" / "1"
    (groups / "own").write_text("5:cpu:/docker/1\n9:memory:/docker/1\n0::/docker/1\n")
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(8 * GB))
    (folder / "memory.usage_in_bytes").write_text(str(7 * GB))
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {2 * GB}\n")
    assert (memory.total_memory(), memory.free_memory()) == (8 * GB, 3 * GB)


def test_a_machine_without_control_groups_has_its_own_memory(groups):
    (groups / "own").unlink()
    assert memory.free_memory() == 40 * GB
