"""Whole data sets through engines: `dovetail batch`. It needs no extra package but for Parquet,
which is the extra `batch`.

Two kinds of processes: the command's own reads rows and writes answers (`runner`), and one for each
engine computes (`engine_process`).
"""

from __future__ import annotations

from dovetail.api.component import CommandSpec, hookimpl


@hookimpl
def dovetail_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            "batch",
            "dovetail_batch.command:app",
            "Put a file of prompts through one engine or several, each row exactly once",
        )
    ]
