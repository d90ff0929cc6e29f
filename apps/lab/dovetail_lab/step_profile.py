"""Profiles: a step-time model, the host's own times, and a description of what was measured. A profile is a .json file, the name of one that the
lab ships, or a mapping in `engine.yaml`; the simulated executor reads it, and calibration writes it."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from dovetail.errors import ConfigError
from dovetail_lab.records import StepTimes
from dovetail_lab.roofline import RooflineStepTime
from dovetail_lab.step_time import (
    Described,
    LaunchRule,
    LinearStepTime,
    PiecewiseStepTime,
    Regime,
    RegimeStepTime,
    Seconds,
    StepShape,
    StepTimeModel,
    TableStepTime,
)
from dovetail_lab.writing import write_whole

LEVELS = (0.0, *(part / 20 for part in range(1, 20)), 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 1.0)  # fine where the tails are
_MASK = (1 << 64) - 1

BUILT_IN: Mapping[str, type[BaseModel]] = {
    "linear": LinearStepTime,
    "piecewise": PiecewiseStepTime,
    "regimes": RegimeStepTime,
    "table": TableStepTime,
    "roofline": RooflineStepTime,
}


class Spread(Described):
    """The distribution of measured over fitted step times, for each regime: the mean between each two neighbours of `LEVELS`.
    None: always 1."""

    decode: tuple[Seconds, ...] = ()
    recorded: tuple[Seconds, ...] = ()
    launched: tuple[Seconds, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Spread:
        for regime in Regime:
            if len(self.of(regime)) not in (0, len(LEVELS) - 1):
                raise ValueError(f"{regime.value} must have {len(LEVELS) - 1} entries, or none, got {len(self.of(regime))}")
        return self

    def of(self, regime: Regime) -> tuple[float, ...]:
        ratios: tuple[float, ...] = getattr(self, regime.value)
        return ratios

    def drawn(self, regime: Regime, share: float) -> float:
        """Return the value at `share` of the distribution, from 0 to less than 1."""
        ratios = self.of(regime)
        return ratios[bisect_right(LEVELS, share) - 1] if ratios else 1.0


def chance(seed: int, step: int, stream: int) -> float:
    """From 0 to less than 1, in no order: of integers alone, so that it is the same in every run and on every machine. The mixing is SplitMix64's
    (Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA '14)."""
    mixed = 0
    for part in (seed, stream, step):
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return (mixed >> 11) * 2.0**-53


class StepTimeProfile(Described):
    """A step-time model with its papers: which machine, fitted on what, how wrong. A file of it is what `dovetail lab calibrate` writes."""

    dovetail_step_times: Literal[1] = 1
    name: str = Field(description="For tables and reports.")
    step_time: dict[str, Any] = Field(
        description='The model: its kind ("linear", "piecewise", "regimes", "table", "roofline" or "package.module:Class") and its numbers.'
    )
    core_s: Seconds = Field(default=0.0, description="The core's own time before a step: planning, batch.")
    core_per_row_s: Seconds = Field(default=0.0, description="What each request in the step adds to it.")
    admission_s: Seconds = Field(default=0.0, description="What it adds that any request takes a row in the step.")
    per_admitted_s: Seconds = Field(default=0.0, description="What each of these adds.")
    launch: dict[str, Any] | None = Field(
        default=None, description="How long handing a step over takes the core: a model, as `step_time` is. Unset: no time."
    )
    joining_s: Seconds = Field(
        default=0.0, description="Of that, in steps with prefills: what is for requests that take a row. Where none does it is so much less."
    )
    launch_spread: Spread | None = Field(default=None, description="How launching varies from step to step. Unset: not at all.")
    core_spread: Spread | None = Field(default=None, description="How the core's own time before a step varies. Unset: not at all.")
    after_launch_s: Seconds = Field(
        default=0.0, description="A step that is computed while it is launched goes on for so long after it was handed over, at least."
    )
    recorded_tokens: int = Field(
        default=0,
        ge=0,
        description="A step with prefills of up to so many tokens is one recorded graph, and begins when launched; others are computed meanwhile.",
    )
    sampling_share: float = Field(
        default=0.0, ge=0, le=1, description="Of launching such a step: what is left to do when its graph begins, which is sampling."
    )
    copying_share: float = Field(
        default=0.0, ge=0, le=1, description="Of launching a step of decodes: what is left to do when its graph begins, such as copying results."
    )
    setup_s: Seconds = Field(
        default=0.0, description="What the device does for a recorded step with prefills before its graph, unless that is launched late anyway."
    )
    request_s: Seconds = Field(default=0.0, description="The core's own time for each request that it takes in, between two steps.")
    results_s: Seconds = Field(default=0.0, description="From a step's end until its tokens are delivered.")
    results_per_row_s: Seconds = Field(default=0.0, description="What each request in the step adds to it.")
    error: float | None = Field(default=None, ge=0, description="Mean of |predicted - measured| / measured over the steps it was judged on.")
    judged_on: str = Field(default="", description="Which steps, how many.")
    kv_tokens: int | None = Field(default=None, ge=1, description="Tokens in the KV pool of the engine that was measured.")
    max_in_flight: int | None = Field(
        default=None, ge=1, le=8, description="Steps in flight at most of the engine that was measured: 1 without overlap. Unset: unknown."
    )
    machine: str = ""
    model: str = ""
    engine: str = Field(default="", description="What was measured, with its version.")
    source: str = Field(default="", description="Where the measurements come from, and their licence.")
    notes: tuple[str, ...] = ()

    def planning_s(self, rows: int, admitted: int = 0) -> float:
        """Return the core's own seconds until it hands over a step of so many requests, of which `admitted` take a row in it."""
        seconds = self.core_s + self.core_per_row_s * rows
        return seconds + self.admission_s + self.per_admitted_s * admitted if admitted else seconds

    def delivering_s(self, rows: int) -> float:
        """Return the seconds from the end of such a step until its tokens are delivered."""
        return self.results_s + self.results_per_row_s * rows

    def make(self) -> StepTimeModel:
        """Raises `ConfigError` if `step_time` describes no model."""
        return self._model(self.step_time)

    @property
    def rule(self) -> LaunchRule:
        return LaunchRule(self.recorded_tokens, self.sampling_share, self.after_launch_s, self.copying_share, self.setup_s)

    def make_launch(self) -> StepTimeModel | None:
        """Return the model of the time of submitting a step in which requests take rows. Raises `ConfigError` if `launch` describes no model."""
        return None if self.launch is None else self._model(self.launch)

    def launching_s(self, launch: StepTimeModel | None, shape: StepShape, joins: bool) -> float:
        """The time that handing such a step over takes, by the model that `make_launch` made; `joins`: a request takes a row in it."""
        if launch is None:
            return 0.0
        seconds = launch.seconds(shape)
        return seconds if joins or not shape.prefill_rows else max(0.0, seconds - self.joining_s)

    def _model(self, description: Mapping[str, Any]) -> StepTimeModel:
        values = dict(description)
        kind = values.get("kind")
        factory = BUILT_IN.get(kind) if isinstance(kind, str) else None
        if factory is None:
            factory = _imported(kind, self.name)
            values.pop("kind")
        try:
            model: StepTimeModel = factory(**values)  # type: ignore[assignment]
        except (ValidationError, TypeError) as error:
            raise ConfigError(f"step times {self.name!r}: {_first_problem(error, factory)}") from None
        return model

    def as_step_times(self) -> StepTimes:
        """Return the profile's description for a run's record."""
        host = {name: getattr(self, name) for name in ("core_s", "core_per_row_s", "admission_s", "per_admitted_s")}
        return StepTimes(self.name, self.error, self.judged_on, {**self.step_time, **host})

    @classmethod
    def load(cls, source: str | Mapping[str, Any]) -> StepTimeProfile:
        """From a file that ends in .json, the name of one that the lab ships, a profile as a mapping, or the mapping of a model alone.

        Raises `ConfigError` with the file, or the names that there are.
        """
        if isinstance(source, Mapping):
            values, origin = ({"name": str(source.get("kind", "?")), "step_time": dict(source)} if "kind" in source else dict(source)), "step_time"
        else:
            values, origin = _read(source), source
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{origin}: {_first_problem(error, cls)}") from None

    def save(self, path: str | Path) -> None:
        write_whole(path, self.model_dump_json(indent=1) + "\n")


def shipped_profiles() -> list[str]:
    """Names that `StepTimeProfile.load` knows."""
    return sorted(entry.name.removesuffix(".json") for entry in files("dovetail_lab").joinpath("profiles").iterdir() if entry.name.endswith(".json"))


def _read(source: str) -> Any:
    try:
        if source.endswith(".json"):
            return json.loads(Path(source).read_text(encoding="utf-8"))
        if source in shipped_profiles():
            return json.loads(files("dovetail_lab").joinpath("profiles", f"{source}.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(f"{source}: can't be read as step times: {getattr(error, 'strerror', None) or error}") from None
    raise ConfigError(f"step times {source!r}: neither a .json file nor one of those shipped: {', '.join(shipped_profiles())}")


def _imported(kind: Any, name: str) -> type[BaseModel]:
    """Somebody else's model, by "package.module:Class"."""
    if isinstance(kind, str) and kind.count(":") == 1:
        module, _, attribute = kind.partition(":")
        try:
            found: type[BaseModel] = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"step times {name!r}: kind {kind!r} can't be imported: {error}") from None
        return found
    raise ConfigError(f'step times {name!r}: kind must be one of {", ".join(BUILT_IN)}, or "package.module:Class", got {kind!r}')


def _first_problem(error: Exception, model: type[BaseModel]) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key" + (f"; there are {', '.join(model.model_fields)}" if len(first["loc"]) == 1 else "")
    return f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {message}"
