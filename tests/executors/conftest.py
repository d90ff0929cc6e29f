from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.executors.rank_threads import ranks_as_threads


@pytest.fixture
def threads_as_ranks() -> Iterator[None]:
    with ranks_as_threads():
        yield
