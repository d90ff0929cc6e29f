"""Arrival processes. Each is a renewal process of rate one, with time scaled to the wanted rate."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, model_validator

from dovetail_lab.calls import Value
from dovetail_lab.traces import TraceError

Times = NDArray[np.float64]

MOST_ARRIVALS = 10_000_000  # more is probably a mistake, and would fill the memory


class Arrivals(Value):
    """Arrival process. `units` are expected numbers of arrivals; `times_at` maps them to times.
    Rates are arrivals per second."""

    def gaps(self, rng: np.random.Generator, count: int) -> Times:
        """Return gaps between arrivals [count] with mean one; Poisson by default."""
        return rng.exponential(size=count)

    def times_at(self, units: Times) -> Times:
        """Return the times at which the expected number of arrivals reaches `units`."""
        raise NotImplementedError

    def times(self, rng: np.random.Generator, count: int | None, duration_s: float | None) -> Times:
        """Return the first `count` arrivals, those before `duration_s`, or those within both
        limits. At least one must be given.

        Rounded to microseconds, to hide the last bit of a machine's logarithm. Raises `TraceError`
        for more than `MOST_ARRIVALS`.
        """
        chunk = 4096 if count is None else count
        far_too_many = (
            count is None
            and duration_s is not None
            and self.times_at(np.array([2.0 * MOST_ARRIVALS]))[0] < duration_s
        )
        gaps = self.gaps(rng, chunk)
        times = self.times_at(np.cumsum(gaps))
        while count is None and duration_s is not None and times[-1] < duration_s:
            if far_too_many or len(gaps) > MOST_ARRIVALS:
                raise TraceError(
                    f"more than {MOST_ARRIVALS:,} would arrive in {duration_s:g} s, the limit of a "
                    f"workload"
                )
            gaps = np.concatenate([gaps, self.gaps(rng, len(gaps))])
            times = self.times_at(np.cumsum(gaps))
        times = np.round(times, 6)
        return times if duration_s is None else times[times < duration_s]


class Steady(Arrivals):
    """Constant rate."""

    rate: PositiveFloat

    def times_at(self, units: Times) -> Times:
        return units / self.rate


class Poisson(Steady):
    """Independent arrivals."""


class Gamma(Steady):
    """Gamma-distributed gaps: cv is their standard deviation divided by their mean; 1 is Poisson,
    more is burstier."""

    cv: PositiveFloat

    def gaps(self, rng: np.random.Generator, count: int) -> Times:
        shape = self.cv**-2
        return rng.gamma(shape, 1 / shape, size=count)


class Constant(Steady):
    """Equal gaps."""

    def gaps(self, rng: np.random.Generator, count: int) -> Times:
        return np.ones(count)


class OnOff(Arrivals):
    """Alternates between Poisson for `on` seconds and nothing for `off` seconds, starting with
    on."""

    rate: PositiveFloat
    on: PositiveFloat
    off: float = Field(ge=0)

    def times_at(self, units: Times) -> Times:
        busy = units / self.rate
        return busy + np.floor(busy / self.on) * self.off


class Ramp(Arrivals):
    """Poisson with a rate that changes linearly from `start` to `end` over `over` seconds, and then
    stays constant."""

    start: float = Field(ge=0)
    end: float = Field(ge=0)
    over: PositiveFloat

    @model_validator(mode="after")
    def _goes_on(self) -> Self:
        if self.end == 0:
            raise ValueError(
                "end must be above 0, or arrivals cease; end the workload by its duration instead"
            )
        return self

    def times_at(self, units: Times) -> Times:
        """During the ramp, start t + (end - start) t² / (2 over) arrivals are expected until t."""
        slope = (self.end - self.start) / self.over
        during = (self.start + self.end) / 2 * self.over
        inside = np.minimum(units, during)
        root = np.sqrt(np.maximum(0.0, self.start**2 + 2 * slope * inside))
        return 2 * inside / (self.start + root) + np.maximum(0.0, units - during) / self.end


class AtOnce(Arrivals):
    """All requests arrive at the beginning."""

    def times_at(self, units: Times) -> Times:
        return np.zeros_like(units)


ARRIVALS: dict[str, type[Arrivals]] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "constant": Constant,
    "onoff": OnOff,
    "ramp": Ramp,
    "at_once": AtOnce,
}
