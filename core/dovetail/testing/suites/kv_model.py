"""`KVWorld`: drives a KV-cache manager like the engine does, with a model of memory that records
which tokens were written where.

The model has no hashes, trees, reference counts or eviction. For each token of each page, it keeps
the tokens whose K and V were written there last, and checks that everything a request believes to
be computed is in its blocks, unless it has left the window of the block's cache group. For each
page of a state, it keeps the tokens before the state. A twin of the manager gets the same actions
but no queries.

A script (`kv_scripts`) is a list of actions, each (method of `KVWorld`, arguments); an action that
is impossible in the current state is a no-op, so that any list is a valid script.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from dovetail.api.kv_cache import (
    HOLE,
    Allocation,
    CacheGroup,
    Checkpoint,
    KVCacheManager,
    KVContext,
    KVLayout,
    PageCopy,
    Pages,
)
from dovetail.engine.live_request import LiveRequest
from dovetail.errors import describe
from dovetail.request.media import MediaSpan
from dovetail.request.sampling_params import SamplingParams
from dovetail.testing.checks import CheckFailed

Act = tuple[str, tuple[Any, ...]]
Content = int  # `Contents`' number of a prefix: cache keys, and all tokens up to one
# what one token's part of a page holds: the content, the cache group and which page of a block it
# is
Written = tuple[Content, int, int]


class Broken(CheckFailed):
    """A manager violated a claim in this script."""

    def __init__(self, message: str, claim: str, shape: Shape, script: Sequence[Act]) -> None:
        super().__init__(message)
        self.claim = claim
        self.shape = shape
        self.script = script


class Ended(Exception):
    """A claim in `FATAL` that isn't watched was violated: the script can't continue."""


READ_ONLY = (  # attributes of a request
    *(
        "id",
        "prompt_tokens",
        "max_tokens",
        "cache_keys",
        "num_computed",
        "capacity",
        "cached_tokens",
        "priority",
        "client",
        "params",
    ),
    *(
        "arrival_time",
        "deadline",
        "ttft_deadline",
        "tbt_s",
        "predicted_tokens",
        "parent",
        "stop_ids",
    ),
)
# After a violation of these the state is inconsistent: the rest is meaningless, or may not end.
FATAL = (
    "lawful",
    "table",
    "holes",
    "hit_length",
    "exclusive",
    "counts",
    "integrity",
    "checkpoints",
)
STATE = -1  # offset of a state in the memory of a page


@dataclass(frozen=True)
class Shape:
    """Shape of a pool."""

    groups: tuple[CacheGroup, ...]
    num_pages: int

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.groups, page_bytes=1, dtype="none")

    @property
    def context(self) -> KVContext:
        return KVContext(self.layout, self.num_pages)


def plain(block_size: int, num_pages: int, window: int | None = None) -> Shape:
    """Return the shape of a pool of one group, whose blocks have one page."""
    return Shape((CacheGroup((0,), block_size, window),), num_pages)


def make_request(
    id: str,
    tokens: Sequence[int],
    *,
    keys: tuple[str, ...] = (),
    prompt_logprobs: int | None = None,
    media: tuple[MediaSpan, ...] = (),
) -> LiveRequest:
    """Make a request as the engine does."""
    return LiveRequest(
        id,
        tokens,
        SamplingParams(prompt_logprobs=prompt_logprobs),
        max_tokens=1000,
        cache_keys=keys,
        media=media,
    )


def generate(request: LiveRequest, tokens: Sequence[int]) -> None:
    """Append tokens as the engine does when ids arrive."""
    request.output.extend(tokens)


class Contents:
    """Numbers prefixes, so that they are compared in one step."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Content, int], Content] = {}  # (prefix before it, token)
        # by number: cache keys, tokens
        self._known: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
        self._roots: dict[tuple[str, ...], Content] = {}

    def extend(self, keys: tuple[str, ...], contents: list[Content], tokens: Sequence[int]) -> None:
        """Append the contents of those of `tokens` that have none yet."""
        for token in tokens[len(contents) :]:
            before = contents[-1] if contents else self._number(self._roots, keys, keys, ())
            contents.append(
                self._number(self._numbers, (before, token), keys, (*self._known[before][1], token))
            )

    def named(self, written: Written | None) -> str:
        """Return `written` in words."""
        if written is None:
            return "nothing"
        keys, tokens = self._known[written[0]]
        return (
            f"token {len(tokens) - 1} of {tokens} under {keys}, in page {written[2]} of a block "
            f"of group {written[1]}"
        )

    def _number(
        self, numbers: dict[Any, Content], key: Any, keys: tuple[str, ...], tokens: tuple[int, ...]
    ) -> Content:
        if key not in numbers:
            numbers[key] = len(self._known)
            self._known.append((keys, tokens))
        return numbers[key]


@dataclass(eq=False)
class Row:
    """The model's state of a request: all its tokens (the last may be unknown to the manager), its
    tables, and the tokens computed or planned."""

    request: LiveRequest
    tokens: list[int]
    # by group; blocks that it doesn't hold consist of HOLEs
    tables: list[list[Pages]] = field(default_factory=list)
    contents: list[Content] = field(default_factory=list)  # by token
    computed: int = 0
    prefill_end: int = 0  # tokens known when it was admitted
    planned_from: int | None = None  # computed before this step's grant
    admitted_now: bool = False
    # tokens taken over by a fork, until the copy of a partial block is verified
    copied: int | None = None
    disowned: bool = False  # by a reset: it depends on dropped values
    asked: int = 0  # tokens that its blocks were asked for
    pending: int = 0  # pages of the checkpoint that this step writes

    def __post_init__(self) -> None:
        self.given = {
            name: copy.deepcopy(getattr(self.request, name)) for name in READ_ONLY
        }  # before the manager saw it

    @property
    def settled(self) -> int:
        """Number of tokens written by earlier steps."""
        return self.computed if self.planned_from is None else self.planned_from

    @property
    def pages(self) -> set[int]:
        """Return the pages that it holds."""
        return {page for table in self.tables for block in table for page in block if page != HOLE}


class KVWorld:
    """A manager, its requests and its memory. `watch`: claim whose violation is raised; None:
    record the first violation of each claim."""

    def __init__(
        self, make: Callable[[KVContext], KVCacheManager], shape: Shape, watch: str | None = None
    ) -> None:
        self.kv, self.twin, self.shape, self.watch = (
            make(shape.context),
            make(shape.context),
            shape,
            watch,
        )
        self.script: Sequence[Act] = ()
        self.breaches: dict[str, Broken] = {}  # by claim
        self.layout, self.groups, self.num_pages = (
            shape.layout,
            tuple(enumerate(shape.groups)),
            shape.num_pages,
        )
        self.paged = self.groups[:-1] if self.layout.recurrent else self.groups  # those of K and V
        self.unit = self.layout.hit_tokens
        self.memory: dict[int, dict[int, Written]] = {}  # page -> offset -> what was written last
        self.contents = Contents()
        # last token of each full block, unless dropped since
        self.committed: list[set[Content]] = [set() for _ in self.groups]
        # False once a block may have been evicted: then lookups may find less
        self.nothing_lost = any(group.window != 1 for group in shape.groups)
        self.live: list[Row] = []
        self.hogs = self.looks = 0
        # copies and checkpoints, and their values then
        self.taken: list[tuple[Sequence[PageCopy] | Sequence[Checkpoint], tuple[Any, ...]]] = []
        self.probe = make_request("probe", [98])
        # unused ids: reused once their request has ended
        self.ids: list[str] = [f"r{number}" for number in range(7, -1, -1)]

    def run(self, script: Sequence[Act]) -> None:
        """Run a script. Raises `Broken` if it breaks the watched claim."""
        self.script = script
        try:
            self._check_books()
            for name, arguments in script:
                getattr(self, name)(*arguments)
                self._check_books()
            self._end()
        except Ended:
            return

    # Requests come …

    def arrive(
        self,
        base: tuple[int, ...],
        blocks: int,
        tail: int,
        keys: tuple[str, ...],
        prompt_logprobs: int | None,
    ) -> None:
        if self.ids:
            length = max(1, blocks * self.unit + tail)
            tokens = [base[position // self.unit % len(base)] for position in range(length)]
            self.live.append(
                Row(
                    make_request(
                        self.ids.pop(), tokens, keys=keys, prompt_logprobs=prompt_logprobs
                    ),
                    tokens,
                )
            )

    def hog(self, leave: int, goes: bool) -> None:
        """Add a request that shares nothing, and takes all but a few of the available pages; at its
        end they hold K and V that no other wants."""
        room = self._fitting(self._ask("available_pages") - leave)
        if self.ids and room > 0:
            self.hogs += 1
            tokens = [1000 + self.hogs] * room
            self.live.append(Row(make_request(self.ids.pop(), tokens), tokens))
            self.grant(len(self.live) - 1, len(tokens), 0)
            if goes:
                self.submit(0, True)
                self.finish(len(self.live) - 1)

    # … are planned …

    def grant(self, who: int, chunk: int, spare: int) -> None:
        """Allocate blocks for the next `chunk` tokens plus `spare` more, and commit these
        tokens."""
        row = self._row(who)
        if (
            row is None
            or row.planned_from is not None
            or (not row.tables and len(row.tokens) > row.request.num_tokens)
        ):
            return
        waiting = not row.tables
        start = self._lookup(row) if waiting else row.computed
        end = min(start + chunk, len(row.tokens))
        if end > start and not self._take_blocks(row, start, max(end + spare, self._room(row))):
            end = start + (end - start) // 2  # fewer may fit
            if end == start or not self._take_blocks(row, start, max(end, self._room(row))):
                return
        if end > start:
            row.planned_from = start
            row.computed = end
            row.admitted_now = waiting
            if waiting:
                row.prefill_end = row.request.num_tokens
            if start < row.prefill_end:
                self._commit(row, self.layout.state_pages)

    def evict(self, who: int, others: int, chunk: int) -> None:
        """Free some requests that aren't planned in this step for another, and check the forecast
        for that one."""
        waiting = [row for row in self.live if not row.tables]
        if not waiting:
            return
        row = waiting[who % len(waiting)]
        victims = [
            other
            for other in self.live
            if other is not row and other.tables and other.planned_from is None
        ][:others]
        going = [victim.request for victim in victims]
        room = min(chunk, len(row.tokens))
        foretold = self._ask("pages_needed", row.request, room, going)
        available = self._ask("available_pages")
        for victim in victims:
            self._release(victim)
        freed = self._ask("available_pages") - available
        needed = self._ask("pages_needed", row.request, room)
        told = (
            f"pages_needed({row.request}, {room}, without={going}) was {foretold}; freeing them "
            f"made {freed} available, and {needed} are needed now"
        )
        self._hold("pages_needed_without", foretold == needed - freed, told)

    def fork(self, who: int, tokens: int) -> None:
        """Add a new request with the prompt of another."""
        parent = self._row(who)
        if parent is None or not self.ids or not self.kv.capabilities.fork or self.layout.recurrent:
            return
        prompt = list(parent.request.prompt_token_ids)
        tokens = min(tokens, parent.settled, len(prompt) - 1)
        if (
            not parent.tables
            or tokens < 1
            or any(
                self._seen(parent, tokens, number).count(self._hole(group))
                for number, group in self.groups
            )
        ):
            return
        child = Row(
            make_request(self.ids[-1], prompt, keys=parent.request.cache_keys),
            prompt,
            prefill_end=len(prompt),
        )
        child.disowned = parent.disowned
        if self._fork_blocks(parent, child, tokens):
            child.computed = child.copied = tokens
            self.ids.pop()
            self.live.append(child)
        else:
            self._tell("free", child.request)  # its id is used again

    def preempt(self, who: int) -> None:
        row = self._row(who)
        if row is not None:
            self._release(row)

    def preempt_last_granted(self) -> None:
        granted = [row for row in self.live if row.planned_from is not None]
        if granted:
            self._release(granted[-1])

    def take_back_last_granted(self) -> None:
        """Revoke a grant; the request keeps its blocks."""
        granted = [row for row in self.live if row.planned_from is not None]
        if granted:
            self._take_back(granted[-1])

    def finish(self, who: int) -> None:
        row = self._row(who)
        if row is not None:
            self._release(row)
            self.live.remove(row)
            self._tell("free", row.request)  # the engine frees at every end, blocks or none
            self._check_request(row)
            self.ids.append(row.request.id)

    def trim(self, who: int) -> None:
        row = self._row(who)
        if (
            not self.layout.has_windows
            or row is None
            or not row.tables
            or row.planned_from is not None
        ):
            return
        self._tell("trim", row.request, row.computed)
        self._tell("trim", row.request, row.computed // 2)  # no layer reads what was trimmed before
        if self.kv.capabilities.trim:
            for (_, group), table in zip(self.groups, row.tables, strict=True):
                unseen = min(group.first_visible_block(row.computed), len(table))
                table[:unseen] = [self._hole(group)] * unseen
        counts = self._ask("counts")
        held = sum(map(len, self._held())) + self._pending
        self._hold(
            "trim",
            counts.held == held,
            f"trim({row.request}, {row.computed}) leaves {held} pages held, of {self.shape}; "
            f"{counts}",
        )

    # … and run

    def step(self, chunk: int, sampled: int) -> None:
        """Run a plain step, in which every request that can gets a grant."""
        for who in range(len(self.live)):
            self.grant(who, chunk, 0)
        self.submit(sampled, True)

    def submit(self, sampled: int, deliver: bool) -> None:
        """Run copies, then the writes of every planned request. Those that reached their last token
        get one more, known now or later."""
        copies = self._tell("take_copies")
        self.taken.append((copies, tuple(copies)))
        for src, dst in ((copied.src, copied.dst) for copied in copies):
            self.memory[dst] = dict(self.memory.get(src, {}))
        if self.layout.recurrent:
            self._take_checkpoints()
        for row in self.live:
            if row.planned_from is not None:
                if self.layout.recurrent and row.planned_from:
                    self._check_state(
                        row, row.planned_from, "state_copies" if row.admitted_now else "states"
                    )
                self._write(row, row.planned_from, row.computed)
                if row.computed == len(row.tokens):
                    row.tokens.append(sampled)
            row.planned_from = None
            row.admitted_now = False
        if deliver:
            self.deliver()
        self._check_memory()

    def _take_checkpoints(self) -> None:
        """Check the checkpoints of this step, and write them."""
        checkpoints = self._tell("take_checkpoints")
        self.taken.append((checkpoints, tuple(checkpoints)))
        number, group = self.groups[-1]
        planned = {row.request: row for row in self.live if row.planned_from is not None}
        used = set.union(*self._held())
        for checkpoint in checkpoints:
            told = f"take_checkpoints returned {checkpoint}, in a step of {[*planned.values()]}"
            row = planned.pop(checkpoint.request, None)
            pages = checkpoint.pages
            if (
                row is None
                or not (row.planned_from or 0) < checkpoint.tokens <= row.computed
                or checkpoint.tokens % self.unit
            ):
                self._broken(
                    "checkpoints",
                    f"{told}: one for each request, at a multiple of {self.unit} of the tokens "
                    f"that the step computes",
                )
                raise Ended
            sound = (
                type(pages) is tuple
                and len(set(pages)) == group.pages_per_block
                and set(pages) <= set(range(self.num_pages))
            )
            self._hold(
                "checkpoints",
                sound and not used & set(pages),
                f"{told}, with the pages {pages}, while {sorted(used)} are in tables or written",
            )
            used |= set(pages)
            content = row.contents[checkpoint.tokens - 1]
            for part, page in enumerate(pages):
                self.memory[page] = {STATE: (content, number, part)}
            if not row.disowned:
                self.committed[number].add(content)
        for row in self.live:
            row.pending = 0

    def deliver(self) -> None:
        """Let the ids in flight arrive."""
        for row in self.live:
            generate(row.request, row.tokens[row.request.num_tokens :])
            if row.tables:
                self._commit(row)

    def reset(self) -> None:
        if all(row.planned_from is None for row in self.live):
            self._tell("reset")
            self.committed = [set() for _ in self.groups]
            # of what is committed from now on
            self.nothing_lost = any(group.window != 1 for _, group in self.groups)
            for row in self.live:
                row.disowned = bool(row.tables)

    # Calls of the manager

    def _tell(self, method: str, *arguments: Any) -> Any:
        """Call a method of both managers, whose results must be equal."""
        answers = [self._lawful(manager, method, *arguments) for manager in (self.kv, self.twin)]
        if answers[0] != answers[1]:
            self._broken(
                "pure",
                f"{method}{arguments} answered {answers[0]}, and {answers[1]} where no question "
                f"had been asked before",
            )
        return answers[0]

    def _ask(self, question: str, *arguments: Any) -> Any:
        """Query one of the two managers, twice."""
        answers = [self._lawful(self.kv, question, *arguments) for _ in range(2)]
        if answers[0] != answers[1]:
            self._broken(
                "pure",
                f"{question}{arguments} answered {answers[0]}, and {answers[1]} when asked again",
            )
        return answers[0]

    def _lawful(self, manager: KVCacheManager, name: str, *arguments: Any) -> Any:
        try:
            member = getattr(manager, name)
            return member(*arguments) if callable(member) else member
        except Exception as error:
            self._broken(
                "lawful", f"{name}{arguments} is a valid call but raised {describe(error)}"
            )

    def _lookup(self, row: Row) -> int:
        """Look a request up, and judge the answer."""
        found = self._ask("lookup", row.request)
        known = row.request.num_tokens
        unit = self.unit
        told = (
            f"lookup found {found} of {known} known tokens of {row.request}, with "
            f"{self.layout.groups}"
        )
        self._hold("hit_length", 0 <= found < known and found % unit == 0, told)
        findable = [0]
        if self.kv.capabilities.reuse and row.request.params.prompt_logprobs is None:
            findable = self._findable(row)
        told = (
            f"{told}, of which {findable} may be found: what was committed under its "
            f"cache_keys, and may be shared"
        )
        self._hold("hit", found in findable, told)
        self._hold(
            "reuse",
            found >= findable[-1] or not self.nothing_lost,
            f"{told}; no block has been given up since",
        )
        return int(found)

    def _findable(self, row: Row) -> list[int]:
        """Return the numbers of leading known tokens that every group accepts, by what was
        committed."""
        self.contents.extend(row.request.cache_keys, row.contents, row.tokens)
        # by group: blocks in a row that end here
        accepted = [0]
        runs = [0] * len(self.groups)
        for end in range(self.unit, row.request.num_tokens, self.unit):
            accepts = not self.layout.recurrent or row.contents[end - 1] in self.committed[-1]
            for number, group in self.paged:
                size = group.block_tokens
                for last in range(end - self.unit + size - 1, end, size):
                    runs[number] = (
                        runs[number] + 1 if row.contents[last] in self.committed[number] else 0
                    )
                accepts &= runs[number] >= end // size - group.first_visible_block(end)
            if accepts:
                accepted.append(end)
            elif (
                len(self.groups) == 1 and not self.layout.has_windows and not self.layout.recurrent
            ):
                break
        return accepted

    def _take_blocks(self, row: Row, start: int, room: int) -> bool:
        """Give a request its first blocks, some of them hits up to `start`, or more blocks."""
        waiting = not row.tables
        needed = self._ask("pages_needed", row.request, room)
        available = self._ask("available_pages")
        before = self._snapshot() if needed > available else None
        empty = self._ask("counts").empty
        allocation = self._tell("allocate", row.request, room)
        told = (
            f"pages_needed({row.request}, {room}) was {needed}, {available} were available, and "
            f"allocate answered {allocation}"
        )
        self._hold("pages_needed", (allocation is not None) == (needed <= available), told)
        if allocation is None:
            told = (
                f"allocate({row.request}, {room}) returned None; counts, lookups and unshared "
                f"pages were {before} and are {self._snapshot()}"
            )
            self._hold("failed_allocate", before in (None, self._snapshot()), told)
            return False
        left = self._ask("available_pages")
        self._hold("pages_needed", left == available - needed, f"{told}; now {left} are available")
        cached = start if waiting else 0
        self._hold(
            "hit",
            allocation.cached == cached,
            f"allocate says {allocation.cached} tokens of {row.request} are cached; lookup said "
            f"{cached}",
        )
        self._append(row, allocation, empty=empty, cached=cached, tokens=max(room, cached))
        return True

    def _fork_blocks(self, parent: Row, child: Row, tokens: int) -> bool:
        copied = sum(
            group.pages_per_block for _, group in self.groups if tokens % group.block_tokens
        )
        available = self._ask("available_pages")
        empty = self._ask("counts").empty
        before = self._snapshot() if copied > available else None
        allocation = self._tell("fork", parent.request, child.request, tokens)
        told = (
            f"fork({parent.request}, {child.request}, {tokens}) with {self.layout.groups}, "
            f"{available} available, answered {allocation}"
        )
        if allocation is None:
            self._hold("fork", copied > available, f"{told}, though its copies need {copied} pages")
            told = (
                f"{told}; counts, lookups and unshared pages were {before} and are "
                f"{self._snapshot()}"
            )
            self._hold("failed_fork", before in (None, self._snapshot()), told)
            return False
        self._hold("fork", allocation.cached == tokens, told)
        self._append(child, allocation, empty=empty, cached=tokens, tokens=tokens)
        for (_, group), mine, theirs in zip(self.groups, child.tables, parent.tables, strict=True):
            full = tokens // group.block_tokens
            hole = self._hole(group)
            shares = all(
                block in (hole, other) for block, other in zip(mine[:full], theirs, strict=False)
            )
            self._hold("fork", shares, f"{told}; the parent holds {theirs} in that group")
        return True

    def _append(
        self, row: Row, allocation: Allocation, *, empty: int, cached: int, tokens: int
    ) -> None:
        """Append blocks to its tables: those of the first `cached` tokens are shared with others,
        the rest are new; `empty` pages were empty before."""
        pages = allocation.pages
        held = set.union(*self._held())
        sound = (
            type(pages) is tuple
            and len(pages) == len(self.groups)
            and all(type(own) is tuple for own in pages)
        )
        self._hold(
            "answers",
            sound and all(type(page) is int for own in pages for page in own),
            f"the pages of an allocation are {pages!r}",
        )
        if not row.tables:
            row.tables = [[] for _ in self.groups]
        row.asked = tokens
        new = list[int]()
        for (_, group), table, own in zip(self.groups, row.tables, pages, strict=True):
            size = group.block_tokens
            width = group.pages_per_block
            hole = self._hole(group)
            table += [own[at : at + width] for at in range(0, len(own), width)]
            shared = 0 if group.recurrent else cached // size
            unseen = group.first_visible_block(cached) if cached else 0
            told = (
                f"{row.request}, {cached} of whose tokens are cached, has the table {table} in "
                f"{group}"
            )
            self._hold(
                "table",
                len(table) == group.blocks(tokens),
                f"{told}; it asked for {tokens} tokens, {group.blocks(tokens)} blocks",
            )
            holes = [HOLE in block for block in table]
            whole = all(
                block == hole for block, has in zip(table[:unseen], holes, strict=False) if has
            )
            new_holes = HOLE in own[unseen * width :]
            self._hold(
                "holes",
                whole and not new_holes,
                f"{told}; blocks from {unseen} on are seen, so that none of them may have a HOLE",
            )
            new += own[shared * width :]
        pages_held = [
            page for table in row.tables for block in table for page in block if page != HOLE
        ]
        told = (
            f"{row.request} was given pages {pages} of {self.num_pages}, of which {new} are "
            f"new, while {sorted(held)} are held"
        )
        sound = (
            len(set(pages_held)) == len(pages_held)
            and not set(new) & held
            and all(page in range(self.num_pages) for page in pages_held)
        )
        self._hold("exclusive", sound, told)
        self.nothing_lost &= len(new) <= empty

    def _commit(self, row: Row, state_pages: int = 0) -> None:
        """Commit its tokens. The manager may take `state_pages` pages for a checkpoint."""
        known = min(row.computed, row.request.num_tokens)
        before = self._ask("counts")
        self._tell("commit", row.request, known)
        self.contents.extend(row.request.cache_keys, row.contents, row.tokens)
        if self.layout.recurrent:
            taken = self._ask("counts").held - before.held
            told = (
                f"commit({row.request}, {known}) took {taken} pages; for a checkpoint, "
                f"{state_pages} are allowed here, as {row.pending} are taken"
            )
            self._hold(
                "checkpoints", taken in (0, state_pages) and not (taken and row.pending), told
            )
            row.pending += taken
            self.nothing_lost &= taken <= before.empty
        if not row.disowned:
            for (number, group), table in zip(self.paged, row.tables, strict=False):
                hole = self._hole(group)
                size = group.block_tokens
                full = enumerate(table[: known // size])
                self.committed[number].update(
                    row.contents[(index + 1) * size - 1] for index, block in full if block != hole
                )

    def _release(self, row: Row) -> None:
        """Release its blocks, after revoking its grant."""
        if not row.tables:
            return
        self._take_back(row)
        foretold = self._freed_by([row.request])
        available = self._ask("available_pages")
        self._tell("free", row.request)
        freed = self._ask("available_pages") - available
        told = (
            f"pages_needed(…, without=[{row.request}]) counted off {foretold} pages; freeing it "
            f"made {freed} available"
        )
        self._hold("pages_needed_without", freed == foretold, told)
        row.tables = []
        row.computed = 0
        row.admitted_now = False
        row.copied = None
        row.disowned = False
        row.asked = 0

    def _take_back(self, row: Row) -> None:
        """Revoke its grant, if any; release requests admitted in this step that share tokens which
        it would have written."""
        if row.planned_from is None:
            return
        before = row.planned_from
        if row.planned_from < row.request.num_tokens:  # known, so that it may have been committed
            self._tell("uncommit", row.request, row.planned_from)
        row.pending = 0
        self.nothing_lost = False
        row.computed = row.planned_from
        row.planned_from = None
        row.admitted_now = False
        for other in self.live:
            if other is not row and other.admitted_now and self._shares(row, other, before):
                self._release(other)

    def _shares(self, row: Row, other: Row, start: int) -> bool:
        """Return whether two requests share blocks of tokens from `start` on."""
        for (_, group), mine, theirs in zip(self.groups, row.tables, other.tables, strict=False):
            first = start // group.block_tokens
            if any(
                a == b != self._hole(group)
                for a, b in zip(mine[first:], theirs[first:], strict=False)
            ):
                return True
        return False

    # Invariants

    def _check_books(self) -> None:
        counts = self._ask("counts")
        by_group = tuple(len(pages) for pages in self._held())
        if self.layout.recurrent:
            by_group = (*by_group[:-1], by_group[-1] + self._pending)
        held = sum(by_group)
        told = (
            f"{counts}, {self._ask('available_pages')} available, of {self.num_pages} pages; "
            f"{by_group} are in tables or of checkpoints, by group"
        )
        adds_up = (
            counts.empty + counts.held + counts.cached == self.num_pages
            and min(counts.empty, counts.held, counts.cached) >= 0
        )
        self._hold(
            "counts",
            adds_up
            and counts.held == held
            and self._ask("available_pages") == counts.empty + counts.cached,
            told,
        )
        self._hold("held_by_group", counts.held_by_group in ((), by_group), told)
        try:
            self.kv.check_integrity()
        except Exception as error:
            self._broken(
                "integrity", f"check_integrity raised {describe(error)}, after valid calls"
            )
        self.looks += 1
        if (
            asked := self._row(self.looks)
        ) is not None:  # the same question again and again, whatever has changed since
            self._lookup(asked)
            self._check_tables(asked)
        running = [row for row in self.live if row.tables]
        for count in sorted({min(1, len(running)), min(2, len(running)), len(running)}):
            self._check_sharing(running[:count], running[count:])

    def _check_sharing(self, group: list[Row], rest: list[Row]) -> None:
        requests = [row.request for row in group]
        alone = (
            set[int]().union(*(row.pages for row in group)).difference(*(row.pages for row in rest))
        )
        foretold = self._freed_by(requests)
        pending = sum(row.pending for row in group)
        told = (
            f"pages_needed(…, without={requests}) counts off {foretold} pages; only in their "
            f"tables are {sorted(alone)}, and {pending} in checkpoints"
        )
        self._hold("pages_needed_without", foretold == len(alone) + pending, told)

    def _check_tables(self, row: Row) -> None:
        """Check that the manager's tables are those that it gave, where the request holds
        blocks."""
        if row.tables:
            answer = self._ask("tables", row.request)
            told = (
                f"tables({row.request}) answered {answer}; it was given {row.tables}, without "
                f"what was released since"
            )
            flat = [[page for block in table for page in block] for table in row.tables]
            sound = type(answer) is tuple and [len(own) for own in answer] == [
                len(own) for own in flat
            ]
            pairs = (
                zip(chain.from_iterable(flat), chain.from_iterable(answer), strict=True)
                if sound
                else ()
            )
            self._hold(
                "tables", sound and all(given in (HOLE, page) for given, page in pairs), told
            )

    def _check_request(self, row: Row) -> None:
        """Check that a request is as the model made it, and its tokens those that it generated."""
        request = row.request
        written = [name for name, value in row.given.items() if getattr(request, name) != value]
        known = [*request.prompt_array.tolist(), *request.output_token_ids]
        self._hold(
            "request_untouched", not written, f"{request} was given another {', '.join(written)}"
        )
        self._hold(
            "request_untouched",
            known == row.tokens[: len(known)],
            f"{request} has the tokens {known}, and had {row.tokens}",
        )

    def _check_memory(self) -> None:
        for row in self.live:
            self.contents.extend(row.request.cache_keys, row.contents, row.tokens)
            if self.layout.recurrent and row.computed:
                self._check_state(row, row.computed, "states")
            for (number, group), table in zip(self.paged, row.tables, strict=False):
                hole = self._hole(group)
                for index, block in enumerate(table[: group.blocks(row.computed)]):
                    start = index * group.block_tokens
                    end = min(start + group.block_tokens, row.computed)
                    for part, page in enumerate(block if block != hole else ()):
                        self._check_page(row, page, range(start, end), number, part)
            row.copied = None

    def _check_state(self, row: Row, tokens: int, claim: str) -> None:
        """Check that the live state of a request is that after its first `tokens` tokens."""
        number = self.groups[-1][0]
        for part, page in enumerate(row.tables[number][0]):
            found = self.memory.get(page, {}).get(STATE)
            if found != (row.contents[tokens - 1], number, part):
                told = (
                    f"{tokens} tokens of {row.request} are computed; page {page} of its live "
                    f"state holds {self.contents.named(found)}"
                )
                self._broken(claim, told)

    def _check_page(self, row: Row, page: int, positions: range, group: int, part: int) -> None:
        """Check that `page`, of a block of the request, holds its tokens `positions`."""
        memory = self.memory.get(page, {})
        for offset, position in enumerate(positions):
            found = memory.get(offset)
            if found != (row.contents[position], group, part):
                told = (
                    f"token {position} of {row.request} reads page {page}, offset {offset}, "
                    f"which holds {self.contents.named(found)}"
                )
                copied = (
                    row.copied is not None
                    and position < row.copied < positions.start + self.groups[group][1].block_tokens
                )
                self._broken("fork_copies" if copied else "private", told)

    def _end(self) -> None:
        """Let all requests end; then let one take the whole pool."""
        while self.live:
            self.finish(0)
        self._tell("free", self.probe)
        for taken, then in self.taken:
            self._hold(
                "answers",
                tuple(taken) == then,
                f"take_copies or take_checkpoints returned {list(then)}, which is now "
                f"{list(taken)}",
            )
        counts = self._ask("counts")
        room = self._fitting(self.num_pages)
        self._hold(
            "no_leak",
            counts.held == 0 and self._ask("available_pages") == self.num_pages,
            f"every request has ended, and {counts}",
        )
        if room:
            allocation = self._tell(
                "allocate", make_request("last", [99] * room, prompt_logprobs=0), room
            )
            pages = [] if allocation is None else [page for own in allocation.pages for page in own]
            whole = len(set(pages)) == self.layout.pages(room) and set(pages) <= set(
                range(self.num_pages)
            )
            self._hold(
                "no_leak",
                whole,
                f"every request has ended, and one that needs {self.layout.pages(room)} pages gets "
                f"{allocation}; {counts}",
            )

    # Helpers

    def _hold(self, claim: str, truth: bool, message: str) -> None:
        if not truth:
            self._broken(claim, message)

    def _broken(self, claim: str, message: str) -> None:
        if self.watch == claim:
            raise Broken(message, claim, self.shape, self.script)
        if self.watch is None and claim not in self.breaches:
            self.breaches[claim] = Broken(message, claim, self.shape, self.script)
        if claim in FATAL:
            raise Ended

    def _row(self, who: int) -> Row | None:
        return self.live[who % len(self.live)] if self.live else None

    def _hole(self, group: CacheGroup) -> Pages:
        return (HOLE,) * group.pages_per_block

    def _room(self, row: Row) -> int:
        """Return the number of tokens that its blocks have room for."""
        return min(
            (
                len(table) * group.block_tokens
                for (_, group), table in zip(self.paged, row.tables, strict=False)
            ),
            default=row.asked,
        )

    def _fitting(self, pages: int) -> int:
        """Return the number of tokens, in whole blocks, that fit into `pages` pages."""
        step = self.layout.block_size
        room = 0
        while self.layout.pages(room + step) <= pages and (self.paged or room < 4 * step):
            room += step
        return room

    def _seen(self, row: Row, tokens: int, number: int) -> list[Pages]:
        """Return the blocks of the first `tokens` tokens that later ones see."""
        group = self.groups[number][1]
        return row.tables[number][group.first_visible_block(tokens) : group.blocks(tokens)]

    @property
    def _pending(self) -> int:
        """Number of pages of checkpoints that the next step writes."""
        return sum(row.pending for row in self.live)

    def _held(self) -> list[set[int]]:
        """Return the pages in tables, by group."""
        tables = [
            [row.tables[number] for row in self.live if row.tables] for number, _ in self.groups
        ]
        return [set(chain.from_iterable(chain.from_iterable(own))) - {HOLE} for own in tables]

    def _write(self, row: Row, start: int, end: int) -> None:
        """Write K and V of tokens `start` … `end` - 1, and the state after them."""
        self.contents.extend(row.request.cache_keys, row.contents, row.tokens)
        for (number, group), table in zip(self.paged, row.tables, strict=False):
            for position in range(start, end):
                index, offset = divmod(position, group.block_tokens)
                for part, page in enumerate(table[index]):
                    self.memory.setdefault(page, {})[offset] = row.contents[position], number, part
                    self.memory[page].pop(STATE, None)
        if self.layout.recurrent:
            for part, page in enumerate(row.tables[-1][0]):
                self.memory[page] = {STATE: (row.contents[end - 1], len(self.paged), part)}

    def _freed_by(self, requests: Sequence[LiveRequest]) -> int:
        """Return how many pages freeing `requests` would make available, by what another request of
        one token would need."""
        return self.layout.pages(1) - int(self._ask("pages_needed", self.probe, 1, requests))

    def _snapshot(self) -> object:
        """Return all answers that a failing call must not change."""
        alone = [self._freed_by([row.request]) for row in self.live if row.tables]
        return self._ask("counts"), [self._ask("lookup", row.request) for row in self.live], alone
