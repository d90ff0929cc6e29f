"""Observer `perfetto`: a trace of steps and requests that https://ui.perfetto.dev opens.

    engine     device     | prefill | decode | prefill+decode | ...        a slice per step of the device
               counters   requests running and waiting; KV pages held, cached and free; tokens of a step; copies
    requests   lane 000   | request 17                          | request 31 ...
                          | queued | prefill | decode | preempted | ...    phases of the request above

The format is Chrome's JSON trace events ("Trace Event Format", Google, 2016), as an array with few
events per line: begins (ph B) and ends (E) of requests and phases, complete events (X), instants
(i), counters (C) and names (M). Times are whole microseconds of the engine's clock. Slices of a
lane must nest, so a lane holds one request at a time. The work per step depends on neither the
number of running nor of waiting requests.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.observer import (
    EngineStarted,
    EngineStopped,
    Observer,
    ObserverContext,
    RequestAdmitted,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepFinished,
)
from dovetail.errors import ConfigError, shown
from dovetail.request import Request

logger = logging.getLogger("dovetail")

# "processes" of the trace
ENGINE = 1
REQUESTS = 2
DEVICE = 1  # the engine's only "thread"
LATEST_US = float(2**53)  # integers up to here are exact in any JSON: 285 years
# events are written once this many bytes are buffered, or this long after the last write
BUFFER_BYTES = 1 << 16
BUFFER_S = 1.0
END_BYTES = 1024  # more than the last events and the closing bracket take
END_BYTES_PER_REQUEST = 160  # more than the ends of its two slices take
LONGEST_TEXT = 200  # characters; ids and reasons of any length come from users

Event = dict[str, Any]
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class PerfettoOptions(BaseModel):
    """Options of the observer `perfetto`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        default="trace.json", min_length=1, description="File to write; overwritten by each run."
    )
    max_mb: int = Field(
        default=256,
        ge=1,
        le=1 << 20,
        description="Maximum size of the file in MiB; the trace ends there.",
    )


class TraceFile:
    """A JSON array of events. Only whole lines are written, so the file of a killed process lacks
    only its closing bracket and the buffer."""

    def __init__(self, path: Path, wall: Callable[[], float]) -> None:
        """Create or overwrite the file. Raises `OSError` or `ValueError` if it can't be written,
        `BlockingIOError` if another `TraceFile` is open on it, in this process or another."""
        if path.exists() and not path.is_file():  # a FIFO would block until it is read
            raise ValueError("not a regular file")
        self.size = 0  # bytes, buffered ones included
        self._wall, self._written_at = wall, wall()
        self._buffer = bytearray()
        self._file = path.open("ab", buffering=0)  # not truncated before it is locked
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(0)
            self._append(b"[\n" + _encode(_meta("process_name", ENGINE, 0, name="engine")).encode())
            self.flush()
        except BaseException:
            self._file.close()
            raise

    def write(self, line: bytes) -> None:
        """Append encoded events, preceded by a comma. Raises as `flush` does."""
        self._append(line)
        if len(self._buffer) >= BUFFER_BYTES or self._wall() - self._written_at >= BUFFER_S:
            self.flush()

    def flush(self) -> None:
        """Pass the buffer to the operating system. Raises `OSError` if that fails, as on a full
        disk: the buffer is lost, and the file ends after a whole event."""
        data = memoryview(bytes(self._buffer))
        kept = self.size - len(self._buffer)
        self._buffer.clear()
        self._written_at = self._wall()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self.size = kept
            with suppress(OSError):
                self._file.truncate(kept)
            raise

    def close(self, line: bytes = b"") -> None:
        """Append the last events and the closing bracket, and close the file. Raises as `flush`
        does, with the file still open."""
        self._append(line + b"\n]\n")
        self.flush()
        self._file.close()

    def abandon(self) -> None:
        """Close the file after a failed write, with the closing bracket if possible."""
        with suppress(OSError):
            self.close()
        with suppress(OSError):
            self._file.close()

    def _append(self, data: bytes) -> None:
        self._buffer += data
        self.size += len(data)


@dataclass(slots=True)
class Life:
    """An unfinished request on its lane, with the time of its last event."""

    lane: int
    at_us: int
    generated: int = 0  # tokens when it was admitted


class PerfettoObserver(Observer):
    """Writes events as they come. If that fails, or the file is full, the trace ends with a
    warning; the engine isn't affected."""

    options: PerfettoOptions

    def __init__(
        self,
        options: PerfettoOptions,
        context: ObserverContext,
        wall: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(options, context)
        self._wall = wall
        self._max_bytes = options.max_mb << 20
        self._file: TraceFile | None = None  # None: not started, or the trace has ended
        self._zero = 0.0
        self._groups: tuple[str, ...] = ()  # names of the cache groups
        self._device_us = 0  # end of the last step
        self._lives: dict[Request, Life] = {}
        self._prefilling: dict[Request, Life] = {}
        # a heap of free lanes, each after the time of its last end
        self._free: list[tuple[int, int]] = []
        self._lanes = 0
        self._copied = False  # the last step had copies

    def on_started(self, event: EngineStarted) -> None:
        """Open the file. Raises `ConfigError` if that fails."""
        self._zero = event.time
        self._groups = tuple(group.name for group in event.cache_groups)
        try:
            self._file = TraceFile(Path(self.options.path), self._wall)
        except BlockingIOError:
            raise self._no_file("is being written by another engine or observer") from None
        except (OSError, ValueError) as error:
            raise self._no_file(
                f"can't be written: {getattr(error, 'strerror', None) or error}"
            ) from None
        label = (
            f"scheduler {event.scheduler}, kv_cache {event.kv_cache}, {event.total_pages} pages, "
            f"blocks of {event.block_size}, executor {event.executor}"
        )
        self._write(
            _meta("process_labels", ENGINE, 0, labels=label),
            _meta("thread_name", ENGINE, DEVICE, name="device"),
            _meta("process_name", REQUESTS, 0, name="requests"),
        )

    def on_arrived(self, event: RequestArrived) -> None:
        if self._file is None:
            return
        request = event.request
        begin = self._us(event.request.arrival_time)
        lane = self._take_lane(begin)
        args: Event = {
            "prompt_tokens": request.prompt_tokens,
            "max_tokens": request.max_tokens,
            "priority": request.priority,
        }
        if request.client is not None:
            args["client"] = _cut(request.client)
        self._write(
            _begin(f"request {_cut(request.id)}", lane, begin, args), _begin("queued", lane, begin)
        )
        if self._file is not None:
            self._lives[request] = Life(lane, begin)

    def on_admitted(self, event: RequestAdmitted) -> None:
        if (life := self._lives.get(event.request)) is not None:
            life.generated = event.request.generated
            self._prefilling[event.request] = life
            self._turn(life, "prefill", event.time, {"cached_tokens": event.cached_tokens})

    def on_preempted(self, event: RequestPreempted) -> None:
        if (life := self._lives.get(event.request)) is not None:
            self._prefilling.pop(event.request, None)
            self._turn(life, "preempted", event.time, instant=True)

    def on_step(self, event: StepFinished) -> None:
        if self._file is None:
            return
        for request, life in [
            (r, life) for r, life in self._prefilling.items() if r.generated > life.generated
        ]:
            self._prefilling.pop(request, None)
            self._turn(life, "decode", event.ended)
        self._write(*self._step(event))
        if (
            self._file is not None and not event.running + event.waiting
        ):  # the next event may be far away
            self._attempt(self._file.flush)

    def on_finished(self, event: RequestFinished) -> None:
        if (life := self._lives.get(event.request)) is None:
            return
        request = event.request
        at = max(life.at_us, self._us(event.time))
        why = {} if event.stop_reason is None else {"why": _cut(str(event.stop_reason))}
        args = {
            "finish": event.finish_reason,
            "generated": request.generated,
            "preemptions": request.preemptions,
            **why,
        }
        self._write(
            _instant(event.finish_reason, REQUESTS, life.lane, at, why),
            _end(life.lane, at),
            _end(life.lane, at, args),
        )
        self._lives.pop(request, None)
        self._prefilling.pop(request, None)
        heapq.heappush(self._free, (at, life.lane))

    def on_stopped(self, event: EngineStopped) -> None:
        why = (
            "stopped"
            if event.error is None
            else _cut(f"stopped by {type(event.error).__name__}: {event.error}")
        )
        self._close(max(self._device_us, self._us(event.time)), why)

    def _step(self, event: StepFinished) -> list[Event]:
        begin = max(self._device_us, self._us(event.started))  # slices that overlap can't be drawn
        end = self._device_us = max(begin, self._us(event.ended))
        kinds = [
            kind
            for kind, tokens in (("prefill", event.prefill_tokens), ("decode", event.decode_tokens))
            if tokens
        ]
        args = {
            "step": event.index,
            "planned_us": self._us(event.planned),
            "prefill_tokens": event.prefill_tokens,
            "decode_tokens": event.decode_tokens,
            "generated_tokens": event.generated_tokens,
            "cached_tokens": event.cached_tokens,
            "recomputed_tokens": event.recomputed_tokens,
            "preempted": event.preempted,
            "core_us": round(1e6 * event.core_s),
            "graphs": _counted(event.graphs) or "none",
        }
        if event.draft_rows:
            args |= {
                "draft_rows": event.draft_rows,
                "draft_tokens": event.draft_tokens,
                "accepted_drafts": sum(event.accepted_drafts),
            }
        name = "+".join(kinds) or "nothing"
        pages = event.pages
        by_group = (
            dict(zip(self._groups, pages.held_by_group, strict=False))
            if len(self._groups) > 1
            else {}
        )
        return [
            {
                "name": name,
                "ph": "X",
                "pid": ENGINE,
                "tid": DEVICE,
                "ts": begin,
                "dur": end - begin,
                "args": args,
            },
            _counter("tokens", begin, prefill=event.prefill_tokens, decode=event.decode_tokens),
            _counter("requests", end, running=event.running, waiting=event.waiting),
            _counter("KV pages", end, held=pages.held, cached=pages.cached, free=pages.empty),
            *([_counter("KV pages held by group", end, **by_group)] if by_group else []),
            *self._copies(event, begin),
        ]

    def _copies(self, event: StepFinished, at_us: int) -> list[Event]:
        """Return the counter of what a step copies; none while it stays at zero."""
        copies = {
            "pages": event.page_copies,
            "checkpoints": event.checkpoints,
            "adapters": event.adapter_loads,
        }
        before = self._copied
        self._copied = any(copies.values())
        return [_counter("copies", at_us, **copies)] if before or self._copied else []

    def _turn(
        self,
        life: Life,
        phase: str,
        time: float,
        args: Event | None = None,
        *,
        instant: bool = False,
    ) -> None:
        """End the phase of a request, and begin the next; with a mark on its lane if `instant`."""
        at = life.at_us = max(life.at_us, self._us(time))
        marks = [_instant(phase, REQUESTS, life.lane, at)] if instant else []
        self._write(*marks, _end(life.lane, at), _begin(phase, life.lane, at, args))

    def _take_lane(self, begin_us: int) -> int:
        """Return a lane that is free from `begin_us` on; a new one is named in the trace."""
        if self._free and self._free[0][0] <= begin_us:
            return heapq.heappop(self._free)[1]
        self._lanes += 1
        name = _meta("thread_name", REQUESTS, self._lanes, name=f"lane {self._lanes - 1:03d}")
        self._write(name, _meta("thread_sort_index", REQUESTS, self._lanes, sort_index=self._lanes))
        return self._lanes

    def _write(self, *events: Event) -> None:
        """Write events, all of them or none: if the file is full, the trace ends. No-op once it has
        ended."""
        if (file := self._file) is None:
            return
        line = _line(events)
        if (
            file.size + len(line) + END_BYTES + END_BYTES_PER_REQUEST * (len(self._lives) + 1)
            > self._max_bytes
        ):
            logger.warning(
                "observer perfetto: %s has reached max_mb: %d; the trace ends here",
                self.options.path,
                self.options.max_mb,
            )
            self._close(self._device_us, "the trace ends here: max_mb is reached")
        else:
            self._attempt(lambda: file.write(line))

    def _close(self, at_us: int, why: str) -> None:
        """End the slices of all requests and close the file. No-op once the trace has ended."""
        if (file := self._file) is None:
            return
        ends = [
            _end(life.lane, max(at_us, life.at_us))
            for life in self._lives.values()
            for _ in ("its phase", "the request")
        ]
        self._attempt(lambda: file.close(_line([_instant(why, ENGINE, DEVICE, at_us), *ends])))
        self._file = None

    def _attempt(self, write: Callable[[], None]) -> None:
        """Call `write`; if it fails, end the trace with a warning."""
        try:
            write()
        except OSError as error:
            logger.warning(
                "observer perfetto: the trace ends here, since %s can't be written any more: %s",
                self.options.path,
                error,
            )
            if self._file is not None:
                self._file.abandon()
            self._file = None

    def _no_file(self, why: str) -> ConfigError:
        return ConfigError(f"observer perfetto: path: {shown(self.options.path)} {why}")

    def _us(self, time: float) -> int:
        return round(min(max(0.0, (time - self._zero) * 1e6), LATEST_US))


def _line(events: Sequence[Event]) -> bytes:
    """Return the events in JSON, after a comma: encoded in one call, which takes half the time of
    one each. Unpaired surrogates, which Perfetto doesn't read, become "?"."""
    return f",\n{_encode(events)[1:-1]}".encode("utf-8", "replace")


def _counted(names: Sequence[str]) -> str:
    """Return names in their order, neighbours that are the same as one: "draft_first, draft_next
    x3, decode"."""
    runs = [(name, len(list(same))) for name, same in groupby(names)]
    return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in runs)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."


def _begin(name: str, lane: int, at_us: int, args: Event | None = None) -> Event:
    return {"name": name, "ph": "B", "pid": REQUESTS, "tid": lane, "ts": at_us, "args": args or {}}


def _end(lane: int, at_us: int, args: Event | None = None) -> Event:
    return {"ph": "E", "pid": REQUESTS, "tid": lane, "ts": at_us, "args": args or {}}


def _instant(name: str, pid: int, tid: int, at_us: int, args: Event | None = None) -> Event:
    return {
        "name": name,
        "ph": "i",
        "s": "t",
        "pid": pid,
        "tid": tid,
        "ts": at_us,
        "args": args or {},
    }


def _counter(name: str, at_us: int, /, **values: int) -> Event:
    return {"name": name, "ph": "C", "pid": ENGINE, "ts": at_us, "args": values}


def _meta(name: str, pid: int, tid: int, /, **args: str | int) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}
