"""A browser for the tests of pages, and what sticks out of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.page.browser import CHROMIUM, Browser

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: `make test-page` installs it from Debian's packages"
)

# What can be seen only by scrolling sideways, but for code, whose lines are as long as they are.
CUT_OFF = """[...document.body.querySelectorAll('*')].filter((element) => {
  const box = element.getBoundingClientRect();
  return box.width && box.right > document.documentElement.clientWidth + 1 && !element.closest('pre, [data-md-component=search]');
}).map((element) => element.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as browser:
        yield browser
