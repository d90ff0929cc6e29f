"""Beyond one engine: replicas behind a router, and batches over a cluster of Ray. Ray is the extra `ray`, the router the extra `router`."""

from __future__ import annotations

from dovetail.api.component import CommandSpec, hookimpl


@hookimpl
def dovetail_commands() -> list[CommandSpec]:
    return [CommandSpec("cluster", "dovetail_cluster.command:app", "Several servers of one model behind a router, kept alive")]
