"""`Structured`: the rule that the text of an answer must follow, as a user gives it in `SamplingParams.structured`. This file doesn't need torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Structured:
    """The rule of an answer: exactly one of the first six. It is checked when made: a wrong value raises `RequestError` with the field's name.

    With `after`, say `"</think>"`, the rule begins behind the first such text in the answer; what comes before is free.
    """

    json_schema: Any = None  # a JSON Schema: a mapping, its JSON, or a pydantic model's class; kept as its JSON
    regex: str | None = None  # the whole answer matches it
    grammar: str | None = None  # a context-free grammar, in Lark's or GBNF's syntax
    choice: Sequence[str] | None = None  # the answer is one of these
    json_object: bool = False  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # see `dovetail.api.grammar.GrammarSpec`; kept as its JSON
    after: str | None = None
