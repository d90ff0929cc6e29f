"""Answers written by chance parse, and follow their schemas: generated schemas, three vocabularies, both backends."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.api.grammar import GrammarSpec
from dovetail.errors import RequestError
from tests.grammars.helpers import BACKENDS
from tests.structured.formats import validator
from tests.structured.schemas import schema
from tests.structured.vocabularies import MAKERS
from tests.structured.walks import backend, walk
from tests.support import FULL

SCHEMAS = 400 if FULL else 300
PLAN = {  # schemas, and answers to each: 20,000 in all in the full profile
    ("llguidance", "demo"): (SCHEMAS, 15 if FULL else 1),
    ("llguidance", "byte-level"): (SCHEMAS, 10) if FULL else (12, 1),
    ("llguidance", "sentencepiece"): (SCHEMAS, 15 if FULL else 1) if FULL else (40, 1),
    ("xgrammar", "demo"): (SCHEMAS, 8) if FULL else (40, 1),
    ("xgrammar", "byte-level"): (SCHEMAS, 4) if FULL else (4, 1),
    ("xgrammar", "sentencepiece"): (SCHEMAS, 8) if FULL else (20, 1),
}
KNOWN = {"llguidance": 0.97, "xgrammar": 0.7}  # share of the schemas that a backend must not refuse


QUICK = {
    ("llguidance", "demo"): 75,
    ("llguidance", "byte-level"): 3,
}  # schemas in the quick profile, where not all
LONGER = pytest.mark.slow("compiles hundreds of schemas, or some with the largest vocabulary")


@pytest.fixture(scope="module", autouse=True)
def _vocabularies_are_read() -> None:
    for name in BACKENDS:
        for vocabulary in MAKERS:
            backend(name, vocabulary)


def parts() -> Iterator[Any]:
    """Yield a backend, a vocabulary and the seeds of schemas."""
    for name in BACKENDS:
        for vocabulary in MAKERS:
            count, _ = PLAN[name, vocabulary]
            first = min(count, QUICK.get((name, vocabulary), count))
            yield pytest.param(name, vocabulary, range(first), id=f"{name}-{vocabulary}")
            if first < count:
                yield pytest.param(
                    name,
                    vocabulary,
                    range(first, count),
                    marks=LONGER,
                    id=f"{name}-{vocabulary}-more",
                )


@pytest.mark.parametrize(("name", "vocabulary", "seeds"), list(parts()))
def test_answers_that_end_follow_their_schemas(name: str, vocabulary: str, seeds: range) -> None:
    count, answers = len(seeds), PLAN[name, vocabulary][1]
    refused = ended = 0
    for seed in seeds:
        rule = schema(seed)
        try:
            grammar = backend(name, vocabulary).compile(
                GrammarSpec("json_schema", json.dumps(rule))
            )
        except RequestError:
            refused += 1
            continue
        for number in range(answers):
            answer = walk(grammar, vocabulary, random.Random(f"{seed} {number}"))
            if answer.ended:
                ended += 1
                require_valid(rule, answer.text)
    assert refused <= max(1, (1 - KNOWN[name]) * count)
    assert ended >= 0.9 * (count - refused) * answers


def require_valid(rule: Any, text: bytes) -> None:
    value = json.loads(text.decode())
    error = next(validator(rule).iter_errors(value), None)
    assert error is None, f"{text!r} doesn't follow {rule}: {error.message}"


def test_the_schemas_are_right_ones_and_differ() -> None:
    schemas = [schema(seed) for seed in range(SCHEMAS)]
    for rule in schemas if FULL else schemas[::10]:
        validator(rule).check_schema(rule)
    assert len({json.dumps(rule) for rule in schemas}) > 0.9 * SCHEMAS
