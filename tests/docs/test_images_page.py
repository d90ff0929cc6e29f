"""The page on images names each type of model in the table, and what becomes of its images."""

from __future__ import annotations

import re
from pathlib import Path

from dovetail.api.media_types import MEDIA_TYPES

PAGE = Path(__file__).parents[2] / "docs" / "images.md"


def test_the_page_names_each_type_and_whether_it_is_refused() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Models\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (are|aren't)( refused)?.* \| (.+) \|$", section, re.MULTILINE)
    refused = {name: bool(how) for _, how, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert refused == {name: bool(each.refused) for name, each in MEDIA_TYPES.items()}
