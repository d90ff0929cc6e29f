"""Reports of the lab and the documentation aren't cut off on a phone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.http_server import http_server
from tests.lab.commands import lab, write_engine
from tests.page.browser import Browser
from tests.page.conftest import CUT_OFF, needs_chromium

pytestmark = [pytest.mark.full, needs_chromium]

WIDTHS = (360, 390)
WORKLOAD = "requests=12 arrivals=poisson(8) prompt=uniform(20, 200) output=fixed(10)"
COVERED = """[...document.querySelectorAll('pre')].filter((block) => {
  const [code, button] = [block.querySelector('code'), block.querySelector('button')].map((part) => part?.getBoundingClientRect());
  return button && code.right > button.left && code.top < button.bottom;
}).map((block) => block.textContent.slice(0, 80))"""
WRAPPED = """[...document.querySelectorAll('.language-python code, .language-yaml code')]
  .filter((code) => getComputedStyle(code).whiteSpace !== 'pre').length"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the documentation. `make test-page` has just built it."""
    folder = os.environ.get("DOVETAIL_TEST_SITE")
    if folder is None:
        folder = str(tmp_path_factory.mktemp("site"))
        subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "-q", "-d", folder],
            cwd=ROOT,
            check=True,
            capture_output=True,
        )

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

    with http_server(partial(Quiet, directory=folder)) as url:
        yield f"{url}/"


def opened(browser: Browser, url: str, width: int) -> Browser:
    browser.open(url, width=width)
    browser.wait_for("document.readyState === 'complete'")
    return browser


def compare(engine: Path, out: Path) -> None:
    lab("compare", engine, engine, "--trace", WORKLOAD, "--seeds", 2, "--out", out)


def sweep(engine: Path, out: Path) -> None:
    lab("sweep", engine, "--trace", WORKLOAD, "--rates", "1,2", "--out", out)


@pytest.mark.parametrize("make", [compare, sweep])
def test_a_report_of_the_lab_is_as_wide_as_its_window(
    browser: Browser, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    make(write_engine(tmp_path / "a-long-name.yaml"), tmp_path / "out")
    for width in WIDTHS:
        assert (
            opened(browser, (tmp_path / "out" / "report.html").as_uri(), width).evaluate(CUT_OFF)
            == []
        )


def test_the_drawing_of_the_home_page_is_as_wide_as_its_window(browser: Browser, site: str) -> None:
    for width in WIDTHS:
        assert opened(browser, site, width).evaluate(CUT_OFF) == []


@pytest.mark.parametrize(
    "page", ["", "write-a-scheduler/", "cli/", "plugins/sampler/", "reference/sampler/"]
)
def test_code_keeps_its_indentation_and_nothing_is_under_the_button_that_copies_it(
    browser: Browser, site: str, page: str
) -> None:
    for width in (*WIDTHS, 1100):
        opened(browser, site + page, width).wait_for(
            "document.querySelector('pre button') !== null"
        )
        assert browser.evaluate(WRAPPED) == 0
        assert browser.evaluate(COVERED) == []
