"""Generated parts of pages are written into the Markdown, and current."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import docs_hooks


@pytest.mark.parametrize("page", docs_hooks.pages(), ids=lambda page: str(page.name))
def test_the_generated_parts_of_a_page_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert docs_hooks.fill_in(text) == text, "run: python -m tools.docs_hooks"


def test_a_part_is_written_between_its_marks_and_replaced_when_it_changes() -> None:
    page = "before\n\n<!-- generated: api versions -->\n\nafter\n"
    filled = docs_hooks.fill_in(page)
    assert "| `scheduler` |" in filled
    assert filled.endswith(f"{docs_hooks.END}\n\nafter\n")
    outdated = filled.replace("| `scheduler` |", "| `planner` |")
    assert docs_hooks.fill_in(filled) == docs_hooks.fill_in(outdated) == filled


def test_a_part_without_an_end_leaves_the_next_one_alone() -> None:
    first = "<!-- generated: drawing of the loop -->"
    filled = docs_hooks.fill_in(f"{first}\n\n{docs_hooks.fill_in(first)}\n")
    assert filled.count(first) == filled.count("![") == filled.count(docs_hooks.END) == 2


def test_the_site_inlines_drawings_and_leaves_signatures_to_the_reference() -> None:
    page = docs_hooks.fill_in(
        "<!-- generated: drawing of the loop -->\n<!-- generated: signatures dovetail.api.clock -->"
    )
    assert "assets/loop.svg" in page
    assert "interface Clock" in page
    shown = docs_hooks.on_page_markdown(page)
    assert "<svg" in shown
    assert "interface Clock" not in shown
