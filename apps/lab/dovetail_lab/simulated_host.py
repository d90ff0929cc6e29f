"""Time that the host takes for a step of the executor `simulated`: the core, which plans and
submits it, and the front end."""

from __future__ import annotations

from collections.abc import Iterator

from dovetail_lab.host_times import HOSTS, FrontEnd
from dovetail_lab.roofline import RooflineStepTime
from dovetail_lab.simulated_device import SimulatedDevice
from dovetail_lab.simulated_options import SimulatedOptions
from dovetail_lab.step_profile import StepTimeProfile, chance
from dovetail_lab.step_time import StepShape

# of random numbers
CORE_STREAM = 1
LAUNCH_STREAM = 2


class SimulatedHost:
    """The host's times of one engine."""

    def __init__(self, options: SimulatedOptions, profile: StepTimeProfile, seed: int) -> None:
        """Raises `ConfigError` for an unknown engine, or if the profile's `launch` is invalid."""
        times = options.host()
        self.front_end = FrontEnd() if times is None else times.front_end
        self._default_plans_late = times is None or times.plans_late
        self._options = options
        self._profile = profile
        self._seed = seed
        self._launch = profile.make_launch()
        self._rule = profile.rule

    @property
    def plans_late(self) -> bool:
        """Whether the core plans as late as the device allows."""
        given = self._options.plans_late
        return self._default_plans_late if given is None else given

    @property
    def polls(self) -> bool:
        """Whether the core's submissions take time, so that it sees a step's end on polling."""
        return self._launch is not None

    def submitting(self, step: int, shape: StepShape, admitted: int) -> tuple[float, float]:
        """Return the core's seconds to plan a step, and to submit it. `admitted`: number of
        requests that take a row in it."""
        profile = self._profile
        regime = self._rule.regime(shape)
        core_s = profile.planning_s(shape.rows, admitted)
        if profile.core_spread is not None:
            core_s *= profile.core_spread.drawn(regime, chance(self._seed, step, CORE_STREAM))
        launch_s = profile.launching_s(self._launch, shape, joins=admitted > 0)
        if profile.launch_spread is not None:
            launch_s *= profile.launch_spread.drawn(regime, chance(self._seed, step, LAUNCH_STREAM))
        return core_s, launch_s

    def occupied_s(self, shape: StepShape, seconds: float, late_s: float, launch_s: float) -> float:
        """Return how long a step with `seconds` of computation occupies the device, if its launch
        took `launch_s` and ended `late_s` after the device was free (negative: before)."""
        if self._launch is None:
            return seconds
        return self._rule.occupied_s(shape, seconds, late_s, launch_s)

    def notes(self, device: SimulatedDevice) -> Iterator[str]:
        """Yield a note if a roofline's steps take the device less than they take a host, which it
        doesn't include."""
        is_roofline = isinstance(device.model, RooflineStepTime)
        if not is_roofline or not device.steps or self._launch is not None:
            return
        if self._profile.core_s or self._profile.core_per_row_s:
            return
        device_s = device.seconds / device.steps
        rows = round(device.rows / device.steps)
        hosts = {name: host.core_seconds(rows) for name, host in HOSTS.items()}
        if longer := [f"{name} {1e3 * s:.2f} ms" for name, s in hosts.items() if s > device_s]:
            yield (
                f"a step takes the device {1e3 * device_s:.2f} ms on average, less than the host, "
                f"whose time isn't included: {', '.join(longer)}: set executor.engine"
            )
