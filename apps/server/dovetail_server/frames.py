"""Messages between front ends and the engine's process: requests and aborts in, one `StepFrame` per
step and front end out.

Frames are columnar, so that encoding a step of 1,024 tokens takes microseconds. Both ends are of
one installation: messages have no version.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import ComponentRef, HostLogprobs, RowPooling
from dovetail.api.sampler import RowSampling
from dovetail.end_reason import EndReason
from dovetail.request.frozen import frozen
from dovetail.request.media import MediaItem, MediaKind
from dovetail.request.request import RequestFields
from dovetail.request.sampling_params import OutputKind, SamplingParams, changed_unchecked
from dovetail.serving import AnswerRule, CheckedRequest, Limits
from dovetail_server.engine import Decisions, EngineInfo, Load

_STREAMED = SamplingParams(output_kind=OutputKind.DELTA)
# Fields that `RowSampling` and `SamplingParams` share: what policies see of them is what the
# sampler gets. Rules about single tokens are packed there, and stop tokens are sent apart.
_OTHERWISE = {"bad_words", "logit_bias", "stop_token_ids"}
_OF_ROWS = {field.name for field in fields(RowSampling)}
_SEEN = [
    field.name
    for field in fields(SamplingParams)
    if field.name in _OF_ROWS and field.name not in _OTHERWISE
]
# bytes of a tensor from which it is a part of its own. Smaller parts would share a buffer with the
# rest of the message, in which they may be misaligned
_OWN_PART = 2**16


# From front ends to the engine


class Hello(msgspec.Struct, array_like=True, tag=0):
    """First message of a front end, answered by `Welcome`."""


class PackedTensor(msgspec.Struct, array_like=True, gc=False):
    """A numpy array."""

    dtype: str
    shape: tuple[int, ...]
    data: Any  # its bytes, of any type that has some; None: another part of the message

    @classmethod
    def of(cls, array: NDArray[Any]) -> PackedTensor:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return cls(array.dtype.str, array.shape, data)

    def array(self) -> NDArray[Any]:
        """Return the array, of the same memory; it may be read-only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class PackedItem(msgspec.Struct, array_like=True, gc=False):
    """`MediaItem`: an image of a prompt."""

    kind: MediaKind
    digest: bytes
    runs: tuple[tuple[int, int], ...]
    tensors: dict[str, PackedTensor]
    grid: tuple[int, int, int] | None
    whole: bool

    @classmethod
    def of(cls, item: MediaItem) -> PackedItem:
        tensors = {name: PackedTensor.of(array) for name, array in item.tensors.items()}
        return cls(item.kind, item.digest, item.runs, tensors, item.grid, item.whole)

    def item(self) -> MediaItem:
        return MediaItem(
            kind=self.kind,
            digest=self.digest,
            runs=self.runs,
            tensors={name: tensor.array() for name, tensor in self.tensors.items()},
            grid=self.grid,
            whole=self.whole,
        )


class Add(msgspec.Struct, array_like=True, tag=1):
    """A checked request. Its samples are numbered `number`, `number` + 1, …; a front end uses each
    number once."""

    number: int
    request_id: str
    prompt_ids: bytes  # int32 [prompt tokens]
    sampling: RowSampling
    max_tokens: int
    n: int
    stop_token_ids: Sequence[int]  # those that the request names, not the model's
    max_drafts: int | None
    fields: RequestFields
    rule: AnswerRule | None
    pooling: RowPooling | None
    indivisible: bool
    extra: dict[str, Any] | None
    confirms: bool  # the front end waits for `Accepted` or `Refused`, not for refusals only
    owner: int = 0  # hash of the client that sent it: rules are compiled for each in turn
    media: tuple[PackedItem, ...] = ()


class Abort(msgspec.Struct, array_like=True, tag=2):
    """Abort samples. Unknown numbers, of samples that have ended, are ignored."""

    numbers: list[int]


class Ask(msgspec.Struct, array_like=True, tag=3):
    """Request for the scheduler's latest decisions, answered by `Decided`."""


class Reset(msgspec.Struct, array_like=True, tag=4):
    """Request to empty the prefix cache, answered by `Accepted`.

    `number`: used once, and for no sample.
    """

    number: int


class LoadAdapter(msgspec.Struct, array_like=True, tag=5):
    """Request to serve an adapter under a name, or, without a path, no longer.

    Answered by `Accepted` once it is loaded, or by `Refused`. `number`: used once, and for no
    sample.
    """

    number: int
    name: str
    path: str | None
    within: str | None  # the folder in which its files must be; None: anywhere


# From the engine to front ends


class Welcome(msgspec.Struct, array_like=True, tag=10):
    """The answer to `Hello`."""

    info: EngineInfo
    tokenizer_dir: str
    tokenizer: ComponentRef | None  # a component; None: that of `tokenizer_dir`
    seed: int  # from the config
    wall_clock: (
        bool  # the engine uses this host's clock; otherwise its time is that of the last frame
    )


class Accepted(msgspec.Struct, array_like=True, tag=11):
    """A request with `confirms` has been added, or the prefix cache reset."""

    number: int


class Refused(msgspec.Struct, array_like=True, tag=12):
    """The engine refused a request."""

    number: int
    reason: EndReason
    text: str


class Dropped(msgspec.Struct, array_like=True, tag=13):
    """The front end didn't read its frames: the engine has aborted its samples with numbers below
    `below`."""

    below: int


class Adapters(msgspec.Struct, array_like=True, tag=16):
    """The adapters that are served now: name -> path."""

    paths: dict[str, str]


class Decided(msgspec.Struct, array_like=True, tag=15):
    """The scheduler's latest decisions."""

    decisions: Decisions


class First(msgspec.Struct, array_like=True, gc=False):
    """First token of a sample."""

    number: int
    cached_tokens: int
    scheduled: float | None  # seconds on the engine's clock
    token: float | None
    restored_tokens: int = 0


class Finished(msgspec.Struct, array_like=True, gc=False):
    """End of a sample."""

    number: int
    reason: EndReason
    stop_reason: int | str | None
    preemptions: int
    keeps_token: bool = False
    pauses: tuple[float, ...] = ()


class PackedLogprobs(msgspec.Struct, array_like=True, gc=False):
    """`HostLogprobs`: rows of `width` entries."""

    numbers: bytes  # int64, sample number of each row; empty if all rows belong to one sample
    width: int
    token_ids: bytes  # int32 [rows, width]
    logprobs: bytes  # float32 [rows, width]
    ranks: bytes  # int32 [rows]

    @classmethod
    def of(
        cls, hosts: HostLogprobs, numbers: bytes = b"", rows: Sequence[int] | None = None
    ) -> PackedLogprobs:
        """Pack the given rows; None: all."""
        kept = slice(None) if rows is None else np.asarray(rows)
        token_ids = hosts.token_ids[kept].astype(np.int32)
        ranks = hosts.ranks[kept].astype(np.int32)
        return cls(
            numbers,
            token_ids.shape[1],
            token_ids.tobytes(),
            hosts.logprobs[kept].astype(np.float32).tobytes(),
            ranks.tobytes(),
        )

    def hosts(self) -> HostLogprobs:
        token_ids = np.frombuffer(self.token_ids, np.int32).reshape(-1, self.width).astype(np.int64)
        logprobs = np.frombuffer(self.logprobs, np.float32).reshape(-1, self.width)
        return HostLogprobs(
            token_ids, logprobs, np.frombuffer(self.ranks, np.int32).astype(np.int64)
        )


class PackedResult(msgspec.Struct, array_like=True, gc=False):
    """A packed result carries the embedding or the scores of one pooling request to a front end."""

    number: int
    size: int  # of a vector
    data: bytes  # float32 [size], or [prompt tokens, size]
    for_each_token: bool

    @classmethod
    def of(cls, number: int, data: NDArray[np.float32]) -> PackedResult:
        return cls(
            number, data.shape[-1], data.astype(np.float32, copy=False).tobytes(), data.ndim > 1
        )

    def array(self) -> NDArray[np.float32]:
        data = np.frombuffer(self.data, np.float32)
        return data.reshape(-1, self.size) if self.for_each_token else data


class Extra(msgspec.Struct, array_like=True, gc=False):
    """Further results of a step, for requests that ask for more than tokens."""

    logprobs: PackedLogprobs | None = None
    prompt_logprobs: tuple[tuple[int, PackedLogprobs], ...] = ()  # number, rows
    pooled: tuple[PackedResult, ...] = ()


class StepFrame(msgspec.Struct, array_like=True, tag=14, gc=False):
    """Results of one step for one front end: `token_ids[i]` is a new token of sample `numbers[i]`;
    those of one sample follow each other."""

    step: int
    time: float  # of its results, seconds on the engine's clock
    numbers: bytes  # int64 [n]
    token_ids: bytes  # int32 [n]
    load: Load
    first: tuple[First, ...] = ()
    finished: tuple[Finished, ...] = ()
    extra: Extra | None = None


ToEngine = Hello | Add | Abort | Ask | Reset | LoadAdapter
ToFrontEnd = Welcome | Accepted | Refused | Dropped | Decided | StepFrame | Adapters


def _encode_limits(value: Any) -> Any:
    if isinstance(value, Limits):
        return value.model_dump()
    raise TypeError(f"can't encode {type(value).__name__}")


encode = msgspec.msgpack.Encoder(enc_hook=_encode_limits).encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front_end = msgspec.msgpack.Decoder(
    ToFrontEnd, dec_hook=lambda kind, value: kind.model_validate(value)
).decode


def parts_of(message: ToEngine) -> list[Any]:
    """Return a message in parts: it, encoded, and the bytes of each large tensor, which aren't
    copied."""
    if not isinstance(message, Add) or not message.media:
        return [encode(message)]
    parts: list[Any] = []
    media = []
    for item in message.media:
        tensors = {}
        for name, tensor in item.tensors.items():
            if len(tensor.data) >= _OWN_PART:
                parts.append(tensor.data)
                tensor = msgspec.structs.replace(tensor, data=None)
            tensors[name] = tensor
        media.append(msgspec.structs.replace(item, tensors=tensors))
    return [encode(msgspec.structs.replace(message, media=tuple(media))), *parts]


def message_of(body: bytes, parts: Sequence[Any] = ()) -> ToEngine:
    """Return the message of `parts_of`. Raises `MsgspecError` for another number of parts."""
    message: ToEngine = decode_to_engine(body)
    items = message.media if isinstance(message, Add) else ()
    missing = [tensor for item in items for tensor in item.tensors.values() if tensor.data is None]
    if len(missing) != len(parts):
        raise msgspec.ValidationError(f"{len(missing)} parts are missing, got {len(parts)}")
    for tensor, part in zip(missing, parts, strict=True):
        tensor.data = part
    return message


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Pack sample numbers: int64, so that they never run out."""
    return array("q", numbers).tobytes()


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Pack token ids: int32."""
    return array("i", token_ids).tobytes()


def unpack_numbers(packed: bytes) -> list[int]:
    return array("q", packed).tolist()


def unpack_tokens(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def add_of(number: int, request: CheckedRequest, owner: int = 0) -> Add:
    """Return the message for a checked request. The engine validates `extra`, so the sender must
    wait for its confirmation."""
    params = request.params
    return Add(
        number,
        request.request_id,
        request.prompt_ids.tobytes(),
        request.sampling,
        request.max_tokens,
        params.n,
        params.stop_token_ids or (),
        params.max_drafts,
        request.fields,
        request.rule,
        request.pooling,
        request.indivisible,
        extra=None if not request.extra else dict(request.extra),
        confirms=bool(request.extra),
        owner=owner,
        media=tuple([PackedItem.of(item) for item in request.media]),
    )


def request_of(add: Add) -> CheckedRequest:
    """Return the request in a message.

    Its `params`, as policies see them, have the defaults filled in, and nothing that concerns text
    only, which stays in the front end.
    """
    sampling = add.sampling
    if sampling.extra_args or sampling.logits_processors:
        sampling = replace(
            sampling,
            extra_args=frozen(sampling.extra_args),
            logits_processors=frozen(sampling.logits_processors),
        )
    params = changed_unchecked(
        _STREAMED,
        n=add.n,
        max_tokens=add.max_tokens,
        stop_token_ids=tuple(add.stop_token_ids),
        max_drafts=add.max_drafts,
        **{name: getattr(sampling, name) for name in _SEEN},
    )
    return CheckedRequest(
        add.request_id,
        np.frombuffer(add.prompt_ids, np.int32),
        sampling,
        add.max_tokens,
        add.fields,
        params,
        add.rule,
        add.pooling,
        add.indivisible,
        add.extra,
        tuple([packed.item() for packed in add.media]),
    )
