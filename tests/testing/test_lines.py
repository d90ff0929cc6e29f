"""Lines of the product are read at 100 columns, beside another file."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
COLUMNS = 100
SHARE = 0.002  # drawings, patterns and examples of formats


def test_lines_have_100_columns() -> None:
    lines = [
        line
        for folder in ("core", "plugins", "apps")
        for path in (ROOT / folder).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    long = [line for line in lines if len(line) > COLUMNS]
    assert len(long) <= SHARE * len(lines), f"{len(long)} of {len(lines)} lines, such as {long[0]}"
