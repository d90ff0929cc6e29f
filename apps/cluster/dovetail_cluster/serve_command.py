"""The command line of a replica: `dovetail serve` with the options of a cluster file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from dovetail_cluster.settings import ClusterSettings
from dovetail_server.command import NULL, option_name
from dovetail_server.settings import API_KEYS_VARIABLE

QUIET = {"log_requests": False}  # health checks would fill the log


def serve_command(settings: ClusterSettings, host: str) -> list[str]:
    """Return the module and arguments of a replica at a free port of `host`."""
    command = ["dovetail", "serve"]
    if isinstance(settings.engine, str):
        command.append(settings.engine)
    else:
        keys = dict(settings.engine)
        command.append(str(keys.pop("model", "demo")))
        for key, value in keys.items():
            command += ["--set", f"{key}={json.dumps(value)}"]
    for name, value in {**QUIET, **settings.serve}.items():
        command += _option(name, value)
    return [*command, "--host", host, "--port", "0"]


def _option(name: str, value: Any) -> list[str]:
    option = option_name(name)
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    if isinstance(value, list | tuple):
        return [word for one in value for word in (option, str(one))]
    return [option, NULL if value is None else str(value)]


def keys_variable(keys: tuple[str, ...]) -> Mapping[str, str]:
    """Return the environment with a server's API keys: every user of the machine may read command lines."""
    return {**os.environ, API_KEYS_VARIABLE: ",".join(keys)}
