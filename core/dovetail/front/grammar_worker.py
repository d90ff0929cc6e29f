"""The process in which grammars are tried: `grammar_trials` starts it, and asks it through standard
input and output, a line of JSON each.

It makes the grammar backend once, and compiles nothing itself: a fork of it does, which is ended
when it is out of time or memory, or crashes. The next fork takes milliseconds, where making the
backend takes a second for a large vocabulary.
"""

from __future__ import annotations

import base64
import faulthandler
import gc
import json
import os
import pickle
import socket
import sys
import time
from typing import Any, BinaryIO, NoReturn

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])  # the parent's
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # its threads would not survive a fork

from dovetail.api.grammar import GrammarBackend, GrammarSpec
from dovetail.api.process_watch import die_with
from dovetail.errors import RequestError, describe
from dovetail.front.worker_processes import OUT_OF_MEMORY, bound_process, own_memory, why_ended


class _Fork:
    """The fork that compiles. It is replaced when it ends."""

    def __init__(self, backend: GrammarBackend, memory_bytes: int) -> None:
        self._backend = backend
        self._memory_bytes = memory_bytes
        self._start()

    def _start(self) -> None:
        parent = os.getpid()
        self._socket, its_socket = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _compile_for(parent, its_socket, self._backend, self._memory_bytes)
        its_socket.close()

    def ask(self, request: dict[str, Any]) -> dict[str, str]:
        """Return `{}` if the spec compiles, otherwise why it doesn't: `refused` or `failed` with a
        text, or `ended` with the reason of `WorkerEndedError`."""
        begun = time.monotonic()
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        with self._socket.makefile("rb") as answers:
            line = answers.readline()
        if line.endswith(b"\n") and line != OUT_OF_MEMORY:
            answer: dict[str, str] = json.loads(line)
            return answer
        self._socket.close()
        _, status = os.waitpid(self._pid, 0)
        self._start()
        late = time.monotonic() - begun >= request["seconds"]
        return {"ended": why_ended(line, os.waitstatus_to_exitcode(status), late=late)}


def _compile_for(
    parent: int, requests: socket.socket, backend: GrammarBackend, memory_bytes: int
) -> NoReturn:
    """Answer the requests of the process that forked this one, and end."""
    die_with(parent)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (
        0,
        1,
    ):  # those of the parent, which end with it, and which no library may write to
        os.dup2(nowhere, number)
    bound_process(memory_bytes + own_memory().address_bytes)
    for line in requests.makefile("rb"):
        request = json.loads(line)
        # By a thread of C: also amidst a single call, and with the parent gone.
        faulthandler.dump_traceback_later(request["seconds"], exit=True)
        try:
            answer = json.dumps(_answer(backend, request)).encode() + b"\n"
        except MemoryError:
            requests.sendall(OUT_OF_MEMORY)
            break
        faulthandler.cancel_dump_traceback_later()
        requests.sendall(answer)
    os._exit(0)


def _answer(backend: GrammarBackend, request: dict[str, Any]) -> dict[str, str]:
    try:
        backend.compile(GrammarSpec(request["kind"], request["text"]))
    except RequestError as error:
        return {"refused": str(error)}
    except MemoryError:
        raise
    except BaseException as error:  # a panic of a native library, too
        return {"failed": describe(error)}
    return {}


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the parent has ended. `null` only asks whether this process is there; the next
    line describes the backend."""
    fork: _Fork | None = None
    for line in requests:
        request = json.loads(line)
        answer: Any = []
        if fork is not None:
            answer = fork.ask(request)
        elif request is not None:
            part, context = pickle.loads(base64.b64decode(request["backend"]))
            backend = part.make(context)
            gc.freeze()  # so that a fork shares its memory
            fork = _Fork(backend, request["memory_bytes"])
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
