from upcycle_core.errors import LONGEST, Fault


def test_a_fault_says_field_value_and_remedy():
    assert str(Fault("moe.top_k", 0, "use 1 or more")) == "moe.top_k = 0: use 1 or more"


def test_a_long_value_is_cut_and_an_empty_field_is_seen():
    said = str(Fault("", list(range(8000)), "no such key"))
    assert said.startswith("'' = [0, 1, 2")
    assert said.endswith("...: no such key")
    assert len(said) == LONGEST + len("'' = ") + len(": no such key")
