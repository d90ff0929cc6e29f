"""`Engine`: a report's description of an engine. Doesn't import matplotlib, so worker processes can
build it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail_lab.records import RunResult
from dovetail_lab.summary import conditions, source_of_times


@dataclass(frozen=True, slots=True)
class Engine:
    """Description of an engine on a page."""

    name: str
    settings: Mapping[str, Any]
    conditions: str
    times: str  # source and error of the step times
    notes: tuple[str, ...]

    @property
    def scheduler(self) -> str:
        return str(self.settings["scheduler"])

    @classmethod
    def of(cls, name: str, runs: Sequence[RunResult]) -> Engine:
        """Describe an engine by its runs, at least one: settings of the first, notes of all."""
        notes = tuple(dict.fromkeys(note for run in runs for note in run.notes))
        return cls(
            name, runs[0].settings, conditions(runs[0]), source_of_times(runs[0].step_times), notes
        )
