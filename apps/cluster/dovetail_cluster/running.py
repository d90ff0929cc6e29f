"""`run_cluster`: the process of `dovetail cluster up`. Connects launcher, router and controller,
and handles signals and commands."""

from __future__ import annotations

import secrets
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import typer

from dovetail.api.process_watch import ProcessWatch
from dovetail.errors import DovetailError
from dovetail.serving import OutputError, discard
from dovetail_cluster.control import ControlSocket
from dovetail_cluster.controller import Controller
from dovetail_cluster.interfaces import Launcher
from dovetail_cluster.local_launcher import LocalLauncher
from dovetail_cluster.probes import Probes
from dovetail_cluster.settings import ClusterSettings
from dovetail_cluster.smg_router import SmgRouter

TICK_S = 0.1
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_cluster(settings: ClusterSettings) -> int:
    """Run a cluster until a signal or `dovetail cluster down`, and return the exit code. A second
    signal ends it at once.

    Raises `DovetailError` if it can't start.
    """
    signals: list[int] = []
    control = ControlSocket(settings.name)
    # as nohup ignores SIGHUP
    handled = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {
        number: signal.signal(number, lambda number, _: signals.append(number))
        for number in handled
    }
    launcher: Launcher | None = None
    router: SmgRouter | None = None
    try:
        clients = settings.server.api_keys
        # otherwise clients without a key would get in by the router's
        own = secrets.token_urlsafe(32) if clients else None
        router = SmgRouter(settings, clients, own)
        launcher = _launcher(settings, (*clients, own) if own else ())
        clock = ProcessWatch()
        controller = Controller(
            settings,
            launcher,
            router,
            Probes(own, clock=lambda: clock.now),
            clock=clock.turn,
            say=_say,
        )
        return _loop(controller, router, control, signals)
    finally:
        if launcher is not None:
            launcher.close()
        if router is not None:
            router.close()
        control.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _launcher(settings: ClusterSettings, api_keys: tuple[str, ...]) -> Launcher:
    if settings.place == "here":
        return LocalLauncher(settings, api_keys)
    from dovetail_cluster.ray_launcher import RayLauncher

    return RayLauncher(settings, api_keys)


def _loop(
    controller: Controller, router: SmgRouter, control: ControlSocket, signals: list[int]
) -> int:
    was_announced = False

    def answer(what: str) -> Mapping[str, Any]:
        if what == "restart":
            try:
                controller.roll()
            except DovetailError as error:
                return {"error": str(error)}
        elif what == "down":
            controller.end()
        elif what != "status":
            return {"error": f"unknown: {what}"}
        return _status(controller, router)

    while not controller.is_done:
        if signals:
            controller.end()
        if len(signals) > 1:
            return 128 + signals[-1]
        controller.tick()
        if controller.serves and not was_announced:
            was_announced = True
            announce(f"dovetail cluster serves at {router.url}")
        control.serve_once(TICK_S, answer)
    return 0


def _status(controller: Controller, router: SmgRouter) -> dict[str, Any]:
    """Return what `dovetail cluster status --json` prints."""
    return {
        "router": {
            "url": router.url,
            "answers": controller.router_answers,
            "pid": router.pid,
            "metrics": f"http://127.0.0.1:{router.metrics_port}/metrics",
        },
        "target": controller.target,
        "rolling": controller.is_rolling,
        "deaths": controller.deaths,
        "last_death": controller.last_death,
        "replicas": [
            {
                "name": member.name,
                "state": member.state.value,
                "url": member.url,
                "pid": getattr(member.replica, "pid", None),
                "waiting": member.vitals.waiting,
                "running": member.vitals.running,
            }
            for member in controller.members
        ],
    }


def announce(text: str) -> None:
    """Print a line; a closed standard output doesn't end the cluster."""
    try:
        print(text, flush=True)
    except (
        OSError,
        OutputError,
        typer.Exit,
    ):  # the last two: standard output as `guard_output` has it, which would end the command
        discard(sys.stdout)


def _say(text: str) -> None:
    with suppress(OSError):  # the log is closed
        print(f"dovetail cluster: {text}", file=sys.stderr, flush=True)
