"""What people see in a browser: the form, a run with its artifacts, the registry's page."""

import re

import pytest
import yaml
from mlflow import MlflowClient
from served import served_project

from infra.services.deployments import PREFECT_FILE, deploy
from infra.tracking.registry import Registry

pytestmark = pytest.mark.faults

SEED = "Seed of every random choice. At least 0, less than 4294967296."


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    with served_project(folder) as project:
        content = yaml.safe_load(PREFECT_FILE.read_text())
        content["deployments"] = content["deployments"][:1]
        content["deployments"][0]["parameters"]["recipe"] = str(project.recipe)
        (folder / "prefect.yaml").write_text(yaml.safe_dump(content))
        assert deploy(project.settings, prefect_file=folder / "prefect.yaml") == ["dume/pico"]
        yield project


def open_form(page, settings):
    """The way a person goes: the list, the deployment, its form; returns the seed's field."""
    page.goto(f"http://127.0.0.1:{settings.prefect_port}/deployments")
    page.get_by_role("link", name="pico", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run", exact=True).click()
    return page.locator(".schema-form-property", has_text=SEED).last.locator("input")


def submit(page):
    """Press the button; again where Prefect's SQLite was busy: it says 503 and starts nothing."""
    status = 503
    while status == 503:
        with page.expect_response(re.compile("/create_flow_run$")) as answer:
            page.get_by_role("button", name="Submit").click()
        status = answer.value.status
    assert status == 201


def test_a_bad_value_is_refused_with_its_field_its_limit_and_the_reason(page, served):
    open_form(page, served.settings).fill("-1")
    page.get_by_role("button", name="Submit").click()
    refusal = page.get_by_text("Validation failed for field 'recipe.seed'").first
    refusal.wait_for()
    assert "-1 is less than the minimum of 0" in refusal.inner_text()


def test_a_run_started_from_the_form_shows_its_version_in_the_registry(page, served):
    open_form(page, served.settings).fill("7")
    submit(page)
    page.wait_for_url(re.compile("tab=Runs"))
    page.locator('a[href*="/runs/flow-run/"]').first.click()
    page.wait_for_url(re.compile("/runs/flow-run/"))
    page.get_by_text("Completed", exact=True).first.wait_for()

    page.get_by_text("Artifacts", exact=True).click()
    for card in ("pico-scores", "pico-routing-plot", "pico-mlflow-run", "pico-mlflow-version"):
        page.get_by_text(card, exact=True).first.wait_for()
    page.get_by_text("pico-model", exact=True).first.click()
    page.get_by_role("heading", name="upcycle-pico, version 1: challenger and champion").wait_for()
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="upcycle-pico, version 1", exact=True).click()
    registry = opened.value
    registry.get_by_role("heading", name="Version 1").wait_for()
    for words in ("champion", "challenger", "DUME Mixture-of-Experts of letters, numbers."):
        registry.get_by_text(words).first.wait_for()


def test_lists_say_what_came_of_a_run_and_its_two_pages_lead_to_each_other(page, served):
    settings = served.settings
    version = Registry(settings).find("upcycle-pico", "champion")
    run = MlflowClient(settings.mlflow_tracking_uri).get_run(version.run_id).info
    assert re.fullmatch(r"pico [\d-]+: version 1 promoted, [\d.]+, the first", run.run_name)
    page.goto(f"http://127.0.0.1:{settings.prefect_port}/v2/runs")
    page.get_by_text(run.run_name).first.wait_for()
    place = f"experiments/{run.experiment_id}/runs/{run.run_id}?workflowType=machine_learning"
    page.goto(f"http://127.0.0.1:{settings.mlflow_port}/#/{place}")
    page.get_by_role("heading", name=run.run_name).wait_for()
    back = page.get_by_role("link", name="Its run in Prefect").get_attribute("href")
    assert back.startswith(f"http://127.0.0.1:{settings.prefect_port}/runs/flow-run/")
    page.goto(back)
    page.get_by_text(run.run_name).first.wait_for()
