"""Console script. Imports nothing before it can handle Ctrl-C."""

from __future__ import annotations

import sys
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the `dovetail` command on `sys.argv`, and exit."""
    try:
        from dovetail.cli.app import app
        from dovetail.cli.streams import guard_output

        guard_output()
        app(prog_name="dovetail")
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
