"""What a container may take is what there is."""

from infra.cluster.memory import machine_memory
from upcycle_core import memory


def test_a_container_s_limit_is_the_machine_s_memory(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "GROUPS", tmp_path)
    limit.write_text("max\n")
    whole = machine_memory("cpu")
    limit.write_text("12345678\n")
    assert machine_memory("cpu") == 12345678 < whole
