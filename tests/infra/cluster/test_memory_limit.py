"""What a container may take is what there is."""

from infra.cluster import memory


def test_a_container_s_limit_is_the_machine_s_memory(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "LIMITS", (tmp_path / "nowhere", limit))
    limit.write_text("max\n")
    whole = memory.machine_memory("cpu")
    limit.write_text("12345678\n")
    assert memory.machine_memory("cpu") == 12345678 < whole
