"""Processes that follow answers and fill their masks, so that neither needs the engine's lock.

The engine's process tells each process its answers' tokens, and goes on while they accept them and
fill the next masks, in memory that all share. An answer stays in its process. If a process ends or
hangs, its answers fail.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import numpy as np

from dovetail.api.grammar import GrammarContext, Matcher
from dovetail.errors import DovetailError
from dovetail_grammars.channels import ACCEPTED, COMPLETE, Channel
from dovetail_grammars.failing import Failing, may_fail

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32
    from dovetail_grammars.options import GrammarOptions

logger = logging.getLogger("dovetail")

ROWS = 64  # answers of a process
# answers that are followed in the engine's process, which is faster for a few
FEW = 4
# that a process may take for one message: some hundred times as long as masks take at worst
ANSWERS_WITHIN_S = 20.0
ENDS_WITHIN_S = 5.0  # all processes, once their sockets are closed


class MaskProcess:
    """One process, as the engine sees it. `rows` of its masks are free."""

    def __init__(self, channel: Channel, rows: range) -> None:
        self._channel = channel
        self.free = deque(rows)
        self._commands: deque[tuple[Any, ...]] = deque()  # to be sent before others
        self._sending = threading.Lock()
        self._calling = threading.RLock()
        # those whose masks it was asked to fill; None: it wasn't, or has answered. Weak: nobody may
        # ask again, and then answers that have ended would keep their rows
        self._filling: Sequence[ref[RemoteMatcher]] | None = None
        self.grammars: set[int] = set()  # that it was told of
        self.pid: int | None = None  # once it is ready
        self.has_ended = False
        self._reason = "has ended"

    @property
    def is_ready(self) -> bool:
        """True once it takes commands, or has ended."""
        if self.pid is None and not self.has_ended:
            with suppress(DovetailError):
                if self._channel.has_message():
                    self.pid = pickle.loads(self._receive())
        return self.pid is not None or self.has_ended

    def later(self, *command: Any) -> None:
        """Send a command that isn't answered with the next ones."""
        self._commands.append(command)

    def send(self, *command: Any) -> None:
        with self._sending:
            commands = [self._commands.popleft() for _ in range(len(self._commands))]
            try:
                self._channel.send(pickle.dumps([*commands, command]))
            except OSError as error:
                raise self._ended(error) from None

    def _receive(self) -> bytes:
        try:
            return self._channel.receive()
        except OSError as error:
            raise self._ended(error) from None

    def _ended(self, error: OSError) -> DovetailError:
        """End the process, whose answers can't be told apart from here on. Returns the reason."""
        if not self.has_ended:
            self.has_ended = True
            self._channel.close()
            if isinstance(error, BlockingIOError):
                self._reason = f"hasn't answered for {ANSWERS_WITHIN_S:g} s"
                if self.pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(self.pid, signal.SIGKILL)
        return DovetailError(f"the process that fills its masks {self._reason}")

    def start_step(self, matchers: Sequence[RemoteMatcher], tokens: Sequence[int]) -> None:
        self.settle()
        self.send(
            "step",
            [(one.answer, token, one.row) for one, token in zip(matchers, tokens, strict=True)],
        )

    def end_step(self, matchers: Sequence[RemoteMatcher]) -> list[bool]:
        """Return whether each has accepted its token."""
        states = self._receive()
        for matcher, state in zip(matchers, states, strict=True):
            matcher.is_filled = state == ACCEPTED
            if state in (ACCEPTED, COMPLETE):
                matcher.is_complete = state == COMPLETE
        self._filling = [ref(one) for one in matchers if one.is_filled]
        return [state in (ACCEPTED, COMPLETE) for state in states]

    def start_fill(self, matchers: Sequence[RemoteMatcher]) -> None:
        self.settle()
        self.send("fill", [(one.answer, one.row) for one in matchers])
        for one in matchers:
            one.is_filled = True
        self._filling = [ref(one) for one in matchers]

    def settle(self) -> None:
        """Wait for the masks that it was asked to fill."""
        filling = self._filling
        if filling is None:
            return
        self._filling = None
        failed = pickle.loads(self._receive())
        for each in filling if failed else ():
            matcher = each()
            if matcher is not None and matcher.answer in failed:
                matcher.is_filled = False

    def call(self, *command: Any) -> tuple[Any, str | None, bool]:
        with self._calling:
            self.settle()
            self.send(*command)
            value, reason, is_complete = pickle.loads(self._receive())
        return value, reason, is_complete


class RemoteMatcher(Failing):
    """Position of an answer that a process follows."""

    def __init__(self, process: MaskProcess, masks: UInt32, row: int, answer: int) -> None:
        self.process = process
        self._masks = masks
        self.row = row
        self.answer = answer
        self.is_filled = False  # its row has the mask of its position, or will have
        self.is_complete: bool | None = None  # None: not known yet
        self.ticket: Ticket | None = None

    def __del__(self) -> None:
        self.process.later("end", self.answer)
        self.process.free.append(self.row)

    @may_fail
    def fill(self, words: UInt32) -> None:
        self._call("fill_one", self.answer, self.row)
        words[:] = self._masks[self.row]

    @may_fail
    def accept(self, token: int) -> bool:
        return bool(self._call("call", self.answer, "accept", token))

    def rollback(self, tokens: int) -> None:
        self._call("call", self.answer, "rollback", tokens)

    @may_fail
    def forced(self) -> Sequence[int]:
        tokens: Sequence[int] = self._call("call", self.answer, "forced")
        return tokens

    @property
    def complete(self) -> bool:
        if self.failure is not None:
            return False
        if self.is_complete is None:
            self.rollback(0)
        return bool(self.is_complete)

    def _call(self, *command: Any) -> Any:
        self.is_filled = False
        value, reason, self.is_complete = self.process.call(*command)
        if reason is not None:
            raise DovetailError(reason)
        if isinstance(value, Exception):
            raise value
        return value


class MaskProcesses:
    """Processes of one backend, started once there are more than a few answers."""

    def __init__(self, number: int, options: GrammarOptions, context: GrammarContext) -> None:
        self._number = number
        self._options = options.model_copy(update={"processes": 0})
        self._context = context
        self._processes: Sequence[MaskProcess] = ()
        self._is_ready = False
        self._lock = threading.Lock()
        self._starting: threading.Thread | None = None
        self._answers = count()
        self.grammars = count()  # numbers of grammars
        self.live = 0  # answers of the backend, of which a few are followed here
        self._masks: UInt32 = np.zeros((0, 0), np.uint32)

    def begin(self, grammar: int, lark: str) -> RemoteMatcher | None:
        """Return a matcher at the start of an answer; None if it is to be followed here."""
        answer = next(self._answers)
        if self.live <= FEW or not self._ready():
            return None
        process = self._processes[answer % len(self._processes)]
        if process.has_ended or not process.free:
            return None
        row = process.free.popleft()
        if grammar not in process.grammars:
            process.grammars.add(grammar)
            process.later("grammar", grammar, lark)
        process.later("begin", answer, grammar)
        return RemoteMatcher(process, self._masks, row, answer)

    def ticket(self) -> Ticket:
        """Return what counts one answer as long as it lives."""
        return Ticket(self)

    def forget(self, grammar: int) -> None:
        for process in self._processes:
            if grammar in process.grammars:
                process.grammars.discard(grammar)
                process.later("forget", grammar)

    def _ready(self) -> bool:
        """Return True once all processes are ready; start them if they aren't yet."""
        if self._is_ready:
            return True
        with self._lock:
            if self._starting is None:
                self._starting = threading.Thread(
                    target=self._start, name="dovetail-mask-processes"
                )
                self._starting.start()
            elif not self._starting.is_alive() and self._processes:
                waiting = [process for process in self._processes if not process.is_ready]
                self._is_ready = not waiting
        return self._is_ready

    def _start(self) -> None:
        """Start the processes, which takes seconds. Without them, answers are followed here."""
        try:
            self._fork()
        except OSError as error:
            logger.warning("no processes fill the masks of grammars: %s", error)

    def _fork(self) -> None:
        width = -(-self._context.vocab_size // 32)
        rows = self._number * ROWS
        memory = os.memfd_create("dovetail-masks")
        os.truncate(memory, 4 * width * rows)
        self._masks = np.frombuffer(mmap.mmap(memory, 0), np.uint32).reshape(rows, width)
        pairs = [Channel.pair() for _ in range(self._number)]
        theirs = [pair[1].fileno() for pair in pairs]
        numbers = json.dumps([memory, theirs, sys.path])
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN, numbers],
            pass_fds=[memory, *theirs],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(memory)
        channels = [Channel(pair[0]) for pair in pairs]
        for pair in pairs:
            pair[1].close()
        finalize(self, _end, channels, process)
        channels[0].send(pickle.dumps((self._options, self._context)))
        for channel in channels:
            channel.limit(ANSWERS_WITHIN_S)
        self._processes = [
            MaskProcess(channel, range(number * ROWS, (number + 1) * ROWS))
            for number, channel in enumerate(channels)
        ]

    def copy(self, matchers: Sequence[RemoteMatcher], words: UInt32) -> None:
        """Write the masks of matchers [m], which are filled, to words [m, …]."""
        rows = np.fromiter([one.row for one in matchers], np.intp, len(matchers))
        np.take(self._masks, rows, axis=0, out=words, mode="clip")


class Ticket:
    """Counts one answer as long as it lives, and keeps its processes."""

    def __init__(self, processes: MaskProcesses) -> None:
        self._processes = processes
        processes.live += 1

    def __del__(self) -> None:
        self._processes.live -= 1


_MAIN = """
import json, sys
memory, sockets, sys.path[:] = json.loads(sys.argv[1])
from dovetail_grammars.mask_worker import main
main(memory, sockets)
"""


def _end(channels: Sequence[Channel], process: subprocess.Popen[bytes]) -> None:
    """Close the processes' sockets, which ends them; kill those that hang. `process`: the first,
    which ends after the others, and leads their group."""
    for channel in channels:
        channel.close()
    try:
        process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


Groups = dict[MaskProcess, tuple[list[int], list[RemoteMatcher]]]


def grouped(matchers: Sequence[Matcher]) -> tuple[list[int], Groups]:
    """Return the indices of the matchers that are followed here, and by process those of the others,
    with themselves."""
    here: list[int] = []
    groups: Groups = {}
    for index, matcher in enumerate(matchers):
        # `isinstance` would take a microsecond of an abstract class
        if type(matcher) is RemoteMatcher:
            places, members = groups.setdefault(matcher.process, ([], []))
            places.append(index)
            members.append(matcher)
        else:
            here.append(index)
    return here, groups


def start_step(groups: Groups, tokens: Sequence[int]) -> None:
    """Let the processes accept a token for each of their answers."""
    for process, (places, members) in groups.items():
        try:
            process.start_step(members, [tokens[place] for place in places])
        except DovetailError as error:
            _fail(members, error)


def end_step(groups: Groups, accepted: list[bool]) -> None:
    """Note which tokens have been accepted."""
    for process, (places, members) in groups.items():
        try:
            states = process.end_step(members)
        except DovetailError as error:
            _fail(members, error)
            continue
        for place, state in zip(places, states, strict=True):
            accepted[place] = state


def start_fill(groups: Groups) -> None:
    """Let the processes fill the masks that they haven't been asked to fill yet."""
    for process, (_, members) in groups.items():
        wanted = [one for one in members if not one.is_filled]
        if wanted:
            try:
                process.start_fill(wanted)
            except DovetailError as error:
                _fail(members, error)


def end_fill(groups: Groups) -> None:
    """Wait for the masks. Raises `DovetailError` if one has failed."""
    for process, (_, members) in groups.items():
        try:
            process.settle()
        except DovetailError as error:
            _fail(members, error)
    for _, members in groups.values():
        if not all(one.is_filled for one in members):
            raise DovetailError("a mask can't be filled")


def _fail(members: Sequence[RemoteMatcher], error: DovetailError) -> None:
    """Let matchers fail, whose process has ended."""
    for one in members:
        one.failure = str(error)
        one.is_filled = False
