"""The process in which adapters are read: `adapters` starts it, and asks it through standard input and output, a line of JSON each.

The files of an adapter are untrusted, and much of what reads them holds the interpreter's lock. A process doesn't hold up the engine, and the system
bounds its processor time and memory. It also removes the folder of copies when the engine has gone without doing so, however that ended.
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
from dovetail.front.worker_processes import OUT_OF_MEMORY


def _bound(cpu_s: float, memory_bytes: int) -> None:
    """Limit this process from now on: exceeding the processor time kills it, and allocations beyond the memory raise `MemoryError`. Where the system
    has no such limits (Windows, and macOS, which doesn't enforce that of memory), only the engine's timeout applies."""
    try:
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        most_s = int(usage.ru_utime + usage.ru_stime + cpu_s) + 1
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError):
        pass


def _serve(requests: BinaryIO, answers: BinaryIO) -> bool:
    """Answer until the parent has ended. Return False if the memory ran out: the process can't be relied on after that."""
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
    """Read an adapter, and write it as executors read it; return its digest, or why it is refused. `null` only asks whether this process is there."""
    request = json.loads(line)
    if request is None:
        return []
    _bound(request["cpu_s"], request["memory_bytes"])
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
