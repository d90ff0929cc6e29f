"""`python -m dovetail_cluster.bound_process PARENT COMMAND...`: executes a command that the kernel
kills when its parent ends.

On Linux only. Elsewhere the command outlives a parent that was killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from dovetail.api.process_watch import die_with


def start_bound(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdout: int | IO[bytes],
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python module with arguments in a new session, bound to the calling thread: the
    kernel kills it when that thread ends."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "dovetail_cluster.bound_process",
            str(os.getpid()),
            sys.executable,
            "-m",
            *command,
        ],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=dict(environment),
        start_new_session=True,  # the terminal's signals go to the controller only
    )


def main() -> None:
    die_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
