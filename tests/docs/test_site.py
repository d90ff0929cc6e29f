"""The built site: no table has an empty column, the style sheet distinguishes code blocks from
tables, search finds words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, blocks_of, pages

COLUMNS = 92  # of a code block beside both side bars in a window of 1,280 pixels
DRAWN = re.compile("[─-╿]")


class Tables(HTMLParser):
    """The tables of a page as rows of texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[list[list[str]]] = []
        self._in_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        if tag == "table":
            self.found.append([])
        elif tag == "tr":
            self.found[-1].append([])
        elif tag in ("td", "th"):
            self.found[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.found[-1][-1][-1] += data.strip()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
def test_no_table_of_the_site_has_a_column_with_nothing_in_it(site: Path) -> None:
    for page in site.rglob("index.html"):
        tables = Tables(page.read_text(encoding="utf-8")).found
        for head, *rows in filter(None, tables):
            for index, title in enumerate(head):
                assert any(row[index].strip("–") for row in rows), (
                    f"{page.parent.relative_to(site)}: {title!r} in {head}"
                )


@pytest.mark.full
def test_a_class_has_its_fields_in_a_table_and_not_once_more_below(site: Path) -> None:
    page = (site / "reference/engine/index.html").read_text(encoding="utf-8")
    assert page.count('id="dovetail.request.sampling_params.SamplingParams"') == 1
    assert 'id="dovetail.request.sampling_params.SamplingParams.max_tokens"' not in page
    assert "model_config" not in "".join(
        path.read_text(encoding="utf-8") for path in (site / "reference").rglob("index.html")
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("word", "title"),
    [("streaming", "Streaming"), ("max_tokens", "When an answer ends: max_tokens, stop and EOS")],
)
def test_search_finds_a_word_where_it_is_explained(site: Path, word: str, title: str) -> None:
    """Matches in a title come first."""
    entries = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["docs"]
    titles = [re.sub("<.*?>", "", entry["title"]) for entry in entries]
    assert [found for found in titles if word in found.lower()] == [title]


@pytest.mark.full
def test_the_style_sheet_can_tell_languages_apart(site: Path) -> None:
    page = (site / "cli/index.html").read_text(encoding="utf-8")
    assert {"language-console highlight", "language-text highlight"} <= set(
        re.findall(r'<div class="([^"]*highlight)">', page)
    )


@pytest.mark.full
def test_the_first_page_has_a_drawing_that_takes_the_colours_of_the_page(site: Path) -> None:
    page = (site / "index.html").read_text(encoding="utf-8")
    (svg,) = re.findall(r'<figure class="drawing">\s*(<svg.*?</svg>)', page, re.DOTALL)
    names = set(re.findall(r"var\((--[a-z]+)\)", svg))
    style = (DOCS / "assets/extra.css").read_text(encoding="utf-8")
    assert names == set(re.findall(r"^  (--[a-z]+): var\(--md-", style, re.MULTILINE))
    assert not re.search(r"(fill|stroke)=\"", svg), "colours are in one place"


def test_drawings_are_narrow_enough_not_to_be_broken() -> None:
    for page in pages():
        for block in blocks_of(page):
            if block.language == "text" and DRAWN.search(block.text):
                assert max(map(len, block.text.splitlines())) <= COLUMNS, block.place
