"""A pool that can't hold one sequence of the model's length is refused when the engine starts."""

from __future__ import annotations

import pytest

from dovetail.api.executor import Capacity
from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.errors import UnsupportedError
from dovetail.front.assembly_checks import check_pool

LAYOUT = KVLayout((CacheGroup((0,), 4), CacheGroup((1,), 4, window=8)), 1, "float32")


def capacity(num_pages: int) -> Capacity:
    return Capacity(num_pages, 1, LAYOUT, vocab_size=10, max_model_len=100)


def test_a_manager_that_releases_nothing_needs_pages_for_all_tokens_of_all_groups() -> None:
    enough = LAYOUT.most_pages(100, 4)
    assert enough < LAYOUT.pages(100) == 50
    check_pool(capacity(enough), 4, trims=True)
    check_pool(capacity(50), 4, trims=False)
    for pages, trims in ((enough - 1, True), (49, False)):
        with pytest.raises(
            UnsupportedError,
            match=f"the KV cache has {pages} pages, but one sequence of max_model_len = 100 tokens "
            f"needs",
        ):
            check_pool(capacity(pages), 4, trims=trims)
