"""Grammars that constrain the model to valid tool calls: the counterparts of the parsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Tool = tuple[str, Mapping[str, Any]]  # a function's name, the JSON Schema of its arguments


class _Markup(NamedTuple):
    """Text around a call's arguments."""

    begin: str
    end: str


class _Form(NamedTuple):
    """How a format writes calls."""

    markup: Callable[[str], _Markup]  # by the function's JSON-encoded name
    trigger: str  # begins a call
    separator: str = ""  # between calls
    marked: bool = True  # text can't be mistaken for a call
    single: bool = False  # one call per answer; several would have another form


_HERMES = _Form(lambda name: _Markup(f'<tool_call>\n{{"name": {name}, "arguments": ', "}\n</tool_call>"), "<tool_call>", separator="\n")
_LLAMA = _Form(lambda name: _Markup(f'{{"name": {name}, "parameters": ', "}"), '{"name"', marked=False, single=True)
_MISTRAL_ARRAY = _Form(lambda name: _Markup(f'[TOOL_CALLS][{{"name": {name}, "arguments": ', "}]"), "[TOOL_CALLS]", single=True)
_MISTRAL = _Form(lambda name: _Markup(f"[TOOL_CALLS]{json.loads(name)}[ARGS]", ""), "[TOOL_CALLS]")


def _form(tool_parser: str, template: str) -> _Form | None:
    if tool_parser == "mistral":
        return _MISTRAL if "[ARGS]" in template else _MISTRAL_ARRAY
    return {"hermes": _HERMES, "llama3_json": _LLAMA}.get(tool_parser)


def call_rule(tool_parser: str, template: str, tools: Sequence[Tool], *, required: bool, single: bool) -> Mapping[str, Any]:
    """Return a structural tag for calls in the parser's format. `template`: the chat template, which determines the variant of a format.
    `required`: the answer consists of calls only; `single`: it ends after the first call.

    Raises `ValueError` if the format can't be constrained that way.
    """
    form = _form(tool_parser, template)
    if form is None:
        raise ValueError(f"calls in the format of tool parser {tool_parser} can't be constrained to a schema")
    if not form.marked and not required:
        raise ValueError(
            f"calls in the format of tool parser {tool_parser} have no mark, so they can be constrained to a schema only if a call is demanded"
        )
    structures = [
        {"begin": markup.begin, "schema": schema, "end": markup.end}
        for name, schema in tools
        for markup in (form.markup(json.dumps(name, ensure_ascii=False)),)
    ]
    tag = {"structures": structures, "triggers": [form.trigger], "at_least_one": required, "stop_after_first": single or form.single}
    return {**tag, "separator": form.separator} if required else tag
