import pytest

from benchmarks import ders_parameters
from benchmarks.ders_parameters import (
    CODER,
    MODELS,
    PAPER,
    PHI,
    STABLE,
    Added,
    added_by_copies,
    added_by_ders,
    count,
    deviations,
)
from upcycle_core.ders.config import DersUpcyclingConfig
from upcycle_core.errors import InputError

ROWS = [pytest.param(row, id=f"{row.table} {row.model} {row.printed}") for row in PAPER]


@pytest.mark.parametrize("row", ROWS)
def test_added_parameters_are_the_papers_to_within_one_in_the_last_digit(row):
    found = dict(deviations(row, count(row)))
    if row.doubt:  # the paper prints two figures for the same layers
        assert found.pop("0.29M") == pytest.approx(-2.57, abs=0.01)
        twin = next(r for r in PAPER if r.printed == "0.26M" and r.model == row.model)
        own = count(row)
        assert own.experts + own.routers == count(twin).total
    assert found
    for figure, deviation in found.items():
        assert abs(deviation) <= 1, figure


def test_counts_equal_the_formulas():
    h, i, layers, n = 2048, 5632, 12, 4
    routers = layers * n * h
    copies = added_by_copies(MODELS[STABLE], experts=n, layers="every-other", universal=True)
    assert copies == Added(layers * (n - 1) * 3 * h * i, routers, layers * 3 * h * i)
    rank = DersUpcyclingConfig(codec="low_rank", rank=8, layers="every-other", universal="delta")
    expected = Added(layers * (n + 1) * 8 * 3 * (h + i), routers, 0)
    assert added_by_ders(MODELS[STABLE], rank, experts=n) == expected
    sparse = DersUpcyclingConfig(codec="sparse", drop_rate=0.99, universal="own")
    h, i, layers = 2560, 10240, 32
    biases = layers * (n - 1) * (h + i)
    expected = Added(
        layers * n * 2 * round(0.01 * h * i) + biases, layers * n * h, layers * (2 * h * i + h + i)
    )
    assert added_by_ders(MODELS[PHI], sparse, experts=n) == expected


def test_xft_counts_its_router_twice():
    (row,) = (r for r in PAPER if r.model == CODER and r.printed.endswith("2.57M"))
    added = count(row)
    once = (added.experts + added.routers) / 1e6
    assert once == pytest.approx(2.37, abs=0.005)  # what one matrix alone would print


def test_the_command_prints_any_configuration(tmp_path, capsys, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(
        '{"model_type": "llama", "hidden_size": 32, "intermediate_size": 48,'
        ' "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}'
    )
    for options, expected in (
        (["--codec", "low_rank", "--rank", "4"], ["7,680", "256", "0", "7,936"]),
        (["--codec", "vanilla", "--universal", "own"], ["27,648", "256", "9,216", "37,120"]),
    ):
        arguments = ["--config", str(file), "--experts", "4", "--layers", "every-other", *options]
        monkeypatch.setattr("sys.argv", ["ders_parameters", *arguments])
        ders_parameters.main()
        assert capsys.readouterr().out.split("\n")[-2].split() == expected
    monkeypatch.setattr("sys.argv", ["ders_parameters", "--config", str(file)])
    with pytest.raises(SystemExit):
        ders_parameters.main()
    assert "ders.rank = None: say how many" in capsys.readouterr().err


def test_what_cannot_be_counted_is_an_error():
    with pytest.raises(InputError, match="no mlp"):
        added_by_copies({"model_type": "gpt2"}, experts=4)
    with pytest.raises(InputError, match="experts = 1"):
        added_by_copies(MODELS[CODER], experts=1)
    rank = DersUpcyclingConfig(codec="low_rank", rank=2049)
    with pytest.raises(InputError, match="at most 2048"):
        added_by_ders(MODELS[CODER], rank, experts=4)
