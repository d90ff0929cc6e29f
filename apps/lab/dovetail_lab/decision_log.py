"""Observer `decision_log`: which requests ran, which waited and why, as a file for Perfetto
(ui.perfetto.dev). Works on the real engine and in simulation.

    engine     device     | prefill | decode | prefill+decode | ...      a slice per step; its arguments name refusals, preemptions, notes
               counters   running, waiting; KV pages held, cached, free, by cache group; tokens
    requests   lane 000   | request 17                    | request 31 ...
                          | waiting: MEMORY | prefill | decode |         phases of the request above, and why it waited
               lane 001   ...

The format is Chrome's JSON trace events ("Trace Event Format", Google, 2016), as an array with one
event per line: complete events (ph X), instants (i), counters (C) and names (M). Slices of a lane
must nest in Perfetto, so a lane holds one request at a time. Times are whole microseconds of the
engine's clock, never of wall time, so that a simulated run gives the same bytes each time. An
unpaired surrogate in a name, which neither UTF-8 nor Perfetto's JSON supports, is written as
"?".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.observer import (
    Act,
    Decision,
    EngineStarted,
    EngineStopped,
    Observer,
    ObserverCapabilities,
    ObserverContext,
    RequestArrived,
    RequestFinished,
    RequestPreempted,
    StepFinished,
)
from dovetail.api.scheduler import Refusal
from dovetail.errors import ConfigError, shown
from dovetail.request import Request

# "processes" of the trace
ENGINE = 1
REQUESTS = 2
DEVICE = 1  # the engine's only "thread"

LATEST_US = float(2**53)  # integers up to here are exact in any JSON: 285 years

NOT_YET = "arrived while a step was being computed"
NOT_ASKED = "the policy didn't request a grant"


class DecisionLogOptions(BaseModel):
    """Options of the observer `decision_log`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        default="decisions.json",
        min_length=1,
        description="File to write; overwritten by each run.",
    )
    listed: int = Field(
        default=20,
        ge=0,
        description="Maximum number of requests listed per heading in a step's slice; the rest are "
        "counted.",
    )


@dataclass(slots=True)
class Phase:
    """A phase of a request ("waiting", "prefill", "decode", "paused", "preempted"), and its
    reason."""

    name: str
    why: str
    begin_us: int

    @property
    def label(self) -> str:
        return f"{self.name}: {self.why}" if self.why else self.name


@dataclass(slots=True)
class Life:
    """A request on its lane, with its phases since arrival."""

    request: Request
    lane: int
    begin_us: int
    known_from: float  # time of the planning that first showed it
    phases: list[Phase]
    prefilling: bool = True
    generated: int = 0  # tokens when last seen
    end_us: int | None = None
    result: str = "unfinished"

    def turn(self, name: str, why: str, at_us: int) -> None:
        """Start a new phase at `at_us`, or the same one for another reason."""
        now = self.phases[-1]
        if (now.name, now.why) != (name, why):
            self.phases.append(Phase(name, why, max(at_us, now.begin_us)))


@dataclass(slots=True)
class Lanes:
    """Lanes that requests are drawn in; each request gets the first that is free when it
    arrives."""

    free_since: list[int] = field(default_factory=list)  # in microseconds, by lane; -1: occupied

    def take(self, begin_us: int) -> int:
        for lane, since in enumerate(self.free_since):
            if 0 <= since <= begin_us:
                self.free_since[lane] = -1
                return lane
        self.free_since.append(-1)
        return len(self.free_since) - 1

    def release(self, lane: int, end_us: int) -> None:
        self.free_since[lane] = end_us


class DecisionLog(Observer):
    """Writes whole events after each step: the file of a killed engine lacks only the closing
    bracket, which the format allows."""

    capabilities = ObserverCapabilities(decisions=True)
    options: DecisionLogOptions

    def __init__(self, options: DecisionLogOptions, context: ObserverContext) -> None:
        """Create the observer. Raises `ConfigError` if the file can't be in that directory."""
        super().__init__(options, context)
        self._path = Path(options.path)
        try:
            possible = self._path.parent.is_dir() and not self._path.is_dir()
        except OSError:  # a name that is too long
            possible = False
        if not possible:
            raise self._no_file("is not a file in an existing directory")
        self._file: TextIO | None = None
        self._zero = 0.0
        self._groups: tuple[str, ...] = ()  # names of the cache groups
        self._lanes = Lanes()
        self._lives: dict[Request, Life] = {}
        self._over: list[Life] = []  # finished requests with a step still in flight

    def on_started(self, event: EngineStarted) -> None:
        """Open the file. Raises `ConfigError` if that fails."""
        self._zero = event.time
        self._groups = tuple(group.name for group in event.cache_groups)
        try:
            self._file = self._path.open("w", encoding="utf-8", errors="replace", newline="\n")
        except (OSError, ValueError) as error:
            raise self._no_file(f"can't be written: {getattr(error, 'strerror', error)}") from None
        label = (
            f"scheduler {event.scheduler}, kv_cache {event.kv_cache}, {event.total_pages} pages, "
            f"blocks of {event.block_size}, executor {event.executor}"
        )
        self._file.write("[\n" + _line(_named("process_name", ENGINE, "engine")))
        self._write(
            _meta("process_labels", ENGINE, {"labels": label}),
            _named("thread_name", ENGINE, "device", DEVICE),
        )
        self._write(_named("process_name", REQUESTS, "requests"))

    def _no_file(self, why: str) -> ConfigError:
        return ConfigError(f"observer decision_log: path: {shown(self.options.path)} {why}")

    def on_arrived(self, event: RequestArrived) -> None:
        begin = self._us(event.request.arrival_time)
        lanes = len(self._lanes.free_since)
        lane = self._lanes.take(begin)
        if lane == lanes:
            order = _meta("thread_sort_index", REQUESTS, {"sort_index": lane}, lane + 1)
            self._write(_named("thread_name", REQUESTS, f"lane {lane:03d}", lane + 1), order)
        self._lives[event.request] = Life(
            event.request, lane, begin, event.time, [Phase("waiting", NOT_YET, begin)]
        )

    def on_preempted(self, event: RequestPreempted) -> None:
        self._mark(event.request, "preempted", event.time)

    def on_finished(self, event: RequestFinished) -> None:
        life = self._lives.pop(event.request, None)
        if life is None:
            return
        life.end_us = max(self._us(event.time), life.begin_us)
        life.result = (
            event.finish_reason
            if event.stop_reason is None
            else f"{event.finish_reason}: {event.stop_reason}"
        )
        self._over.append(life)
        if event.finish_reason in ("rejected", "error", "abort"):
            self._write(_instant(life.result, life.lane, life.end_us))
        if not event.more_steps:
            self._bury()

    def on_step(self, event: StepFinished) -> None:
        fates = _fates(event.decisions)
        for life in (*self._lives.values(), *self._over):
            if life.known_from <= event.planned:
                self._follow(life, fates.get(life.request), event)
        for decision in event.decisions:
            if decision.act is Act.NOTED:
                self._mark(decision.request, f"note: {decision.reason}", event.planned)
        self._write(*self._step(event))
        self._bury()
        if self._file is not None:
            self._file.flush()

    def on_stopped(self, event: EngineStopped) -> None:
        for life in self._lives.values():
            life.end_us = max(self._us(event.time), life.begin_us)
        self._over += self._lives.values()
        self._lives.clear()
        self._bury()
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()
            self._file = None

    def _follow(self, life: Life, fate: Decision | None, event: StepFinished) -> None:
        """Update a request's phase after a step."""
        request = life.request
        at = self._us(event.started)
        act, why = (fate.act, fate.reason) if fate is not None else (None, NOT_ASKED)
        if act is Act.GRANTED:
            life.turn("prefill" if life.prefilling else "decode", "", at)
        elif act is Act.PREEMPTED:
            life.turn("preempted", "", at)
            life.prefilling = True
        elif act is not Act.REJECTED and (
            act or request.output_left > 0
        ):  # requests with their last token in flight need no grant
            waits = life.phases[-1].name
            life.turn("paused" if waits in ("prefill", "decode") else waits, why, at)
        if request.generated > life.generated:
            life.generated = request.generated
            life.prefilling &= act is not Act.GRANTED

    def _step(self, event: StepFinished) -> list[dict[str, Any]]:
        begin = self._us(event.started)
        end = self._us(event.ended)
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
            "cached_tokens": event.cached_tokens,
            "recomputed_tokens": event.recomputed_tokens,
            **self._headings(event.decisions),
        }
        pages = event.pages
        by_group = (
            dict(zip(self._groups, pages.held_by_group, strict=False))
            if len(self._groups) > 1
            else {}
        )
        return [
            _slice("+".join(kinds) or "nothing", ENGINE, DEVICE, begin, end, args),
            _counter(
                "tokens", begin, {"prefill": event.prefill_tokens, "decode": event.decode_tokens}
            ),
            _counter("requests", end, {"running": event.running, "waiting": event.waiting}),
            _counter(
                "KV pages",
                end,
                {"held": pages.held, "cached": pages.cached, "free": pages.empty},
            ),
            *([_counter("KV pages held by group", end, by_group)] if by_group else []),
        ]

    def _headings(self, decisions: Sequence[Decision]) -> dict[str, Any]:
        """Return, for each act, the requests with their tokens or the reason. Grants of one token
        are omitted: there are too many decodes."""
        listed: dict[str, dict[str, Any]] = {}
        for decision in decisions:
            if decision.act is not Act.GRANTED or decision.tokens > 1:
                listed.setdefault(decision.act, {})[decision.request.id] = (
                    decision.tokens if decision.act is Act.GRANTED else _reason(decision.reason)
                )
        return {act: self._cut(entries) for act, entries in listed.items()}

    def _cut(self, entries: dict[str, Any]) -> dict[str, Any]:
        more = len(entries) - self.options.listed
        return (
            entries
            if more <= 0
            else {**dict(list(entries.items())[: self.options.listed]), "...": f"and {more} more"}
        )

    def _bury(self) -> None:
        """Write the slices of finished requests."""
        for life in self._over:
            end = life.end_us if life.end_us is not None else life.begin_us
            self._write(*_slices(life, end))
            self._lanes.release(life.lane, end)
        self._over = []

    def _mark(self, request: Request, name: str, time: float) -> None:
        life = self._lives.get(request)
        if life is not None:
            self._write(_instant(name, life.lane, max(self._us(time), life.begin_us)))

    def _us(self, time: float) -> int:
        return round(min(max(0.0, (time - self._zero) * 1e6), LATEST_US))

    def _write(self, *events: dict[str, Any]) -> None:
        if self._file is not None:
            # all of them, or none
            self._file.write("".join([",\n" + _line(event) for event in events]))


def _fates(decisions: Sequence[Decision]) -> dict[Request, Decision]:
    """Return each request's outcome in a step: the last decision on it, but a refusal only if there
    is no other (grants may be retried)."""
    fates: dict[Request, Decision] = {}
    for decision in decisions:
        if decision.act is not Act.NOTED and (
            decision.act is not Act.REFUSED or decision.request not in fates
        ):
            fates[decision.request] = decision
    return fates


def _slices(life: Life, end_us: int) -> list[dict[str, Any]]:
    """Return the slice of the request, then those of its phases: of slices that start together the
    outer must come first."""
    request = life.request
    args = {
        "client": request.client,
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "generated": request.generated,
        "preemptions": request.preemptions,
        "finish": life.result,
    }
    name = f"request {request.id}" + (f" ({request.client})" if request.client is not None else "")
    slices = [_slice(name, REQUESTS, life.lane + 1, life.begin_us, end_us, args)]
    ends = [phase.begin_us for phase in life.phases[1:]] + [end_us]
    for phase, phase_end in zip(life.phases, ends, strict=True):
        begin = min(phase.begin_us, end_us)
        until = min(phase_end, end_us)
        if until > begin:
            slices.append(
                _slice(
                    phase.label,
                    REQUESTS,
                    life.lane + 1,
                    begin,
                    until,
                    {"why": _reason(phase.why)} if phase.why else {},
                )
            )
    return slices


def _reason(why: str) -> str:
    """Return a refusal's name, or any other reason as it is."""
    return Refusal[why].value if why in Refusal.__members__ else why


def _slice(
    name: str, pid: int, tid: int, begin_us: int, end_us: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": begin_us,
        "dur": end_us - begin_us,
        "args": args,
    }


def _instant(name: str, lane: int, at_us: int) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "t", "pid": REQUESTS, "tid": lane + 1, "ts": at_us}


def _counter(name: str, at_us: int, values: dict[str, int]) -> dict[str, Any]:
    return {"name": name, "ph": "C", "pid": ENGINE, "ts": at_us, "args": values}


def _meta(name: str, pid: int, args: dict[str, Any], tid: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _named(what: str, pid: int, name: str, tid: int = 0) -> dict[str, Any]:
    return _meta(what, pid, {"name": name}, tid)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":"))
