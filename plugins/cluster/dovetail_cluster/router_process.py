"""`python -m dovetail_cluster.router_process`: the router's own command line, with arguments from the environment: nobody else reads keys there."""

from __future__ import annotations

import json
import os
import sys

from dovetail_cluster.smg_router import ARGUMENTS


def main() -> None:
    from smg.cli import main as smg_main

    sys.argv = ["smg", *json.loads(os.environ.pop(ARGUMENTS))]
    smg_main()


if __name__ == "__main__":
    main()
