"""Rules by which a model can but write calls of given functions: the counterparts of the parsers, for requests that demand calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Tool = tuple[str, Mapping[str, Any]]  # a function's name, the JSON Schema of its arguments


class _Markup(NamedTuple):
    """The text around the arguments of a call."""

    begin: str
    end: str


class _Form(NamedTuple):
    """The form of a format's calls."""

    markup: Callable[[str], _Markup]  # by the function's name as JSON
    trigger: str  # where it stands, a call begins
    separator: str = ""  # between calls
    marked: bool = True  # text can't be taken for a call
    single: bool = False  # one call an answer; more would be told by another form


_HERMES = _Form(lambda name: _Markup(f'<tool_call>\n{{"name": {name}, "arguments": ', "}\n</tool_call>"), "<tool_call>", separator="\n")
_LLAMA = _Form(lambda name: _Markup(f'{{"name": {name}, "parameters": ', "}"), '{"name"', marked=False, single=True)
_MISTRAL_ARRAY = _Form(lambda name: _Markup(f'[TOOL_CALLS][{{"name": {name}, "arguments": ', "}]"), "[TOOL_CALLS]", single=True)
_MISTRAL = _Form(lambda name: _Markup(f"[TOOL_CALLS]{json.loads(name)}[ARGS]", ""), "[TOOL_CALLS]")


def _form(tool_parser: str, template: str) -> _Form | None:
    if tool_parser == "mistral":
        return _MISTRAL if "[ARGS]" in template else _MISTRAL_ARRAY
    return {"hermes": _HERMES, "llama3_json": _LLAMA}.get(tool_parser)


def call_rule(tool_parser: str, template: str, tools: Sequence[Tool], *, required: bool, single: bool) -> Mapping[str, Any]:
    """Return a structural tag of calls in the parser's format. `template`: the model's chat template, which tells variants of a format apart.
    `required`: the answer is calls, with no text; `single`: it ends behind the first.

    Raises `ValueError` with the reason if the format can't be held to that.
    """
    form = _form(tool_parser, template)
    if form is None:
        raise ValueError(f"calls as tool parser {tool_parser} reads them can't be held to a schema")
    if not form.marked and not required:
        raise ValueError(
            f"calls as tool parser {tool_parser} reads them have no mark, so that they can be held to a schema only where one is demanded"
        )
    structures = [
        {"begin": markup.begin, "schema": schema, "end": markup.end}
        for name, schema in tools
        for markup in (form.markup(json.dumps(name, ensure_ascii=False)),)
    ]
    tag = {"structures": structures, "triggers": [form.trigger], "at_least_one": required, "stop_after_first": single or form.single}
    return {**tag, "separator": form.separator} if required else tag
