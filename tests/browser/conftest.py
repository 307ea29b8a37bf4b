"""A browser for every test of this folder."""

import os
import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 600


@pytest.fixture
def page():
    """A page of the system's browser; there has to be one."""
    from playwright.sync_api import expect, sync_playwright

    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.fail(f"no {', '.join(BROWSERS)} on the PATH; on Debian: apt-get install chromium")
    expect.set_options(timeout=SECONDS * 1000)
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium's sandbox refuses root
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=as_root)
        page = opened.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(SECONDS * 1000)
        yield page
        opened.close()
