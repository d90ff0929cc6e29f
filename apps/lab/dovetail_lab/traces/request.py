"""A trace in memory: `Trace`, its `TraceRequest`s, and their measured times. Loaders create it, the
simulation replays it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import xxhash


def stream_of(*name: str | int) -> int:
    """Return the number of the stream `name`: 64 bits of a hash, the same in every run."""
    return xxhash.xxh64_intdigest("\x1f".join(map(str, name)).encode())


class Span(NamedTuple):
    """Tokens `start` to `start + tokens` of the endless text number `stream`
    (`dovetail_lab.token_ids`). Equal spans have equal ids."""

    stream: int  # 64 bits, of `stream_of`
    start: int
    tokens: int


class TraceImage(NamedTuple):
    """An image of a prompt: `rows` of its tokens, from `start`. The same digest and number of rows
    are the same picture."""

    start: int
    rows: int  # at least 1
    digest: str  # any text

    @property
    def stop(self) -> int:
        return self.start + self.rows

    @property
    def stream(self) -> int:
        """The number of the picture, which is also that of the text in its place."""
        return stream_of("image", self.digest, self.rows)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured times of a request on the recorded system, in seconds on the trace's clock."""

    first_token_time: float
    last_token_time: float
    scheduled_time: float | None = None

    def shifted(self, by: float) -> Measured:
        """Return the same times, `by` seconds later."""
        scheduled = None if self.scheduled_time is None else self.scheduled_time + by
        return Measured(self.first_token_time + by, self.last_token_time + by, scheduled)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. Times are in seconds from the trace's start."""

    id: str  # unique in its trace
    arrival_time: float
    prompt_tokens: int  # at least 1
    output_tokens: int  # at least 1: the true length, known only to the executor
    client: str | None = None
    priority: int = 0  # smaller is more important
    deadline: float | None = None  # of the last token
    max_tokens: int | None = None  # the user's limit; None: exactly output_tokens
    predicted_tokens: int | None = None  # predicted output_tokens (`dovetail_lab.predictors`)
    spans: tuple[Span, ...] = ()  # beginning of prompt plus output; the rest is unique text
    measured: Measured | None = None
    ttft_deadline: float | None = None  # of the first token
    tbt_s: float | None = None  # maximum seconds between two tokens
    grammar: bool = False  # constrained by a grammar; unspecified, since only its time is simulated
    # probability that a simulated draft is accepted; None: as the executor says
    acceptance: float | None = None
    session: str | None = None  # id of its conversation or agent
    # earlier requests: it arrives `gap_s` after the last of them ended; `arrival_time` is the
    # earliest possible
    after: tuple[str, ...] = ()
    gap_s: float = 0.0  # reading, thinking, or running a tool
    images: tuple[TraceImage, ...] = ()  # of its prompt, ascending, without overlap
    adapter: str | None = None  # name of its LoRA adapter
    # ends with its prompt, and yields a vector, which counts as its only output token
    pools: bool = False

    @property
    def limit(self) -> int:
        """`max_tokens` for the engine and policies: that of the trace, otherwise the true
        length."""
        return self.output_tokens if self.max_tokens is None else self.max_tokens


class LengthUpdates(Protocol):
    """Predictions of lengths that are renewed while an answer is generated."""

    def after(self, request: TraceRequest, generated: int) -> int | None:
        """Return a new `predicted_tokens` after that many generated tokens; None keeps the last
        one."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `notes` describe changes to the file's rows (sorted, scaled,
    cut, ...), for the report."""

    name: str
    source: str  # a path, or a synthetic workload's spec
    requests: tuple[TraceRequest, ...]
    notes: tuple[str, ...] = ()
    seeded: bool = False  # arrivals or lengths are random: another seed gives other traffic
    window: tuple[float, float] | None = None  # measured part of a run in seconds; None: all of it
    length_updates: LengthUpdates | None = None  # None: predictions don't change

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    @property
    def duration_s(self) -> float:
        """Time from the start of the trace to the last arrival."""
        return self.requests[-1].arrival_time if self.requests else 0.0
