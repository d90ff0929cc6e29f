"""`replay`: run a trace through an engine and record it. With the executor `simulated`, time is
virtual and every run has the same result; with any other, the same requests are sent in real
time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail import EngineConfig, LLMEngine
from dovetail.api.clock import VirtualClock
from dovetail.errors import ConfigError, PluginError
from dovetail.serving import Registry, assemble
from dovetail_lab.feeding import Feeder, SimulatedRules
from dovetail_lab.recording import Recorder
from dovetail_lab.records import RequestRecord, RunResult, StepTimes, Timeline
from dovetail_lab.simulated import SimulatedExecutor
from dovetail_lab.simulated_options import SimulatedOptions
from dovetail_lab.traces.request import Trace

if TYPE_CHECKING:
    from dovetail.serving import Delivery, EngineCore

STORM_STEPS = 1_000  # same window as the engine's own warning
LEAD_S = 0.1  # real time between the start of the engine and of the trace
UNREAD_MODEL = "demo"  # a simulation loads no model: any bundled one will do

Progress = Callable[[int, int], None]  # (requests finished, total)


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
    """Run every request of `trace`, at its time, through the engine that `config` describes.

    Policies see a request's `limit` as its `max_tokens`; only the simulated executor knows its true
    length, and samples a stop token there. A real executor can't do that: requests generate as many
    tokens as their limit, and none may have a grammar or an image. Raises the errors of
    `LLMEngine`, `ConfigError` for a grammar or an image, and the error that ended the engine.
    """
    loaded = EngineConfig.load(config, **{**(overrides or {}), "seed": seed})
    registry = registry or Registry.discover(loaded.plugins)
    simulated = is_simulated(loaded, registry)
    if not simulated:
        _check_real(trace)
    config_in_full = loaded.in_full(registry)
    runnable = without_model(loaded, trace) if simulated else loaded
    clock = _TraceClock() if simulated else None
    rules = SimulatedRules() if simulated else None
    assembly = assemble(runnable, {}, registry=registry, clock=clock)
    device = assembly.core.executor
    executor = device if isinstance(device, SimulatedExecutor) else None
    adapter_of = None if executor is None else executor.adapters.get
    with LLMEngine(assembly, constraints_of=rules, adapter_of=adapter_of) as engine:
        start = 0.0 if simulated else engine.now() + LEAD_S
        front_end = None if executor is None else executor.host.front_end
        recorder = Recorder(engine.core, trace, start, front_end)
        feeder = Feeder(engine, executor, trace, start, recorder.refused, rules, front_end)
        if clock is not None:
            clock.moved = feeder.feed
        _run(
            engine.core,
            executor,
            feeder,
            recorder,
            lambda: progress(recorder.num_finished, len(trace)) if progress else None,
        )
        return RunResult(
            name=name or loaded.scheduler.label,
            trace=trace.name,
            trace_source=trace.source,
            seed=seed,
            settings=settings_of(config_in_full, engine, simulated),
            step_times=StepTimes("measured")
            if executor is None
            else executor.profile.as_step_times(),
            requests=recorder.records,
            timeline=recorder.timeline,
            notes=(
                *trace.notes,
                *(() if executor is None else measured_otherwise(executor, engine.core)),
                *device_notes(() if executor is None else (executor,)),
                *notes_of(
                    recorder.records, recorder.timeline, feeder.cut, engine.capacity.max_model_len
                ),
            ),
            seeded=trace.seeded,
            window=trace.window,
        )


def is_simulated(config: EngineConfig, registry: Registry | None = None) -> bool:
    """Return True if the executor simulates a device: its options are those of `simulated`, or
    extend them. Only its options are imported. False for an executor that isn't installed."""
    registry = registry or Registry.discover(config.plugins)
    try:
        options = registry.resolve("executor", config.executor.name).options_model()
    except PluginError:
        return False
    return issubclass(options, SimulatedOptions)


def without_model(config: EngineConfig, trace: Trace) -> EngineConfig:
    """Return the config of an engine that simulates `trace`: it loads no model, and has a cache of
    images' rows only if a request has images."""
    changed: dict[str, Any] = {"model": UNREAD_MODEL, "tokenizer": None}
    if not any(request.images for request in trace):
        changed["media.images"] = False
    return EngineConfig.load(config, **changed)


def _check_real(trace: Trace) -> None:
    """Raise `ConfigError` if a request of the trace can only be simulated."""
    if any(request.grammar for request in trace):
        raise ConfigError(
            f"{trace.name}: requests with a grammar can only be simulated: the trace doesn't say "
            f"what their answers must follow"
        )
    if any(request.images for request in trace):
        raise ConfigError(
            f"{trace.name}: requests with images can only be simulated: the trace doesn't have "
            f"the pictures"
        )
    if any(request.adapter is not None for request in trace):
        raise ConfigError(
            f"{trace.name}: requests with adapters can only be simulated: the trace doesn't have "
            f"the adapters"
        )


class _TraceClock(VirtualClock):
    """Clock that reports each advance, so that requests can be created when they are due."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Callable[[float], None] = lambda now: None

    def wait_until(self, instant: float) -> None:
        super().wait_until(instant)
        self.moved(self._now)


def drive(
    core: EngineCore,
    feeder: Feeder,
    fed: Callable[[], None],
    take: Callable[[Delivery], None],
    wait_until: Callable[[float], None] | None = None,
) -> None:
    """Run steps until all requests of `feeder` have ended.

    `fed` is called after the feeder's turn, `take` with each step's delivery; `wait_until`: as of
    `EngineCore.step`. The core is driven directly: only the times of tokens matter here, and no
    text is created. Raises the error that ended the engine.
    """
    while True:
        feeder.feed(core.clock.now())
        fed()
        if not core.has_unfinished() and feeder.done:
            return
        delivery = core.step(wait_until)
        if core.dead is not None:
            raise core.dead
        take(delivery)
        feeder.delivered(delivery)


def _run(
    core: EngineCore,
    executor: SimulatedExecutor | None,
    feeder: Feeder,
    recorder: Recorder,
    progress: Callable[[], None],
) -> None:
    """Run the trace to its end."""
    if executor is not None:
        core.plan_timing.plans_late = executor.host.plans_late

    def take(delivery: Delivery) -> None:
        recorder.take(delivery)
        if executor is not None:
            core.plan_timing.virtual_plan_s = executor.plan_s
        if delivery.finished:
            progress()

    drive(core, feeder, feeder.let_in, take)


def settings_of(config: dict[str, Any], engine: LLMEngine, simulated: bool) -> dict[str, Any]:
    """Return the `settings` of a run: the engine's full config, and derived settings."""
    capacity = engine.capacity
    core = engine.core
    return {
        "config": {key: _finite(value) for key, value in config.items() if key != "plugins"},
        "scheduler": core.settings.scheduler_name,
        "executor": "simulated" if simulated else "real",
        "prefill_limit": core.prefill_limit,
        "overlap": core.max_in_flight > 1,
        "prefix_reuse": core.kv.capabilities.reuse,
        "block_size": capacity.layout.block_size,
        "num_pages": capacity.num_pages,
        **(
            {"cache_groups": [group.name for group in capacity.layout.groups]}
            if len(capacity.layout.groups) > 1
            else {}
        ),
        "max_model_len": capacity.max_model_len,
    }


def _finite(value: Any) -> Any:
    """Return plain values with numbers that JSON lacks written as in YAML: ".inf", ".nan"."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return value


def measured_otherwise(executor: SimulatedExecutor, core: EngineCore) -> Iterator[str]:
    """Yield differences between the engine that was measured and the simulated one."""
    if (factor := executor.options.step_time_factor) != 1:
        yield f"step times are multiplied by {factor:.6g}"
    profile = executor.profile
    here = core.max_in_flight
    if profile.max_in_flight not in (None, here):
        measured, simulated = (
            f"{'on' if steps > 1 else 'off'} (steps in flight: {steps})"
            for steps in (profile.max_in_flight, here)
        )
        yield f"step times {profile.name} were measured with overlap {measured}, and are used here with overlap {simulated}"


def device_notes(executors: Sequence[SimulatedExecutor]) -> Iterator[str]:
    """Yield notes on what the devices did besides generating tokens, and on times that are
    missing."""
    yield from _encoding_notes(executors)
    for executor in executors[:1]:
        yield from executor.host.notes(executor.device)
    loads = sum(executor.adapters.loads for executor in executors)
    if loads:
        seconds = sum(executor.adapters.seconds for executor in executors)
        yield f"adapters loaded to slots: {loads:,}; adapters prolonged steps by {seconds:.3f} s"


def _encoding_notes(executors: Sequence[SimulatedExecutor]) -> Iterator[str]:
    """Yield a note on the images that the devices have encoded, if any."""
    images = rows = 0
    seconds = 0.0
    for executor in executors:
        images += executor.device.encoded_images
        rows += executor.device.encoded_rows
        seconds += executor.device.encoding_s
    if images:
        yield f"images encoded: {images:,}, with {rows:,} rows, in {seconds:.3f} s of steps"


def notes_of(
    records: tuple[RequestRecord, ...], timeline: Timeline, cut: int, max_model_len: int
) -> Iterator[str]:
    """Yield notes for readers of the run. `cut`: number of requests that would have generated more
    than the engine supports."""
    refused = [
        record
        for record in records
        if record.finish_reason == "rejected" and record.first_scheduled_s is None
    ]
    if refused:
        yield f"{len(refused)} requests were rejected before they ran, the first ({refused[0].id}) because {refused[0].stop_reason}"
    storms = timeline.storms(STORM_STEPS)
    if storms:
        yield f"{storms} times, {STORM_STEPS:,} consecutive steps recomputed more tokens after preemptions than they computed for the first time"
    if cut:
        yield f"{cut} requests would exceed max_model_len {max_model_len}, and end there"
