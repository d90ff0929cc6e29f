"""The command `dovetail cluster`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dovetail.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Cluster = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME|cluster.yaml]",
        help="The cluster's name, or its file. None: the only one that is up.",
    ),
]
POLL_S = 0.2


@app.callback()
def cluster() -> None:
    """Several servers of one model behind a router, kept alive."""


@app.command()
def up(
    file: Annotated[
        str,
        typer.Argument(
            metavar="cluster.yaml",
            help="The cluster: `engine`, `replicas`, `router` and what docs/serving/replicas.md "
            "lists.",
        ),
    ],
) -> None:
    """Start replicas and their router, and keep them running until `dovetail cluster down`, SIGTERM
    or Ctrl-C.

    Requests under way are finished first. A second signal ends everything at once.
    """
    from dovetail_cluster.running import run_cluster
    from dovetail_cluster.settings import load_cluster

    raise typer.Exit(run_cluster(load_cluster(file)))


@app.command()
def status(
    name: Cluster = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Show the state of a cluster's replicas. The exit code is 0 while enough of them serve."""
    found = _send(name, "status")
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)
    raise typer.Exit(0 if _serves(found) else 1)


@app.command()
def restart(
    name: Cluster = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until all are replaced.")
    ] = True,
) -> None:
    """Replace all replicas one by one while the others serve."""
    found = _send(name, "restart")
    while wait and (found["rolling"] or not _serves(found)):
        time.sleep(POLL_S)
        found = _send(name, "status")
    _print(found)


@app.command()
def down(
    name: Cluster = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until all have ended.")
    ] = True,
) -> None:
    """Drain all replicas, and end the cluster."""
    from dovetail_cluster.control import names_up

    which = _name(name)
    _send(which, "down")
    while wait and which in names_up():
        time.sleep(POLL_S)


def _send(name: str | None, what: str) -> dict[str, Any]:
    from dovetail_cluster.control import tell

    return tell(_name(name), what)


def _serves(found: dict[str, Any]) -> bool:
    """Return True if enough replicas serve behind a router that answers."""
    serving = sum(replica["state"] == "serving" for replica in found["replicas"])
    return bool(found["router"]["answers"]) and serving >= found["target"]


def _name(given: str | None) -> str:
    """Return the cluster's name. Raises `ConfigError` if it is ambiguous."""
    if given is not None and Path(given).suffix in (".yaml", ".yml"):
        from dovetail_cluster.settings import load_cluster

        return load_cluster(given).name
    if given is not None:
        return given
    from dovetail_cluster.control import NotUp, names_up

    up = names_up()
    if not up:
        raise NotUp("no cluster is up")
    if len(up) > 1:
        raise ConfigError(f"several clusters are up: name one of {', '.join(up)}")
    return up[0]


def _print(found: dict[str, Any]) -> None:
    router = found["router"]
    typer.echo(
        f"router   {router['url']}  {'answers' if router['answers'] else 'does not answer'}, its "
        f"metrics: {router['metrics']}"
    )
    typer.echo(
        f"replicas {found['target']} "
        f"wanted{', rolling restart under way' if found['rolling'] else ''}; {found['deaths']} "
        f"have died so far"
    )
    for replica in found["replicas"]:
        where = replica["url"] or ""
        typer.echo(
            f"  {replica['name']:<12} {replica['state']:<9} {where:<28} {replica['running']} "
            f"running, {replica['waiting']} waiting"
        )
    if found["last_death"]:
        typer.echo(f"last death: {found['last_death']}")
