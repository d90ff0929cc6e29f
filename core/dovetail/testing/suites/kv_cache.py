"""`KVCacheSuite`: checks that a KV-cache manager conforms to the contract of
`dovetail.api.kv_cache`.

There are two kinds of checks. Some set up one situation and inspect it. The others must hold over
whole scripts of engine actions, which are drawn at random, the same in every run, and executed by
`kv_model`, which has its own model of memory; their error messages end with the shortest failing
script found. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count, islice, zip_longest
from random import Random
from typing import Any

from dovetail.api.kv_cache import (
    HOLE,
    CacheGroup,
    Checkpoint,
    KVCacheManager,
    KVCapabilities,
    PageCopy,
)
from dovetail.engine.live_request import LiveRequest
from dovetail.errors import DovetailError
from dovetail.request import Request
from dovetail.request.media import MediaSpan
from dovetail.request.sampling_params import SamplingParams
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites.holding import reachable, require_bounded
from dovetail.testing.suites.kv_model import Broken, KVWorld, Shape, generate, make_request, plain
from dovetail.testing.suites.kv_scripts import (
    BLOCK_SIZES,
    draw_groups,
    draw_script,
    draw_shape,
    draw_states,
    shortest,
)

FAR = 1_000  # number of blocks of a long prefix
TOKEN_BITS = 31  # significant bits of a token id
SCRIPTS = 130  # per manager; about 30 actions each
GROUP_SCRIPTS = 90  # more, over several groups and blocks of several pages
STATE_SCRIPTS = 90  # more, over layouts with states
STATE_CLAIMS = ("states", "state_copies", "checkpoints")  # which only layouts with states can break
STATE_SHAPES = [
    Shape((CacheGroup((0,), 4), CacheGroup((1,), 4, recurrent=True)), 60),
    Shape((CacheGroup((0,), 4), CacheGroup((1,), 4, None, 3, recurrent=True)), 60),
    Shape(
        (
            CacheGroup((0,), 2),
            CacheGroup((1,), 4, 5, 2),
            CacheGroup((2,), 4, None, 2, recurrent=True),
        ),
        100,
    ),
]
MARKS = (*",;:|/-_. \n\0", "::", "', '", '", "')  # that may separate keys
IMAGES = (1, 6, 13)  # first tokens of images, of 3 tokens each
KEYS: tuple[tuple[str, ...], ...] = (
    (),
    ("a",),
    ("b",),
    ("a", "b"),
    ("b", "a"),
    ("ab",),
    ("a", ""),
    ("a", "", "b"),
    # equal in a short form: without case, space or accents, in the beginning, the end or the number
    ("A",),
    ("a ",),
    ("\u00e4",),
    ("a\u0308",),
    ("\u0430",),
    ("a" * 64,),
    ("a" * 64 + "b",),
    ("b" + "a" * 64,),
    ("a", "b", "c", "d"),
    ("a", "b", "c", "e"),
)
IDS = (  # equal in their first or last 8 characters, or without case, space or zeros
    "request-1-of-a-user",
    "request-2-of-a-user",
    "Request-1-of-a-user",
    "request-1-of-a-user ",
    "1",
    "01",
    "1.0",
    "",
)
OTHERWISE: tuple[dict[str, Any], ...] = (  # fields of requests that lookups don't depend on
    {"client": "another"},
    {"priority": 7},
    {"arrival_time": 1e6},
    {"deadline": 1e6},
    {"ttft_deadline": 1e6},
    {"tbt_s": 1.0},
    {"predicted_tokens": 7},
    {"max_tokens": 7},
    {"parent": "another"},
    {"stop_ids": frozenset({7})},
)
LONG = 1_200  # pairs of requests before a manager's size is taken, and again as many
GROWTH = 4 * LONG  # most bytes more that it may keep after the latter

FINDS = "a request that had found a prefix"
SAMPLES = ("a sample", "a sample whose parent had ended", "a sample of a sample")
HOLDS = {  # ways to hold blocks -> number of them that the first request had committed
    "a request that had committed all": 2,
    "a request that had committed one block": 1,
    "a request that had committed nothing": 0,
    **dict.fromkeys((FINDS, *SAMPLES), 2),
}


class KVCacheSuite(Suite):
    """Suite of KV-cache managers: blocks of 1, 2, 3 and 16 tokens, pools of 1 to 16 blocks, with
    and without a window; layouts of up to three groups, and blocks of up to three pages, if the
    manager declares `groups`; layouts with states if it declares `states`."""

    kind = "kv_cache"

    @property
    def capabilities(self) -> KVCapabilities:
        # options may change them
        capabilities: KVCapabilities = self.make(plain(16, 8).context).capabilities
        return capabilities

    # Ownership of blocks

    @check("kv_cache.private", since="1.0")
    def test_no_request_reads_what_another_wrote(self) -> None:
        """A request read K and V of other tokens, or of other cache keys, than its own. A block may
        be overwritten only when no request holds it; it may be found only for exactly the tokens
        (all from the first on) and keys that it was written for."""
        self._explore("private")

    @check("kv_cache.exclusive", since="1.0")
    def test_a_new_block_is_nobodys(self) -> None:
        """`allocate` or `fork` returned a page that a table holds already, the same page twice, or
        one outside of the pool. Pin the prefix hit of every group before taking new blocks, and
        never evict a held block."""
        self._explore("exclusive")

    @check("kv_cache.table", since="1.0")
    def test_a_table_has_as_many_blocks_as_its_tokens_need(self) -> None:
        """After `allocate(request, n)` the table of each group must have exactly
        `CacheGroup.blocks(n)` blocks of `pages_per_block` pages, including those of the prefix hit
        and trimmed ones: a row of the executor has no space for more, and fewer leave tokens
        without a slot."""
        self._explore("table")

    @check("kv_cache.holes", since="1.0")
    def test_no_block_that_a_query_sees_is_a_hole(self) -> None:
        """`allocate` or `fork` returned a `HOLE` for a page of a block that later tokens see
        (`CacheGroup.first_visible_block(cached)` and later), or for some pages of an earlier block
        but not for all."""
        self._explore("holes")

    @check("kv_cache.tables", since="1.0")
    def test_tables_are_what_was_given(self) -> None:
        """`tables` must return, by group, the pages that `allocate` and `fork` returned, in their
        order; for blocks released since, `HOLE` or any pages."""
        self._explore("tables")

    @check("kv_cache.held_by_group", since="1.0")
    def test_pages_held_by_group_are_those_in_tables(self) -> None:
        """`PageCounts.held_by_group` must be empty, or the number of different pages in the tables
        of each group, as `held` is of all."""
        self._explore("held_by_group")

    @check("kv_cache.counts", since="1.0")
    def test_empty_held_and_cached_are_all(self) -> None:
        """`counts` must always add up to the pool, with `held` the pages in tables, and
        `available_pages` must be empty + cached: the step admits requests by these numbers."""
        self._explore("counts")

    @check("kv_cache.no_leak", since="1.0")
    def test_when_everybody_has_left_the_whole_pool_can_be_taken(self) -> None:
        """All requests have ended, but pages are still held, or a request that needs the whole pool
        doesn't get it. `free` must return every page of a table, including those of shared, copied
        and trimmed blocks; `allocate` must take cached blocks, with all their pages, when empty
        ones run out."""
        self._explore("no_leak")

    @check("kv_cache.lawful", since="1.0")
    def test_no_lawful_call_raises(self) -> None:
        """A valid call raised: `free` of a request without blocks, `trim` with nothing to trim,
        `commit` of committed tokens, an id reused after its request ended, …"""
        self._explore("lawful")

    @check("kv_cache.integrity", since="1.0")
    def test_the_books_are_found_in_order(self) -> None:
        """`check_integrity` raised after valid calls: the state is inconsistent, or the check
        rejects a valid state (a block in two tables, a trimmed table)."""
        self._explore("integrity")

    @check("kv_cache.request_untouched", since="1.0")
    def test_requests_are_only_read(self) -> None:
        """The manager modified a request or its tokens. Keep per-request state in your own table,
        by id, until `free`."""
        self._explore("request_untouched")

    @check("kv_cache.forgets", since="1.0")
    def test_requests_that_ended_are_forgotten(self) -> None:
        """The manager keeps requests that were freed, or their ids, so that a server's memory grows
        forever. In `free`, drop all state of a request, including that from `lookup`, even if it
        holds no blocks."""
        kv = self._manager(4)
        requests = [make_request(f"request {index}", range(index, index + 9)) for index in range(4)]
        for request in requests[:-1]:
            kv.lookup(request)
            _compute(kv, request)
        # one that finds what another computed, and ends first
        reader = make_request("reader", [*range(9), 7])
        _compute(kv, reader)
        requests.insert(0, reader)
        kv.lookup(requests[-1])
        for request in requests:
            kv.free(request)
        ids = {request.id for request in requests}
        kept = [path for path, value in reachable(kv) if isinstance(value, Request) or value in ids]
        require(
            not kept,
            f"after all requests were freed, {', '.join(kept)} still holds some of them, or their "
            f"ids",
        )

    @check("kv_cache.ids", since="1.0")
    def test_requests_are_told_apart_by_all_of_their_ids(self) -> None:
        """Requests whose ids are equal in part, or but for case, were taken for one another. Keep
        values by the whole id, as it is."""
        kv = self._manager(4)
        requests = [
            make_request(id, [index, *range(50, 53), index]) for index, id in enumerate(IDS)
        ]
        given = [_compute(kv, request) for request in requests]
        for index, request in enumerate(requests):
            found = kv.tables(request)
            require(
                found == (given[index],),
                f"the tables of request {request.id!r}, beside {IDS}, are {found}, after allocate "
                f"returned {given[index]}",
            )
            kv.free(request)
            held = 2 * (len(requests) - index - 1)
            require(
                kv.counts.held == held,
                f"after request {request.id!r} was freed, {kv.counts}; the others hold {held}",
            )

    @check("kv_cache.long_use", since="1.0")
    def test_use_changes_nothing(self) -> None:
        """After many requests the manager found less, had fewer pages, or kept more than before.
        Bound what you keep of requests that have ended, by the number of pages or by a constant."""
        kv = self._manager(4)
        numbers = count()

        def serve(pairs: int) -> None:
            for number in islice(numbers, pairs):
                self._serve_one_more(kv, number)

        require_bounded(kv, serve, LONG, GROWTH, "pairs of requests, which were freed")
        kv.reset()
        require(
            kv.counts.empty == kv.context.num_pages,
            f"after {2 * next(numbers)} requests that were freed, and reset, {kv.counts}",
        )

    def _serve_one_more(self, kv: KVCacheManager, number: int) -> None:
        """Compute a request of tokens of its own, and another with the same beginning."""
        tokens = [number * 7 + position for position in range(8)]
        first = make_request(f"first {number}", tokens)
        second = make_request(f"second {number}", [*tokens, 7])
        _compute(kv, first)
        kv.free(first)
        if self.capabilities.reuse:
            self._finds(kv, second, 8, f"whose tokens another computed, after {number} others")
        _compute(kv, second)
        kv.free(second)

    @check("kv_cache.answers", since="1.0")
    def test_answers_are_the_callers(self) -> None:
        """`Allocation.pages` isn't a tuple of ints for each group, or a result of `take_copies`
        changed afterwards. Return values, not a list that you keep modifying."""
        self._explore("answers")

    @check("kv_cache.misuse", since="1.0")
    def test_misuse_is_refused(self) -> None:
        """`tables`, `commit`, `uncommit`, `fork` and `trim` of a request that holds no blocks, or
        such a request in `without`, `fork` into one that holds blocks, and `allocate` for fewer
        tokens than before (also than it was forked with, also within the same block) must raise
        `DovetailError`: a mistake in the core should be reported where it happens, not some steps
        later."""
        kv, request = self._manager(4), make_request("r", range(9))
        for name, call in self._calls_with(kv, request).items():
            _refused(call, f"{name} for a request that holds no blocks")
        _compute(kv, request)
        _refused(lambda: kv.allocate(request, 5), "allocate for 5 tokens after 9")
        for more, fewer in (
            (11, 10),
            (12, 11),
            (16, 14),
        ):  # within a block, up to its end, after a new one
            kv.allocate(request, more)
            _refused(
                lambda fewer=fewer: kv.allocate(request, fewer),  # type: ignore[misc]
                f"allocate for {fewer} tokens after {more}, with blocks of 4,",
            )
        if self.capabilities.fork:
            child = make_request("child", range(9))
            kv.fork(request, child, 8)
            _refused(lambda: kv.allocate(child, 7), "allocate for 7 tokens after a fork of 8")
            kv.allocate(child, 10)
            _refused(
                lambda: kv.allocate(child, 9), "allocate for 9 tokens after a fork of 8 and 10"
            )
            other = make_request("other", range(9))
            _compute(kv, other)
            _refused(lambda: kv.fork(request, other, 8), "fork into a request that holds blocks")

    def _calls_with(self, kv: KVCacheManager, request: Request) -> dict[str, Callable[[], object]]:
        """Return the calls that only a request with blocks may be named in."""
        calls: dict[str, Callable[[], object]] = {
            "tables": lambda: kv.tables(request),
            "commit": lambda: kv.commit(request, 4),
            "uncommit": lambda: kv.uncommit(request, 0),
        }
        calls["pages_needed(without=…)"] = lambda: kv.pages_needed(
            make_request("other", range(9)), 9, [request]
        )
        if self.capabilities.trim:
            calls["trim"] = lambda: kv.trim(request, 4)
        if self.capabilities.fork:
            calls["fork"] = lambda: kv.fork(request, make_request("child", range(9)), 8)
        return calls

    # Answers to a step

    @check("kv_cache.failed_allocate", since="1.0")
    def test_an_allocation_that_fails_changes_nothing(self) -> None:
        """`allocate` returned None but changed the counts, or what lookups find, or then rejected
        fewer tokens, which would fit. Check that the blocks suffice before taking the first, and
        before recording the number of tokens."""
        for block_size in BLOCK_SIZES:
            kv = self._manager(block_size)
            first = make_request("first", range(block_size))
            second = make_request("second", [-1] * 3 * block_size)
            _compute(kv, first)
            generate(first, range(20 * block_size))
            for request in (second, first):  # one that holds no blocks, and one that does
                told = (
                    f"{request}, after 17 blocks of {block_size} were asked for, which there "
                    f"aren't,"
                )
                require(kv.allocate(request, 17 * block_size) is None, f"{told} got them")
                try:
                    _compute(kv, request, 2 * block_size)
                except DovetailError as error:
                    fail(f"{told} was refused two blocks: {error}")
        self._explore("failed_allocate")

    @check("kv_cache.pages_needed", since="1.0")
    def test_an_allocation_takes_what_was_foretold(self) -> None:
        """`allocate` must succeed exactly if `pages_needed` is at most `available_pages`, and take
        exactly that many: the pages of a hit on a cached block count, since they are no longer
        available; those of a hit on a held one don't."""
        self._explore("pages_needed")

    @check("kv_cache.pages_needed_without", since="1.0")
    def test_pages_needed_without_others_count_what_freeing_them_gives_back(self) -> None:
        """`pages_needed(…, without=others)` must equal `pages_needed` after freeing these, minus
        the pages that this makes available: those in no other table, each counted once. A hit on
        one of these counts again. A step preempts by this number."""
        self._explore("pages_needed_without")

    @check("kv_cache.pure", since="1.0")
    def test_questions_change_nothing(self) -> None:
        """`lookup`, `pages_needed` and `counts` must change nothing, not even the order of
        eviction; and two managers with the same calls must behave the same (draw randomness only
        from `context.seed`)."""
        self._explore("pure")

    # Lookups

    @check("kv_cache.hit_length", since="1.0")
    def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute(self) -> None:
        """`lookup` must be a multiple of `KVLayout.hit_tokens` and less than the request's known
        tokens: the last one has to be computed, or there would be nothing to sample from."""
        self._explore("hit_length")

    @check("kv_cache.hit", since="1.0")
    def test_only_what_was_committed_is_found(self) -> None:
        """`lookup` found tokens that weren't committed under the same `cache_keys` since the last
        `reset`, or any for a request that asks for prompt logprobs, or without the capability
        `reuse`; or it found a length that some group doesn't accept, because one of the blocks that
        later tokens see wasn't committed in that group; or `allocate` took another hit than
        `lookup` returned."""
        for block_size in BLOCK_SIZES:
            kv = self._manager(block_size)
            first = make_request("first", range(2 * block_size))
            waiting = make_request("waiting", range(3 * block_size))
            hog = make_request("hog", [-1] * 16 * block_size)
            _compute(kv, first)
            kv.free(first)
            kv.lookup(waiting)
            kv.allocate(hog, 16 * block_size)
            kv.free(hog)
            self._finds(
                kv, waiting, 0, "which found tokens before another took all blocks and ended"
            )
        self._explore("hit")

    @check("kv_cache.reuse", since="1.0", capability="reuse")
    def test_a_computed_prompt_is_found_up_to_where_it_differs(self) -> None:
        """A prompt was computed, nothing was evicted, and a request with the same beginning,
        running or after the first ended, didn't find exactly the full blocks before the first
        differing token (or before its last known token). A group with a window needs only the
        blocks that later tokens see; trimmed blocks are found until their space is needed."""
        for block_size in BLOCK_SIZES:
            for ended in (False, True):
                kv = self._manager(block_size)
                tokens = [*range(3 * block_size)]
                first = make_request("first", tokens)
                _compute(kv, first)
                kv.commit(first, block_size)  # which it was before
                if ended:
                    kv.free(first)
                for same in range(len(tokens) + 1):
                    rest = [-1] * (len(tokens) - same)
                    other = make_request(f"other {same}", [*tokens[:same], *rest, 7])
                    self._finds(
                        kv,
                        other,
                        same // block_size * block_size,
                        f"whose first {same} tokens were computed",
                    )
                self._finds(
                    kv,
                    make_request("again", tokens),
                    2 * block_size,
                    "all of whose tokens were computed",
                )
        kv = self.make(plain(1, 2 * FAR).context)
        _compute(kv, make_request("first", range(FAR)))
        self._finds(
            kv,
            make_request("other", [*range(FAR), 0]),
            FAR,
            f"whose first {FAR} tokens were computed",
        )
        kv = self._manager(4)
        _compute(kv, make_request("first", range(4)))
        for bit in range(TOKEN_BITS):
            self._finds(
                kv,
                make_request(f"other {bit}", [0, 1, 2, 3 ^ 1 << bit, 7]),
                0,
                f"with a token id that differs from the computed one in bit {bit} alone",
            )
        self._find_for_any_request()
        if self.capabilities.groups and self.capabilities.trim:
            self._find_without_what_no_window_sees()
        self._explore("reuse")

    def _find_for_any_request(self) -> None:
        """Ask with requests that differ in other fields than those that lookups depend on."""
        for fields in OTHERWISE:
            kv = self._manager(4)
            for number, changed in enumerate((fields, {}, fields)):
                values = {"max_tokens": 1000, **changed}
                request = LiveRequest(f"{number}", [*range(8), 7], SamplingParams(), **values)
                told = f"computed by one with {fields}" if number == 1 else f"with {fields}"
                self._finds(kv, request, 8 if number else 0, told)
                _compute(kv, request)
                kv.free(request)

    def _find_without_what_no_window_sees(self) -> None:
        """Let others take the pages of the blocks before a window."""
        for groups in (
            (CacheGroup((0,), 4), CacheGroup((1,), 4, 5, 2)),
            (CacheGroup((0,), 2, 3), CacheGroup((1,), 4, 5)),
        ):
            kv = self.make(Shape(groups, 40).context)
            tokens = [*range(24)]
            computing = make_request("computing", tokens)
            kv.allocate(computing, 24)
            kv.commit(computing, 24)
            kv.trim(computing, 24)
            others = [make_request(f"other {number}", [-1]) for number in range(40)]
            while kv.available_pages >= kv.context.layout.pages(1):
                kv.allocate(others.pop(), 1)
            self._finds(
                kv,
                make_request("same", [*tokens, 7]),
                24,
                "all of whose blocks that its last token sees are held; those before are taken",
            )

    @check("kv_cache.same_step", since="1.0", capability="reuse")
    def test_a_prefix_is_shared_within_the_step_that_computes_it(self) -> None:
        """Blocks committed by one grant must be found by the next request of the same step, and
        then be held by both: the backend writes the K and V of the whole batch before it
        attends."""
        for block_size in BLOCK_SIZES:
            kv = self._manager(block_size)
            prompt = list(range(2 * block_size))
            first = make_request("first", prompt)
            second = make_request("second", [*prompt, 7])
            blocks = _compute(kv, first)
            available = kv.available_pages
            self._finds(
                kv, second, 2 * block_size, "whose prefix another computes in the same step"
            )
            told = (
                f"with blocks of {block_size}, the first request holds {blocks}, and the "
                f"second, which shares its tokens,"
            )
            shared = _compute(kv, second)
            require(shared[:2] == blocks, f"{told} got {shared}")
            require(
                kv.available_pages == available - 1,
                f"{told} took {available - kv.available_pages} blocks for the one token that is "
                f"its own",
            )

    @check("kv_cache.generated", since="1.0", capability="reuse")
    def test_generated_tokens_are_found_like_those_of_the_prompt(self) -> None:
        """A request generated tokens, they were committed, it was freed, and they weren't found: by
        itself (resumed after preemption) or by another with them in its prompt (the next turn of a
        conversation)."""
        for block_size in BLOCK_SIZES:
            kv = self._manager(block_size)
            request = make_request("r", range(block_size + 1))
            _compute(kv, request)
            generate(request, range(100, 101 + block_size))
            _compute(kv, request, 2 * block_size)
            kv.free(request)
            self._finds(kv, request, 2 * block_size, "which was preempted after it had generated")
            turn = make_request("turn", [*range(block_size + 1), *range(100, 101 + block_size)])
            self._finds(kv, turn, 2 * block_size, "whose prompt another generated")

    @check("kv_cache.cache_keys", since="1.0", capability="reuse")
    def test_requests_with_different_cache_keys_share_nothing(self) -> None:
        """The same tokens were found under other `cache_keys` (adapters, salts of tenants who must
        not see each other), or not under equal ones. The keys are a sequence: ("a", "b") is neither
        ("b", "a") nor ("ab",) nor ("a", "", "b")."""
        for keys in KEYS:
            kv = self._manager(4)
            _compute(kv, make_request("first", range(8), keys=keys))
            for others in KEYS:
                expected = 8 if others == keys else 0
                self._finds(
                    kv,
                    make_request(f"other {others}", range(9), keys=others),
                    expected,
                    f"with cache_keys {others}, computed under {keys}",
                )

    @check("kv_cache.joined_keys", since="1.1", capability="reuse")
    def test_keys_that_are_equal_when_joined_share_nothing(self) -> None:
        """Tokens were found under `cache_keys` that are equal to the request's when they are
        joined: ("a,b",) for ("a", "b"). Keys may have any character: write their lengths, or escape
        what separates them."""
        for mark in MARKS:
            pairs = (((f"a{mark}b",), ("a", "b")), ((f"a{mark}", "b"), ("a", f"{mark}b")))
            for keys, others in pairs:
                kv = self._manager(4)
                _compute(kv, make_request("first", range(8), keys=keys))
                self._finds(
                    kv,
                    make_request("second", range(9), keys=others),
                    0,
                    f"with cache_keys {others}, computed under {keys}",
                )

    @check("kv_cache.media", since="1.1", capability="media")
    def test_any_image_tells_prompts_apart(self) -> None:
        """Prompts with the same tokens whose images differ shared blocks with the first image that
        differs, or after it, or equal ones weren't found. All of `Request.media` counts, not only
        the first."""
        if not self.declares("reuse"):
            return
        for changed, start in enumerate(IMAGES):
            kv = self._manager(4)
            _compute(kv, make_request("first", range(20), media=_images()))
            self._finds(kv, make_request("same", range(21), media=_images()), 20, "of equal images")
            self._finds(
                kv,
                make_request("other", range(21), media=_images(changed)),
                start // 4 * 4,
                f"of {len(IMAGES)} images at {IMAGES}, number {changed} of which is another",
            )

    @check("kv_cache.prompt_logprobs", since="1.0", capability="reuse")
    def test_a_request_for_prompt_logprobs_finds_nothing(self) -> None:
        """Logprobs of a prompt require computing all of it: `lookup` must be 0 if
        `request.params.prompt_logprobs` isn't None (0 is a request, too), and `allocate` must pin
        nothing."""
        kv = self._manager(4)
        _compute(kv, make_request("first", range(8)))
        for wanted in (0, 5):
            request = make_request(f"asks for {wanted}", range(9), prompt_logprobs=wanted)
            self._finds(kv, request, 0, f"with prompt_logprobs={wanted}")
            allocation = kv.allocate(request, 9)
            require(
                allocation is not None and not allocation.cached,
                f"with prompt_logprobs={wanted}, allocate answered {allocation}",
            )

    @check("kv_cache.uncommit", since="1.0", capability="reuse")
    def test_what_is_uncommitted_is_not_found(self) -> None:
        """Tokens were committed on grant, the grant was revoked, `uncommit` was called, and they
        were found; or tokens were dropped that weren't covered, or that another request
        computed."""
        for block_size in BLOCK_SIZES:
            kv = self._manager(block_size)
            tokens = list(range(3 * block_size))
            first = make_request("first", tokens[: 2 * block_size])
            second = make_request("second", tokens)
            _compute(kv, first)
            _compute(kv, second)
            other = make_request("other", [*tokens, 7])
            kv.uncommit(second, 0)
            self._finds(
                kv,
                other,
                2 * block_size,
                "of whose three blocks the third was uncommitted, and the first two were computed "
                "by another",
            )
            kv.uncommit(first, 2 * block_size - 1)
            self._finds(
                kv,
                other,
                block_size,
                "the second block of whose prefix was uncommitted in its last token",
            )
            kv = self._manager(block_size)
            alone = make_request("alone", tokens)
            for upto in (2 * block_size, 2 * block_size - 1, 1, 0):
                _compute(kv, alone)
                self._finds(
                    kv,
                    other,
                    3 * block_size,
                    "whose prefix was committed, perhaps again after an uncommit",
                )
                kv.uncommit(alone, upto)
                self._finds(
                    kv,
                    other,
                    upto // block_size * block_size,
                    f"of whose prefix all but {upto} tokens were uncommitted",
                )
            if self.capabilities.fork:
                self._uncommit_a_fork(block_size)

    def _uncommit_a_fork(self, block_size: int) -> None:
        kv = self._manager(block_size)
        tokens = [*range(2 * block_size + 1)]
        parent = make_request("parent", tokens)
        child = make_request("child", tokens)
        _compute(kv, parent, 2 * block_size)
        self._fork(kv, parent, child, 2 * block_size)
        generate(child, range(50, 50 + block_size))
        turn = make_request("turn", [*tokens, *child.output_token_ids])
        for upto in (2 * block_size, 0):
            _compute(kv, child)
            self._finds(kv, turn, 3 * block_size, "whose prefix a sample computed")
            kv.uncommit(child, upto)
            self._finds(
                kv,
                turn,
                2 * block_size,
                f"whose prefix a sample shares with its parent, after uncommit(sample, {upto})",
            )

    @check("kv_cache.reset", since="1.0", capability="reuse")
    def test_after_a_reset_nothing_old_is_found(self) -> None:
        """`reset` means that the weights have changed: no block cached or held before may be found,
        nor what a request running at that time commits later, since it depends on old values.
        Cached blocks become free; newly computed ones are found."""
        for block_size in BLOCK_SIZES:
            kv = self._manager(block_size)
            tokens = list(range(2 * block_size))
            running = make_request("running", tokens)
            ended = make_request("ended", [-1] * block_size)
            other = make_request("other", [*tokens, 7])
            _compute(kv, running)
            _compute(kv, ended)
            kv.free(ended)
            kv.reset()
            require(
                kv.counts.cached == 0, f"after reset, {kv.counts}: cached blocks must become free"
            )
            self._finds(
                kv,
                make_request("again", [-1] * (block_size + 1)),
                0,
                "whose prefix was cached before a reset",
            )
            self._finds(kv, other, 0, "whose prefix was held at a reset")
            _compute(kv, make_request("anew", tokens))
            self._finds(kv, other, 2 * block_size, "whose prefix was computed anew after a reset")
            for how in (how for how in HOLDS if self.capabilities.fork or how not in SAMPLES):
                for resets in (1, 2):
                    self._outlive_resets(block_size, how, resets)

    def _outlive_resets(self, block_size: int, how: str, resets: int) -> None:
        """Let a request that holds blocks live on after a reset, have samples and start again."""
        kv = self._manager(block_size)
        tokens = list(range(2 * block_size))
        holder = self._holder(kv, how, tokens)
        told = f"held at {'a reset' if resets == 1 else 'two resets'} by {how}"
        for _ in range(resets):
            kv.reset()
        generate(holder, range(50, 51 + block_size))
        turn = make_request("turn", [*tokens, *holder.output_token_ids])
        _compute(kv, holder)
        self._finds(kv, turn, 0, f"whose prefix was {told}, and committed after it")
        line = [holder]
        for shared in (
            (block_size, 2 * block_size - 1) if self.capabilities.fork else ()
        ):  # full blocks, and one that is copied
            line.append(make_request(f"sample {len(line)}", tokens))
            self._fork(kv, line[-2], line[-1], shared)
            generate(line[-1], holder.output_token_ids)
            _compute(kv, line[-1])
            self._finds(
                kv,
                turn,
                0,
                f"whose prefix a sample committed, forked afterwards from what was {told}",
            )
        for request in line:
            kv.free(request)
            self._finds(kv, turn, 0, f"whose prefix was {told}, and freed after it")
        _compute(kv, make_request("anew", tokens))
        self._finds(
            kv,
            turn,
            2 * block_size,
            f"of whose prefix two blocks were computed anew, and a third was committed by what was "
            f"{told}",
        )
        _compute(kv, holder)
        self._finds(
            kv,
            turn,
            3 * block_size,
            f"whose prefix was {told}, by a request that was then freed and computed it anew",
        )

    def _holder(self, kv: KVCacheManager, how: str, tokens: list[int]) -> LiveRequest:
        """Return a request that holds blocks for some of its tokens; `how` is one of `HOLDS`."""
        first, second, third = (make_request(name, tokens) for name in ("first", "second", "third"))
        size = kv.context.layout.block_size
        committed = HOLDS[how]
        kv.allocate(first, max(1, committed * size))
        kv.commit(first, committed * size)
        if how == FINDS:
            _compute(kv, second, size + 1)
        elif how in SAMPLES:
            self._fork(kv, first, second, size)
        if how == SAMPLES[-1]:
            self._fork(kv, second, third, size)
        if how == SAMPLES[1]:
            kv.free(first)
        return {FINDS: second, SAMPLES[0]: second, SAMPLES[1]: second, SAMPLES[2]: third}.get(
            how, first
        )

    def _fork(self, kv: KVCacheManager, parent: Request, child: Request, num_tokens: int) -> None:
        require(
            kv.fork(parent, child, num_tokens) is not None,
            "fork answered None, with blocks available",
        )
        kv.take_copies()

    # Forks and windows

    @check("kv_cache.fork", since="1.0", capability="fork")
    def test_a_fork_shares_the_full_blocks(self) -> None:
        """The child's tables must begin with the parent's full blocks and have own blocks for
        partial ones; `cached` is the number of tokens. Blocks that the parent has released, or that
        no query of the child will see, are a `HOLE`. None only if too few pages are available for
        the partial blocks."""
        if self.capabilities.trim:
            self._fork_after_a_trim()
        self._explore("fork")

    def _fork_after_a_trim(self) -> None:
        """Fork a request that has released blocks, of which another has taken the pages."""
        kv = self.make(plain(4, 16, window=5).context)
        tokens = [*range(24)]
        parent = make_request("parent", tokens)
        child = make_request("child", tokens)
        given = _compute(kv, parent, 20)
        kv.trim(parent, 20)
        kv.allocate(make_request("other", [-1] * 60), 60)  # all pages but one
        allocation = kv.fork(parent, child, 20)
        told = (
            f"fork of 20 tokens, with blocks of 4 and a window of 5, after trim(20) released "
            f"all but the last of {given}, answered {allocation}"
        )
        require(
            allocation is not None and allocation.pages == ((*[HOLE] * 4, given[4]),),
            f"{told}: what was released can't be shared",
        )

    @check("kv_cache.fork_copies", since="1.0", capability="fork")
    def test_a_fork_copies_the_partial_block(self) -> None:
        """The tokens of the partial block weren't in the child's copy of it. `take_copies` must
        return a copy of each of its pages once, in the order of the forks, from the parent's page
        to the child's; the next batch runs them first."""
        for block_size in BLOCK_SIZES[1:]:
            kv = self._manager(block_size)
            tokens = [*range(2 * block_size)]
            requests = [make_request("0", tokens)]
            expected = list[PageCopy]()
            freed = [make_request(f"freed {number}", tokens[:1]) for number in range(8)]
            for request in freed:
                kv.allocate(request, 1)
            for request in sorted(
                freed, key=lambda request: request.id[-1] in "1346"
            ):  # so that new blocks don't come in the order of their ids
                kv.free(request)
            tables = [_compute(kv, requests[0])]
            for parent in (
                0,
                0,
                1,
                2,
                1,
                0,
                5,
            ):  # samples, and samples of samples, before the copies run
                requests.append(make_request(str(len(requests)), tokens))
                allocation = kv.fork(requests[parent], requests[-1], block_size + 1)
                require(allocation is not None, "fork answered None, with blocks available")
                tables.append(allocation.pages[0] if allocation is not None else ())
                expected.append(PageCopy(tables[parent][-1], tables[-1][-1]))
            if block_size == BLOCK_SIZES[-1]:
                kv.reset()  # the samples live on, so their blocks must be copied
            copies = list(kv.take_copies())
            again = list(kv.take_copies())
            require(
                copies == expected,
                f"take_copies returned {copies}, after forks that asked for {expected}",
            )
            require(not again, f"take_copies, called again, returned {again}")
        self._explore("fork_copies")

    @check("kv_cache.failed_fork", since="1.0", capability="fork")
    def test_a_fork_that_fails_changes_nothing(self) -> None:
        """`fork` returned None for lack of pages for the copies, but changed the counts, or what
        lookups find. Take those pages first."""
        self._explore("failed_fork")

    @check("kv_cache.trim", since="1.0", capability="trim")
    def test_trim_lets_go_of_the_blocks_that_no_query_will_see(self) -> None:
        """`trim(request, computed)` must release, in each group with a window, exactly the blocks
        before `first_visible_block(computed)`, with all their pages: fewer waste memory, and one
        more drops tokens that a layer still reads. Groups without a window release nothing. A
        second call with a smaller `computed` returns nothing, and trims nothing."""
        self._explore("trim")

    # States

    @check("kv_cache.states", since="1.0", capability="states")
    def test_nobody_goes_on_from_a_state_that_is_not_its_own(self) -> None:
        """A request went on from another state than that after its own tokens. Its live state is
        one block, the same from the first `allocate` to `free`, and of nobody else; tokens
        generated later don't move it."""
        self._explore("states")

    @check("kv_cache.state_copies", since="1.0", capability="states")
    def test_a_hit_copies_the_checkpoint_to_the_live_state(self) -> None:
        """A request that had found a prefix didn't start from the checkpoint after exactly these
        tokens. `allocate` must queue one copy for each of its pages, from the checkpoint's to the
        live state's in their order; the checkpoint isn't held, and is found again by others. If its
        pages are reused before the copies have run, the new owner must write after them: copies run
        in order, and before the batch."""
        for shape in STATE_SHAPES:
            kv = self.make(shape.context)
            tokens = [*range(21)]
            first = make_request("first", tokens)
            pages = {checkpoint.tokens: checkpoint.pages for checkpoint in _submit(kv, first)}
            kv.free(first)
            for number in range(2):  # one after the other, so that the second finds it, too
                asking = make_request(f"asking {number}", [*tokens, 7])
                held = kv.counts.held
                if not (found := kv.lookup(asking)):
                    break
                allocation = kv.allocate(asking, 22)
                copies = list(kv.take_copies())
                live = allocation.pages[-1] if allocation is not None else ()
                expected = [PageCopy(src, dst) for src, dst in zip(pages[found], live, strict=True)]
                told = (
                    f"of {shape}, a hit of {found} tokens, whose checkpoint is in pages "
                    f"{pages[found]}, with a live state in {live}"
                )
                require(
                    sorted(copies, key=_page) == sorted(expected, key=_page),
                    f"{told}, has the copies {copies}",
                )
                own = kv.context.layout.pages(22) - (
                    kv.context.layout.pages(found) - kv.context.layout.state_pages if number else 0
                )
                require(
                    kv.counts.held - held <= own,
                    f"{told}, holds {kv.counts.held - held} more pages, {own} of them in its "
                    f"tables",
                )
        self._explore("state_copies")

    @check("kv_cache.checkpoints", since="1.0", capability="states")
    def test_a_step_writes_a_checkpoint_of_what_it_computes(self) -> None:
        """`take_checkpoints` returned a checkpoint of a request that isn't in the step, two of one
        request, one after tokens that the step doesn't compute or that aren't whole blocks, or in
        pages that a table or another checkpoint has; or commits of tokens unknown at the first
        `allocate` took pages; or a second call returned the same again."""
        for shape in STATE_SHAPES:
            kv = self.make(shape.context)
            _submit(kv, make_request("first", range(21)))
            require(
                not kv.take_checkpoints(),
                f"of {shape}, take_checkpoints returned checkpoints again",
            )
        self._explore("checkpoints")

    @check("kv_cache.checkpoint_found", since="1.0", capability="states")
    def test_a_checkpoint_is_found_once_its_step_is_submitted(self) -> None:
        """A prefix was found without a checkpoint, or before `take_checkpoints` had returned it; or
        a checkpoint wasn't found afterwards by a request with the same tokens before it, was found
        by one with others, or under other `cache_keys`, or held pages afterwards."""
        for shape in STATE_SHAPES:
            kv = self.make(shape.context)
            tokens = [*range(21)]
            first = make_request("first", tokens)
            size = kv.context.layout.block_size
            kv.allocate(first, 21)
            kv.commit(first, 21)
            asking = make_request("asking", [*tokens, 7])
            self._finds(
                kv,
                asking,
                0,
                "whose prefix another computes in the same step: the state isn't there yet",
            )
            written = list(kv.take_checkpoints())
            held = kv.context.layout.pages(21)
            require(
                kv.counts.held == held,
                f"of {shape}, {kv.counts} after take_checkpoints, with {held} pages in tables",
            )
            ends = [checkpoint.tokens for checkpoint in written] if self.capabilities.reuse else []
            for same in range(0, 22, size):
                other = make_request(f"other {same}", [*tokens[:same], *[-1] * (21 - same), 7])
                expected = max([0, *(end for end in ends if end <= same)])
                self._finds(
                    kv,
                    other,
                    expected,
                    f"whose first {same} tokens were computed, with checkpoints after {ends}",
                )
            self._finds(
                kv,
                make_request("of other keys", [*tokens, 7], keys=("a",)),
                0,
                "with other cache_keys than those of the checkpoint",
            )

    @check("kv_cache.checkpoint_dropped", since="1.0", capability="states")
    def test_a_checkpoint_that_is_not_written_is_dropped(self) -> None:
        """A checkpoint was returned by `take_checkpoints` or found, or its pages stayed held,
        though before the step was submitted its request was freed, its tokens were uncommitted, or
        `reset` was called; or it was found after its request failed (`uncommit` after the step was
        submitted) or after a `reset`."""
        for shape in STATE_SHAPES:
            for how in ("uncommit", "uncommit of its last token", "free", "reset"):
                kv, first = self.make(shape.context), make_request("first", range(21))
                kv.allocate(first, 21)
                kv.commit(first, 21)
                again = self.make(shape.context)
                ends = [
                    checkpoint.tokens
                    for checkpoint in _submit(again, make_request("again", range(21)))
                ]
                {
                    "uncommit": lambda kv=kv, first=first: kv.uncommit(first, 0),
                    "free": lambda kv=kv, first=first: kv.free(first),
                    "reset": kv.reset,
                }.get(
                    how,
                    lambda kv=kv, first=first, ends=ends: kv.uncommit(
                        first, min(ends, default=21) - 1
                    ),
                )()
                taken = list(kv.take_checkpoints())
                held = 0 if how == "free" else kv.context.layout.pages(21)
                told = f"of {shape}, after commit and {how}"
                require(not taken, f"{told}, take_checkpoints returned {taken}")
                require(kv.counts.held == held, f"{told}, {kv.counts}; {held} pages are in tables")
            for how in ("uncommit", "reset"):
                self._drop_after_submission(shape, how)

    def _drop_after_submission(self, shape: Shape, how: str) -> None:
        """Drop a checkpoint of `first`, whose K and V another has computed, too."""
        kv = self.make(shape.context)
        tokens = [*range(21)]
        first = make_request("first", tokens[:9])
        other = make_request("other", tokens)
        if how == "uncommit":
            ends = [checkpoint.tokens for checkpoint in _submit(kv, other)]
        written = [checkpoint.tokens for checkpoint in _submit(kv, first)]
        if how == "uncommit":
            kv.uncommit(first, 0)
        else:
            kv.reset()
            ends = [checkpoint.tokens for checkpoint in _submit(kv, other)]
        expected = max([0, *(end for end in ends if end <= 8)])
        told = f"with the checkpoints {written} that {how} dropped, and {ends} of another request"
        self._finds(
            kv, make_request("asking", tokens[:9]), expected if self.capabilities.reuse else 0, told
        )

    # Helpers

    def _explore(self, claim: str) -> None:
        """Raise the breach of a claim, shown by a short script."""
        for states in (True,) if claim in STATE_CLAIMS else (False, True):
            breach = _search_of(type(self), states).breach(claim)  # type: ignore[arg-type]  # a class is hashable
            if breach is not None:
                raise shortest(self.make, breach)

    def _manager(self, block_size: int) -> KVCacheManager:
        manager: KVCacheManager = self.make(plain(block_size, 16).context)
        return manager

    def _finds(self, kv: KVCacheManager, request: Request, expected: int, which: str) -> None:
        found = kv.lookup(request)
        size = kv.context.layout.block_size
        require(
            found == expected,
            f"with blocks of {size}, lookup found {found} tokens, expected {expected}, of a "
            f"request {which}",
        )


class _Search:
    """One search for breaches, for all checks of a suite: it goes on where the check before left
    it. `states`: over layouts with states."""

    def __init__(self, suite: KVCacheSuite, states: bool) -> None:
        self._make = suite.make
        self._found: dict[str, Broken] = {}  # claim -> its first breach
        if states:
            draws = [draw_states] * (STATE_SCRIPTS if suite.capabilities.states else 0)
        else:
            draws = [draw_shape] * SCRIPTS + [draw_groups] * (
                GROUP_SCRIPTS if suite.capabilities.groups else 0
            )
        numbered = list(enumerate(draws))
        # in turn, since some breaches need several groups
        turns = zip_longest(numbered[:SCRIPTS], numbered[SCRIPTS:])
        self._left = (one for turn in turns for one in turn if one is not None)

    def breach(self, claim: str) -> Broken | None:
        """Return the first breach of `claim`, or None if all scripts have run without one."""
        while claim not in self._found and (following := next(self._left, None)) is not None:
            seed, draw = following
            random = Random(seed)
            world = KVWorld(self._make, draw(random))
            world.run(draw_script(random))
            self._found = world.breaches | self._found
        return self._found.get(claim)


@cache
def _search_of(suite: type[KVCacheSuite], states: bool) -> _Search:
    return _Search(suite(), states)


def _compute(
    kv: KVCacheManager, request: Request, num_tokens: int | None = None
) -> tuple[int, ...]:
    """Allocate and commit all (or `num_tokens`) of its known tokens, and return the new blocks, in
    a pool of one group."""
    tokens = request.num_tokens if num_tokens is None else num_tokens
    allocation = kv.allocate(request, tokens)
    if allocation is None:
        fail(
            f"allocate({request}, {tokens}) answered None, with {kv.available_pages} blocks of "
            f"{kv.context.layout.block_size} tokens available"
        )
    kv.commit(request, tokens)
    return allocation.pages[0]


def _submit(kv: KVCacheManager, request: Request) -> list[Checkpoint]:
    """Compute all its known tokens in one step, and return the checkpoints that the step writes."""
    _compute(kv, request)
    kv.take_copies()
    return list(kv.take_checkpoints())


def _page(copy: PageCopy) -> int:
    return copy.dst


def _refused(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except DovetailError:
        return
    fail(f"{what} was accepted; it must raise DovetailError")


def _images(changed: int | None = None) -> tuple[MediaSpan, ...]:
    """Return the images of a prompt. `changed`: the one that is another picture."""
    return tuple(
        MediaSpan(digest=bytes([index, index == changed]) * 16, start=start, stop=start + 3)
        for index, start in enumerate(IMAGES)
    )
