"""`try_routes`: make the routes of plugins in a process of its own, before the engine starts.

`dovetail serve --route` calls it, so that a plugin that raises, exits or hangs is refused before
weights are read. The process is `python -m dovetail_server.route_trial SETTINGS SELECTION`.
The last line that it prints is JSON: the error, or null.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import NoReturn

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dovetail.errors import DovetailError, PluginError
from dovetail.serving import PluginSelection, Registry
from dovetail_server.live_page import FILES
from dovetail_server.plugin_routes import PluginRoutes
from dovetail_server.routes import all_routes
from dovetail_server.settings import ServerSettings

LIMIT_S = 60.0


def try_routes(settings: ServerSettings, selection: PluginSelection) -> None:
    """Make the routes that the settings name, of the plugins that `selection` admits. Raises
    `PluginError` that names the plugin, what failed and the line."""
    names = settings.model_dump_json(include={"routes", "page"})
    command = [sys.executable, "-P", "-m", __name__, names, selection.model_dump_json()]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _unfinished(settings, f"took longer than {LIMIT_S:g} s") from None
    try:
        error = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        what = f"ended their process with exit code {done.returncode}"
        raise _unfinished(settings, what) from None
    if error is not None:
        raise PluginError(error)


def _unfinished(settings: ServerSettings, what: str) -> PluginError:
    named = ", ".join(map(repr, settings.routes))
    return PluginError(
        f"making the routes {named} {what}; `dovetail plugins doctor` says which plugin's"
    )


def main(settings: str, selection: str) -> NoReturn:
    """Print the error of these routes, or null, and exit without waiting for a plugin's threads."""
    error = None
    try:
        _make(
            ServerSettings.model_validate_json(settings),
            Registry.discover(
                PluginSelection.model_validate_json(selection), enforce_require=False
            ),
        )
    except DovetailError as raised:
        error = str(raised)
    print(f"\n{json.dumps(error)}", flush=True)
    os._exit(0)


def _make(settings: ServerSettings, registry: Registry) -> None:
    paths = {route.path for route in all_routes(settings) if isinstance(route, Route)}
    taken = frozenset({*paths, "/metrics", *(FILES if settings.page else ())})
    for middleware in PluginRoutes.of(settings.routes, taken, registry).middleware:
        middleware.cls(_nothing, *middleware.args, **middleware.kwargs)


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands for the server's app, in middleware."""


if __name__ == "__main__":
    main(*sys.argv[1:])
