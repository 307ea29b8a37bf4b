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


@pytest.fixture
def many_cores(groups, monkeypatch):
    monkeypatch.setattr(memory.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(memory.os, "sched_getaffinity", lambda _: set(range(48)))
    return groups


def test_without_a_quota_cores_are_those_that_may_be_used(many_cores):
    (many_cores / "cpu.max").write_text("max 100000\n")
    assert memory.cores() == 48


@pytest.mark.parametrize(("quota", "cores"), [(250_000, 2), (50_000, 1), (9_999_999, 48)])
def test_a_container_s_quota_counts(many_cores, quota, cores):
    own = many_cores / "a.slice" / "b.service"
    own.mkdir(parents=True)
    (own / "cpu.max").write_text(f"{quota} 100000\n")
    assert memory.cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("400000", 4), ("-1", 48)])
def test_quotas_of_the_first_version_count_too(many_cores, quota, cores):
    (many_cores / "own").write_text("5:cpu,cpuacct:/docker/1\n9:memory:/docker/1\n")
    folder = many_cores / "cpu,cpuacct" / "docker" / "1"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert memory.cores() == cores
