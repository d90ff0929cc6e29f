"""Answers under one schema whose tokens are accepted, and whose masks are filled, together: they
are those that each would have by itself, whatever happens around them."""

from __future__ import annotations

import json
import random
import time
from functools import cache
from typing import Any

import numpy as np
import pytest

from dovetail.api.grammar import Grammar, GrammarContext, GrammarSpec, Matcher
from dovetail.api.sampler import RowSampling
from dovetail.engine.constraint import Constraint
from dovetail.engine.live_request import LiveRequest
from dovetail.request.sampling_params import SamplingParams
from dovetail.testing.fake_executor import next_allowed, next_token
from dovetail_grammars import llguidance_backend
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.mask_processes import FEW, RemoteMatcher
from dovetail_grammars.options import GrammarOptions
from tests.engine.drafters import Oracle
from tests.engine.rules import compiled
from tests.engine.world import Shape, World

STRING = {"type": "string"}
RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {**STRING, "maxLength": 6},
        "code": {**STRING, "pattern": "^[a-c]{2}-[0-9]{1,3}$"},
        "tags": {"type": "array", "items": {**STRING, "minLength": 2, "maxLength": 5}},
        "text": STRING,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "code", "tags", "text", "age"],
    "additionalProperties": False,
}
SCHEMAS = {
    "records": {"type": "array", "items": RECORD, "minItems": 1, "maxItems": 3},
    "no bounds": {"type": "array", "items": {"enum": ["ab", "abc", 1, None]}, "minItems": 20},
}
PIECES = ("abc", "cab", '","', '"],"', '":"', '":["', '"}', "é", "ab-", "12", "\xe9\xe9x", '\\n"')
# bytes, longer tokens, and halves of characters; the last id ends an answer
TEXTS = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES)]
CONTEXT = GrammarContext([*TEXTS, None], frozenset([len(TEXTS)]), len(TEXTS) + 1)
MOST_TOKENS = 60
READY_S = 60
ANSWERS = 12  # more than are worth a thread


@cache
def backend(processes: int = 0) -> LLGuidance:
    return LLGuidance(GrammarOptions(threads=2, processes=processes), CONTEXT)


@pytest.fixture(autouse=True)
def _no_grammar_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_backend, "SHARED_WITHIN_S", READY_S)


@cache
def grammar(schema: str, processes: int = 0) -> Grammar:
    return backend(processes).compile(GrammarSpec("json_schema", json.dumps(SCHEMAS[schema])))


def wait_for_processes(schema: str, processes: int) -> None:
    until = time.monotonic() + READY_S
    kept: list[Matcher] = []
    while not (kept and isinstance(kept[-1], RemoteMatcher)):
        assert time.monotonic() < until, "no process is ready"
        kept = [*kept[-FEW - 1 :], grammar(schema, processes).begin()]


@cache
def expected(schema: str, prompt: tuple[int, ...], seed: int) -> list[int]:
    """Return the tokens of an answer by itself."""
    tokens = list(prompt)
    words = np.zeros(-(-CONTEXT.vocab_size // 32), np.uint32)
    matcher = grammar(schema).begin()
    for _ in range(MOST_TOKENS):
        matcher.fill(words)
        token = next_token(tokens, seed, CONTEXT.vocab_size)
        tokens.append(next_allowed(token, words, CONTEXT.vocab_size))
        assert matcher.accept(tokens[-1])
        if matcher.complete:
            break
    return tokens[len(prompt) :]


def add(world: World, schema: str, number: int, processes: int) -> LiveRequest:
    name = f"{schema} {number}"
    request = LiveRequest(
        name,
        (number, 5, 6, 7),
        SamplingParams(max_tokens=MOST_TOKENS),
        max_tokens=MOST_TOKENS,
        sampling=RowSampling(seed=number % 3),
        stop_ids=CONTEXT.stop_ids,
        constraint=Constraint(compiled(grammar(schema, processes)), backend(processes)),
    )
    world.requests[name], world.seeds[name], world.tokens[name] = request, number % 3, []
    world.core.add(request)
    return request


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({}, id="overlap"),
        pytest.param({"max_in_flight": 1}, id="one in flight"),
        pytest.param({"num_pages": 60, "max_model_len": 72}, id="preemption"),
        pytest.param({"drafter": "alternating"}, id="drafts"),
    ],
)
@pytest.mark.parametrize(
    "processes", [0, pytest.param(2, marks=pytest.mark.slow("starts processes"))]
)
def test_tokens_are_those_of_each_answer_by_itself(
    schema: str, shape: dict[str, Any], processes: int
) -> None:
    if processes:
        wait_for_processes(schema, processes)
    sizes = {"num_pages": 512, "max_num_seqs": ANSWERS, "max_model_len": 128, **shape}
    world = World(shape=Shape(vocab_size=CONTEXT.vocab_size, **sizes))
    requests = [add(world, schema, number, processes) for number in range(ANSWERS)]
    answers = {
        one.id: expected(schema, tuple(one.prompt_token_ids), world.seeds[one.id])
        for one in requests
    }
    if isinstance(world.drafter, Oracle):
        world.drafter.answers = answers.__getitem__
    chance = random.Random(1)
    while world.core.has_unfinished():
        world.step()
        if chance.random() < 0.03:
            world.abort(chance.choice(requests).id)
    assert world.core.dead is None
    assert len(world.aborted) < ANSWERS
    for request in requests:
        wanted = answers[request.id]
        found = world.tokens[request.id]
        assert found == wanted[: len(found)]
        assert request.id in world.aborted or len(found) == len(wanted)
    assert bool(sum(one.preemptions for one in requests)) == ("num_pages" in shape)
    assert world.kv.counts.held == 0
