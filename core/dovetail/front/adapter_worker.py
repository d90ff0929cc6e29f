"""The process in which adapters are read: `adapters` starts it, and asks it through standard input
and output, a line of JSON each.

The files of an adapter are untrusted, and much of what reads them holds the interpreter's lock. A
process doesn't hold up the engine, and the system bounds its processor time and memory. It also
removes the folder of copies when the engine has gone without doing so, however that ended.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, BinaryIO

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])  # the parent's
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would reserve memory

from dovetail.api.executor import AdapterCapacity
from dovetail.errors import RequestError
from dovetail.front.lora_files import AdapterFiles, read_adapter
from dovetail.front.worker_processes import OUT_OF_MEMORY, bound_process


def _serve(requests: BinaryIO, answers: BinaryIO) -> bool:
    """Answer until the parent has ended. Return False if the memory ran out: the process can't be
    relied on after that."""
    for line in requests:
        try:
            answer = json.dumps(_answer(line)).encode()
        except MemoryError:
            answers.write(OUT_OF_MEMORY)
            return False
        answers.write(answer + b"\n")
        answers.flush()
    return True


def _answer(line: bytes) -> dict[str, Any] | list[Any]:
    """Read an adapter, and write it as executors read it; return its digest, or why it is refused.
    `null` only asks whether this process is there."""
    request = json.loads(line)
    if request is None:
        return []
    bound_process(request["memory_bytes"], request["cpu_s"])
    files = AdapterFiles(Path(request["config"]), Path(request["weights"]), ())
    modules = {
        name: (size_in, size_out) for name, (size_in, size_out) in request["modules"].items()
    }
    try:
        content = read_adapter(
            files, AdapterCapacity(request["slots"], request["max_rank"], modules)
        )
        content.write(Path(request["target"]))
    except RequestError as error:
        return {"refused": str(error)}
    except OSError as error:
        return {"refused": f"its copy can't be written: {error.strerror or error}"}
    return {"digest": content.digest}


if __name__ == "__main__" and _serve(sys.stdin.buffer, sys.stdout.buffer):
    shutil.rmtree(sys.argv[2], ignore_errors=True)
