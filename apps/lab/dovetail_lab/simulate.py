"""Replay a trace through an engine and keep what happened: `replay`. With the executor `simulated` time is virtual and the result the same in every
run; with any other the same requests are sent in real time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail import EngineConfig, LLMEngine
from dovetail.api.clock import VirtualClock
from dovetail.errors import ConfigError
from dovetail.registry.registry import Registry
from dovetail_lab.feeding import Feeder
from dovetail_lab.recording import Recorder
from dovetail_lab.records import RequestRecord, RunResult, StepTimes, Timeline
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.traces.request import Trace

if TYPE_CHECKING:
    from dovetail.engine.core import EngineCore
    from dovetail.engine.flight import Delivery

SIMULATED = ("simulated", "dovetail:simulated")  # the executor's names
STORM_STEPS = 1_000  # over which the engine itself watches, too
LEAD_S = 0.1  # real time between the engine's start and the trace's
UNREAD_MODEL = "demo"  # a simulation reads no model: any that is always there will do

Progress = Callable[[int, int], None]  # (requests finished, of all)


def replay(
    config: str | Path | Mapping[str, Any] | EngineConfig,
    trace: Trace,
    *,
    name: str | None = None,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
    registry: Registry | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Every request of `trace`, at its time, through the engine that `config` describes.

    Policies see a request's `limit` as its `max_tokens`; when it really ends, the simulated executor alone knows, and tells by a stop token. A real
    executor can't be told: there requests generate as many tokens as their limit says, and none may have a grammar. Raises what `LLMEngine` raises,
    `ConfigError` for a grammar, and what ended the engine.
    """
    loaded = EngineConfig.load(config, **{**(overrides or {}), "seed": seed})
    simulated = loaded.executor.name in SIMULATED
    if not simulated and any(request.grammar for request in trace):
        raise ConfigError(f"{trace.name}: requests with a grammar can only be simulated: the trace doesn't say what their answers must follow")
    registry = registry or Registry.discover(loaded.plugins)
    config_in_full = loaded.in_full(registry)
    runnable = EngineConfig.load(loaded, model=UNREAD_MODEL, tokenizer=None) if simulated else loaded
    clock = _TraceClock() if simulated else None
    with LLMEngine.from_config(runnable, registry=registry, clock=clock) as engine:
        executor = engine.core.executor if isinstance(engine.core.executor, SimulatedExecutor) else None
        start = 0.0 if simulated else engine.now() + LEAD_S
        recorder = Recorder(engine.core, trace, start)
        feeder = Feeder(engine, executor, trace, start, recorder.refused)
        if clock is not None:
            clock.moved = feeder.feed
        _run(engine.core, executor, feeder, recorder, lambda: progress(recorder.num_finished, len(trace)) if progress else None)
        return RunResult(
            name=name or loaded.scheduler.label,
            trace=trace.name,
            trace_source=trace.source,
            seed=seed,
            settings=settings_of(config_in_full, engine, simulated),
            step_times=StepTimes("measured") if executor is None else executor.profile.as_step_times(),
            requests=recorder.records,
            timeline=recorder.timeline,
            notes=(
                *trace.notes,
                *(() if executor is None else measured_otherwise(executor, engine.core)),
                *notes_of(recorder.records, recorder.timeline, feeder.cut, engine.capacity.max_model_len),
            ),
            seeded=trace.seeded,
            window=trace.window,
        )


class _TraceClock(VirtualClock):
    """A clock that reports each move of time, so that requests can be made when they are due."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Callable[[float], None] = lambda now: None

    def wait_until(self, instant: float) -> None:
        super().wait_until(instant)
        self.moved(self._now)


def drive(core: EngineCore, feeder: Feeder, fed: Callable[[], None], take: Callable[[Delivery], None]) -> None:
    """Steps, until all that `feeder` brings has ended; `fed` is called when it has had its turn, `take` with what each step brought. The core is
    driven directly: what matters here is when tokens come, and no texts are made of them. Raises what ended the engine."""
    while True:
        feeder.feed(core.clock.now())
        fed()
        if not core.has_unfinished() and feeder.done:
            return
        delivery = core.step()
        if core.dead is not None:
            raise core.dead
        take(delivery)
        feeder.forget(delivery.finished)


def _run(core: EngineCore, executor: SimulatedExecutor | None, feeder: Feeder, recorder: Recorder, progress: Callable[[], None]) -> None:
    """Run to the end of the trace."""
    if executor is not None:
        core.plan_timing.plans_late = executor.options.plans_late

    def take(delivery: Delivery) -> None:
        recorder.take(delivery)
        if executor is not None:
            core.plan_timing.virtual_plan_s = executor.plan_s
        if delivery.finished:
            progress()

    drive(core, feeder, feeder.let_in, take)


def settings_of(config: dict[str, Any], engine: LLMEngine, simulated: bool) -> dict[str, Any]:
    """Return the `settings` of a run: the engine's config in full, and what follows from it."""
    capacity, core = engine.capacity, engine.core
    return {
        "config": {key: _finite(value) for key, value in config.items() if key != "plugins"},
        "scheduler": core.settings.scheduler_name,
        "executor": "simulated" if simulated else "real",
        "pace": core.pace,
        "overlap": core.max_in_flight > 1,
        "prefix_reuse": core.kv.capabilities.reuse,
        "block_size": capacity.layout.block_size,
        "num_blocks": capacity.num_blocks,
        "max_model_len": capacity.max_model_len,
    }


def _finite(value: Any) -> Any:
    """Return plain values in which numbers that JSON lacks are written as YAML writes them: ".inf", ".nan"."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return value


def measured_otherwise(executor: SimulatedExecutor, core: EngineCore) -> Iterator[str]:
    """Yield how the engine whose step times these are differed from the simulated one."""
    if (factor := executor.options.step_time_factor) != 1:
        yield f"every step takes {factor:.6g} times as long as its step times say"
    profile, here = executor.profile, core.max_in_flight
    if profile.max_in_flight not in (None, here):
        measured, simulated = (f"{'on' if steps > 1 else 'off'} (steps in flight: {steps})" for steps in (profile.max_in_flight, here))
        yield f"step times {profile.name} were measured with overlap {measured}, and are used here with overlap {simulated}"


def notes_of(records: tuple[RequestRecord, ...], timeline: Timeline, cut: int, max_model_len: int) -> Iterator[str]:
    """Yield what a reader of the run should know. `cut`: requests that would have generated more than fits the engine."""
    refused = [record for record in records if record.finish_reason == "rejected" and record.first_scheduled_s is None]
    if refused:
        yield f"{len(refused)} requests were rejected before they ran, the first ({refused[0].id}) because {refused[0].stop_reason}"
    storms = timeline.storms(STORM_STEPS)
    if storms:
        yield f"{storms} times {STORM_STEPS:,} steps in a row recomputed more tokens after preemptions than they computed anew"
    if cut:
        yield f"{cut} requests would generate more than max_model_len {max_model_len} has room for, and end there"
