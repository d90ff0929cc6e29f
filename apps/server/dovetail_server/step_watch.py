"""`StepWatch`: for how long an engine's step has made no progress, for timeouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.api.process_watch import PULSE, ProcessWatch

if TYPE_CHECKING:
    from dovetail_server.host import EngineHost


class StepWatch:
    """Measures the time since the last progress in the current turn of a host's loop, usually a
    step, excluding time during which the process was suspended.

    On a CPU each layer of a step is progress.
    """

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._clock = ProcessWatch()
        self._step: float | None = None  # its start, or its latest progress, as the host says
        self._since = 0.0  # the same, on the watch's clock

    def busy_s(self) -> float:
        """Return the seconds; 0 while the host waits. Call it several times a second, from one
        thread."""
        now = self._clock.turn()
        step = self._host.busy_since
        if step is not None:
            step = max(step, PULSE.last)
        if step != self._step:
            self._step = step
            self._since = now
        return 0.0 if step is None else now - self._since
