"""The effect of wrong step times on a comparison. Intervals cover the traffic; `Repeated` covers
the error of the step-time model: the comparison is run again with all steps shorter and longer by
that error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dovetail import EngineConfig
from dovetail.errors import ConfigError
from dovetail_lab.digits import per_cent
from dovetail_lab.planned_runs import simulated_options
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.verdict import Comparison, Line, signed_per_cent

# ratio of a mean's change to that of the steps, in logarithms, above which `Repeated.warnings`
# warns
NEAR_SATURATION = 5.0
FACTOR_KEY = "executor.step_time_factor"


@dataclass(frozen=True, slots=True)
class StepErrors:
    """The error of each engine's step times, as a share of a step's time; 0 if unknown. `source`:
    where the errors come from, in words."""

    of: Mapping[str, float]
    source: str

    @classmethod
    def find(cls, engines: Mapping[str, EngineConfig], given: float | None) -> StepErrors:
        """Return `given` for all engines, or the error that each engine's profile states. Raises
        `ConfigError` unless 0 <= given < 1."""
        if given is not None:
            if not 0 <= given < 1:
                raise ConfigError(
                    f"--step-time-error: expected a share of at least 0 and less than 1, such as "
                    f"0.04, got {given:g}"
                )
            return cls(dict.fromkeys(engines, given), "--step-time-error")
        profiles = {
            name: StepTimeProfile.load(simulated_options(config).step_time)
            for name, config in engines.items()
        }
        known = dict.fromkeys(profile.name for profile in profiles.values() if profile.error)
        return cls(
            {name: profile.error or 0.0 for name, profile in profiles.items()},
            f"the error of {', '.join(known)}",
        )

    def __bool__(self) -> bool:
        return any(self.of.values())

    @property
    def words(self) -> str:
        """Return the errors: "3.0 %", or by engine if they differ."""
        if len(set(self.of.values())) == 1:
            return per_cent(next(iter(self.of.values())))
        return ", ".join(f"{per_cent(error)} ({name})" for name, error in self.of.items())

    def scaled(
        self, engines: Mapping[str, EngineConfig], *, longer: bool
    ) -> dict[str, EngineConfig]:
        """Return the engines with all steps longer by their error, or shorter by the same
        factor."""
        made = {}
        for name, config in engines.items():
            factor = 1 + self.of[name]
            own = simulated_options(config).step_time_factor
            made[name] = EngineConfig.load_with(
                config, {FACTOR_KEY: own * factor if longer else own / factor}
            )
        return made


@dataclass(frozen=True, slots=True)
class Repeated:
    """A comparison, and the same with all steps shorter and longer."""

    errors: StepErrors
    nominal: Comparison
    shorter: Comparison
    longer: Comparison

    @property
    def says(self) -> str:
        return (
            f"Repeated with every step {self.errors.words} longer, and shorter by the same "
            f"factor ({self.errors.source})"
        )

    def survives(self, index: int, line: Line) -> bool:
        """Return True if a line of `versus[index]` has the same outcome at all three step times."""
        return all(other.better == line.better for _, other in self.elsewhere(index, line))

    def cells(self, index: int, line: Line) -> list[str]:
        """Return the line's change with shorter and with longer steps, as texts."""
        return [signed_per_cent(other.change.relative) for _, other in self.elsewhere(index, line)]

    def verdict(self, index: int) -> str:
        """Return which findings of `versus[index]` survive, in words; "" if nothing was
        compared."""
        versus = self.nominal.versus[index]
        if not versus.compared:
            return ""
        kept = []
        lost = []
        gained: dict[str, list[str]] = {}  # a direction, and the steps with which it is measurable
        for line in versus.headlines():
            others = [
                (steps, other)
                for steps, other in self.elsewhere(index, line)
                if other.better != line.better
            ]
            if line.measurable and not others:
                kept.append(line.direction)
            elif line.measurable:
                outcomes: dict[str, list[str]] = {}
                for steps, other in others:
                    outcomes.setdefault(other.outcome, []).append(steps)
                lost.append(f"{line.direction} ({_with_steps(outcomes)})")
            else:
                for steps, other in others:
                    gained.setdefault(other.direction, []).append(steps)
        found = {
            "survives": ", ".join(kept),
            "doesn't survive": ", ".join(lost),
            "measurable only then": _with_steps(gained),
        }
        parts = [f"{what}: {says}" for what, says in found.items() if says]
        return (
            f"{versus.other} against {versus.base}: "
            f"{'; '.join(parts) or 'no measurable difference then either'}"
        )

    @property
    def warnings(self) -> Iterator[str]:
        """Yield a warning for each engine near saturation: its mean TTFT or E2E changes by far more
        than its steps do. Queues grow without bound there, so small errors of step times
        dominate."""
        names = [
            *dict.fromkeys(
                [self.nominal.versus[0].base, *(versus.other for versus in self.nominal.versus)]
            )
        ]
        for name in names:
            for metric, label in (("ttft", "TTFT"), ("e2e", "E2E")):
                before, *after = (
                    _mean(one, name, metric) for one in (self.nominal, self.shorter, self.longer)
                )
                if not all(math.isfinite(value) and value > 0 for value in (before, *after)):
                    continue
                moves = [math.log(value / before) for value in after]
                if max(map(abs, moves)) > NEAR_SATURATION * math.log1p(self.errors.of[name]) > 0:
                    low, high = (signed_per_cent(math.expm1(move)) for move in moves)
                    yield (
                        f"{name} is near saturation: with every step "
                        f"{per_cent(self.errors.of[name])} shorter or longer its mean {label} "
                        f"changes by "
                        f"{low} or {high}, so its latencies at this load are uncertain: compare at "
                        f"a lower rate too (--scale-rate)"
                    )
                    break

    def elsewhere(self, index: int, line: Line) -> list[tuple[str, Line]]:
        """Return the same line of the comparisons with shorter and with longer steps."""
        return [
            ("shorter", self.shorter.versus[index].line(line.metric, line.statistic)),
            ("longer", self.longer.versus[index].line(line.metric, line.statistic)),
        ]


def _mean(comparison: Comparison, name: str, metric: str) -> float:
    """Return an engine's mean of a latency, in seconds."""
    for versus in comparison.versus:
        change = versus.line(metric, "mean").change
        if name == versus.base:
            return change.a
        if name == versus.other:
            return change.b
    raise KeyError(name)


def _with_steps(found: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{what} with {' and '.join(steps)} steps" for what, steps in found.items())
