"""The pages of the documentation and the code blocks on them.

What a block's info string means, here and for writers:

    ```python                     runs; the blocks of a page share a process, a namespace and a temporary directory
    ```python title="a/b.py"      a file, written to that directory; so are blocks of any other language with a title
    ```yaml                       an engine config, titled or not; one titled "wrong…" must be refused, one titled "job…" is a job of `dovetail batch`
    ```console                    lines that begin with "$ dovetail" or "$ curl" run; lines that don't begin with "$ " are their output, "..." for
                                  any text. A line that ends with a backslash goes on in the next
    ```text title="Output"        what the block above printed, "..." for any text
    ```any language               `--8<-- "path"` alone: the page shows that file, which must exist
    ```bash                       commands of docker, which don't run; the files that they name must exist
    <!-- generated: name -->      up to its end: a copy of something that has tests of its own; its blocks are left out here
    <!-- not run: why -->         on the line above a block: it doesn't run, and `test_code_blocks.NOT_RUN` must list it
Python and curl that name `SHOWN_URL` talk to a server of the demo model. Of `dovetail serve`, `chat` and `ranks`, which don't end, the flags are
checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHOWN_URL = "http://127.0.0.1:8000"

_GENERATED = re.compile(
    r"^<!-- generated: [^\n]+ -->$.*?^<!-- end of generated -->$", re.MULTILINE | re.DOTALL
)
_INCLUDED = re.compile(r'--8<-- "([^"]+)"\n')
_NOT_RUN = re.compile(r"<!-- not run: .+ -->")


@dataclass(frozen=True)
class Block:
    page: str  # relative to the repository
    line: int  # of the fence, from 1
    language: str
    title: str | None
    text: str
    not_run: bool

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def included(self) -> Path | None:
        """The file that is shown here, if this is all that there is."""
        found = _INCLUDED.fullmatch(self.text)
        return ROOT / found[1] if found else None

    @property
    def is_output(self) -> bool:
        return self.language == "text" and self.title == "Output"

    @property
    def is_file(self) -> bool:
        return self.title is not None and not self.is_output


@dataclass(frozen=True)
class Command:
    """A line of a console block, without the "$ ", and the output shown for it."""

    line: str
    output: str


def pages() -> list[str]:
    """README and all pages, relative to the repository."""
    return ["README.md", *sorted(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))]


def has_blocks(page: str) -> bool:
    """Return True if `blocks_of` would find any, which takes longer: it parses the page."""
    return re.search(r"^ *```", _written(page), re.MULTILINE) is not None


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    text = _written(page)
    lines = text.splitlines()
    return tuple(
        _block(page, lines, token) for token in MarkdownIt().parse(text) if token.type == "fence"
    )


def _written(page: str) -> str:
    """Return a page with empty lines for what is generated: lines keep their numbers."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return _GENERATED.sub(lambda part: "\n" * part[0].count("\n"), text)


def commands_of(block: Block) -> Iterator[Command]:
    first, *others = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    assert not first, f"{block.place}: a console block begins with a command, got {first!r}"
    for part in others:
        line, _, output = part.replace("\\\n", "").partition("\n")
        yield Command(line, output)


def _block(page: str, lines: list[str], token: object) -> Block:
    language, _, rest = token.info.strip().partition(" ")  # type: ignore[attr-defined]
    title = re.search(r'title="([^"]+)"', rest)
    start: int = token.map[0]  # type: ignore[attr-defined]
    above = lines[start - 1] if start else ""
    return Block(
        page,
        start + 1,
        language,
        title[1] if title else None,
        token.content,
        bool(_NOT_RUN.fullmatch(above)),
    )  # type: ignore[attr-defined]
