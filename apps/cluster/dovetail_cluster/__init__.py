"""Replicas behind a router, and batch jobs and Ray Serve on a Ray cluster. Needs the extras
`router` and `ray`, respectively."""

from __future__ import annotations

from dovetail.api.component import CommandSpec, hookimpl


@hookimpl
def dovetail_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            "cluster",
            "dovetail_cluster.command:app",
            "Several servers of one model behind a router, kept alive",
        )
    ]
