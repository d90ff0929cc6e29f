"""`ShownStep`: what a policy may read of a step, and the checks of what it names. `PlannedStep` adds what a policy may do."""

from __future__ import annotations

from collections.abc import Callable

from dovetail.api.scheduler import Cost, Fit
from dovetail.engine.books import Books
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.siblings import fork_source
from dovetail.errors import PolicyError
from dovetail.request import Request

_ELSEWHERE = "in an engine that isn't its own"


class ShownStep:
    """The half of the `Step` of `dovetail.api.scheduler` that changes nothing."""

    def __init__(self, books: Books, index: int, now: float, max_tokens: int, max_seqs: int, flights_end: Callable[[], float] | None) -> None:
        """Open a step. `flights_end` estimates when the steps in flight will have ended; None: there are none."""
        self.index = index
        self.now = now
        self.admitted: dict[LiveRequest, int] = {}  # request -> tokens found in the cache
        self._books = books
        self._kv = books.kv
        self._known = books.known
        self._tokens_left = max_tokens
        self._seqs_left = max_seqs
        self._flights_end = flights_end
        self._open = True

    @property
    def tokens_left(self) -> int:
        self._check_open()
        return self._tokens_left

    @property
    def seqs_left(self) -> int:
        self._check_open()
        return self._seqs_left

    @property
    def free_blocks(self) -> int:
        self._check_open()
        return self._kv.available_blocks

    @property
    def waiting(self) -> tuple[LiveRequest, ...]:
        self._check_open()
        return self._books.waiting.as_tuple()

    @property
    def running(self) -> tuple[LiveRequest, ...]:
        self._check_open()
        return self._books.running.as_tuple()

    @property
    def decoding(self) -> tuple[LiveRequest, ...]:
        return tuple([r for r in self.running if r.num_computed >= r.prefill_end])  # a list first: twice as fast

    @property
    def held_back(self) -> tuple[LiveRequest, ...]:
        self._check_open()
        return tuple(self._books.gated)

    @property
    def in_flight_until(self) -> float:
        self._check_open()
        return self.now if self._flights_end is None else max(self.now, self._flights_end())

    @property
    def fit(self) -> Fit:
        self._check_open()
        return Fit(self._books.fit.steps, self._books.fit.error())

    def shared_tokens(self, one: Request, other: Request) -> int:
        one, other = self._check_known(one), self._check_known(other)
        if one.cache_keys != other.cache_keys or not self._kv.capabilities.reuse:
            return 0
        block_size = self._books.block_size
        most = (min(one.prompt_tokens, other.prompt_tokens) - 1) // block_size * block_size
        differs = one.prompt_array[:most] != other.prompt_array[:most]
        same = int(differs.argmax()) if differs.any() else most
        return same // block_size * block_size

    def cost(self, request: Request) -> Cost:
        request = self._check_known(request)
        if request.status in (Status.RUNNING, Status.DRAINING):
            end = request.num_tokens + request.in_flight
            blocks = self._kv.blocks_needed(request, end) if end > request.capacity else 0
            return Cost(end - request.num_computed, blocks, 0)
        if self._fork_source(request) is not None:
            return Cost(1, 1, request.prompt_tokens - 1)
        cached, known = self._kv.lookup(request), request.num_tokens
        return Cost(known - cached, self._kv.blocks_needed(request, known), cached)

    def estimate_s(self, prefill_tokens: int = 0, decodes: int = 0, context_tokens: int = 0) -> float:
        self._check_open()
        return self._books.fit.estimate_s(prefill_tokens, decodes, context_tokens)

    # Checks, and the end

    def close(self) -> None:
        """Close the step for its policy, as `schedule` has returned."""
        self._open = False

    def _fork_source(self, request: LiveRequest) -> LiveRequest | None:
        if not request.siblings or not self._kv.capabilities.fork:
            return None
        return fork_source(request, self.admitted)

    def _check_open(self) -> None:
        if not self._open:
            raise PolicyError(f"scheduler {self._books.policy_name}: used a Step after schedule() had returned; it holds for one call only")

    def _check_known(self, request: Request) -> LiveRequest:
        """Return the request, if this engine has it in its books. Raises `PolicyError` otherwise."""
        self._check_open()
        if not isinstance(request, Request):
            raise PolicyError(f"scheduler {self._books.policy_name}: expected a Request, got {request!r}")
        if request in self._known:
            return request
        status = request.status if isinstance(request, LiveRequest) else Status.NEW
        when = {Status.FINISHED: "after it had finished; forget it in on_finished", Status.NEW: "before it arrived in this engine"}
        raise self._misuse(request, f"used {when.get(status) or _ELSEWHERE}")

    def _misuse(self, request: Request, rule: str) -> PolicyError:
        return PolicyError(f"scheduler {self._books.policy_name}: request {request.id!r} was {rule}")
