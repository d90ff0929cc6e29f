"""A request and what comes of it: `Request` (what policies see) and `RequestOutput` (what users get).

The engine makes both. Nothing here needs torch.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "rejected", "error"]


def token_array(token_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """`token_ids` as a read-only int64 array; one that is an array already is returned as it is. Raises `OverflowError` if one needs more than
    64 bits."""
    import numpy as np  # which a command line that only shows its help can do without

    if isinstance(token_ids, np.ndarray):
        return token_ids
    try:
        packed = struct.pack(f"{len(token_ids)}q", *token_ids)  # five times as quick as numpy by itself
    except struct.error:
        raise OverflowError("a token id of more than 64 bits") from None
    return np.frombuffer(packed, np.int64)


class Request:
    """A request as schedulers, KV-cache managers and observers see it: read-only for them. All times are seconds on the engine's clock.

    Progress is that of a request that hasn't begun; the engine's `LiveRequest` keeps it up to date. A token is *known* when its id has arrived, *in
    flight* when its step is planned and its id hasn't arrived yet.
    """

    __slots__ = (
        "_prompt_token_ids",
        "arrival_time",
        "cache_keys",
        "client",
        "deadline",
        "extra",
        "id",
        "max_tokens",
        "params",
        "parent",
        "predicted_tokens",
        "priority",
        "prompt_array",
        "prompt_tokens",
    )

    def __init__(
        self,
        id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.int64],
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
    ) -> None:
        """`prompt_token_ids`: an int64 array is kept as it is, and must not change afterwards; of any other sequence an array is made. Raises
        `OverflowError` if an id needs more than 64 bits."""
        self.id = id
        self.prompt_array = token_array(prompt_token_ids)
        self._prompt_token_ids: tuple[int, ...] | None = None
        self.prompt_tokens: int = len(prompt_token_ids)  # how many
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

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's ids as ints. The engine itself computes with `prompt_array`, int64 [prompt_tokens]: the tuple is made, and kept, when somebody
        first asks for it."""
        if self._prompt_token_ids is None:
            self._prompt_token_ids = tuple(self.prompt_array.tolist())
        return self._prompt_token_ids

    @property
    def generated(self) -> int:
        """Tokens generated whose ids have been received."""
        return len(self.output_token_ids)

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The ids generated and received so far; grows while the request runs, not to be changed."""
        return ()

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return self.prompt_tokens + len(self.output_token_ids)

    @property
    def prefill_left(self) -> int:
        """Tokens still to compute before it decodes; what is planned counts as computed. 0 while decoding."""
        return self.num_tokens

    @property
    def output_left(self) -> int:
        """Tokens that it may still generate; those in flight count as done."""
        return self.max_tokens - len(self.output_token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose K and V are there or planned."""
        return 0

    @property
    def preemptions(self) -> int:
        """How often it lost its blocks to others."""
        return 0

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed again after preemptions; what is planned counts as computed."""
        return 0

    @property
    def cached_tokens(self) -> int:
        """Tokens found in the prefix cache when it was first admitted."""
        return 0

    @property
    def first_scheduled_time(self) -> float | None:
        return None

    @property
    def first_token_time(self) -> float | None:
        return None

    @property
    def last_token_time(self) -> float | None:
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, prompt_tokens={self.prompt_tokens}, generated={self.generated})"


@dataclass(slots=True, unsafe_hash=True)  # not frozen: there are thousands a step, and that takes four times as long to make
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
    logprobs: Sequence[TokenLogprobMap] | None = None  # one map a token of `token_ids`, made when it is read
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
