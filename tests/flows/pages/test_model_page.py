"""What flows log of a report."""

import re
from types import SimpleNamespace

import pytest

from flows.pages.model import log_report, summary
from upcycle_core.evaluation.report.files import write_report
from upcycle_core.evaluation.report.parts import Report, Section, Table


class Run:
    """Keeps what it is given to log."""

    def __init__(self):
        self.files = {}

    def log_artifacts(self, folder, name):
        for path in folder.iterdir():
            self.files[f"{name}/{path.name}"] = path.read_text()

    def log_text(self, text, path):
        self.files[path] = text


def test_the_logged_page_names_version_date_and_commit_and_the_artifact_does_not(tmp_path):
    report = Report("demo: scores", [Section("Scores", [Table(["Model"], [["DUME"]])])])
    write_report(report, tmp_path, metrics={"a": 1})
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    run = Run()
    version = SimpleNamespace(reference="models:/demo/3")
    log_report(SimpleNamespace(run=run), tmp_path, "report", version)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    assert {name.removeprefix("report/") for name in run.files} == set(before)
    page = run.files["report/report.html"]
    words = r"models:/demo/3 · \d{4}-\d\d-\d\d · commit ([0-9a-f]{10}(, modified)?|unknown)"
    assert re.search(f"<title>demo: scores · {words}</title>", page)
    assert re.search(f'</h1>\n<p class="note">{words}</p>', page)
    log_report(SimpleNamespace(run=run), tmp_path, "report", cost="It took 3 < 4 s.")
    page = run.files["report/report.html"]
    assert "models:/" not in page
    assert page.count('</p>\n<p class="note">It took 3 &lt; 4 s.</p>') == 1


@pytest.mark.parametrize("runs", [True, False])
def test_the_summary_names_the_pages_of_servers_that_run_and_else_what_starts_them(tmp_path, runs):
    (tmp_path / "table.txt").write_text("scores")
    prefect, mlflow = ("http://here:1", "http://here:2") if runs else (None, None)
    session = SimpleNamespace(
        workspace=SimpleNamespace(path=lambda name: tmp_path),
        timings=lambda: {"wall": 1.0, "pieces": 1.0, "stages": {}},
        settings=SimpleNamespace(
            prefect_api_url=prefect and f"{prefect}/api", mlflow_url=mlflow, mlflow_pages=mlflow
        ),
        run=SimpleNamespace(page="/#/run"),
    )
    version = SimpleNamespace(reference="models:/moe/3", name="moe", number=3, aliases=())
    said = summary(session, SimpleNamespace(version=version, verdict="the first"))
    assert ("make up" in said) is not runs
    assert (f"{prefect} and {mlflow}/#/models/moe/versions/3?" in said) is runs
