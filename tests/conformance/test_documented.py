"""Every check is on a page, with what it tells an author."""

from __future__ import annotations

import pytest
from tools.docs_hooks import fill_in

from dovetail.api.component import KINDS, Kind
from dovetail.testing.checks import checks_of
from dovetail.testing.suites import suite_for
from tests.docs.pages import DOCS


@pytest.mark.parametrize("kind", KINDS)
def test_every_check_is_documented(kind: Kind) -> None:
    pages = "".join(
        fill_in((DOCS / "plugins" / f"{page}.md").read_text()) for page in (kind, "conformance")
    )
    missing = [
        check.id for check in checks_of(suite_for(kind)).values() if f"| `{check.id}`" not in pages
    ]
    assert not missing
