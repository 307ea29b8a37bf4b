"""The table of what each part of joining in closed form gives."""

from benchmarks.closed_form import COLUMNS, table


def test_a_row_of_before_that_lacks_a_figure_does_not_end_the_run():
    whole = dict(zip(COLUMNS, (96.0, 93.0, 92.0, 79.0, 91.0), strict=True))
    of_layers = {name: figure for name, figure in whole.items() if name != "k = 2"}
    *_, first, second = table({"average": whole, "sequential": of_layers}).splitlines()
    assert first == "| average | 96.00 | 93.00 | 92.00 | 79.00 | 91.00 |"
    assert second == "| sequential | 96.00 | 93.00 | – | 79.00 | 91.00 |"
