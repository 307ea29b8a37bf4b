"""The report on how alike experts are: numbers, files, words."""

import json
from dataclasses import replace

import pytest

from upcycle_core.errors import InputError
from upcycle_core.evaluation.report.text import markdown_page
from upcycle_core.evaluation.similarity.measure import PairSimilarity
from upcycle_core.evaluation.similarity.report import page, write_report
from upcycle_core.evaluation.similarity.results import Stage, Stages, metrics, unmoved

PAIRS = [("law", "code"), ("law", "physics"), ("code", "physics")]


def pairs(*, lift: float = 0.0, matched: float = 0.5) -> list[PairSimilarity]:
    """Two layers, three experts: CKA .1, .2, .3 at layer 0, ten times the layer's step above."""
    return [
        PairSimilarity(
            layer=layer,
            representation=representation,
            first=first,
            second=second,
            rows=900 + place,
            features=100,
            cka=0.1 * (place + 1) + 0.5 * layer + lift,
            matched=matched,
            best=0.75,
            constant_first=0,
            constant_second=0,
        )
        for layer in (0, 1)
        for representation in ("neurons", "outputs")
        for place, (first, second) in enumerate(PAIRS)
    ]


def report() -> Stages:
    undefined = [replace(p, cka=None, best=None, matched=0.0, constant_first=9) for p in pairs()]
    return {
        "original": Stage(title="dense models", inputs="own", pairs=pairs()),
        "unaligned": Stage(title="unaligned, before", inputs="shared", pairs=pairs(matched=0)),
        "aligned": Stage(title="aligned, before", inputs="shared", pairs=pairs(matched=0.7)),
        "trained": Stage(title="aligned, after", inputs="shared", pairs=pairs(lift=0.01)),
        "dead": Stage(title="dead experts", inputs="shared", pairs=undefined),
    }


def test_metrics_are_means_over_pairs_and_valid_json():
    found = json.loads(json.dumps(metrics(report()), allow_nan=False))
    neurons = found["original"]["neurons"]
    assert neurons["layers"] == [0, 1]
    assert neurons["cka_by_layer"] == pytest.approx([0.2, 0.7])
    assert neurons["cka"] == pytest.approx(0.45)
    assert (neurons["matched"], neurons["best"]) == (0.5, 0.75)
    assert (neurons["rows"], neurons["features"], neurons["constant"]) == (900, 100, 0)
    dead = found["dead"]["outputs"]
    assert (dead["cka"], dead["cka_by_layer"], dead["best"]) == (None, [None, None], None)
    assert dead["constant"] == 9


def test_a_mean_leaves_out_what_is_undefined():
    some = pairs()
    some[0] = replace(some[0], cka=None)
    stage = Stage(title="one dead", inputs="own", pairs=some)
    assert stage.mean("neurons", "cka", 0) == pytest.approx(0.25)


def test_experts_stand_in_the_order_they_were_given():
    assert report()["original"].names() == ["law", "code", "physics"]


def test_stages_are_called_the_same_only_if_no_pair_moved():
    stages = report()
    assert unmoved(stages, "neurons") == [(stages["unaligned"], stages["aligned"])]
    moved = pairs()
    moved[-1] = replace(moved[-1], cka=moved[-1].cka + 0.002)
    other = replace(stages["aligned"], pairs=moved)
    two = {"unaligned": stages["unaligned"], "moved": other}
    assert unmoved(two, "outputs") == []
    assert len(unmoved(two, "neurons")) == 1


def test_the_page_says_what_is_compared_and_what_follows():
    text = markdown_page(page(report()))
    assert "| dense models | 0.450 | 0.200 | 0.700 | 0.500 | 0.750 |" in text
    assert "| dead experts | – | – | – | 0.000 | – |" in text
    assert '"unaligned, before" and "aligned, before" have the same CKA' in text
    assert "matched correlation is 0.000 and 0.700" in text
    assert "independent features of equal variance would show 0.100" in text
    assert "Up to 9 features" in text
    for words in ("act(gate) * up", "adds to the residual stream", "Figure 3", "hidden states"):
        assert words in text


def test_a_report_is_whole_and_depends_on_its_numbers_alone(tmp_path):
    for name in ("first", "second"):
        write_report(report(), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    pictures = ["similarity.png", "similarity_neurons.png", "similarity_outputs.png"]
    assert files == sorted([*pictures, "similarity.csv", "similarity.json", "similarity.md"])
    for file in files:
        content = (tmp_path / "first" / file).read_bytes()
        assert content == (tmp_path / "second" / file).read_bytes()
        assert file not in pictures or content.startswith(b"\x89PNG")
    lines = (tmp_path / "first" / "similarity.csv").read_text().splitlines()
    assert len(lines) == 1 + 5 * 2 * 2 * 3
    assert lines[0].startswith("stage,layer,representation,first,second,rows,features,cka,matched")
    assert lines[1] == "original,0,neurons,law,code,900,100,0.1,0.5,0.75,0,0"
    assert lines[-1].split(",")[7] == ""


def test_an_empty_stage_is_refused(tmp_path):
    nothing = Stage(title="one expert", inputs="shared", pairs=[])
    for stages in ({}, {"one": nothing}):
        with pytest.raises(InputError, match="two experts or more"):
            write_report(stages, tmp_path / "out")
    assert not (tmp_path / "out").exists()
