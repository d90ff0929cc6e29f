"""Layouts of real models, and traffic of agents: many requests share a long prompt, and each adds
its own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout
from dovetail.api.prefix_cache import PrefixCache, PrefixOptions
from dovetail.engine.live_request import LiveRequest
from tests.kv_cache.helpers import generate, request

BLOCK = 16  # tokens
SHARED, OWN, ANSWER = 1_500, 700, 64  # tokens
RUNNING = 8  # requests at a time


@dataclass(frozen=True)
class Model:
    """Layers with full attention and with a window, each of which keeps `token_bytes` for a
    token."""

    full_layers: int
    window_layers: int
    window: int
    token_bytes: int

    @property
    def layout(self) -> KVLayout:
        """Return a layout whose page holds a block of as many layers as the smaller group has."""
        slots = min(self.full_layers, self.window_layers)
        full, sliding = -(-self.full_layers // slots), -(-self.window_layers // slots)
        groups = CacheGroup((0,), BLOCK, None, full), CacheGroup((1,), BLOCK, self.window, sliding)
        return KVLayout(groups, slots * self.token_bytes * BLOCK, "bfloat16")

    @property
    def one_group(self) -> KVLayout:
        """Return the layout that keeps all tokens in all layers."""
        return KVLayout(
            (CacheGroup((0,), BLOCK),),
            (self.full_layers + self.window_layers) * self.token_bytes * BLOCK,
            "bfloat16",
        )

    def seen_bytes(self, num_tokens: int) -> int:
        """Return the bytes of K and V that the layers of a request with `num_tokens` tokens can
        see."""
        return (
            self.full_layers * num_tokens + self.window_layers * min(self.window, num_tokens)
        ) * self.token_bytes


GPT_OSS_20B = Model(12, 12, window=128, token_bytes=2 * 8 * 64 * 2)
GEMMA_3_27B = Model(10, 52, window=1_024, token_bytes=2 * 16 * 128 * 2)


def found_tokens(
    layout: KVLayout, pool_bytes: int, families: int, requests: int = 120, seed: int = 0
) -> int:
    """Serve `requests` requests of a number of `families`, each with a shared prompt, and return
    the tokens that they found."""
    kv = PrefixCache(PrefixOptions(), KVContext(layout, pool_bytes // layout.page_bytes))
    random = Random(seed)
    drawn = random.choices(range(families), k=requests)
    waiting = deque(
        request([*[family] * SHARED, *[1_000 + number] * OWN])
        for number, family in enumerate(drawn)
    )
    running: list[LiveRequest] = []
    found = 0
    while waiting or running:
        if waiting and len(running) < RUNNING and (cached := _admit(kv, waiting[0])) is not None:
            found += cached
            running.append(waiting.popleft())
        for each in [each for each in running if not _decode(kv, each)]:
            kv.free(each)
            running.remove(each)
    return found


def _admit(kv: PrefixCache, asking: LiveRequest) -> int | None:
    allocation = kv.allocate(asking, asking.num_tokens)
    if allocation is None:
        return None
    kv.commit(asking, asking.num_tokens)
    return allocation.cached


def _decode(kv: PrefixCache, each: LiveRequest) -> bool:
    """Let it generate a block of tokens; False if it has ended, or must, for lack of memory."""
    computed = each.num_tokens
    kv.trim(each, computed)
    if len(each.output_token_ids) >= ANSWER or kv.allocate(each, computed + BLOCK) is None:
        return False
    generate(each, [computed] * BLOCK)
    kv.commit(each, computed + BLOCK)
    return True
