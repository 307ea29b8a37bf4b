"""The page on tasks, on the version's page in MLflow."""

from contextlib import contextmanager
from threading import Lock, Thread
from types import SimpleNamespace

import pytest

from flows.pages import tasks as pages
from upcycle_core.evaluation.report.files import MARKDOWN

VERSION = SimpleNamespace(name="demo", reference="models:/demo/1")


class Registry:
    """The page of one version; another command of the home writes to it as soon as it may."""

    def __init__(self):
        self.page, self._turn, self.other = "A model.", Lock(), Thread(target=self._certify)

    @contextmanager
    def alone(self, name):
        with self._turn:
            yield

    def description(self, version):
        page = self.page
        self.other.start()
        self.other.join(0.5)
        return page

    def describe(self, version, markdown):
        self.page = markdown

    def add_metrics(self, version, metrics, *, run):
        pass

    def set_tags(self, version, tags):
        pass

    def _certify(self):
        with self.alone("demo"):
            self.page += "\ncertificate"


@pytest.fixture
def session(tmp_path, monkeypatch):
    def write(tasks, folder, *, model):
        folder.mkdir()
        (folder / MARKDOWN).write_text("scores on tasks")

    monkeypatch.setattr(pages, "write_task_report", write)
    for name in ("log_report", "publish_table", "publish_pictures", "score_table"):
        monkeypatch.setattr(pages, name, lambda *_: None)
    monkeypatch.setattr(pages.results, "metrics", lambda tasks: {})
    run = SimpleNamespace(id="run", log_metrics=lambda _: None, file_page=lambda path: f"#/{path}")
    return SimpleNamespace(
        workspace=SimpleNamespace(path=lambda name: tmp_path / name),
        recipe=SimpleNamespace(name="demo"),
        run=run,
        registry=Registry(),
        settings=SimpleNamespace(mlflow_pages=None),
    )


def test_what_another_command_writes_meanwhile_stays_on_the_version_s_page(session):
    pages.publish_tasks(session, VERSION, SimpleNamespace(scores={"demo": {}}, subject="demo"))
    session.registry.other.join()
    page = session.registry.page
    assert page.startswith(f"A model.\n{pages.HEADING}")
    assert page.endswith("scores on tasks\ncertificate")
