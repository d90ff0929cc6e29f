"""Answers that processes follow are those that the engine's process would follow; if a process
ends, its answers fail alone."""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dovetail.api.grammar import GrammarContext, GrammarSpec, Matcher
from dovetail.errors import DovetailError
from dovetail.testing.checks import checks_of
from dovetail.testing.suites.grammar import GrammarSuite
from dovetail_grammars import llguidance_backend, mask_processes
from dovetail_grammars.channels import Channel
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.mask_processes import FEW, MaskProcess, RemoteMatcher
from dovetail_grammars.options import GrammarOptions
from tests.grammars.helpers import BYTES, STOP

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "maxLength": 4},
            "b": {"type": "string", "pattern": "^[xy]{1,3}$"},
            "c": {"enum": [1, 23, None]},
        },
        "required": ["a", "b", "c"],
        "additionalProperties": False,
    },
    "minItems": 1,
    "maxItems": 2,
}
SPEC = GrammarSpec("json_schema", json.dumps(SCHEMA))
ANSWERS = 8
READY_S = 60
STARTS_PROCESSES = pytest.mark.slow("starts processes")


def began(backend: LLGuidance, count: int, spec: GrammarSpec = SPEC) -> list[Matcher]:
    """Return answers that processes follow, once these have started."""
    grammar = backend.compile(spec)
    until = time.monotonic() + READY_S
    local: list[Matcher] = []
    while time.monotonic() < until:
        matcher = grammar.begin()
        if isinstance(matcher, RemoteMatcher):
            return [matcher, *(grammar.begin() for _ in range(count - 1))]
        if len(local) < FEW:
            local.append(matcher)
    raise AssertionError("no process is ready")


@pytest.fixture(autouse=True)
def _no_grammar_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_backend, "SHARED_WITHIN_S", READY_S)


@pytest.fixture(scope="module")
def remote() -> Iterator[LLGuidance]:
    yield LLGuidance(GrammarOptions(processes=2), BYTES)
    gc.collect()


@pytest.fixture(scope="module")
def local() -> LLGuidance:
    return LLGuidance(GrammarOptions(threads=2, processes=0), BYTES)


def mask(matcher: Matcher) -> Any:
    words = np.full(9, 0xFFFFFFFF, np.uint32)
    matcher.fill(words)
    return words


def tokens_of(words: Any) -> list[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


@pytest.mark.slow("starts processes")
@pytest.mark.parametrize(
    "together",
    [
        pytest.param(True, id="together"),
        pytest.param(False, id="one by one", marks=STARTS_PROCESSES),
    ],
)
def test_masks_and_ends_are_those_of_the_engine_s_own_process(
    remote: LLGuidance, local: LLGuidance, together: bool
) -> None:
    chance = random.Random(2)
    answers = began(remote, ANSWERS)
    assert sum(isinstance(answer, RemoteMatcher) for answer in answers) == ANSWERS
    twins = [local.compile(SPEC).begin() for _ in answers]
    words = np.zeros((ANSWERS, 9), np.uint32)
    for step in range(25):
        if together:
            wait = remote.start_fill(answers, words)
            assert wait is not None
            wait()
        masks = words if together else [mask(answer) for answer in answers]
        tokens = []
        for line, twin in zip(masks, twins, strict=True):
            assert (line == mask(twin)).all(), step
            allowed = tokens_of(line) or [STOP]
            tokens.append(
                chance.choice(allowed) if chance.random() < 0.9 else chance.randrange(257)
            )
        advanced = remote.accept_many(answers, tokens) if together else [False] * ANSWERS
        for answer, twin, token, done in zip(answers, twins, tokens, advanced, strict=True):
            accepted = done or answer.accept(token)
            assert accepted == twin.accept(token)
            assert answer.complete == twin.complete
            if accepted and chance.random() < 0.1:
                answer.rollback(1)
                twin.rollback(1)
                assert list(answer.forced()) == list(twin.forced())


@STARTS_PROCESSES
def test_a_few_answers_are_followed_in_the_engine_s_process(remote: LLGuidance) -> None:
    assert began(remote, 1)
    gc.collect()
    grammar = remote.compile(SPEC)
    assert not any(isinstance(grammar.begin(), RemoteMatcher) for _ in range(3))


@STARTS_PROCESSES
@pytest.mark.parametrize("advance", [True, False])
def test_answers_that_end_while_their_masks_are_filled_make_room(
    remote: LLGuidance, advance: bool
) -> None:
    answers = [one for one in began(remote, ANSWERS) if isinstance(one, RemoteMatcher)]
    processes = {one.process for one in answers}
    free = sum(len(one.free) for one in processes)
    if advance:
        assert all(remote.accept_many(answers, [ord("[")] * len(answers)))
    else:
        remote.start_fill(answers, np.zeros((len(answers), 9), np.uint32))
    count = len(answers)
    del answers
    gc.collect()
    assert sum(len(one.free) for one in processes) == free + count


@STARTS_PROCESSES
def test_what_cannot_go_on_fails_alone_and_with_the_reason(remote: LLGuidance) -> None:
    answers = began(remote, 4)
    with pytest.raises(ValueError, match="can't roll back 3"):
        answers[0].rollback(3)
    assert tokens_of(mask(answers[0])) == [ord("[")]


@STARTS_PROCESSES
def test_when_a_process_ends_only_its_answers_fail(local: LLGuidance) -> None:
    backend = LLGuidance(GrammarOptions(processes=2), BYTES)
    answers = [one for one in began(backend, ANSWERS) if isinstance(one, RemoteMatcher)]
    first = answers[0].process
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    words = np.zeros((len(answers), 9), np.uint32)
    with pytest.raises(DovetailError):
        backend.fill_many(answers, words)
    others = [one for one in answers if one.process is not first]
    assert others
    assert all(tokens_of(mask(one)) == [ord("[")] for one in others)
    with pytest.raises(DovetailError, match="process"):
        answers[0].fill(words[0])
    assert not answers[0].complete
    assert not any(backend.accept_many(answers[:1], [ord("[")]))
    later = [backend.compile(SPEC).begin() for _ in range(4)]
    backend.fill_many(later, words[:4])
    assert all(tokens_of(line) == [ord("[")] for line in words[:4])


@STARTS_PROCESSES
def test_answers_of_a_process_that_hangs_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_processes, "ANSWERS_WITHIN_S", 2.0)
    backend = LLGuidance(GrammarOptions(processes=2), BYTES)
    answers = [one for one in began(backend, ANSWERS) if isinstance(one, RemoteMatcher)]
    first = answers[0].process
    assert first.pid is not None
    os.kill(first.pid, signal.SIGSTOP)
    words = np.zeros((len(answers), 9), np.uint32)
    with pytest.raises(DovetailError):
        backend.fill_many(answers, words)
    with pytest.raises(DovetailError, match="hasn't answered for 2 s"):
        answers[0].fill(words[0])
    others = [one for one in answers if one.process is not first]
    assert others
    assert all(tokens_of(mask(one)) == [ord("[")] for one in others)


@STARTS_PROCESSES
@pytest.mark.parametrize("number", [0, 1])
def test_a_backend_ends_processes_that_hang(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(mask_processes, "ENDS_WITHIN_S", 0.5)
    backend = LLGuidance(GrammarOptions(processes=2), BYTES)
    answers = [one for one in began(backend, ANSWERS) if isinstance(one, RemoteMatcher)]
    pids = sorted({one.process.pid or 0 for one in answers})
    ends = [os.pidfd_open(pid) for pid in pids]
    os.kill(pids[number], signal.SIGSTOP)
    del answers, backend
    gc.collect()
    for end in ends:
        assert select.select([end], [], [], READY_S)[0], "a process hasn't ended"
        os.close(end)


def test_a_process_that_ended_before_it_was_ready_is_noticed() -> None:
    ours, theirs = Channel.pair()
    channel = Channel(ours)
    channel.send(b"context")
    theirs.close()  # with what it hasn't read
    process = MaskProcess(channel, range(1))
    assert process.is_ready
    assert process.has_ended


def test_only_a_channel_with_a_message_or_without_its_other_end_need_not_wait() -> None:
    ours, theirs = map(Channel, Channel.pair())
    assert not ours.has_message()
    theirs.send(b"context")
    assert ours.has_message()
    assert ours.receive() == b"context"
    assert not ours.has_message()
    theirs.close()
    assert ours.has_message()
    ours.close()


@STARTS_PROCESSES
def test_a_grammar_that_is_slow_to_compile_is_followed_in_the_engine_s_process(
    remote: LLGuidance, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = began(remote, 8)
    monkeypatch.setattr(llguidance_backend, "SHARED_WITHIN_S", 0)
    grammar = remote.compile(GrammarSpec("choice", '["a", "b"]'))
    assert not any(isinstance(grammar.begin(), RemoteMatcher) for _ in range(8))
    assert kept


class Suite(GrammarSuite):
    """The suite runs on a backend that follows all answers in worker processes."""

    component_class = LLGuidance

    def make(self, context: GrammarContext) -> LLGuidance:
        backend = LLGuidance(GrammarOptions(processes=2), context)
        until = time.monotonic() + READY_S
        grammar = backend.compile(GrammarSpec("choice", '["a"]'))
        while not isinstance(grammar.begin(), RemoteMatcher):
            assert time.monotonic() < until, "no process is ready"
        return backend


@STARTS_PROCESSES
@pytest.mark.parametrize(
    "check", ["mask", "accept", "end", "rollback", "forced", "failed", "accept_many", "start_fill"]
)
def test_the_suite_passes_where_processes_follow_all_answers(
    check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_processes, "FEW", -1)
    getattr(Suite(), checks_of(GrammarSuite)[f"grammar.{check}"].attribute)()
