"""The ways in which a job ends early although it was begun in order. The same command goes on with it. Bad settings are `ConfigError`s."""

from __future__ import annotations

from dovetail.cli.streams import OutputError
from dovetail.errors import EngineDeadError

GO_ON = "the same command goes on with the job"


class BatchEngineFailed(EngineDeadError):
    """The process of an engine has ended before the job."""


class UnwritableOutput(OutputError):
    """The output folder can't be written to any more."""
