"""`Scaler`: the target number of replicas, from the number of waiting requests."""

from __future__ import annotations

from dovetail_cluster.settings import Replicas, Scale


class Scaler:
    """Changes the target by one at a time, after the queue has been too long, or empty, without interruption."""

    def __init__(self, bounds: Replicas, scale: Scale) -> None:
        self._bounds, self._scale = bounds, scale
        self.target = bounds.min
        self._long_since: float | None = None
        self._empty_since: float | None = None

    def note(self, now: float, serving: int, waiting: int) -> int:
        """Update the target from the number of serving replicas and of waiting requests at `now` seconds, and return it.

        While fewer replicas serve than targeted it stays: a new replica must first show its effect.
        """
        if serving < self.target:
            self._long_since = self._empty_since = None
            return self.target
        is_long = waiting > self._scale.queue_per_replica * serving
        self._long_since = (self._long_since if self._long_since is not None else now) if is_long else None
        self._empty_since = (self._empty_since if self._empty_since is not None else now) if waiting == 0 else None
        if self._long_since is not None and now - self._long_since >= self._scale.up_after_s and self.target < self._bounds.max:
            self.target, self._long_since = self.target + 1, None
        elif self._empty_since is not None and now - self._empty_since >= self._scale.down_after_s and self.target > self._bounds.min:
            self.target, self._empty_since = self.target - 1, now
        return self.target
