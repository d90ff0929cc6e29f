"""`LiveRequest`: the engine's state of one request.

Policies, managers and observers get it as a read-only `Request`; only the engine writes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from dovetail.api.sampler import RowSampling
from dovetail.request import Request
from dovetail.request.request import TokenIds
from dovetail.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dovetail.api.executor import RowPooling
    from dovetail.engine.adapter import Adapter
    from dovetail.engine.constraint import Constraint
    from dovetail.engine.finish import Finish, Gate, Preparation, TokenWatcher
    from dovetail.request.media import MediaItem


MAX_PAUSES = 100  # of a request, whose times are kept
ALL_TOKENS = 1 << 62


class Status(Enum):
    """The state of a request in the engine."""

    NEW = "not arrived"  # invisible to the policy
    PREPARING = "being prepared"  # arrived, but invisible to the policy: what it needs isn't ready
    GATED = "held back"  # arrived, but hidden from the policy: a gate is closed
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds blocks
    # its last allowed token is in flight, or one that may be its last isn't certain: see `windows`
    DRAINING = "draining"
    FINISHED = "finished"


class LiveRequest(Request):
    """A request in the engine.

    Its block tables are the KV-cache manager's; the executor keeps a copy in its rows.
    """

    __slots__ = (
        "_output_token_ids",
        "adapter",
        "ahead",
        "cached_tokens",
        "capacity",
        "constraint",
        "decided_in",
        "first_scheduled_time",
        "first_token_time",
        "gates",
        "granted",
        "has_window",
        "in_flight",
        "items",
        "keeps_row",
        "last_computed",
        "last_token_time",
        "lost",
        "next_commit",
        "next_trim",
        "num_computed",
        "order",
        "output",
        "pauses",
        "pooling",
        "preemptions",
        "prefill_end",
        "preparations",
        "recomputed_tokens",
        "restored_tokens",
        "row",
        "sampling",
        "settled",
        "siblings",
        "status",
        "stop_ids",
        "trimmed",
        "watchers",
        "yields_token",
    )

    def __init__(
        self,
        id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.int32],
        params: SamplingParams,
        *,
        max_tokens: int,
        sampling: RowSampling | None = None,
        stop_ids: Collection[int] = (),
        watchers: Sequence[TokenWatcher] = (),
        constraint: Constraint | None = None,
        pooling: RowPooling | None = None,
        adapter: Adapter | None = None,
        items: tuple[MediaItem, ...] = (),
        **fields: Any,
    ) -> None:
        """Make a request that hasn't arrived.

        `sampling` are its parameters for the executor, `stop_ids` the tokens that end it, as any of
        the `watchers` may. A `constraint` masks each token; it watches, too, and the request waits
        for it, as for its `adapter`. With `pooling` it ends with its prompt, without a token;
        `max_tokens` is 1 then. `fields` are those of `Request`.
        """
        super().__init__(id, prompt_token_ids, params, max_tokens=max_tokens, **fields)
        self.sampling = sampling if sampling is not None else RowSampling(seed=0)
        self.stop_ids: frozenset[int] = frozenset(stop_ids)
        self.constraint = constraint
        self.watchers: tuple[TokenWatcher, ...] = (
            (*watchers,) if constraint is None else (constraint, *watchers)
        )
        self.pooling = pooling
        self.adapter = adapter
        self.items = items  # one for each span of `media`
        # its row has what is pooled of its prompt up to now
        self.keeps_row = pooling is not None and params.prompt_logprobs is not None
        # it waits for them before policies see it
        self.preparations: tuple[Preparation, ...] = tuple(filter(None, (constraint, adapter)))
        # all samples of its prompt, itself included; empty for n = 1
        self.siblings: Sequence[LiveRequest] = ()
        self.gates: list[Gate] = []  # reasons to hold it back when it arrives
        self.status = Status.NEW
        self.order = 0  # number of requests added before
        # no list: the garbage collector would look at each token, and a step wait for it
        self.output: array[int] = array("q")
        self._output_token_ids = TokenIds(self.output)
        self.num_computed: int = 0  # tokens whose K and V are computed or planned
        self.settled = ALL_TOKENS  # K and V of tokens after these are provisional: see `windows`
        # provisional tokens after its output, which its row knows: see `windows`
        self.ahead: Sequence[int] = ()
        self.has_window = False  # it decodes in windows: see `windows`
        self.prefill_end = self.prompt_tokens  # it decodes once num_computed reaches this
        # computing this many samples the last allowed token
        self.last_computed = self.prompt_tokens + max_tokens - 1
        self.in_flight = 0  # planned sampled tokens whose ids haven't arrived
        self.capacity = 0  # tokens that its blocks can hold; 0: it holds none
        self.next_commit = 0  # at this many tokens another block is full
        self.next_trim = 0  # at this many computed tokens another block may have left a window
        self.row = -1  # in the executor; -1: none
        self.granted = 0  # tokens granted in the step being planned
        # Its grant computes its last known token, so that a new one is sampled; true of decodes
        self.yields_token = False
        self.decided_in = -1  # the last step that granted, evicted or rejected it
        # it runs, and has released blocks of the prompt that a sibling would need
        self.trimmed = False
        self.lost = 0  # tokens that were computed once, before a preemption
        self.recomputed_tokens: int = 0
        self.preemptions: int = 0
        # Times of preemptions, each followed by that of the next admission; the first `MAX_PAUSES`
        # pairs
        self.pauses: Sequence[float] = ()
        self.cached_tokens: int = 0
        self.restored_tokens: int = 0  # of these, the tokens that came from host memory or a tier
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

    @property
    def is_prepared(self) -> bool:
        """True once policies may see it, or a preparation has failed."""
        return not any(preparation.closed() for preparation in self.preparations)

    @property
    def output_token_ids(self) -> TokenIds:
        return self._output_token_ids

    # As in the base class, without a call of the view: policies read these often.

    @property
    def generated(self) -> int:
        return len(self.output)

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + len(self.output)

    @property
    def num_settled(self) -> int:
        """Number of leading tokens whose K and V are final, computed or planned."""
        return min(self.num_computed, self.settled)

    @property
    def prefill_left(self) -> int:
        return max(0, self.prefill_end - self.num_computed)

    @property
    def output_left(self) -> int:
        return self.max_tokens - len(self.output) - self.in_flight

    def receive(self, token: int) -> None:
        """Append a sampled token, whose step has run."""
        self.in_flight -= 1
        self.output.append(token)

    def goes_on_after(self, token_ids: Sequence[int]) -> bool:
        """Return True if none of these next tokens can end the request."""
        return (
            not self.watchers
            and len(self.output) + len(token_ids) < self.max_tokens
            and self.stop_ids.isdisjoint(token_ids)
        )

    def watch(self, token: int) -> Finish | None:
        """Pass a token to all watchers. Returns the first `Finish`, if any."""
        if len(self.watchers) == 1:
            return self.watchers[0].see(token)
        seen = [watcher.see(token) for watcher in self.watchers]
        return next((finish for finish in seen if finish is not None), None)

    def pause(self, now: float) -> None:
        """Note the time of a preemption."""
        if (
            len(self.pauses) % 2 == 0 and len(self.pauses) < 2 * MAX_PAUSES
        ):  # otherwise it hasn't been computed since the last one
            self.pauses = [*self.pauses, now]

    def resume(self, now: float) -> None:
        """Note the time of an admission, if it follows a preemption."""
        if len(self.pauses) % 2:
            self.pauses = [*self.pauses, now]

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.status.value})"
