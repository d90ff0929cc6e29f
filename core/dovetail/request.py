"""A request and what comes of it: `SamplingParams`, `Request` (what policies see), `RequestOutput`.

Front ends make `SamplingParams`, the engine makes `Request` and `RequestOutput`. Nothing here needs torch.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from dovetail.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "abort", "rejected", "error"]

MAX_LOGPROBS = 1024  # more alternatives a token than this is a mistake, not a wish
REPETITION_PENALTIES = (0.01, 100.0)  # allowed: beyond these, logits in 16 or 32 bits become 0 or infinite


class OutputKind(Enum):
    """What an output holds: all text so far, only what is new, or one output at the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL = "final"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens for one request, and when to stop. Checked when made: raises `RequestError` with the name and the allowed range.

    A field left `None` in `temperature`, `top_k`, `top_p`, `min_p` or `repetition_penalty` takes the model's default (its
    `generation_config.json`, if the engine uses it), else the neutral value.
    """

    n: int = 1  # samples, 1 or more; they share the prompt's blocks
    temperature: float | None = None  # 0 is greedy; neutral: 1
    top_k: int | None = None  # keep the k most likely; 0 or -1: all
    top_p: float | None = None  # keep the smallest set whose probability reaches p, 0 < p <= 1
    min_p: float | None = None  # keep tokens at least min_p times as likely as the likeliest, 0 <= p <= 1
    seed: int | None = None  # same seed, same tokens, whatever else runs
    max_tokens: int | None = 16  # None: up to the model's length, which also ends it if that is nearer
    min_tokens: int = 0  # nothing stops it before this many, as far as there is room for them
    stop: str | Sequence[str] | None = None  # stop strings
    stop_token_ids: Sequence[int] | None = None  # ends when one of these is generated
    include_stop_str_in_output: bool = False  # keep the stop string, or the stop token's text, at the end of the text
    ignore_eos: bool = False  # go on after the model's EOS, unless it is in stop_token_ids
    repetition_penalty: float | None = None  # of tokens in prompt and output, 0.01 to 100 (CTRL, arXiv:1909.05858 section 4.1); neutral: 1
    presence_penalty: float = 0.0  # subtracted once from a generated token's logit, -2 to 2
    frequency_penalty: float = 0.0  # subtracted for each time it was generated, -2 to 2
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit, -100 to 100
    allowed_token_ids: Sequence[int] | None = None  # only these can be sampled
    bad_words: Sequence[str] | None = None  # texts that are never completed
    logprobs: int | None = None  # log-probabilities of the sampled token and of the k likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    skip_special_tokens: bool = True  # leave them out of the text
    detokenize: bool = True  # False: token ids only, no text
    output_kind: OutputKind = OutputKind.CUMULATIVE  # or its value as a string: "delta", "final"
    extra_args: Mapping[str, Any] = field(default_factory=dict)  # for the sampler; keys that it doesn't name in its capabilities are refused

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        def integer(name: str, low: int, high: int | None = None, *, optional: bool = False) -> None:
            put(name, _integer(name, getattr(self, name), low, high, optional=optional))

        def number(name: str, low: float, high: float = math.inf, *, optional: bool = False, open_low: bool = False) -> None:
            put(name, _number(name, getattr(self, name), low, high, optional=optional, open_low=open_low))

        put("stop", _texts("stop", [self.stop] if isinstance(self.stop, str) else self.stop))
        put("bad_words", _texts("bad_words", self.bad_words))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must name at least one token id, got an empty list")
        put("output_kind", _output_kind(self.output_kind))
        _check_bools(self, "include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize")
        integer("n", 1, 1024)
        integer("max_tokens", 1, optional=True)
        integer("min_tokens", 0)
        integer("top_k", -1, optional=True)
        integer("seed", -(2**63), 2**64 - 1, optional=True)
        integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        number("temperature", 0.0, optional=True)
        number("top_p", 0.0, 1.0, optional=True, open_low=True)
        number("min_p", 0.0, 1.0, optional=True)
        number("repetition_penalty", *REPETITION_PENALTIES, optional=True)
        number("presence_penalty", -2.0, 2.0)
        number("frequency_penalty", -2.0, 2.0)
        put("logit_bias", _logit_bias(self.logit_bias))
        put("extra_args", _extra_args(self.extra_args))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens must be at most max_tokens ({shown(self.max_tokens)}), got {shown(self.min_tokens)}")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need text: set detokenize to true, or use stop_token_ids")

    def __copy__(self) -> SamplingParams:
        """Unchecked, since `self` was. What dataclasses have for frozen ones with slots takes four times as long, and offline calls copy one a
        prompt."""
        other = object.__new__(type(self))
        for name in self.__match_args__:
            object.__setattr__(other, name, getattr(self, name))
        return other


def shown(value: Any) -> str:
    """What an error says of a wrong value: its repr, not all of it if that is long. Numbers have no limit to their length."""
    try:
        text = repr(value)
    except Exception:  # somebody else's class, or an integer that Python finds too long to print
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_integer(value: Any) -> bool:
    """An int, or a numpy one; a bool is none."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def as_number(value: Any) -> float | None:
    """A finite int or float, or a numpy one, as a float; None for anything else, a bool too."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _integer(name: str, value: Any, low: int, high: int | None = None, *, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    if not is_integer(value) or value < low or (high is not None and value > high):
        upper = "" if high is None else f" and <= {high}"
        raise RequestError(f"{name} must be an integer >= {low}{upper}{' or None' if optional else ''}, got {shown(value)}")
    return int(value)


def _number(name: str, value: Any, low: float, high: float, *, optional: bool = False, open_low: bool = False) -> float | None:
    if value is None and optional:
        return None
    number = as_number(value)
    if number is None or not low <= number <= high or (open_low and number == low):
        upper = "" if high == math.inf else f" and <= {high:g}"
        sign = ">" if open_low else ">="
        raise RequestError(f"{name} must be a finite number {sign} {low:g}{upper}{' or None' if optional else ''}, got {shown(value)}")
    return number


def _texts(name: str, values: Any) -> tuple[str, ...]:
    for value in _items(name, values, "non-empty strings"):
        if not isinstance(value, str) or not value or unicode_error(value):
            raise RequestError(f"{name} must be a list of non-empty strings, got {shown(value)} in it")
    return tuple(values or ())


def unicode_error(text: str) -> UnicodeEncodeError | None:
    """What is wrong with it, if anything is: Python allows half a surrogate pair in a string."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error
    return None


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    for value in _items(name, values, "token ids >= 0"):
        if not is_integer(value) or value < 0:
            raise RequestError(f"{name} must be a list of token ids >= 0, got {shown(value)} in it")
    return tuple(map(int, values or ()))


def _items(name: str, values: Any, what: str) -> Collection[Any]:
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | Set):
        raise RequestError(f"{name} must be a list of {what}, got {shown(values)}")
    return values


def _check_bools(params: SamplingParams, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(params, name), bool):
            raise RequestError(f"{name} must be true or false, got {shown(getattr(params, name))}")


def _output_kind(value: Any) -> OutputKind:
    try:
        return value if isinstance(value, OutputKind) else OutputKind(value)
    except ValueError:
        raise RequestError(f"output_kind must be one of {', '.join(k.value for k in OutputKind)}, got {shown(value)}") from None


def _logit_bias(bias: Any) -> Mapping[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {shown(bias)}")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        if not is_integer(token) or token < 0:
            raise RequestError(f"logit_bias: token id must be an integer >= 0, got {shown(token)}")
        number = as_number(value)
        if number is None or not -100 <= number <= 100:
            raise RequestError(f"logit_bias[{shown(token)}] must be a finite number >= -100 and <= 100, got {shown(value)}")
        checked[int(token)] = number
    return checked


def _extra_args(extra: Any) -> Mapping[str, Any]:
    if extra is None:
        return {}
    if not isinstance(extra, Mapping) or not all(isinstance(key, str) for key in extra):
        raise RequestError(f"extra_args must map names to values, got {shown(extra)}")
    return dict(extra)


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
