"""Means over seeds, marks, faults, and pictures that show the numbers of the CSV beside them."""

import csv
import json
from dataclasses import replace

import pytest
from scipy.cluster import hierarchy

from upcycle_core.errors import InputError
from upcycle_core.evaluation.instructions import report as instruction_report
from upcycle_core.evaluation.instructions import results
from upcycle_core.evaluation.instructions.activations import Activation
from upcycle_core.evaluation.instructions.report import (
    notes,
    sections,
    write_instruction_report,
)
from upcycle_core.evaluation.instructions.results import (
    InstructionEvaluation,
    Row,
    Run,
    across_runs,
    faults,
    metrics,
)
from upcycle_core.evaluation.instructions.scores import Score, SplitScore
from upcycle_core.evaluation.instructions.structure import Structure
from upcycle_core.evaluation.report import canvas
from upcycle_core.evaluation.report.parts import mark_of, text_of
from upcycle_core.evaluation.report.text import markdown, terminal


def split(*scores: float, truncated: int = 0) -> SplitScore:
    """ROUGE-L of categories x, y, ...; exact match is half of it; 10 instances each."""
    return SplitScore(
        categories={
            name: Score(exact_match=score / 2, rouge_l=score, count=10)
            for name, score in zip("xyz", scores, strict=False)
        },
        truncated=truncated,
    )


def run(unseen: tuple[float, ...], seen: tuple[float, ...], **more) -> Run:
    counts = {"total_parameters": 1_000_000, "trained_parameters": 0, **more}
    return Run(unseen=split(*unseen), seen=split(*seen), **counts)


def evaluation(shift: float = 0.0) -> InstructionEvaluation:
    """SIMoE is best on unseen, the dense model on seen and on unseen category y."""
    simoe = run(
        (0.6 + shift, 0.3), (0.5, 0.5 + shift), total_parameters=1_500_000,
        trained_parameters=700_000, density_parameters=1_250_000,
    )  # fmt: skip
    return InstructionEvaluation(
        rows={
            "full": Row(title="Full | tuned", runs=(run((0.2, 0.4), (0.7, 0.7)),)),
            "simoe": Row(title="SIMoE", runs=(simoe,), groups=("Models", "Ablations")),
            "no_penalty": Row(
                title="No penalty",
                runs=(run((0.5, 0.2), (0.5, 0.5004), density_parameters=2_000_000),),
                groups=("Ablations",),
            ),
        }
    )


def structure(level: float) -> Structure:
    return Structure(
        by_type={"q_proj": (level, level / 2), "norms": (0.9, 0.7)},
        by_depth={"0": (level, level), "1": (0.0, 0.2), "outside": (0.5, 0.5)},
        total=(level, level / 2),
        parameters=1000,
        union=level,
        overlap=((1.0, level / 4), (level / 4, 1.0)),
    )


def activations() -> list[Activation]:
    points = {
        ("text", "join"): (0.9, 0.1, 0.0),
        ("sums", "add"): (0.1, 0.8, 0.1),
        ("text", "cut"): (0.8, 0.2, 0.0),
        ("sums", "take"): (0.1, 0.6, 0.3),
        ("", "rest"): (0.0, 0.0, 1.0),
    }
    return [
        Activation(domain=domain, name=name, coefficients=own, count=7)
        for (domain, name), own in points.items()
    ]


def test_several_seeds_are_mean_and_deviation_and_come_back_from_json():
    both = across_runs([evaluation(), evaluation(shift=0.2)])
    found = json.loads(json.dumps(results.metrics(both), allow_nan=False))
    unseen = found["simoe"]["unseen"]
    # By hand: categories x 0.6 and 0.8, y 0.3 twice; means over categories 0.45 and 0.55.
    assert unseen["rouge_l"] == pytest.approx({"mean": 0.5, "deviation": 0.1 / 2**0.5})
    assert unseen["categories"]["x"]["rouge_l"] == pytest.approx(
        {"mean": 0.7, "deviation": 0.2 / 2**0.5}
    )
    assert unseen["categories"]["x"]["exact_match"]["mean"] == pytest.approx(0.35)
    assert unseen["categories"]["y"]["rouge_l"]["deviation"] == 0.0
    assert unseen["count"] == 20
    assert found["simoe"]["density_parameters"] == {"mean": 1_250_000, "deviation": 0.0}
    assert found["full"]["density_parameters"] is None
    assert InstructionEvaluation.from_dict({"highlight": "simoe", "rows": found}) == both
    text = terminal(sections(found))
    assert "45.0" not in text
    assert "50.0 ± 7.1*" in text
    assert "over 2 seeds" in text


def test_how_prompts_use_experts_stands_beside_the_parameters():
    """Effective experts alone make a router that gives all prompts the same look best."""
    use = {"effective_experts": 7.96, "tasks_apart": 0.004}
    rows = {
        "full": Row(title="Full", runs=(run((0.2,), (0.7,)),)),
        "simoe": Row(title="SIMoE", runs=(run((0.6,), (0.5,), **use),)),
    }
    rows = results.metrics(InstructionEvaluation(rows=rows))
    assert rows["simoe"]["tasks_apart"] == {"mean": 0.004, "deviation": 0.0}
    table = sections(rows)[0].blocks[0]
    assert table.header[3:5] == ["Effective experts", "Tasks apart"]
    assert [[text_of(cell) for cell in row[3:5]] for row in table.rows] == [
        ["–", "–"],
        ["8.0", "0.00"],
    ]


def test_runs_of_other_rows_do_not_go_together():
    other = evaluation()
    other = replace(other, rows={"simoe": other.rows["simoe"]})
    with pytest.raises(InputError, match=r"evaluations\[1\]"):
        across_runs([evaluation(), other])


def test_each_table_marks_the_best_of_its_columns():
    rows = results.metrics(evaluation())
    models, ablations, unseen, *_ = (own.blocks[0] for own in sections(rows))
    assert models.header == [
        *("Model", "Parameters", "By density", "Trained", "Seen, exact match", "Seen, ROUGE-L"),
        *("Unseen, exact match", "Unseen, ROUGE-L"),
    ]
    lines = {title: [(text_of(c), mark_of(c)) for c in cells] for title, *cells in models.rows}
    assert list(lines) == ["Full | tuned", "SIMoE"]
    assert lines["SIMoE"][:3] == [("1.50 M", None), ("1.25 M", None), ("0.70 M", None)]
    assert lines["SIMoE"][3:] == [
        *(("25.0", None), ("50.0", None), ("22.5", "best"), ("45.0", "best")),
    ]
    assert lines["Full | tuned"][:3] == [("1.00 M", None), ("–", None), ("0", None)]
    assert lines["Full | tuned"][3:5] == [("35.0", "best"), ("70.0", "best")]
    assert [title for title, *_ in ablations.rows] == ["SIMoE", "No penalty"]
    # Equal in the digits that are shown: nobody is marked.
    assert [mark_of(line[5]) for line in ablations.rows] == [None, None]
    assert sections(rows)[2].heading == "Unseen categories, ROUGE-L"
    assert unseen.header == ["Model", "x", "y", "Average"]
    assert [[mark_of(c) for c in cells] for _, *cells in unseen.rows] == [
        [None, "best", None],
        ["best", None, "best"],
    ]
    text = markdown(sections(rows))
    assert "| Full \\| tuned | 20.0 | **40.0** | 30.0 |" in text
    assert "| SIMoE | **60.0** | 30.0 | **45.0** |" in text


def test_many_categories_stand_below_each_other(monkeypatch):
    monkeypatch.setattr(instruction_report, "ACROSS", 1)
    unseen = sections(results.metrics(evaluation()))[2].blocks[0]
    assert unseen.header == ["Category", "Full | tuned", "SIMoE"]
    assert [(title, list(map(text_of, cells))) for title, *cells in unseen.rows] == [
        ("x", ["20.0", "60.0"]),
        ("y", ["40.0", "30.0"]),
        ("Average", ["30.0", "45.0"]),
    ]


def test_models_that_were_not_asked_seen_categories_and_cut_prompts_are_told():
    rows = {
        name: replace(row, runs=(replace(row.runs[0], seen=None, unseen=split(0.5, truncated=n)),))
        for n, (name, row) in enumerate(evaluation().rows.items())
    }
    found = results.metrics(InstructionEvaluation(rows=rows))
    assert found["simoe"]["seen"] is None
    told = notes(found)
    assert "Unseen: 10 instances of 1 categories." in told
    assert sum("1 of SIMoE." in note or "2 of No penalty." in note for note in told) == 2
    assert "Seen" not in terminal(sections(found))


def rows_of(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def figures(monkeypatch):
    """{file name: the figure that was saved there}."""
    kept = {}
    real = canvas.save

    def keep(figure, path):
        kept[path.name] = figure
        real(figure, path)

    monkeypatch.setattr(canvas, "save", keep)
    return kept


def test_pictures_show_the_numbers_of_their_csv(tmp_path, figures):
    structures = {"no_penalty": structure(0.8), "simoe": structure(0.4)}
    write_instruction_report(
        tmp_path, evaluation(), model="demo", structures=structures, activations=activations()
    )
    for name in figures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert set(figures) == {
        *("structure_no-penalty.png", "structure_simoe.png", "overlap.png", "activations.png"),
    }
    kinds, depths = figures["structure_simoe.png"].axes
    found = rows_of(tmp_path / "structure_simoe.csv")
    for ax, by in ((kinds, "type"), (depths, "depth")):
        means = [r for r in found if r["by"] == by and r["expert"] == "mean"]
        assert [bar.get_height() for bar in ax.patches] == pytest.approx(
            [100 * float(r["share"]) for r in means]
        )
        assert [label.get_text() for label in ax.get_xticklabels()] == [r["group"] for r in means]
    shown = {(r["group"], r["expert"]): float(r["share"]) for r in found}
    assert shown["q_proj", "mean"] == pytest.approx(0.3)
    assert shown["q_proj", "deviation"] == pytest.approx(0.2 / 2**0.5)
    assert shown["q_proj", "2"] == 0.2
    without, with_it, _ = figures["overlap.png"].axes
    for ax, title in ((without, "No penalty"), (with_it, "SIMoE")):
        pairs = [r for r in rows_of(tmp_path / "overlap.csv") if r["model"] == title]
        values = [100 * float(r["overlap"]) for r in pairs if r["first"] != r["second"]]
        assert ax.images[0].get_array().compressed().tolist() == pytest.approx(values)
        assert ax.get_title(loc="left") == title
        assert ax.get_title(loc="right") == f"mean {values[0]:.1f} %"
    assert with_it.images[0].get_clim() == (0, 20)  # one scale for both


def test_the_tree_is_that_of_scipy_and_stands_beside_its_tasks(tmp_path, figures):
    own = activations()
    write_instruction_report(tmp_path, evaluation(), model="demo", activations=own)
    tree, heat, _ = figures["activations.png"].axes
    points = [a.coefficients for a in own]
    linkage = hierarchy.linkage(points, "average", optimal_ordering=True)
    order = hierarchy.dendrogram(linkage, no_plot=True)["leaves"]
    labels = [own[place].label for place in order]
    assert [text.get_text() for text in heat.get_yticklabels()] == labels
    assert heat.images[0].get_array().tolist() == [list(points[place]) for place in order]
    lines = rows_of(tmp_path / "activations.csv")
    assert [(r["domain"], r["name"]) for r in lines] == [
        (own[p].domain, own[p].name) for p in order
    ]
    assert [float(lines[0][f"expert_{i + 1}"]) for i in range(3)] == list(points[order[0]])
    merges = rows_of(tmp_path / "dendrogram.csv")
    assert [float(r["distance"]) for r in merges] == linkage[:, 2].tolist()
    assert {merges[0]["first"], merges[0]["second"]} == {"text: join", "text: cut"}
    assert float(merges[0]["distance"]) == pytest.approx(0.02**0.5)  # by hand
    # One bracket a merge, its ends at the heights of the two that it joins.
    brackets = [line.get_xydata().tolist() for line in tree.lines]
    assert [bracket[1][0] for bracket in brackets] == linkage[:, 2].tolist()
    heights = [0.0] * len(own) + linkage[:, 2].tolist()
    for (first, second, *_), bracket in zip(linkage, brackets, strict=True):
        assert [bracket[0][0], bracket[3][0]] == [heights[int(first)], heights[int(second)]]
    colours = {t.get_text(): t.get_color() for t in heat.get_yticklabels()}
    assert colours["text: join"] == colours["text: cut"] != colours["sums: add"]


def test_the_same_evaluation_gives_the_same_files_and_one_page(tmp_path):
    more = {"structures": {"simoe": structure(0.4)}, "activations": activations()[:1]}
    for place in ("a", "b"):
        write_instruction_report(tmp_path / place, evaluation(), model="demo", **more)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"metrics.json", "table.txt", "table.md", "scores.csv", "report.html"} < set(files)
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    found = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert InstructionEvaluation.from_dict(found) == evaluation()
    assert Structure.from_dict(found["structures"]["simoe"]) == structure(0.4)
    assert [Activation.from_dict(a) for a in found["activations"]] == activations()[:1]
    page = (tmp_path / "a" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "Full | tuned" in page
    assert '<td class="best">45.0</td>' in page
    means = [r for r in rows_of(tmp_path / "a" / "scores.csv") if r["category"] == "mean"]
    assert [float(r["rouge_l"]) for r in means if r["row"] == "simoe"] == pytest.approx([0.5, 0.45])


def test_faults_are_told_together_and_nothing_is_written(tmp_path):
    rows = dict(evaluation().rows)
    rows["full"] = replace(rows["full"], runs=(run((0.2, float("nan")), (1.5, 0.7)),))
    rows["simoe"] = replace(rows["simoe"], runs=(run((0.2,), (0.5, 0.5)),))
    wrong = InstructionEvaluation(rows=rows, highlight="best")
    tasks = [*activations(), activations()[0]]
    tasks[1] = replace(tasks[1], coefficients=(1.0,))
    with pytest.raises(InputError) as raised:
        write_instruction_report(
            tmp_path / "out",
            wrong,
            model="demo",
            structures={"gone": structure(0.1)},
            activations=tasks,
        )
    assert {fault.field for fault in raised.value.faults} == {
        "highlight",
        "rows.full.runs[0].unseen.y.rouge_l",
        "rows.full.runs[0].unseen.y.exact_match",
        "rows.full.runs[0].seen.x.rouge_l",
        "rows.simoe.runs[0].unseen",
        "structures.gone",
        "activations",
    }
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="nothing to report"):
        write_instruction_report(tmp_path / "out", InstructionEvaluation(rows={}), model="demo")


@pytest.mark.parametrize("name", ["from $5 to $10", "50 % of $100, $_$", "$ and # of $"])
def test_a_name_is_drawn_as_it_is_written(tmp_path, figures, name):
    own = [replace(activations()[0], name=name), activations()[1]]
    write_instruction_report(tmp_path, evaluation(), model="demo", activations=own)
    labels = figures["activations.png"].axes[1].get_yticklabels()
    assert {text.get_text() for text in labels} == {one.label for one in own}
    assert not any(text.get_parse_math() for text in labels)


def test_other_seeds_may_ask_other_questions_of_the_same_categories():
    first, second = evaluation(), evaluation(0.1)
    rows = {
        name: replace(
            row,
            runs=tuple(
                replace(
                    run,
                    seen=replace(
                        run.seen,
                        categories={
                            key: replace(score, count=7)
                            for key, score in run.seen.categories.items()
                        },
                    ),
                )
                for run in row.runs
            ),
        )
        for name, row in second.rows.items()
    }
    both = across_runs([first, replace(second, rows=rows)])
    assert faults(both) == []
    assert metrics(both)["full"]["seen"]["categories"]["x"]["count"] == 7
    rows["full"] = second.rows["full"]  # two rows of one run must be asked alike
    found = faults(across_runs([first, replace(second, rows=rows)]))
    assert {fault.field for fault in found} == {
        f"rows.{name}.runs[1].seen" for name in rows if name != "full"
    }
