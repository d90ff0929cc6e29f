"""Answers written by chance parse, and follow their schemas: generated schemas, three
vocabularies."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.api.grammar import GrammarSpec
from dovetail.errors import RequestError
from tests.structured.formats import validator
from tests.structured.schemas import schema
from tests.structured.vocabularies import MAKERS
from tests.structured.walks import backend, walk
from tests.support import FULL

SCHEMAS = 400 if FULL else 300
PLAN = {  # schemas, and answers to each
    "demo": (SCHEMAS, 20 if FULL else 1),
    "byte-level": (SCHEMAS, 14) if FULL else (12, 1),
    "sentencepiece": (SCHEMAS, 20) if FULL else (40, 1),
}
KNOWN = 0.97  # share of the schemas that must not be refused
QUICK = {"demo": 75, "byte-level": 3}  # schemas in the quick profile, where not all
LONGER = pytest.mark.slow("compiles hundreds of schemas, or some with the largest vocabulary")


@pytest.fixture(scope="module", autouse=True)
def _vocabularies_are_read() -> None:
    for vocabulary in MAKERS:
        backend(vocabulary)


def parts() -> Iterator[Any]:
    """Yield a vocabulary and the seeds of schemas."""
    for vocabulary in MAKERS:
        count, _ = PLAN[vocabulary]
        first = min(count, QUICK.get(vocabulary, count))
        yield pytest.param(vocabulary, range(first), id=vocabulary)
        if first < count:
            more = range(first, count)
            yield pytest.param(vocabulary, more, marks=LONGER, id=f"{vocabulary}-more")


@pytest.mark.parametrize(("vocabulary", "seeds"), list(parts()))
def test_answers_that_end_follow_their_schemas(vocabulary: str, seeds: range) -> None:
    count, answers = len(seeds), PLAN[vocabulary][1]
    refused = ended = 0
    for seed in seeds:
        rule = schema(seed)
        try:
            grammar = backend(vocabulary).compile(GrammarSpec("json_schema", json.dumps(rule)))
        except RequestError:
            refused += 1
            continue
        for number in range(answers):
            answer = walk(grammar, vocabulary, random.Random(f"{seed} {number}"))
            if answer.ended:
                ended += 1
                require_valid(rule, answer.text)
    assert refused <= max(1, (1 - KNOWN) * count)
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
