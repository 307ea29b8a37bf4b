"""What flows log of a report."""

import re
from types import SimpleNamespace

from flows.pages.model import log_report
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
