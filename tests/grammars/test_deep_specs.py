"""Specs whose parts refer to each other in a long chain are followed, or refused: the library's
recursion ends no process."""

from __future__ import annotations

import json

import pytest

from dovetail.api.grammar import GrammarSpec
from dovetail.config.limits import Limits
from dovetail_grammars.deep_threads import in_deep_thread
from tests.grammars.helpers import at, backend


def chain_of_rules(count: int) -> GrammarSpec:
    rules = [f'r{number}: "b" r{number + 1} | "a"' for number in range(count)]
    return GrammarSpec("grammar", "\n".join(["start: r0", *rules, f'r{count}: "z"']))


def chain_of_schemas(count: int) -> GrammarSpec:
    definitions: dict[str, object] = {
        f"d{number}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{number + 1}"}}}
        for number in range(count)
    }
    definitions[f"d{count}"] = {"type": "string"}
    return GrammarSpec("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": definitions}))


@pytest.mark.parametrize(
    ("spec", "text"), [(chain_of_rules(4_000), "bbbb"), (chain_of_schemas(1_500), '{"a":{"a"')]
)
def test_a_chain_that_is_longer_than_a_stack_is_followed(spec: GrammarSpec, text: str) -> None:
    assert at(backend().compile(spec), text) is not None


@pytest.mark.slow("compiles the longest texts that may be compiled")
@pytest.mark.parametrize("make", [chain_of_rules, chain_of_schemas])
def test_the_longest_chain_that_the_limit_of_characters_allows_is_followed(make: object) -> None:
    most, count = Limits().max_grammar_chars, 3_000
    while len(make(count + 200).text) <= most:  # type: ignore[operator]
        count += 200
    backend().compile(make(count))  # type: ignore[operator]


def test_what_a_call_in_a_deep_thread_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        in_deep_thread(lambda: 1 // 0, 1)
    assert in_deep_thread(lambda: 7, 1) == 7
