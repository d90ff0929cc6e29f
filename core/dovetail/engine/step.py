"""`PlannedStep`: a step being planned.

It is the policy's `Step`, and keeps the books so that no policy can overspend or lose a block.

A policy's call takes effect in full, or changes nothing and returns the reason. A grant is refused
if memory, the token budget or the number of sequences doesn't suffice. Misuse raises `PolicyError`
that names the policy, the request and the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from dovetail.api.kv_cache import HOLE, Pages
from dovetail.api.observer import Act, Decision
from dovetail.api.scheduler import Cost, Fit, Grant, Refusal
from dovetail.engine.books import Books
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.siblings import fork_source
from dovetail.errors import DovetailError, PolicyError
from dovetail.request import Request
from dovetail.request.media import same_tokens

_ELSEWHERE = "in an engine that isn't its own"
_GRANT_OF_ONE = Grant(1)
_REFUSED = {refusal: Grant(0, refusal) for refusal in Refusal}


class PlannedStep:
    """The `Step` of `dovetail.api.scheduler`, over the core's `Books`.

    The core reads its grants when `schedule` has returned.

    A grant counts at once: a request's `num_computed` and `in_flight` include it, and preempting in
    the same step takes it back.
    """

    def __init__(
        self,
        books: Books,
        index: int,
        now: float,
        token_budget: int,
        max_num_seqs: int,
        *,
        prompt_tokens: Callable[[Sequence[Request], int], float] | None = None,
        flights_end: Callable[[], float] | None = None,
        log: bool = False,
        reserved: int = 0,
    ) -> None:
        """Open a step. `log`: keep all decisions. `reserved`: tokens of the budget that the policy
        doesn't get, since drafts will need them.

        `prompt_tokens`: returns how many prompt tokens the step may have beside the decodes of
        these requests, of this many that its budget allows; None: as many. `flights_end`: estimates
        when the steps in flight will have ended; None: there are none.
        """
        self.index = index
        self.now = now
        self._books = books
        self._kv = books.kv
        self._known = books.known
        # False: there are none that the policy may see
        self.has_requests = bool(books.running.as_tuple() or books.waiting.as_tuple())
        # True if features hide some of the waiting requests
        self._hides = bool(books.concerned) and books.open_step(now)
        # the waiting requests, and the shown and the hidden ones among them
        self._split: tuple[tuple[LiveRequest, ...], ...] | None = None
        self._token_budget = token_budget
        self._tokens_left = token_budget - reserved
        self._reserved = reserved
        self._seqs_left = max_num_seqs
        self._flights_end = flights_end
        self._open = True
        self._prompt_tokens = prompt_tokens
        # What that returned for this step; None: no prompt has been requested
        self._most_prompt_tokens: float | None = None
        self.granted: dict[LiveRequest, int] = {}  # request -> tokens, in the order of grants
        self.admitted: dict[LiveRequest, int] = {}  # request -> tokens found in the cache
        # pages by group, given to requests that ran before
        self.appended: list[tuple[LiveRequest, tuple[Pages, ...]]] = []
        self.preempted: list[LiveRequest] = []
        self.rejected: dict[LiveRequest, str] = {}
        self.wake_time = math.inf
        self.decisions: list[Decision] | None = [] if log else None
        self.prefill_tokens = 0
        self.recomputed_tokens = 0
        # request that prefills in this step -> tokens computed before
        self.prefilled: dict[LiveRequest, int] = {}
        # request -> how many of this step's tokens were computed once, before a preemption
        self.recomputed: dict[LiveRequest, int] = {}
        # Requests that pages were lacking for, whatever was evicted
        self.lacking: list[LiveRequest] = []
        # The core released blocks after this planning, so that planning again may grant more
        self.freed = False

    # For a policy to read

    @property
    def tokens_left(self) -> int:
        self._check_open()
        return self._tokens_left

    @property
    def seqs_left(self) -> int:
        self._check_open()
        return self._seqs_left

    @property
    def free_pages(self) -> int:
        self._check_open()
        return self._kv.available_pages

    @property
    def waiting(self) -> tuple[LiveRequest, ...]:
        self._check_open()
        queue = self._books.waiting
        waiting = queue.as_tuple() if queue.cached is None else queue.cached
        return self._shown_and_hidden(waiting)[1] if self._hides else waiting

    @property
    def running(self) -> tuple[LiveRequest, ...]:
        self._check_open()
        queue = self._books.running
        return queue.as_tuple() if queue.cached is None else queue.cached

    @property
    def decoding(self) -> tuple[LiveRequest, ...]:
        # a list first: twice as fast
        return tuple([r for r in self.running if r.num_computed >= r.prefill_end])

    @property
    def held_back(self) -> tuple[LiveRequest, ...]:
        self._check_open()
        gated = tuple(self._books.gated)
        if not self._hides:
            return gated
        hidden = self._shown_and_hidden(self._books.waiting.as_tuple())[2]
        return tuple(sorted((*gated, *hidden), key=lambda r: (r.arrival_time, r.order)))

    def _shown_and_hidden(
        self, waiting: tuple[LiveRequest, ...]
    ) -> tuple[tuple[LiveRequest, ...], ...]:
        """Return `waiting`, and the shown and the hidden ones of it, cached until it changes."""
        if self._split is None or self._split[0] is not waiting:
            hidden = [self._refusal(request) is Refusal.NOT_NOW for request in waiting]
            self._split = (
                waiting,
                tuple([r for r, hides in zip(waiting, hidden, strict=True) if not hides]),
                tuple([r for r, hides in zip(waiting, hidden, strict=True) if hides]),
            )
        return self._split

    def _refusal(self, request: LiveRequest) -> Refusal | None:
        """Return why a feature doesn't admit the waiting `request` now."""
        for feature in self._books.asking.get(request, ()):
            if (refusal := feature.refuses(request)) is not None:
                return refusal
        return None

    @property
    def in_flight_until(self) -> float:
        self._check_open()
        return self.now if self._flights_end is None else max(self.now, self._flights_end())

    @property
    def fit(self) -> Fit:
        self._check_open()
        return Fit(steps=self._books.fit.steps, error=self._books.fit.error())

    def shared_tokens(self, one: Request, other: Request) -> int:
        one = self._check_known(one)
        other = self._check_known(other)
        if one.cache_keys != other.cache_keys or not self._kv.capabilities.reuse:
            return 0
        whole = self._books.layout.hit_tokens
        most = (min(one.prompt_tokens, other.prompt_tokens) - 1) // whole * whole
        same = same_tokens(one.prompt_array, one.media, other.prompt_array, other.media)
        return min(same, most) // whole * whole

    def cost(self, request: Request) -> Cost:
        request = self._check_known(request)
        if request.status in (Status.RUNNING, Status.DRAINING):
            end = request.num_tokens + request.in_flight
            pages = self._kv.pages_needed(request, end) if end > request.capacity else 0
            return Cost(end - request.num_computed, pages, 0)
        if self._fork_source(request) is not None:
            return Cost(1, self._books.layout.pages(1), request.prompt_tokens - 1)
        cached = self._kv.lookup(request)
        known = request.num_tokens
        pages = self._kv.pages_needed(request, known)
        if (
            self._books.layout.has_windows
        ):  # chunks release what leaves a window before the next one takes its blocks
            pages = min(pages, self._books.layout.most_pages(known, self._token_budget))
        return Cost(known - cached, pages, cached)

    def pages_at(self, request: Request, tokens: int) -> int:
        request = self._check_known(request)
        self._check_count("tokens", tokens, 0, request)
        return self._books.layout.visible_pages(tokens)

    def estimate_s(
        self, prefill_tokens: int = 0, decodes: int = 0, context_tokens: int = 0
    ) -> float:
        self._check_open()
        return self._books.fit.estimate_s(prefill_tokens, decodes, context_tokens)

    # For a policy to do

    def grant(
        self,
        request: Request,
        max_tokens: int | None = None,
        *,
        min_tokens: int = 1,
        reserve: bool = False,
        evict: Iterable[Request] = (),
    ) -> Grant:
        request = self._check_known(request)
        if max_tokens is not None:
            self._check_count("max_tokens", max_tokens, 0, request)
        self._check_count("min_tokens", min_tokens, 1, request)
        refusal = self._try(request, max_tokens, min_tokens, reserve, evict)
        if refusal is not None:
            self._log(request, Act.REFUSED, reason=refusal.name)
            return _REFUSED[refusal]
        tokens = request.granted
        return _GRANT_OF_ONE if tokens == 1 else Grant(tokens)

    def grant_each(self, requests: Iterable[Request]) -> list[Request]:
        self._check_open()
        refused: list[Request] = []
        granted = self.granted
        index = self.index
        running = Status.RUNNING
        known = self._known
        slow = self.decisions is not None or bool(self._books.rows.keeping)
        for request in cast(
            "Iterable[LiveRequest]", requests
        ):  # anything else is refused as unknown
            if request not in known:
                self._check_known(request)
            in_flight = request.in_flight
            end = request.prompt_tokens + len(request.output) + in_flight
            if (
                request.status is running
                and request.num_computed + 1
                == end  # one token to compute: a decode, or the last one of a prefill
                and request.num_computed >= request.prefill_end  # a decode
                and request.decided_in != index
                and self._tokens_left > 0
                and self._seqs_left > 0
                and not (in_flight and request.row < 0)
                and not slow
                and (
                    end <= request.capacity or self._extend(request, end)
                )  # last, since it takes a block
            ):
                request.num_computed = end
                request.in_flight = in_flight + 1
                request.granted = 1
                request.decided_in = index
                granted[request] = 1
                # Now, because `requests` may be a generator that reads the step, or acts on it.
                self._tokens_left -= 1
                self._seqs_left -= 1
            elif not self.grant(request):
                refused.append(request)
        return refused

    def preempt(self, request: Request) -> None:
        request = self._check_known(request)
        if request.status is Status.RUNNING:
            self._preempt(request)
        elif request.status in (Status.WAITING, Status.GATED) and request.decided_in != self.index:
            raise self._misuse(
                request, "preempted, but it is waiting and holds no pages to give back"
            )
        else:
            # Preempted with another already, or its last token is in flight: the policy could see
            # neither.
            self._log(request, Act.REFUSED, reason=Refusal.NOT_NOW.name)

    def reject(self, request: Request, reason: str) -> None:
        request = self._check_known(request)
        if request in self.rejected:
            return
        if (
            request.status is Status.DRAINING
        ):  # too late, as its last token is in flight, which no policy can see
            self._log(request, Act.REFUSED, reason=Refusal.NOT_NOW.name)
            return
        dependents = self._dependents(request)
        if request.granted:
            self._take_back(request)
        self._preempt_all(dependents)
        self.admitted.pop(request, None)
        request.decided_in = self.index
        self.rejected[request] = str(reason)
        self._log(request, Act.REJECTED, reason=str(reason))

    def wake_at(self, time: float) -> None:
        self._check_open()
        if (
            isinstance(time, bool)
            or not isinstance(time, int | float)
            or not math.isfinite(time)
            or time <= self.now
        ):
            raise PolicyError(
                f"scheduler {self._books.policy_name}: wake_at needs a finite time after now "
                f"({self.now:.6f}), got {time!r}"
            )
        self.wake_time = min(self.wake_time, time)

    def note(self, request: Request, reason: str) -> None:
        request = self._check_known(request)
        self._log(request, Act.NOTED, reason=str(reason))

    # For the core to call

    def close(self) -> None:
        """Close the step for its policy, as `schedule` has returned."""
        self._open = False

    @property
    def acted(self) -> bool:
        """True if the policy changed anything."""
        return bool(self.granted or self.preempted or self.rejected or self.freed)

    @property
    def spare_tokens(self) -> int:
        """Tokens of the budget that the policy has left over, or that were reserved."""
        return self._tokens_left + self._reserved

    @property
    def is_short(self) -> bool:
        """True if requests would run, or run on, with more memory or slots; but for deterministic
        ones that wait: the end of a window doesn't hurry for them."""
        lacks = any(r.status is Status.RUNNING or not r.has_window for r in self.lacking)
        return lacks or self._hides or bool(self.preempted)

    def give_room(self, request: LiveRequest, drafts: int) -> int:
        """Give a decode granted in this step room for `drafts` tokens after its known ones, from
        what the policy has left over. Return how many of them fit."""
        drafts = self.hold(request, drafts)
        self._tokens_left -= drafts
        return drafts

    def hold(self, request: LiveRequest, tokens: int) -> int:
        """Give a decode granted in this step blocks for `tokens` tokens after its known ones, from
        what the policy has left over: a page for each running request stays. Return how many of
        them fit."""
        end = request.num_tokens + tokens
        if end > request.capacity:
            spare = self._kv.available_pages - len(self._books.running)
            if self._kv.pages_needed(request, end) > spare or not self._extend(request, end):
                tokens = request.capacity - request.num_tokens
        return tokens

    # A grant

    def _try(
        self,
        request: LiveRequest,
        max_tokens: int | None,
        min_tokens: int,
        reserve: bool,
        evict: Iterable[Request],
    ) -> Refusal | None:
        """Grant, or change nothing and return the reason."""
        waits = request.status is Status.WAITING
        refusal = self._refusal(request) if waits and self._books.asking else None
        if refusal is Refusal.NOT_NOW or self._not_now(request):
            return Refusal.NOT_NOW
        if waits and min_tokens == 1 and max_tokens != 0 and self._refuses_prefill(request):
            return self._no_row(request) or Refusal.PREFILL_LIMIT
        source = self._fork_source(request) if waits and request.siblings else None
        start, end = self._span(request, source)
        least = self._least(request, start, max(1, min(min_tokens, end - start)))
        if request.indivisible:
            max_tokens = None
            least = end - start
        most = max(max_tokens, least) if max_tokens else max_tokens
        tokens = min(end - start, self._tokens_left, end if most is None else most)
        if tokens < least:
            return Refusal.BUDGET
        if (no_row := self._no_row(request)) is not None:
            return no_row
        room_for = end if reserve and self._may_reserve(end) else start + tokens
        if start < request.prefill_end:  # the limits slow computing, and spare no memory
            tokens, limit = self._limited(request, start, tokens, least)
            refusal = limit or refusal
        refusal = refusal or self._delay(request, room_for)
        if refusal is not None:
            return refusal
        if not self._take_or_evict(request, source, room_for, evict):
            self.lacking.append(request)
            return Refusal.MEMORY
        if waits:
            self._admit(request)
        return self._book_from(request, start, tokens, end)

    def _delay(self, request: LiveRequest, num_tokens: int) -> Refusal | None:
        """Return `Refusal.NOT_NOW` if `request` waits, and a feature wants to prepare it before it
        is admitted with the blocks of `num_tokens` tokens."""
        if request.status is not Status.WAITING:
            return None
        for feature in self._books.asking.get(request, ()):
            if feature.delays(request, num_tokens):
                return Refusal.NOT_NOW
        return None

    def _refuses_prefill(self, request: LiveRequest) -> bool:
        """Return True if the prefill limit refuses even one token of the waiting `request`, whatever
        its cached prefix. This saves the prefix-cache lookup, which takes time proportional to the
        length of the prompt, and a policy may try to grant every waiting request in each step."""
        if not self.prefill_tokens or self._tokens_left < 1 or self._prompt_tokens_left() >= 1:
            return False
        return not (request.siblings or request.indivisible or request in self._books.asking)

    def _least(self, request: LiveRequest, start: int, tokens: int) -> int:
        """Return the fewest tokens of a grant of `tokens` or more, which divides nothing that
        features compute in one step."""
        if start < request.prefill_end and self._books.asking:
            for feature in self._books.asking.get(request, ()):
                tokens = feature.least(request, start, tokens, self._token_budget)
        return tokens

    def _limited(
        self, request: LiveRequest, start: int, tokens: int, least: int
    ) -> tuple[int, Refusal | None]:
        """Return how many tokens of its prompt may be granted, and what refuses fewer than
        `least`."""
        allowed = max(self._prompt_tokens_left(), 0 if self.prefill_tokens else least)
        tokens = int(min(tokens, allowed))
        if tokens < least:
            return tokens, Refusal.PREFILL_LIMIT
        return self._allowed(request, start, tokens, least)

    def _book_from(self, request: LiveRequest, start: int, tokens: int, end: int) -> Refusal | None:
        """Book `tokens` tokens from `start` on. Its blocks may hold a longer prefix by now, which
        an eviction has left."""
        begun = request.num_computed
        if begun != start:
            tokens, limit = self._allowed(request, begun, min(tokens, end - begun), 1)
            if limit is not None:
                self._preempt(request)
                return limit
        self._book(request, tokens)
        return None

    def _allowed(
        self, request: LiveRequest, start: int, tokens: int, least: int
    ) -> tuple[int, Refusal | None]:
        """Return how many tokens of its prompt the features allow, and what refuses fewer than
        `least`."""
        for feature in self._books.asking.get(request, ()):
            tokens = feature.most(request, start, tokens, least)
            if tokens < least:
                return tokens, feature.limit
        return tokens, None

    def _admit(self, request: LiveRequest) -> None:
        self._books.admit(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self.now
            request.cached_tokens = request.num_computed

    def _no_row(self, request: LiveRequest) -> Refusal | None:
        """Return why the step has no row for `request`: others took all, or keep theirs."""
        if self._seqs_left < 1:
            return Refusal.SEQS
        rows = self._books.rows
        if rows.keeping and self._seqs_left <= rows.kept_from(request):
            return Refusal.NOT_NOW
        return None

    def _may_reserve(self, num_tokens: int) -> bool:
        """Return True if `num_tokens` tokens fit at once, or no window will release any."""
        layout = self._books.layout
        return not layout.has_windows or layout.pages(num_tokens) <= self._books.num_pages

    def _take_or_evict(
        self,
        request: LiveRequest,
        source: LiveRequest | None,
        num_tokens: int,
        evict: Iterable[Request],
    ) -> bool:
        """Give it blocks, preempting from `evict` if need be, or change nothing; return False."""
        if self._take_blocks(request, source, num_tokens):
            return True
        if not self._make_room(request, source, num_tokens, evict):
            return False
        if not self._take_blocks(request, source, num_tokens):
            raise DovetailError(
                f"the KV-cache manager refused {num_tokens} tokens of {request.id!r} that it had "
                "said would fit"
            )
        return True

    def _prompt_tokens_left(self) -> float:
        """Return how many more prompt tokens the prefill limit and the device's speed allow.

        The bound is set once, at the first prompt.
        """
        if self._prompt_tokens is None:
            return math.inf
        if self._most_prompt_tokens is None:
            self._most_prompt_tokens = self._prompt_tokens(self.decoding, self._tokens_left)
        return self._most_prompt_tokens - self.prefill_tokens

    def _not_now(self, request: LiveRequest) -> bool:
        """Return True if its token in flight or an earlier decision on it forbids a grant."""
        if request.decided_in == self.index or request.status in (Status.DRAINING, Status.GATED):
            return True
        return request.in_flight > 0 and request.row < 0

    def _fork_source(self, request: LiveRequest) -> LiveRequest | None:
        if not request.siblings or not self._books.forks:
            return None
        return fork_source(request, self.admitted)

    def _span(self, request: LiveRequest, source: LiveRequest | None) -> tuple[int, int]:
        """Return the range of its tokens still to compute: from the first without K and V up to the
        last one known or in flight."""
        end = request.prompt_tokens + len(request.output) + request.in_flight
        if request.status is Status.RUNNING:
            return request.num_computed, end
        return (request.prompt_tokens - 1 if source is not None else self._kv.lookup(request)), end

    def _take_blocks(
        self, request: LiveRequest, source: LiveRequest | None, num_tokens: int
    ) -> bool:
        """Give it blocks for `num_tokens` tokens in all, or change nothing and return False."""
        if request.status is Status.RUNNING:
            return num_tokens <= request.capacity or self._extend(request, num_tokens)
        cached = 0
        if source is not None:
            forked = self._kv.fork(source, request, request.prompt_tokens - 1)
            if forked is None:
                return False
            cached = forked.cached
            request.capacity = self._books.layout.capacity(cached)
        if num_tokens > request.capacity:
            allocation = self._kv.allocate(request, num_tokens)
            if allocation is None:
                if source is not None:
                    self._books.drop_blocks(request)
                return False
            cached = cached or allocation.cached
            request.capacity = self._books.layout.capacity(max(num_tokens, cached))
        self.admitted[request] = cached
        request.num_computed = cached
        # It was preempted after its prompt, and what a hit beyond the prompt leaves out may be what
        # a fork of the prompt needs.
        request.trimmed = cached >= request.prompt_tokens and self._books.layout.has_windows
        return True

    def _extend(self, request: LiveRequest, num_tokens: int) -> bool:
        """Give a running request more blocks. Returns False if there are too few."""
        allocation = self._kv.allocate(request, num_tokens)
        if allocation is None:
            return False
        request.capacity = self._books.layout.capacity(num_tokens)
        self.appended.append((request, allocation.pages))
        return True

    def _make_room(
        self,
        request: LiveRequest,
        source: LiveRequest | None,
        num_tokens: int,
        evict: Iterable[Request],
    ) -> bool:
        """Preempt from `evict` until `num_tokens` tokens of `request` fit; none, if all of them
        wouldn't free enough."""
        victims: list[LiveRequest] = []
        layout = self._books.layout
        short_of = (
            layout.pages(1) if source is not None else self._kv.pages_needed(request, num_tokens)
        ) - self._kv.available_pages
        fits = False
        before = self._acts
        for candidate in evict:
            if candidate is request:
                break
            candidate = self._check_known(candidate)
            if (
                candidate.status is not Status.RUNNING
                or candidate in victims
                or self._builds_on(request, source, candidate)
            ):
                continue
            victims.append(candidate)
            short_of -= layout.pages(candidate.capacity)  # at best
            if short_of <= 0 and self._fits(request, source, num_tokens, victims):
                fits = True
                break
        if self._acts != before:
            raise self._misuse(
                request,
                "granted with an `evict` that itself grants, preempts or rejects while it is read",
            )
        if fits:
            self._preempt_all(victims)
        return fits

    def _builds_on(
        self, request: LiveRequest, source: LiveRequest | None, candidate: LiveRequest
    ) -> bool:
        """Return True if evicting `candidate` may take from `request` the very tokens that it would
        start from: those of the sibling that it forks, or tokens in the cache that are computed in
        this step."""
        if candidate is source:
            return True
        if (
            source is not None
            or candidate not in self.prefilled
            or request.status is Status.RUNNING
        ):
            return False
        found = self._kv.lookup(request)
        return any(
            self._may_find(request, found, going)
            for going in (candidate, *self._dependents(candidate))
            if going in self.prefilled
        )

    def _may_find(self, request: LiveRequest, found: int, other: LiveRequest) -> bool:
        """Return True if the first block that `other` fills in this step may be among the `found`
        tokens."""
        before = self.prefilled[other]
        end = min(
            (before // group.block_tokens + 1) * group.block_tokens
            for group in self._books.layout.groups
        )
        return (
            end <= min(found, other.num_computed)
            and request.cache_keys == other.cache_keys
            and _same_beginning(request, other, end)
        )

    @property
    def _acts(self) -> tuple[int, ...]:
        """Return counts that differ once the policy has done anything."""
        return self._tokens_left, len(self.granted), len(self.preempted), len(self.rejected)

    def _fits(
        self,
        request: LiveRequest,
        source: LiveRequest | None,
        num_tokens: int,
        victims: list[LiveRequest],
    ) -> bool:
        """Return True if `num_tokens` tokens of it would fit if `victims` were preempted."""
        if source is None:
            needed = self._kv.pages_needed(request, num_tokens, without=victims)
        else:  # a block of each group, and its source doesn't grow
            needed = self._books.layout.pages(1) + self._kv.pages_needed(
                source, source.capacity, without=victims
            )
        return needed <= self._kv.available_pages

    def _book(self, request: LiveRequest, tokens: int) -> None:
        before = request.num_computed
        request.num_computed = before + tokens
        request.granted = tokens
        request.decided_in = self.index
        request.yields_token = (
            request.num_computed == request.prompt_tokens + len(request.output) + request.in_flight
        )
        request.in_flight += request.yields_token
        self.granted[request] = tokens
        self._tokens_left -= tokens
        self._seqs_left -= 1
        if before < request.prefill_end:
            self.prefill_tokens += tokens
            if request.lost > before:
                self.recomputed[request] = again = min(request.num_computed, request.lost) - before
                self.recomputed_tokens += again
                request.recomputed_tokens += again
            # Others planned in this very step may share its blocks: a backend writes the whole
            # batch's K and V before it attends.
            self.prefilled[request] = before
            self._books.commit(request)
            for feature in self._books.asking.get(request, ()):
                feature.granted(request, before, tokens)
        if self.decisions is not None:
            self._log(request, Act.GRANTED, tokens)

    # Taking back

    def _preempt(self, request: LiveRequest) -> None:
        dependents = self._dependents(request)
        if request.granted:
            self._take_back(request)
        self.admitted.pop(request, None)
        self._books.requeue(request)
        request.decided_in = self.index
        self.preempted.append(request)
        self._log(request, Act.PREEMPTED)
        self._preempt_all(dependents)

    def _preempt_all(self, requests: list[LiveRequest]) -> None:
        for request in requests:
            if request.status is Status.RUNNING:
                self._preempt(request)

    def _take_back(self, request: LiveRequest) -> None:
        """Take back its grant of this step, which won't run."""
        tokens = self.granted.pop(request)
        self._tokens_left += tokens
        self._seqs_left += 1
        request.in_flight -= request.yields_token
        request.num_computed -= tokens
        request.granted = 0
        if request in self.prefilled:
            before = self.prefilled.pop(request)
            for feature in self._books.asking.get(request, ()):
                feature.taken_back(request, before, tokens)
            self.prefill_tokens -= tokens
            again = self.recomputed.pop(request, 0)
            self.recomputed_tokens -= again
            request.recomputed_tokens -= again
            self._kv.uncommit(request, before)

    def _dependents(self, request: LiveRequest) -> list[LiveRequest]:
        """Return the requests admitted in this step that found tokens in the cache which `request`
        was going to compute in it."""
        if request not in self.prefilled:
            return []
        certain = self.prefilled[request]
        fresh = self._pages_after(request, certain)
        return [
            r
            for r in self.admitted
            if r is not request and not fresh.isdisjoint(self._pages_after(r, certain))
        ]

    def _pages_after(self, request: LiveRequest, num_tokens: int) -> set[int]:
        """Return the pages of its blocks that aren't full of its first `num_tokens` tokens."""
        tables = zip(self._books.layout.groups, self._kv.tables(request), strict=True)
        return {
            page
            for group, pages in tables
            for page in pages[num_tokens // group.block_tokens * group.pages_per_block :]
        } - {HOLE}

    # Checks

    def _check_open(self) -> None:
        if not self._open:
            raise PolicyError(
                f"scheduler {self._books.policy_name}: used a Step after schedule() had returned; "
                "it holds for one call only"
            )

    def _check_known(self, request: Request) -> LiveRequest:
        """Return the request, if this engine has it in its books. Raises `PolicyError`
        otherwise."""
        self._check_open()
        if not isinstance(request, Request):
            raise PolicyError(
                f"scheduler {self._books.policy_name}: expected a Request, got {request!r}"
            )
        if request in self._known:
            return request
        status = request.status if isinstance(request, LiveRequest) else Status.NEW
        when = {
            Status.FINISHED: "after it had finished; forget it in on_finished",
            Status.NEW: "before it arrived in this engine",
        }
        raise self._misuse(request, f"used {when.get(status) or _ELSEWHERE}")

    def _misuse(self, request: Request, rule: str) -> PolicyError:
        return PolicyError(
            f"scheduler {self._books.policy_name}: request {request.id!r} was {rule}"
        )

    def _check_count(self, name: str, value: int, least: int, request: LiveRequest) -> None:
        if type(value) is not int or value < least:
            raise self._misuse(
                request, f"granted with {name}={value!r}; it must be an integer >= {least}"
            )

    def _log(self, request: LiveRequest, act: Act, tokens: int = 0, reason: str = "") -> None:
        if self.decisions is not None:
            self.decisions.append(Decision(request, act, tokens, reason))


def _same_beginning(one: LiveRequest, other: LiveRequest, end: int) -> bool:
    """Return True if the first `end` known tokens, and their images, are the same."""
    inside = [[span for span in request.media if span.start < end] for request in (one, other)]
    return inside[0] == inside[1] and _known(one)[:end] == _known(other)[:end]


def _known(request: LiveRequest) -> tuple[int, ...]:
    return (*request.prompt_token_ids, *request.output)
