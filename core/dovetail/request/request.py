"""A request as policies see it. The engine makes it."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

from dovetail.base.checks import INT64, MAX_TIME_S, as_number, plain_integer
from dovetail.errors import RequestError, shown
from dovetail.request.lora import LoRARequest
from dovetail.request.media import MediaSpan
from dovetail.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def token_array(token_ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Return `token_ids` as a read-only int32 array [tokens], of such an array a view.

    A prompt's ids are int32 from where a request enters to the device. Raises `OverflowError` for
    an id of more than 32 bits.
    """
    import numpy as np  # here, since a command line that only shows its help doesn't need it

    if isinstance(token_ids, np.ndarray):
        view = token_ids.astype(np.int32, copy=False).view()
        view.flags.writeable = False
        return view
    try:
        packed = struct.pack(f"{len(token_ids)}i", *token_ids)  # five times as fast as numpy alone
    except struct.error:
        raise OverflowError("a token id of more than 32 bits") from None
    return np.frombuffer(packed, np.int32)


class TokenIds(Sequence[int]):
    """Read-only view of token ids in an array that grows. Slices are copies."""

    __slots__ = ("_ids",)

    def __init__(self, ids: array[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> array[int]: ...

    def __getitem__(self, index: int | slice) -> int | array[int]:
        return self._ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __repr__(self) -> str:
        return f"TokenIds({self._ids.tolist()})"


@dataclass(frozen=True, slots=True)
class RequestFields:
    """A request's fields besides its id, prompt, parameters and `extra`.

    `LLMEngine.add_request` says what each means.
    """

    arrival_time: float | None = None
    priority: int = 0
    client: str | None = None
    deadline: float | None = None
    cache_salt: str | None = None
    predicted_tokens: int | None = None
    ttft_deadline: float | None = None
    tbt_s: float | None = None
    lora_request: LoRARequest | None = None

    def checked(self) -> RequestFields:
        """Return the same, with numbers as plain `int` and `float`, not numpy's.

        Raises `RequestError` naming the field whose value is wrong.
        """
        values = {}
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None or name == "priority":
                value = check(name, value)
            values[name] = value
        return RequestFields(**values)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string or None, got {shown(value)}")
    return value


def _instant(name: str, value: Any) -> float:
    if (seconds := as_number(value)) is None or abs(seconds) > MAX_TIME_S:
        raise RequestError(
            f"{name} must be a finite number of seconds or None, got {shown(value)}: on the "
            "engine's clock (engine.now()), from "
            f"-{MAX_TIME_S:g} to {MAX_TIME_S:g}"
        )
    return seconds


def _duration(name: str, value: Any) -> float:
    if (seconds := as_number(value)) is None or not 0 < seconds <= MAX_TIME_S:
        raise RequestError(
            f"{name} must be a number of seconds above 0, up to {MAX_TIME_S:g}, or None, got "
            f"{shown(value)}"
        )
    return seconds


def _rank(name: str, value: Any) -> int:
    if (number := plain_integer(value)) is None or not INT64[0] <= number <= INT64[1]:
        raise RequestError(
            f"{name} must be an integer from {INT64[0]} to {INT64[1]}, got {shown(value)}"
        )
    return number


def _count(name: str, value: Any) -> int:
    if (number := plain_integer(value)) is None or not 0 <= number <= INT64[1]:
        raise RequestError(
            f"{name} must be an integer from 0 to {INT64[1]} or None, got {shown(value)}"
        )
    return number


def _adapter(name: str, value: Any) -> LoRARequest:
    if not isinstance(value, LoRARequest):
        raise RequestError(f"{name} must be a dovetail.LoRARequest or None, got {shown(value)}")
    return value


# of `RequestFields`; None isn't checked, but as a priority
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "arrival_time": _instant,
    "priority": _rank,
    "client": _text,
    "deadline": _instant,
    "cache_salt": _text,
    "predicted_tokens": _count,
    "ttft_deadline": _instant,
    "tbt_s": _duration,
    "lora_request": _adapter,
}


class Request:
    """A request as schedulers, KV-cache managers and observers see it: read-only for them.

    All times are seconds on the engine's clock.

    Here its progress stays that of a request that hasn't begun; the engine's `LiveRequest` keeps it
    up to date. A token is *known* once its id has arrived, and *in flight* while its step is
    planned and its id hasn't arrived yet.
    """

    __slots__ = (
        "_prompt_token_ids",
        "arrival_time",
        "cache_keys",
        "client",
        "deadline",
        "extra",
        "id",
        "indivisible",
        "max_tokens",
        "media",
        "params",
        "parent",
        "predicted_tokens",
        "priority",
        "prompt_array",
        "prompt_tokens",
        "tbt_s",
        "ttft_deadline",
    )

    def __init__(
        self,
        id: str,
        prompt_token_ids: Sequence[int] | NDArray[np.int32],
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
        ttft_deadline: float | None = None,
        tbt_s: float | None = None,
        indivisible: bool = False,
        media: tuple[MediaSpan, ...] = (),
    ) -> None:
        """Make a request. `prompt_token_ids`: of an int32 array a read-only view is kept, and it
        must not change afterwards; any other sequence is copied. Raises `OverflowError` for an id
        of more than 32 bits."""
        self.id = id
        self.prompt_array = token_array(prompt_token_ids)
        self._prompt_token_ids: tuple[int, ...] | None = None
        self.prompt_tokens: int = len(prompt_token_ids)  # their number
        # Behind a server with all defaults filled in, and without what concerns text only
        self.params = params
        self.max_tokens = max_tokens  # the most tokens it may generate
        self.arrival_time = arrival_time
        self.client = client
        self.priority = priority  # smaller is more important
        # absolute, for the last token; an objective, which ends no request
        self.deadline = deadline
        self.ttft_deadline = ttft_deadline  # absolute, for the first token
        self.tbt_s = tbt_s  # the most seconds between two of its tokens that its user asks for
        # a predicted length of the output, in tokens, if given
        self.predicted_tokens = predicted_tokens
        self.parent = parent  # for a sample of n > 1, the id of the user's request
        # salt, adapters: requests share K and V only if theirs are equal
        self.cache_keys = cache_keys
        # its prompt is computed in one step: `Step.grant` grants all of it, or refuses
        self.indivisible = indivisible
        # images of its prompt, ascending; two prompts are equal only if these are, too
        self.media = media
        # distribution -> its own validated model
        self.extra: Mapping[str, Any] = MappingProxyType(dict(extra or {}))

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The prompt's ids as ints. The tuple is made on first use and kept; the engine itself uses
        `prompt_array`, int32 [prompt_tokens]."""
        if self._prompt_token_ids is None:
            self._prompt_token_ids = tuple(self.prompt_array.tolist())
        return self._prompt_token_ids

    @property
    def generated(self) -> int:
        """Number of generated tokens whose ids have arrived."""
        return len(self.output_token_ids)

    @property
    def output_token_ids(self) -> Sequence[int]:
        """The generated ids that have arrived: a read-only view, which grows while the request
        runs. A slice of it is a copy."""
        return ()

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: prompt and generated."""
        return self.prompt_tokens + len(self.output_token_ids)

    @property
    def prefill_left(self) -> int:
        """Number of tokens to compute before it decodes; planned tokens count as computed. 0 while
        decoding."""
        return self.num_tokens

    @property
    def output_left(self) -> int:
        """Number of tokens that it may still generate; tokens in flight count as generated."""
        return self.max_tokens - len(self.output_token_ids)

    @property
    def num_computed(self) -> int:
        """Number of tokens whose K and V are computed or planned."""
        return 0

    @property
    def preemptions(self) -> int:
        """Number of times that it was preempted."""
        return 0

    @property
    def recomputed_tokens(self) -> int:
        """Number of tokens computed again after preemptions; planned tokens count as computed."""
        return 0

    @property
    def cached_tokens(self) -> int:
        """Number of tokens found in the prefix cache when it was first admitted."""
        return 0

    @property
    def restored_tokens(self) -> int:
        """Number of the `cached_tokens` that were restored from host memory or a KV tier."""
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
        return (
            f"{type(self).__name__}({self.id!r}, prompt_tokens={self.prompt_tokens}, "
            f"generated={self.generated})"
        )
