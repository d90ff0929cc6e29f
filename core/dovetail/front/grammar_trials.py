"""`GrammarTrials`: compiles specs on trial, in processes that can be ended.

For `grammars`. A spec is untrusted, and the libraries that compile it take time that is cubic in
its length for some, with no way to stop. A compiled grammar can't leave its process. So a spec is
compiled twice: what has passed a trial is known to take little time and memory, and not to
crash.
"""

from __future__ import annotations

import base64
import json
import pickle
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dovetail.api.grammar import GrammarContext, GrammarSpec
from dovetail.errors import DovetailError, RequestError
from dovetail.front.worker_processes import WorkerEndedError, WorkerProcess, WorkerProcesses

if TYPE_CHECKING:
    from dovetail.api.executor import ComponentRef

MEMORY_BYTES = 1 << 30  # address space that compiling a spec may take
_WORKER = Path(__file__).with_name("grammar_worker.py")
_MAKING_S = 60.0  # how long making the backend may take
_OVERTIME_S = 5.0  # the process ends a trial in time; if it doesn't for so long, it is ended


class TrialTimeoutError(Exception):
    """A spec takes longer to compile than it was given."""


class TrialEndedError(RequestError):
    """The process that compiled a spec has ended, which the state of the machine may also cause."""


class Trials(Protocol):
    """Interface through which `GrammarCompiler` compiles untrusted specs on trial. Thread safe."""

    def check(self, spec: GrammarSpec, seconds: float) -> None:
        """Compile a spec on trial. Raises `TrialTimeoutError` if that takes longer than `seconds`,
        `RequestError` if it doesn't compile or takes too much memory."""

    def prepare(self) -> None:
        """Start a process, so that the first spec doesn't wait for that."""

    def close(self) -> None:
        """End the processes."""


class GrammarTrials:
    """`Trials` of one backend. Its processes are started when they are needed."""

    def __init__(self, backend: ComponentRef, context: GrammarContext, most: int) -> None:
        """`most`: processes, of which each has a copy of the vocabulary."""
        self._processes = WorkerProcesses(most, partial(_start, backend, context))

    def check(self, spec: GrammarSpec, seconds: float) -> None:
        request = {"kind": spec.kind, "text": spec.text, "seconds": seconds}
        with self._processes.one() as process:
            try:
                answer = process.ask(json.dumps(request).encode(), seconds, _OVERTIME_S)
            except WorkerEndedError as ended:
                answer = {"ended": ended.reason}
        if "refused" in answer:
            raise RequestError(answer["refused"])
        if "failed" in answer:
            raise RequestError(f"the grammar backend failed: {answer['failed']}")
        match answer.get("ended"):
            case None:
                return
            case "time":
                raise TrialTimeoutError
            case "memory":
                raise TrialEndedError(f"it takes more than {MEMORY_BYTES >> 20} MiB to compile")
            case _:
                raise TrialEndedError("compiling it ended the process that did")

    def prepare(self) -> None:
        with self._processes.one():
            pass

    def close(self) -> None:
        self._processes.close()


def _start(backend: ComponentRef, context: GrammarContext) -> WorkerProcess:
    """Start a process, and have it make the backend. Raises `DovetailError` if it doesn't start."""
    process = WorkerProcess("tries grammars", _WORKER, plugins=True)
    pickled = base64.b64encode(pickle.dumps((backend, context))).decode()
    request = {"backend": pickled, "memory_bytes": MEMORY_BYTES}
    try:
        process.ask(json.dumps(request).encode(), _MAKING_S)
    except WorkerEndedError:
        raise DovetailError(f"{backend.name} can't be made in a process of its own") from None
    return process
