"""`python -m dovetail_cluster.bound_process PARENT COMMAND...`: become a command that is killed when its parent is gone, however that came.

Linux alone can do that. Elsewhere the command runs on when its parent was killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1


def start_bound(
    command: Sequence[str], *, environment: Mapping[str, str], stdout: int | IO[bytes], stderr: int | IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a Python module with its arguments, in a session of its own, bound to the calling thread's process. Call it in a thread that lives as
    long as the process: the kernel sends the signal when that thread ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "dovetail_cluster.bound_process", str(os.getpid()), sys.executable, "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=dict(environment),
        start_new_session=True,  # signals of the terminal come to the controller alone
    )


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os._exit(0)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
