"""The manager `prefix` over layouts with recurrent states, beyond what `KVCacheSuite` checks."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from dovetail.api.kv_cache import HOLE, Allocation, CacheGroup, Checkpoint, PageCopy, PageCounts
from dovetail.api.prefix_cache import PrefixCache
from dovetail.engine.live_request import LiveRequest
from dovetail.errors import DovetailError
from tests.kv_cache.helpers import generate, manager_of, request
from tests.kv_cache.state_traffic import Served, agents, conversation, qwen3_next, share
from tests.support import FULL

KV, STATES = CacheGroup((0,), 4), CacheGroup((1,), 4, pages_per_block=3, recurrent=True)
WINDOW = CacheGroup((1,), 4, window=5, pages_per_block=2)
THREE = KV, WINDOW, CacheGroup((2,), 4, pages_per_block=2, recurrent=True)


def step(
    kv: PrefixCache, *grants: tuple[LiveRequest, int]
) -> tuple[list[Allocation], Sequence[PageCopy], Sequence[Checkpoint]]:
    """Give each request blocks for its number of tokens, commit the known ones, and submit."""
    allocations = []
    for each, tokens in grants:
        allocation = kv.allocate(each, tokens)
        assert allocation is not None
        allocations.append(allocation)
        kv.commit(each, min(tokens, each.num_tokens))
    return allocations, kv.take_copies(), kv.take_checkpoints()


def ends(checkpoints: Sequence[Checkpoint]) -> list[int]:
    return [checkpoint.tokens for checkpoint in checkpoints]


def test_a_table_has_one_state_and_a_checkpoint_is_written_at_the_last_boundary_of_a_prompt() -> (
    None
):
    kv, first = manager_of(KV, STATES, num_pages=20), request(range(9))
    [allocation], copies, checkpoints = step(kv, (first, 9))
    assert (allocation, list(copies)) == (Allocation(((3, 4, 5), (0, 1, 2))), [])
    assert list(checkpoints) == [Checkpoint(first, 8, (6, 7, 8))]
    assert kv.counts == PageCounts(empty=11, held=6, cached=3, held_by_group=(3, 3))
    assert kv.allocate(first, 200) is None
    assert kv.allocate(first, 13) == Allocation(((9,), ()))


def test_a_hit_copies_the_checkpoint_and_shares_k_and_v() -> None:
    kv, first, second = (
        manager_of(KV, STATES, num_pages=20),
        request(range(9)),
        request([*range(8), 99]),
    )
    step(kv, (first, 9))
    kv.free(first)
    assert kv.lookup(second) == 8
    assert (
        kv.pages_needed(second, 9) == 2 + 1 + 3
    )  # two cached blocks, a new one and the live state
    [allocation], copies, _ = step(kv, (second, 9))
    live = allocation.pages[1]
    assert allocation.pages[0][:2] == (3, 4)
    assert list(copies) == [PageCopy(6, live[0]), PageCopy(7, live[1]), PageCopy(8, live[2])]
    assert kv.counts.cached == 3  # the checkpoint isn't held


@pytest.mark.parametrize("found_before", [0, 4], ids=["nothing else", "a prefix without a state"])
def test_a_placed_checkpoint_is_found(found_before: int) -> None:
    kv = manager_of(KV, STATES, num_pages=30)
    if found_before:  # K and V are there, and no checkpoint
        early = request([*range(4), 98])
        kv.allocate(early, 5)
        kv.commit(early, 4)
        kv.free(early)
    placed, later = request(range(13)), request([*range(12), 99])
    kv.allocate(placed, 12)
    kv.commit(placed, 12)
    pages = kv.place_checkpoint(placed, 12)
    assert pages is not None
    assert len(pages) == 3
    assert not {*pages} & {page for table in kv.tables(placed) for page in table}
    assert kv.place_checkpoint(placed, 12) is None
    kv.free(placed)
    assert not kv.take_checkpoints()
    kv.check_integrity()
    assert kv.lookup(later) == 12
    allocation = kv.allocate(later, 13)
    assert allocation is not None
    assert [copy.src for copy in kv.take_copies()] == list(pages)
    kv.free(later)
    kv.reset()
    assert kv.counts.cached == 0
    kv.check_integrity()


def test_no_checkpoint_is_placed_of_what_is_not_committed_or_has_no_room() -> None:
    kv = manager_of(KV, STATES, num_pages=7)
    placed = request(range(13))
    kv.allocate(placed, 12)
    assert kv.place_checkpoint(placed, 12) is None
    kv.commit(placed, 12)
    assert kv.place_checkpoint(placed, 12) is None
    kv.free(placed)
    assert kv.lookup(request(range(13))) == 0
    kv.check_integrity()


def test_a_prompt_of_at_most_a_block_writes_no_checkpoint() -> None:
    kv = manager_of(KV, STATES, num_pages=20)
    assert not step(kv, (request(range(4)), 4))[2]


def test_without_reuse_nothing_is_written() -> None:
    kv, first = manager_of(KV, STATES, num_pages=20, reuse=False), request(range(9))
    assert not step(kv, (first, 9))[2]
    kv.free(first)
    assert kv.counts == PageCounts(20, 0, 0, (0, 0))


def test_a_prompt_whose_logprobs_are_wanted_writes_a_checkpoint_for_others() -> None:
    kv, first = manager_of(KV, STATES, num_pages=20), request(range(9), prompt_logprobs=1)
    assert ends(step(kv, (first, 9))[2]) == [8]
    assert (kv.lookup(first), kv.lookup(request(range(9)))) == (0, 8)


def test_chunks_write_where_prompts_part_and_then_at_the_end() -> None:
    kv, first, second = (
        manager_of(KV, STATES, num_pages=60),
        request(range(20)),
        request([*range(10), *[99] * 10]),
    )
    assert [ends(step(kv, (first, tokens))[2]) for tokens in (8, 16, 20)] == [[], [16], []]
    assert kv.lookup(second) == 0  # two blocks of K and V, but no state
    assert [ends(step(kv, (second, tokens))[2]) for tokens in (7, 8, 15, 20)] == [[], [8], [], [16]]
    assert kv.lookup(request([*range(10), 98])) == 8


def test_a_step_that_passes_both_writes_where_prompts_part() -> None:
    kv, first, second = (
        manager_of(KV, STATES, num_pages=60),
        request(range(20)),
        request([*range(10), *[99] * 10]),
    )
    step(kv, (first, 20))
    assert ends(step(kv, (second, 20))[2]) == [8]


def test_the_next_turn_of_a_conversation_writes_at_its_end_and_replaces_the_checkpoint_that_it_started_from() -> (
    None
):
    kv, first = manager_of(KV, STATES, num_pages=26), request(range(9))
    step(kv, (first, 9))
    generate(first, range(100, 108))
    kv.allocate(first, 16)
    kv.commit(first, 16)
    kv.free(first)
    turn = request([*range(9), *range(100, 108), *range(50, 58)])
    [allocation], _, checkpoints = step(kv, (turn, 25))
    assert (allocation.cached, ends(checkpoints)) == (8, [24])
    kv.free(turn)
    assert kv.lookup(request([*range(9), 99])) == 8
    hog = request([-1])
    kv.allocate(hog, 48)  # a page more than are free
    assert kv.lookup(request([*range(9), 99])) == 0  # the one replaced is evicted first
    assert kv.lookup(request([*turn.prompt_token_ids, 99])) == 24


def test_further_answers_to_a_turn_show_that_prompts_part_there() -> None:
    kv, first = manager_of(KV, STATES, num_pages=60), request(range(12))
    step(kv, (first, 12))
    generate(first, [7])
    kv.commit(first, 12)
    kv.free(first)
    branches = [request([*range(12), *[40 + number] * 9]) for number in range(3)]
    assert [ends(step(kv, (branch, 21))[2]) for branch in branches] == [[20], [12], [20]]


def test_no_checkpoint_is_written_where_another_request_writes_or_has_written_it() -> None:
    kv = manager_of(KV, STATES, num_pages=40)
    first, second, third = (request(range(9)) for _ in range(3))
    _, _, checkpoints = step(kv, (first, 9), (second, 9))
    assert [(checkpoint.request, checkpoint.tokens) for checkpoint in checkpoints] == [(first, 8)]
    assert not step(kv, (third, 9))[2]


def test_a_checkpoint_is_given_up_rather_than_pages_that_decodes_need() -> None:
    for num_pages, written in (
        (6, False),
        (8, False),
        (9, False),
        (10, True),
    ):  # 6 of the request, 3 of the checkpoint, a block to grow by
        kv = manager_of(KV, STATES, num_pages=num_pages)
        assert bool(step(kv, (request(range(9)), 9))[2]) == written
        assert kv.counts.held == 6


def test_a_checkpoint_takes_the_pages_of_the_least_recently_used_blocks() -> None:
    kv, old, young = manager_of(KV, STATES, num_pages=13), request([1] * 9), request([2] * 9)
    for each in (old, young):
        step(kv, (each, 9))
        kv.free(each)
    assert kv.lookup(request([1] * 9)) == 0
    assert kv.lookup(request([2] * 9)) == 8
    kv.check_integrity()


def test_the_last_checkpoint_in_a_full_pool_becomes_the_live_state_itself() -> None:
    """Nothing is copied: its pages are the live state's, in their order."""
    kv, first = manager_of(KV, STATES, num_pages=10), request(range(9))
    _, _, [checkpoint] = step(kv, (first, 9))
    kv.free(first)
    hog = request([-1])
    kv.allocate(hog, 4)
    assert kv.lookup(request([*range(8), 99])) == 8
    second = request([*range(8), 99])
    [allocation], copies, _ = step(kv, (second, 9))
    assert (allocation.cached, list(copies)) == (8, [])
    assert allocation.pages[1] == checkpoint.pages
    assert kv.lookup(request([*range(8), 98])) == 0


def test_what_is_computed_again_replaces_what_is_cached() -> None:
    """So that a new checkpoint and its prefix are evicted together."""
    kv, first, second = (
        manager_of(KV, STATES, num_pages=40),
        request(range(20)),
        request([*range(10), *[99] * 10]),
    )
    step(kv, (first, 20))
    kv.free(first)
    [allocation], _, _ = step(kv, (second, 20))
    kv.free(second)
    [again], _, _ = step(kv, (request([*range(8), 98]), 9))
    assert again.cached == 8
    assert again.pages[0][:2] == allocation.pages[0][:2]


def test_a_window_keeps_what_a_checkpoint_needs() -> None:
    kv, first = manager_of(*THREE, num_pages=40), request(range(17))
    step(kv, (first, 17))
    kv.trim(first, 17)
    kv.free(first)
    allocation = kv.allocate(request([*range(16), 99]), 17)
    assert allocation is not None
    assert allocation.cached == 16
    assert allocation.pages[1][:6] == (HOLE,) * 6


def test_layouts_with_states_have_no_forks() -> None:
    kv, first = manager_of(KV, STATES, num_pages=40), request(range(9))
    step(kv, (first, 9))
    with pytest.raises(DovetailError, match="fork, which layouts with states have no use for"):
        kv.fork(first, request(range(9)), 8)


def test_a_model_of_recurrent_layers_only_finds_the_ends_of_prompts() -> None:
    kv, first = (
        manager_of(CacheGroup((0,), 4, pages_per_block=2, recurrent=True), num_pages=8),
        request(range(9)),
    )
    step(kv, (first, 9))
    assert kv.allocate(first, 1_000) == Allocation(((),))
    assert kv.lookup(request([*range(8), 99])) == 8
    assert kv.lookup(request([*range(5), 99])) == 0


def test_440_requests_of_300_tokens_of_qwen3_next_fit_into_40_gb() -> None:
    layout = qwen3_next()
    assert (layout.page_bytes, layout.state_pages) == (393_216, 198)
    kv = manager_of(*layout.groups, num_pages=40 * 10**9 // layout.page_bytes)
    fitting = 0
    while kv.allocate(request([fitting] * 300), 300) is not None:
        fitting += 1
    assert fitting == 468


@pytest.mark.parametrize("chunk", [512, 2_048, 8_192] if FULL else [2_048])
@pytest.mark.parametrize("gigabytes", [10, 5, 2.5] if FULL else [5])
def test_agents_and_conversations_find_most_of_what_k_and_v_alone_would(
    gigabytes: float, chunk: int
) -> None:
    """Shared prefixes of 1,500 tokens plus 700 of one's own; conversations of 43 turns."""
    layout = qwen3_next()
    pages = int(gigabytes * 1e9) // layout.page_bytes
    for traffic in (lambda: agents(4, 60), lambda: iter([conversation(0)])):
        found, ours, _ = share(layout, pages, chunk, traffic)
        assert found >= 0.8
        assert not ours.preemptions


def test_many_conversations_keep_one_checkpoint_each() -> None:
    """64 states and prompts take three quarters of this pool; all that they write would take three
    of it."""
    layout = qwen3_next()

    def traffic() -> list[Served]:
        return [conversation(number, 4) for number in range(32)]

    found, ours, _ = share(layout, 12_715, 2_048, lambda: iter(traffic()))
    assert found >= 0.75  # 85 % of 4 turns is what one checkpoint a prompt can give
    assert ours.checkpoints * layout.state_pages > 12_715


@pytest.mark.parametrize(
    "groups",
    [
        (KV, STATES),
        THREE,
        (WINDOW, STATES),
        (CacheGroup((0,), 2), CacheGroup((1,), 4, recurrent=True)),
    ],
    ids=str,
)
def test_random_operations_leak_nothing_and_read_no_state_but_their_own(
    groups: tuple[CacheGroup, ...],
) -> None:
    kv = manager_of(*groups, num_pages=40)
    world = _World(kv, Random(0))
    for number in range(15_000 if FULL else 1_500):
        world.act()
        if number % 50 == 0:
            kv.check_integrity()
    assert min(world.hits, world.written, world.revoked) > 10
    assert world.reused
    world.submit()
    for each in world.running:
        kv.free(each)
    assert (kv.counts.held, kv.counts.held_by_group) == (0, (0,) * len(groups))
    kv.check_integrity()


class _World:
    """Requests that begin alike, and a memory that knows what each page holds. Whatever isn't
    written for a reader is poison to it."""

    def __init__(self, kv: PrefixCache, random: Random) -> None:
        self.kv, self.random = kv, random
        self.groups = kv.context.layout.groups
        self.running: dict[LiveRequest, int] = {}  # -> tokens computed by the steps submitted
        self.granted: dict[LiveRequest, int] = {}  # -> tokens computed after the step in planning
        self.known: dict[LiveRequest, int] = {}  # -> tokens known at admission
        self.memory: dict[int, object] = {}  # page -> what it holds
        self.hits = self.written = self.revoked = 0
        # pages of checkpoints that were evicted and reused before they had been copied
        self.reused = 0

    def act(self) -> None:
        random = self.random
        match random.choices(
            ["grant", "submit", "end", "preempt", "fail", "reset"], [8, 3, 1, 0.7, 0.3, 0.05]
        )[0]:
            case "grant":
                self._grant()
            case "submit":
                self.submit()
            case "end":
                self._leave([each for each in self.running if each not in self.granted])
            case "preempt":
                self._leave(
                    [*self.granted], lambda each: self.kv.uncommit(each, self.running[each])
                )
            case "fail":
                self._leave(
                    [each for each in self.running if each not in self.granted],
                    lambda each: self.kv.uncommit(each, 0),
                )
            case "reset" if not self.granted:
                self.kv.reset()

    def submit(self) -> None:
        """Run copies in order, check the states that the step starts from, write, and check all."""
        copies = self.kv.take_copies()
        held = {page for each in self.running for pages in self.kv.tables(each) for page in pages}
        self.reused += len({copy.src for copy in copies} & held)
        for copy in copies:
            self.memory[copy.dst] = self.memory.get(copy.src)
        for each in self.granted:
            self._check_state(each, self.running[each])
        for checkpoint in self.kv.take_checkpoints():
            self.written += 1
            self._put(self._state(checkpoint.request, checkpoint.tokens), checkpoint.pages)
        for each, end in self.granted.items():
            self._write(each, self.running[each], end)
            self.running[each] = end
            if end == each.num_tokens:
                generate(each, [self.random.randint(0, 1)])
        self.granted.clear()
        for each, computed in self.running.items():
            self.kv.trim(each, computed)
            self.kv.commit(each, computed)
            self._check(each, computed)

    def _grant(self) -> None:
        random, kv = self.random, self.kv
        idle = [each for each in self.running if each not in self.granted]
        if not idle or random.random() < 0.4:
            each = request(
                [
                    *[random.choice([0, 0, 0, 1])] * random.randint(1, 30),
                    *[random.randint(0, 1)] * random.randint(0, 12),
                ]
            )
            start = kv.lookup(each)
        else:
            each = random.choice(idle)
            start = self.running[each]
        end = min(each.num_tokens, start + random.choice([1, 5, 40]))
        needed, available = kv.pages_needed(each, end), kv.available_pages
        allocation = kv.allocate(each, end)
        assert (allocation is not None) == (needed <= available)
        if allocation is None:
            return
        assert kv.available_pages == available - needed
        if each not in self.running:
            assert allocation.cached == start
            self.hits += start > 0
            self.running[each], self.known[each] = start, each.num_tokens
        self.granted[each] = end
        if start < self.known[each]:
            kv.commit(each, end)

    def _leave(self, candidates: list[LiveRequest], before: object = None) -> None:
        """Let a request end, or be preempted, with those of this step that read what it won't
        write."""
        if not candidates:
            return
        going = [self.random.choice(candidates)]
        if going[0] in self.granted:
            self.revoked += 1
            at = [*self.granted].index(going[0])
            going += [*self.granted][at + 1 :]  # as if all later ones had found something of it
        for each in reversed(going):
            if each in self.granted and self.running[each] < self.known[each]:
                self.kv.uncommit(each, self.running[each])
            elif callable(before) and each not in self.granted:
                before(each)
            self.granted.pop(each, None)
            self.kv.free(each)
            del self.running[each], self.known[each]

    # Memory

    def _check(self, each: LiveRequest, computed: int) -> None:
        """Check that a request's blocks hold what its tokens after `computed` read."""
        self._check_state(each, computed)
        for number, (group, pages) in enumerate(
            zip(self.groups[:-1], self.kv.tables(each), strict=False)
        ):
            width = group.pages_per_block
            for index in range(group.first_visible_block(computed), group.blocks(computed)):
                end = min((index + 1) * group.block_tokens, computed)
                self._holds(
                    (number, self._tokens(each, end)), pages[index * width : (index + 1) * width]
                )

    def _check_state(self, each: LiveRequest, computed: int) -> None:
        if computed:  # otherwise it is zero
            self._holds(self._state(each, computed), self.kv.tables(each)[-1])

    def _write(self, each: LiveRequest, start: int, end: int) -> None:
        self._put(self._state(each, end), self.kv.tables(each)[-1])
        for number, (group, pages) in enumerate(
            zip(self.groups[:-1], self.kv.tables(each), strict=False)
        ):
            width = group.pages_per_block
            for index in range(start // group.block_tokens, group.blocks(end)):
                content = number, self._tokens(each, min((index + 1) * group.block_tokens, end))
                self._put(content, pages[index * width : (index + 1) * width])

    def _state(self, each: object, tokens: int) -> object:
        assert isinstance(each, LiveRequest)
        return "state", self._tokens(each, tokens)

    @staticmethod
    def _tokens(each: LiveRequest, end: int) -> tuple[int, ...]:
        return (*each.prompt_token_ids, *each.output_token_ids)[:end]

    def _put(self, content: object, pages: Sequence[int]) -> None:
        for part, page in enumerate(pages):
            self.memory[page] = content, part

    def _holds(self, content: object, pages: Sequence[int]) -> None:
        assert [self.memory.get(page) for page in pages] == [
            (content, part) for part in range(len(pages))
        ]
