"""The table of what each part of joining in closed form gives."""

import json
from types import SimpleNamespace

from benchmarks import closed_form
from benchmarks.closed_form import COLUMNS, measured, table


def test_a_row_of_before_that_lacks_a_figure_does_not_end_the_run():
    whole = dict(zip(COLUMNS, (96.0, 93.0, 92.0, 79.0, 91.0), strict=True))
    of_layers = {name: figure for name, figure in whole.items() if name != "k = 2"}
    *_, first, second = table({"average": whole, "sequential": of_layers}).splitlines()
    assert first == "| average | 96.00 | 93.00 | 92.00 | 4.00 | 3.00 | 79.00 | 91.00 |"
    assert second == "| sequential | 96.00 | 93.00 | – | 4.00 | 3.00 | 79.00 | 91.00 |"


def test_a_row_has_both_gaps_and_its_absolute_perplexity(tmp_path, monkeypatch):
    metrics = {
        "normalised_average": {"oracle": 96.0, "dume": 93.0},
        "sweeps": {"top_k": {"dume": [{"value": 2, "normalised_average": 92.0}]}},
        "routing": {"agreement": 0.79},
        "normalised": {"dume": {"code": 91.0, "law": 95.0}},
        "perplexity": {"dume": {"code": 4.0, "law": 25.0}},
    }
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "metrics.json").write_text(json.dumps(metrics))
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(closed_form.subprocess, "run", lambda *_, **__: done)
    *_, head, _, row = table({"one": measured("recipe.yaml", (), tmp_path)}).splitlines()
    assert head.startswith("| | Oracle | DUME | k = 2 | Backbone gap | Router gap | Agreement |")
    assert head.endswith("| Worst domain | Perplexity |")
    assert row == "| one | 96.00 | 93.00 | 92.00 | 4.00 | 3.00 | 79.00 | 91.00 | 10.00 |"
