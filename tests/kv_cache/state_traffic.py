"""Prefix hits of models with recurrent states, by the manager `prefix` in an engine's order of
calls.

    python -m tests.kv_cache.state_traffic      # prints the share of the possible hits, for several pools and chunks

The possible hits are those of the same traffic in a pool of as many pages, with the full-attention
layers' group only.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from dovetail.api.kv_cache import KVContext, KVLayout
from dovetail.api.kv_layout import CachedLayer, CachedState, plan_layout
from dovetail.api.prefix_cache import PrefixCache, PrefixOptions
from dovetail.engine.live_request import LiveRequest
from tests.kv_cache.helpers import generate, request

BLOCK = 16  # tokens; also how many a request generates in a step of these simulations
SHARED, OWN, ANSWER = 1_500, 700, 64  # tokens of agents' requests
ASKED, ANSWERED, TURNS = 200, 150, 43  # tokens of a turn, and turns of a conversation
RUNNING = 8  # requests at a time


def qwen3_next(block_size: int = BLOCK) -> KVLayout:
    """Return the layout of Qwen3-Next-80B-A3B: 12 of 48 layers have full attention, with 2 heads of
    256; 36 are Gated DeltaNet with 32 value and 16 key heads of 128 and a convolution over 4
    tokens; K, V and past inputs in bfloat16, matrices in float32."""
    layers = [
        CachedLayer(index, None, lambda tokens: (tokens * 2 * 256 * 2,) * 2)
        for index in range(3, 48, 4)
    ]
    states = [
        CachedState(index, ((32 * 128, 128 * 4), ((2 * 16 + 32) * 128, 3 * 2)))
        for index in range(48)
        if index % 4 != 3
    ]
    return plan_layout(layers, block_size, "bfloat16", states=states).layout


def attention_only(layout: KVLayout) -> KVLayout:
    """Return `layout` without its states."""
    return KVLayout(layout.groups[:-1], layout.page_bytes, layout.dtype)


@dataclass
class Served:
    """A request in a simulation."""

    request: LiveRequest
    answer: int  # tokens to generate
    computed: int = 0
    known: int = 0  # at admission
    # returns the request that follows
    done: Callable[[LiveRequest], Served | None] = lambda _: None

    @property
    def ended(self) -> bool:
        return len(self.request.output_token_ids) >= self.answer


@dataclass
class Engine:
    """Runs requests in order of arrival, at most `RUNNING` at a time, and computes at most `chunk`
    prompt tokens in a step."""

    kv: PrefixCache
    chunk: int
    waiting: deque[Served] = field(default_factory=deque)
    running: list[Served] = field(default_factory=list)
    found: int = 0  # tokens, at first admissions
    preemptions: int = 0
    checkpoints: int = 0

    def run(self) -> Engine:
        while self.waiting or self.running:
            self._step()
        return self

    def _step(self) -> None:
        left, planned = self.chunk, list[tuple[Served, int]]()
        for each in [*self.running]:
            if each not in self.running:  # preempted for another
                continue
            tokens = min(left, each.known - each.computed) if each.computed < each.known else BLOCK
            while tokens and self.kv.allocate(each.request, each.computed + tokens) is None:
                self._preempt(self.running[-1], planned)
                if each not in self.running:
                    tokens = 0
            if tokens:
                left -= self._plan(each, tokens, planned)
        while self.waiting and left and len(self.running) < RUNNING:
            each = self.waiting[0]
            found = self.kv.lookup(each.request)
            tokens = min(left, each.request.num_tokens - found)
            allocation = self.kv.allocate(each.request, found + tokens)
            if allocation is None:
                break
            self.running.append(self.waiting.popleft())
            self.found += found if not each.request.output_token_ids and not each.known else 0
            each.computed, each.known = found, each.request.num_tokens
            left -= self._plan(each, tokens, planned)
        if not planned:
            raise RuntimeError("a request doesn't fit into the pool")
        self.kv.take_copies()
        self.checkpoints += len(self.kv.take_checkpoints())
        for each, _ in planned:
            if each.computed >= each.known:
                generate(
                    each.request,
                    [1_000_000 + each.request.num_tokens]
                    * (each.computed - each.request.num_tokens + 1),
                )
            self.kv.commit(each.request, min(each.computed, each.request.num_tokens))
            if each.ended:
                self.kv.free(each.request)
                self.running.remove(each)
                if (following := each.done(each.request)) is not None:
                    self.waiting.append(following)

    def _plan(self, each: Served, tokens: int, planned: list[tuple[Served, int]]) -> int:
        """Count the next tokens as computed, commit those of the prompt, and return how many these
        are."""
        planned.append((each, each.computed))
        prefills = each.computed < each.known
        each.computed += tokens
        if prefills:
            self.kv.commit(each.request, each.computed)
        return tokens if prefills else 0

    def _preempt(self, each: Served, planned: list[tuple[Served, int]]) -> None:
        for grant in [grant for grant in planned if grant[0] is each]:
            planned.remove(grant)
            if grant[1] < each.known:
                self.kv.uncommit(each.request, grant[1])
        self.kv.free(each.request)
        self.running.remove(each)
        each.computed = 0
        self.waiting.appendleft(each)
        self.preemptions += 1


def agents(families: int, requests: int, seed: int = 0) -> Iterator[Served]:
    """Requests with one of several shared prefixes, and tokens of their own."""
    drawn = Random(seed).choices(range(families), k=requests)
    for number, family in enumerate(drawn):
        yield Served(request([*[family] * SHARED, *[1_000 + number] * OWN]), ANSWER)


def conversation(number: int, turns: int = TURNS) -> Served:
    """First turn of a conversation, each of which asks with everything before it."""

    def turn(before: list[int], left: int) -> Served:
        prompt = [*before, *[2_000 + number] * ASKED]

        def following(ended: LiveRequest) -> Served | None:
            return (
                turn([*ended.prompt_token_ids, *ended.output_token_ids], left - 1)
                if left > 1
                else None
            )

        return Served(request(prompt), ANSWERED, done=following)

    return turn([number] * ASKED, turns)


def serve(
    layout: KVLayout, num_pages: int, chunk: int, traffic: Callable[[], Iterator[Served]]
) -> Engine:
    """Serve `traffic` in a pool of `num_pages` pages, and return the engine."""
    return Engine(
        PrefixCache(PrefixOptions(), KVContext(layout, num_pages)), chunk, deque(traffic())
    ).run()


def share(
    layout: KVLayout, num_pages: int, chunk: int, traffic: Callable[[], Iterator[Served]]
) -> tuple[float, Engine, Engine]:
    """Return the share of the possible hits, and the engines that served with states and
    without."""
    ours, possible = (
        serve(each, num_pages, chunk, traffic) for each in (layout, attention_only(layout))
    )
    return ours.found / possible.found, ours, possible


def main() -> None:
    layout = qwen3_next()
    print(f"{layout.page_bytes} bytes a page; a state: {layout.state_pages} pages")
    for gb in map(float, sys.argv[1:]):
        pages = int(gb * 1e9) // layout.page_bytes
        for chunk in (512, 2_048, 8_192):
            told = []
            for name, traffic in (
                ("4 families", lambda: agents(4, 120)),
                ("16 families", lambda: agents(16, 320)),
                ("1 conversation", lambda: iter([conversation(0)])),
                ("16 conversations", lambda: (conversation(number) for number in range(16))),
                ("64 short ones", lambda: (conversation(number, 5) for number in range(64))),
            ):
                part, ours, possible = share(layout, pages, chunk, traffic)
                told.append(
                    f"{name}: {part:.0%} ({ours.checkpoints} ck, "
                    f"{ours.preemptions}/{possible.preemptions} pre)"
                )
            print(f"{gb} GB ({pages} pages), chunks of {chunk}: {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
