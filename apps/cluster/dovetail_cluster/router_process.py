"""`python -m dovetail_cluster.router_process`: the router, with the gate in a thread. Arguments
come from the environment, which keeps keys private; further ones of the router may be on the
command line."""

from __future__ import annotations

import json
import os
import sys
import threading

from dovetail_cluster.gate import serve_gate
from dovetail_cluster.smg_router import ARGUMENTS
from dovetail_server.settings import ServerSettings


def main() -> None:
    from smg.cli import main as smg_main

    arguments = json.loads(os.environ.pop(ARGUMENTS))
    gate = {
        **arguments["gate"],
        "settings": ServerSettings.model_validate(arguments["gate"]["settings"]),
    }
    threading.Thread(target=serve_gate, kwargs=gate, daemon=True).start()
    sys.argv = ["smg", *arguments["router"], *sys.argv[1:]]
    smg_main()


if __name__ == "__main__":
    main()
