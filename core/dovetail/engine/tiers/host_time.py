"""`HostTime`: bounds the frames that are enqueued per step, since the host plans no step
meanwhile."""

from __future__ import annotations

from dovetail.api.clock import Clock

SHARE = 0.025  # of a step's time, which saves may take, and restores
FIRST_S = 1e-4  # host time per frame until it is measured
WEIGHT = 0.1  # of the latest measurement


class HostTime:
    """The host time of enqueuing frames in one direction, measured on `clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._frame_s = FIRST_S  # running mean
        self._begun = 0.0

    def begin(self) -> None:
        """Begin to measure."""
        self._begun = self._clock.now()

    def end(self, frames: int) -> None:
        """Note that `frames` frames, at least one, were enqueued since `begin`."""
        seconds = (self._clock.now() - self._begun) / frames
        self._frame_s += WEIGHT * (seconds - self._frame_s)

    def frames(self, step_s: float) -> float:
        """Return the number of frames that may be enqueued in a step of `step_s` seconds, at least
        1."""
        return max(1.0, SHARE * step_s / max(self._frame_s, 1e-9))
