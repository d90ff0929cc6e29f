"""Errors that end a running job; the same command resumes it. Invalid settings are `ConfigError`s."""

from __future__ import annotations

from dovetail.cli.streams import OutputError
from dovetail.errors import EngineDeadError

GO_ON = "the same command goes on with the job"


class BatchEngineFailed(EngineDeadError):
    """An engine failed before the end of the job."""


class UnwritableOutput(OutputError):
    """The output folder became unwritable."""
