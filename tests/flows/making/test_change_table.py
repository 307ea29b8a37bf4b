"""What a flow that changed a model shows of it."""

from flows.making.change import change_table
from upcycle_core.evaluation.report.text import markdown_table


def test_every_domain_stands_before_and_after_the_change():
    before = {"law": 20.0, "code": 8.0, "old": 5.0}
    lines = markdown_table(change_table(before, {"law": 19.0, "code": 8.0, "new": 7.5}))
    assert lines.splitlines()[2:] == [
        "| code | 8.00 | 8.00 | +0.0 % |",
        "| law | 20.00 | 19.00 | -5.0 % |",
        "| new | – | 7.50 | – |",
        "| old | 5.00 | – | – |",
    ]
