"""The start-up line of `dovetail serve` about the model's cache groups."""

from __future__ import annotations

from dovetail.api.executor import Capacity
from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.api.kv_layout import CachedLayer, plan_layout
from dovetail.front.engine_info import groups_in_words


def test_several_cache_groups_are_a_line_of_their_own_and_one_is_none() -> None:
    layers = [
        CachedLayer(index, window, lambda tokens: (tokens, tokens))
        for index, window in enumerate((128, None))
    ]
    planned = plan_layout(layers, 16, "float32")
    several = Capacity(10, 1, planned.layout, 9, 64, details={"kv_groups": planned.describe()})
    assert groups_in_words(several) == f"KV cache: {planned.describe()}\n"
    assert "window 128" in groups_in_words(several)
    assert (
        groups_in_words(Capacity(10, 1, KVLayout((CacheGroup((0,), 16),), 8, "float32"), 9, 64))
        == ""
    )
