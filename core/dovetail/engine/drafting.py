"""`Drafting`: decides whether steps overlap, or check drafts, for which they await all results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from dovetail.engine.flight import InFlightStep
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.stats import EngineStats
from dovetail.engine.step import PlannedStep
from dovetail.engine.step_times import StepTimeFit


class Drafting(ABC):
    """The strategy of one engine."""

    def __init__(self, fit: StepTimeFit, max_in_flight: int) -> None:
        """`fit`: of all finished steps. `max_in_flight`: steps, without drafts."""
        self.fit = fit
        self.max_in_flight = max_in_flight

    @abstractmethod
    def may_overlap(self, flights: Sequence[InFlightStep]) -> bool:
        """Return True if a step may be submitted before the results of `flights`, at least one."""

    @abstractmethod
    def drafts(self, step: PlannedStep) -> Mapping[LiveRequest, Sequence[int]]:
        """Return the drafts that a planned step checks, with blocks for all of them.

        -1: the executor proposes it. Nothing is in flight.
        """

    def submitted(self, running: Sequence[LiveRequest], host_s: float | None) -> None:
        """A step was submitted.

        `host_s`: the host's time since it had the results of the step before, without sleep; None:
        the engine was idle.
        """

    def collected(self, flight: InFlightStep) -> None:
        """The results of a step are in, and not delivered yet."""

    def settled(self, flight: InFlightStep, stats: EngineStats) -> None:
        """The results of a step are part of the requests' outputs. Add to `stats`."""

    def ended(self, request: LiveRequest) -> None:
        """`request`, which had arrived, has ended."""

    def stop(self) -> None:
        """Nothing is called any more."""


class NoDrafts(Drafting):
    """Steps overlap as far as the executor allows, and check no drafts."""

    def may_overlap(self, flights: Sequence[InFlightStep]) -> bool:
        return True

    def drafts(self, step: PlannedStep) -> Mapping[LiveRequest, Sequence[int]]:
        return {}
