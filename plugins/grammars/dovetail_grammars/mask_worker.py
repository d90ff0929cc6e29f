"""A process that follows answers and fills their masks, run by `mask_processes.py`.

The first process builds the vocabulary, and forks into the others, which share its memory. Each
reads commands from a socket of its own, until that is closed, and writes masks to shared memory.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import signal
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dovetail.api.grammar import Grammar, Matcher
from dovetail.errors import DovetailError
from dovetail_grammars.channels import ACCEPTED, COMPLETE, FAILED, REJECTED, Channel
from dovetail_grammars.llguidance_backend import LLGuidance


class Worker:
    """Follows some answers."""

    def __init__(self, backend: LLGuidance, channel: Channel, masks: NDArray[np.uint32]):
        """`masks` [rows, ceil(vocab_size / 32)]: shared with the engine's process."""
        self._backend = backend
        self._channel = channel
        self._masks = masks
        self._grammars: dict[int, Grammar] = {}
        self._matchers: dict[int, Matcher] = {}

    def serve(self) -> NoReturn:
        """Carry out commands until the other end is closed, which raises `OSError`."""
        while True:
            for name, *arguments in pickle.loads(self._channel.receive()):
                getattr(self, name)(*arguments)

    # Commands without an answer

    def grammar(self, number: int, lark: str) -> None:
        self._grammars[number] = self._backend.compiled(lark)

    def forget(self, number: int) -> None:
        self._grammars.pop(number, None)

    def begin(self, answer: int, grammar: int) -> None:
        self._matchers[answer] = self._grammars[grammar].begin()

    def end(self, answer: int) -> None:
        del self._matchers[answer]

    # Commands with answers

    def step(self, tokens: list[tuple[int, int, int]]) -> None:
        """Accept the token of each (answer, token, row), answer how that went, then fill the masks
        as `fill`."""
        states = bytes([self._accepted(answer, token) for answer, token, _ in tokens])
        self._channel.send(states)
        self.fill(
            [
                (answer, row)
                for (answer, _, row), state in zip(tokens, states, strict=True)
                if state == ACCEPTED
            ]
        )

    def fill(self, rows: list[tuple[int, int]]) -> None:
        """Fill the masks of each (answer, row), and answer with those that failed."""
        failed = []
        for answer, row in rows:
            try:
                self._matchers[answer].fill(self._masks[row])
            except DovetailError:
                failed.append(answer)
        self._channel.send(pickle.dumps(failed))

    def call(self, answer: int, name: str, *arguments: Any) -> None:
        """Call a method of one, and answer with (value, reason why it failed, is complete)."""
        matcher = self._matchers[answer]
        value: Any = None
        reason: str | None = None
        try:
            value = getattr(matcher, name)(*arguments)
        except DovetailError as error:
            reason = str(error)
        except ValueError as error:
            value = error
        self._channel.send(pickle.dumps((value, reason, matcher.complete)))

    def fill_one(self, answer: int, row: int) -> None:
        """Fill one mask, and answer as `call`."""
        matcher = self._matchers[answer]
        reason: str | None = None
        try:
            matcher.fill(self._masks[row])
        except DovetailError as error:
            reason = str(error)
        self._channel.send(pickle.dumps((None, reason, matcher.complete)))

    def _accepted(self, answer: int, token: int) -> int:
        matcher = self._matchers[answer]
        try:
            if not matcher.accept(token):
                return REJECTED
            return COMPLETE if matcher.complete else ACCEPTED
        except DovetailError:
            return FAILED


def main(memory: int, sockets: list[int]) -> None:
    """Serve in one process for each socket. `memory`: a file descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the engine
    channels = [Channel.of(each) for each in sockets]
    options, context = pickle.loads(channels[0].receive())
    masks = np.frombuffer(mmap.mmap(memory, 0), np.uint32)
    masks = masks.reshape(-1, -(-context.vocab_size // 32))
    backend = LLGuidance(options, context)
    backend.prepare()
    gc.freeze()  # so that the forks share its memory
    channel = channels[0]
    for other in channels[1:]:
        if not os.fork():
            channel = other
            break
    for each in channels:
        if each is not channel:
            each.close()
    with suppress(OSError):  # the engine's process has ended
        channel.send(pickle.dumps(os.getpid()))
        Worker(backend, channel, masks).serve()
    with suppress(ChildProcessError):  # the engine's process waits for the first alone
        while True:
            os.wait()
    os._exit(0)
