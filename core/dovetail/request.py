"""A request and what comes of it: `Request` (what policies see) and `RequestOutput` (what users get).

The engine makes both. Nothing here needs torch.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "rejected", "error"]


def token_array(token_ids: Sequence[int]) -> NDArray[np.int64]:
    """They, and not to be changed. Raises `OverflowError` if one needs more than 64 bits."""
    import numpy as np  # which a command line that only shows its help can do without

    try:
        packed = struct.pack(f"{len(token_ids)}q", *token_ids)  # five times as quick as numpy by itself
    except struct.error:
        raise OverflowError("a token id of more than 64 bits") from None
    return np.frombuffer(packed, np.int64)


class Request:
    """A request as schedulers, KV-cache managers and observers see it: read-only for them. All times are seconds on the engine's clock.

    The underscored fields are the engine's books of this request; only `dovetail.engine` writes them (a token is *known* when
    its id has arrived, *in flight* when its step is planned and its id hasn't arrived yet).
    """

    __slots__ = (
        "_blocks",
        "_capacity",
        "_computed",
        "_family",
        "_first_scheduled_time",
        "_first_token_time",
        "_front",
        "_granted",
        "_in_flight",
        "_last_computed",
        "_last_token_time",
        "_lost",
        "_next_commit",
        "_num_cached",
        "_order",
        "_output_ids",
        "_preemptions",
        "_prefill_end",
        "_prompt_array",
        "_recomputed",
        "_row",
        "_samples",
        "_sampling",
        "_status",
        "_stop_ids",
        "_stopper",
        "_touched",
        "arrival_time",
        "cache_keys",
        "client",
        "deadline",
        "extra",
        "id",
        "max_tokens",
        "needs_last_token",
        "params",
        "parent",
        "predicted_tokens",
        "priority",
        "prompt_token_ids",
        "prompt_tokens",
    )

    def __init__(
        self,
        id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        arrival_time: float = 0.0,
        client: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        predicted_tokens: int | None = None,
        parent: str | None = None,
        cache_keys: tuple[str, ...] = (),
        extra: Mapping[str, Any] | None = None,
        needs_last_token: bool = False,
    ) -> None:
        self.id = id
        self.prompt_token_ids: tuple[int, ...] = tuple(prompt_token_ids)
        self.prompt_tokens: int = len(self.prompt_token_ids)  # how many
        self.params = params
        self.max_tokens = max_tokens  # the most tokens it may generate
        self.arrival_time = arrival_time
        self.client = client
        self.priority = priority  # smaller is more important
        self.deadline = deadline  # absolute, for the last token
        self.predicted_tokens = predicted_tokens  # a guess of the output's length, if somebody made one
        self.parent = parent  # id of the request that the user made, for the samples of n > 1
        self.cache_keys = cache_keys  # salt, adapters: K and V are shared only under equal keys
        self.extra: Mapping[str, Any] = MappingProxyType(dict(extra or {}))  # distribution -> its own validated model
        self.needs_last_token = needs_last_token  # on the host, before the next token can be computed
        self._prompt_array: NDArray[np.int64] | None = None
        self._output_ids = array("q")  # no list: the garbage collector would look at each token, and a step wait for it
        self._order = 0  # how many were added before
        self._status = Status.NEW
        self._computed = 0  # tokens whose K and V are there or planned
        self._prefill_end = self.prompt_tokens  # decoding once _computed reaches this
        self._in_flight = 0  # sampled tokens planned, whose ids haven't arrived
        self._blocks: list[int] = []  # its block table
        self._last_computed = self.prompt_tokens + max_tokens - 1  # computing this many samples the last allowed token
        self._capacity = 0  # tokens that its blocks can hold
        self._next_commit = 0  # at this many tokens another block is full
        self._row = -1  # its row in the executor, or -1
        self._granted = 0  # tokens granted in the step being planned
        self._samples = False  # its grant computes its last known token, so that a new one is sampled; always true of decodes
        self._touched = -1  # the last step that granted, evicted or rejected it
        self._lost = 0  # tokens that were computed once, before a preemption
        self._recomputed = 0  # tokens computed again
        self._sampling: Any = None  # RowSampling, resolved by the front end
        self._stop_ids: frozenset[int] = frozenset()
        self._stopper: Any = None  # called with each token id; returns the stop string that it completes, or None
        self._family: Any = None  # the samples of one user request (engine.family), if n > 1
        self._front: Any = None  # what the front end keeps with it: text so far, and how to report it
        self._preemptions = 0
        self._num_cached = 0
        self._first_scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._last_token_time: float | None = None

    @property
    def prompt_array(self) -> NDArray[np.int64]:
        """`prompt_token_ids` [prompt_tokens], not to be changed; made once, so that nobody goes over thousands of ints again."""
        if self._prompt_array is None:
            self._prompt_array = token_array(self.prompt_token_ids)
        return self._prompt_array

    @property
    def generated(self) -> int:
        """Tokens generated whose ids have been received."""
        return len(self._output_ids)

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The ids generated and received so far; grows while the request runs, not to be changed."""
        return self._output_ids

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return self.prompt_tokens + len(self._output_ids)

    @property
    def prefill_left(self) -> int:
        """Tokens still to compute before it decodes; what is planned counts as computed. 0 while decoding."""
        return max(0, self._prefill_end - self._computed)

    @property
    def output_left(self) -> int:
        """Tokens that it may still generate; those in flight count as done."""
        return self.max_tokens - len(self._output_ids) - self._in_flight

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V are there or planned."""
        return self._computed

    @property
    def preemptions(self) -> int:
        return self._preemptions

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again after preemptions; what is planned counts as computed."""
        return self._recomputed

    @property
    def cached_tokens(self) -> int:
        """Tokens found in the prefix cache when it was first admitted."""
        return self._num_cached

    @property
    def first_scheduled_time(self) -> float | None:
        return self._first_scheduled_time

    @property
    def first_token_time(self) -> float | None:
        return self._first_token_time

    @property
    def last_token_time(self) -> float | None:
        return self._last_token_time

    def __repr__(self) -> str:
        return f"Request({self.id!r}, prompt_tokens={self.prompt_tokens}, generated={self.generated}, {self._status.value})"


class Status(Enum):
    """Where a request stands in the engine."""

    NEW = "not arrived"  # invisible to the policy
    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # holds blocks
    DRAINING = "draining"  # its last allowed token is in flight
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Logprob:
    """`logprob` is of the raw distribution (before temperature, filters and penalties); `rank` 1 is the likeliest token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobMap = dict[int, Logprob]  # token id -> its logprob, for one position


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds on the engine's clock; None: not yet."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    preemptions: int = 0


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request. `text` and `token_ids` hold all or only what is new, as `SamplingParams.output_kind` says."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobMap] | None = None  # one map a token of `token_ids`
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that matched (None: EOS), "kv_capacity", or why it was rejected or failed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __getitem__(self, key: str) -> Any:
        """`output["text"]` and `output["token_ids"]`, a list, as nano-vllm's results have them. Raises `KeyError` for any other key."""
        if key == "text":
            return self.text
        if key == "token_ids":
            return list(self.token_ids)
        raise KeyError(f"an output answers to 'text' and 'token_ids', not to {key!r}; its other fields are attributes")


@dataclass(slots=True)
class RequestOutput:
    """What a user gets of one request, after each step that brought something or once at its end (`SamplingParams.output_kind`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobMap | None] | None = None  # None for the first token
    num_cached_tokens: int = 0  # prompt tokens whose K and V were found in the prefix cache (of n > 1: by the first sample)
    metrics: RequestMetrics | None = None
    prompt_index: int = 0  # the place of its prompt in the list that `LLM` was given

    def __getitem__(self, key: str) -> Any:
        """As of its first sample."""
        return self.outputs[0][key]
