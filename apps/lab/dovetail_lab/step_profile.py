"""Profiles: a step-time model, the host's times, and a description of the measured engine. A
profile is a .json file, the name of one shipped with the lab, or a mapping in `engine.yaml`; the
simulated executor reads it, and calibration writes it."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from dovetail.errors import ConfigError
from dovetail_lab.adapters import AdapterCosts
from dovetail_lab.cache_layout import MeasuredGroup
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
    ascending,
)
from dovetail_lab.writing import write_whole

# fine where the tails are
LEVELS = (
    0.0,
    *(part / 20 for part in range(1, 20)),
    0.97,
    0.98,
    0.99,
    0.995,
    0.998,
    0.999,
    1.0,
)
_MASK = (1 << 64) - 1

BUILT_IN: Mapping[str, type[BaseModel]] = {
    "linear": LinearStepTime,
    "piecewise": PiecewiseStepTime,
    "regimes": RegimeStepTime,
    "table": TableStepTime,
    "roofline": RooflineStepTime,
}


class Spread(Described):
    """Distribution of measured over fitted step times, by regime: the mean between each two
    neighbors of `LEVELS`. None: always 1."""

    decode: tuple[Seconds, ...] = ()
    recorded: tuple[Seconds, ...] = ()
    launched: tuple[Seconds, ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Spread:
        for regime in Regime:
            if len(self.of(regime)) not in (0, len(LEVELS) - 1):
                raise ValueError(
                    f"{regime.value} must have {len(LEVELS) - 1} entries, or none, got "
                    f"{len(self.of(regime))}"
                )
        return self

    def of(self, regime: Regime) -> tuple[float, ...]:
        ratios: tuple[float, ...] = getattr(self, regime.value)
        return ratios

    def drawn(self, regime: Regime, share: float) -> float:
        """Return the distribution's value at `share`, from 0 to less than 1."""
        ratios = self.of(regime)
        return ratios[bisect_right(LEVELS, share) - 1] if ratios else 1.0


def chance(seed: int, step: int, stream: int) -> float:
    """Return a pseudorandom number from 0 to less than 1, computed only from integers, so that it
    is the same in every run and on every machine. Mixes like SplitMix64 (Steele, Lea and Flood,
    Fast Splittable Pseudorandom Number Generators, OOPSLA '14)."""
    mixed = 0
    for part in (seed, stream, step):
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return (mixed >> 11) * 2.0**-53


class StepTimeProfile(Described):
    """A step-time model with its provenance: machine, measurements, error. `dovetail lab calibrate`
    writes it as a file."""

    dovetail_step_times: Literal[1] = 1
    name: str = Field(description="Display name.")
    step_time: dict[str, Any] = Field(
        description='The model: its kind ("linear", "piecewise", "regimes", "table", "roofline" or '
        '"package.module:Class") and its numbers.'
    )
    core_s: Seconds = Field(
        default=0.0, description="The core's time before a step: planning, building the batch."
    )
    core_per_row_s: Seconds = Field(
        default=0.0, description="Additional core time per request in the step."
    )
    admission_s: Seconds = Field(
        default=0.0, description="Additional core time if any request takes a row in the step."
    )
    per_admitted_s: Seconds = Field(
        default=0.0, description="Additional core time per request that takes a row."
    )
    launch: dict[str, Any] | None = Field(
        default=None,
        description="The core's time to submit a step: a model like `step_time`. Unset: 0.",
    )
    joining_s: Seconds = Field(
        default=0.0,
        description="Part of `launch` in steps with prefills that is saved if no request takes a "
        "row.",
    )
    launch_spread: Spread | None = Field(
        default=None, description="Variation of `launch` between steps. Unset: none."
    )
    core_spread: Spread | None = Field(
        default=None, description="Variation of the core's time before a step. Unset: none."
    )
    after_launch_s: Seconds = Field(
        default=0.0,
        description="Minimum time after its launch of a step computed during the launch.",
    )
    recorded_tokens: int = Field(
        default=0,
        ge=0,
        description="Steps with prefills of up to this many tokens are one graph, which starts "
        "after its launch; others run during it.",
    )
    sampling_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the launch of such a step after its graph has started: sampling.",
    )
    copying_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the launch of a decode step after its graph has started, such as "
        "copying results.",
    )
    setup_s: Seconds = Field(
        default=0.0,
        description="Device time before the graph of a recorded step with prefills, unless the "
        "graph is launched late anyway.",
    )
    request_s: Seconds = Field(
        default=0.0, description="The core's time to accept a request, between two steps."
    )
    results_s: Seconds = Field(
        default=0.0, description="Time from a step's end until its tokens are delivered."
    )
    results_per_row_s: Seconds = Field(
        default=0.0, description="Additional delivery time per request in the step."
    )
    image_s: Seconds = Field(
        default=0.013, description="Time of a step for each image that it encodes."
    )
    image_row_s: Seconds = Field(
        default=0.02 / 1024,
        description="Additional time for each row of these images. The defaults of both are "
        "measured: Qwen3-VL-8B's encoder on an H200 takes 0.033 s for 1,024 rows, 0.020 s of them "
        "on the device.",
    )
    pooled_s: Seconds = Field(
        default=0.0, description="Time of a step for each prompt that it pools."
    )
    adapter_load_s: Seconds = Field(
        default=0.001, description="Time of a step for each LoRA adapter that it loads to a slot."
    )
    adapter_step_s: Seconds = Field(
        default=0.0013,
        description="Additional time of a step in which a request has an adapter. The default is "
        "measured: eight adapters of rank 16 of Qwen3-0.6B on an H200.",
    )
    adapter_token_s: Seconds = Field(
        default=0.0, description="Additional time for each token of such requests."
    )
    error: float | None = Field(
        default=None,
        ge=0,
        description="Mean of |predicted - measured| / measured over the evaluated steps.",
    )
    judged_on: str = Field(default="", description="The evaluated steps: which, how many.")
    kv_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens in the KV pool of the measured engine: its pages times the tokens of "
        "its smallest block.",
    )
    cache_groups: tuple[MeasuredGroup, ...] = Field(
        default=(),
        description="Its layers by window, full attention first. Unset: all have full attention.",
    )
    line_costs: Annotated[tuple[tuple[int, Seconds], ...], AfterValidator(ascending)] = Field(
        default=(),
        description="(lines, device seconds) of decode steps with short contexts, as the measured "
        "engine saw them when it started with speculation; "
        "a line is a token that a step samples. Unset: as `step_time` has them.",
    )
    draft_costs: Annotated[tuple[tuple[int, float], ...], AfterValidator(ascending)] = Field(
        default=(),
        description="(rows, device seconds) of a draft of each of that many rows, as the measured "
        "engine saw them. Unset: drafts take no time.",
    )
    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        le=8,
        description="Maximum number of steps in flight in the measured engine; 1 without overlap. "
        "Unset: unknown.",
    )
    machine: str = ""
    model: str = ""
    engine: str = Field(default="", description="The measured engine, with its version.")
    source: str = Field(default="", description="Source of the measurements, and their license.")
    notes: tuple[str, ...] = ()

    @property
    def states_core(self) -> bool:
        """True if the core's times are known, if only to be part of the step times."""
        return bool({"core_s", "launch"} & self.model_fields_set)

    def planning_s(self, rows: int, admitted: int = 0) -> float:
        """Return the core's seconds before the submission of a step of `rows` requests, `admitted`
        of which take a row in it."""
        seconds = self.core_s + self.core_per_row_s * rows
        return seconds + self.admission_s + self.per_admitted_s * admitted if admitted else seconds

    def delivering_s(self, rows: int) -> float:
        """Return the seconds from the end of such a step until its tokens are delivered."""
        return self.results_s + self.results_per_row_s * rows

    def encoding_s(self, images: int, rows: int) -> float:
        """Return the seconds by which encoding these images prolongs a step."""
        return self.image_s * images + self.image_row_s * rows

    def adapter_costs(self, factor: float = 1.0) -> AdapterCosts:
        """Return what adapters cost, with all times multiplied by `factor`."""
        return AdapterCosts(
            load_s=factor * self.adapter_load_s,
            step_s=factor * self.adapter_step_s,
            token_s=factor * self.adapter_token_s,
        )

    def make(self) -> StepTimeModel:
        """Create the model. Raises `ConfigError` if `step_time` is invalid."""
        return self._model(self.step_time)

    @property
    def rule(self) -> LaunchRule:
        return LaunchRule(
            self.recorded_tokens,
            self.sampling_share,
            self.after_launch_s,
            self.copying_share,
            self.setup_s,
        )

    def make_launch(self) -> StepTimeModel | None:
        """Return the model of the time to submit a step in which requests take rows. Raises
        `ConfigError` if `launch` is invalid."""
        return None if self.launch is None else self._model(self.launch)

    def launching_s(self, launch: StepTimeModel | None, shape: StepShape, joins: bool) -> float:
        """Return the time to submit such a step, by the model of `make_launch`. `joins`: a request
        takes a row in it."""
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
            raise ConfigError(
                f"step times {self.name!r}: {_first_problem(error, factory)}"
            ) from None
        return model

    def as_step_times(self) -> StepTimes:
        """Return the profile's description for a run's record."""
        host = {
            name: getattr(self, name)
            for name in ("core_s", "core_per_row_s", "admission_s", "per_admitted_s")
        }
        return StepTimes(self.name, self.error, self.judged_on, {**self.step_time, **host})

    @classmethod
    def load(cls, source: str | Mapping[str, Any]) -> StepTimeProfile:
        """Load from a .json file, the name of a profile shipped with the lab, a profile as a
        mapping, or a mapping with only a model.

        Raises `ConfigError` with the file, or the valid names.
        """
        if isinstance(source, Mapping):
            values = (
                {"name": str(source.get("kind", "?")), "step_time": dict(source)}
                if "kind" in source
                else dict(source)
            )
            origin = "step_time"
        else:
            values = _read(source)
            origin = source
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{origin}: {_first_problem(error, cls)}") from None

    def save(self, path: str | Path) -> None:
        write_whole(path, self.model_dump_json(indent=1) + "\n")


def shipped_profiles() -> list[str]:
    """Return the names that `StepTimeProfile.load` accepts."""
    return sorted(
        entry.name.removesuffix(".json")
        for entry in files("dovetail_lab").joinpath("profiles").iterdir()
        if entry.name.endswith(".json")
    )


def _read(source: str) -> Any:
    try:
        if source.endswith(".json"):
            return json.loads(Path(source).read_text(encoding="utf-8"))
        if source in shipped_profiles():
            return json.loads(
                files("dovetail_lab")
                .joinpath("profiles", f"{source}.json")
                .read_text(encoding="utf-8")
            )
    except (OSError, UnicodeError, ValueError) as error:
        raise ConfigError(
            f"{source}: can't be read as step times: {getattr(error, 'strerror', None) or error}"
        ) from None
    raise ConfigError(
        f"step times {source!r}: neither a .json file nor a shipped profile: "
        f"{', '.join(shipped_profiles())}"
    )


def _imported(kind: Any, name: str) -> type[BaseModel]:
    """Import a third-party model by "package.module:Class"."""
    if isinstance(kind, str) and kind.count(":") == 1:
        module, _, attribute = kind.partition(":")
        try:
            found: type[BaseModel] = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"step times {name!r}: kind {kind!r} can't be imported: {error}"
            ) from None
        return found
    raise ConfigError(
        f"step times {name!r}: kind must be one of {', '.join(BUILT_IN)}, or "
        f'"package.module:Class", got {kind!r}'
    )


def _first_problem(error: Exception, model: type[BaseModel]) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key" + (
            f"; there are {', '.join(model.model_fields)}" if len(first["loc"]) == 1 else ""
        )
    return f"{'.'.join(map(str, first['loc'])) or 'all of it'}: {message}"
