"""Formats of calls and reasoning that come with a model: what is written in one is read back,
wherever it is cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail_server.parsers import vllm_names
from dovetail_server.parsers.registry import ChosenParsers, Finds, parser_for
from tests.budget import least_cpu_s
from tests.server.answers import KNOWN
from tests.server.scripted import Script, ScriptedEngine
from tests.server.serving import PATIENCE_S, serving_in_thread
from tests.server.test_parsers import Answer, cuts_of, joined
from tests.support import examples

some = examples(quick=60, full=300)
NAMES = st.from_regex(r"[a-z][a-z0-9_.-]{0,11}", fullmatch=True)
PIECES = [
    "a",
    " ",
    "\n",
    "{",
    "}",
    "[",
    ",",
    ":",
    '"',
    "\\",
    "<",
    "<|",
    "é",
    "😀",
    "</",
    "`" * 3,
    "|>",
]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-99, 99)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
PROSE = st.sampled_from(["", "Well.", "A < b", "{", "<|", "call:"])

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def deepseek_v3(calls: Calls) -> str:
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{f}\n```json\n{as_json(a)}\n```<｜tool▁call▁end｜>"
        for f, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    body = "".join(
        f"<｜tool▁call▁begin｜>{f}<｜tool▁sep｜>{as_json(a)}<｜tool▁call▁end｜>" for f, a in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def kimi(calls: Calls) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{f}:{i}<|tool_call_argument_begin|>{as_json(a)}<|tool_call_end|>"
        for i, (f, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def nemotron(calls: Calls) -> str:
    return f"<TOOLCALL>{as_json([{'name': f, 'arguments': a} for f, a in calls])}</TOOLCALL>"


def minimax(calls: Calls) -> str:
    def call(name: str, arguments: Mapping[str, Any]) -> str:
        written = [
            (key, value if isinstance(value, str) else as_json(value))
            for key, value in arguments.items()
        ]
        values = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in written)
        return f'<invoke name="{name}">\n{values}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(call(*one) for one in calls)}</minimax:tool_call>"


def loose(value: Any, mark: str) -> str:
    match value:
        case str():
            return f"{mark}{value}{mark}"
        case list():
            return f"[{','.join(loose(one, mark) for one in value)}]"
        case dict():
            return "{" + ",".join(f"{key}:{loose(one, mark)}" for key, one in value.items()) + "}"
    return as_json(value)


GEMMA_QUOTE = '<|"|>'


def gemma4(calls: Calls) -> str:
    return "".join(
        f"<|tool_call>call:{f}{loose(dict(a), GEMMA_QUOTE)}<tool_call|>" for f, a in calls
    )


def functiongemma(calls: Calls) -> str:
    return "".join(
        f"<start_function_call>call:{f}{loose(dict(a), '<escape>')}<end_function_call>"
        for f, a in calls
    )


def harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{f} <|constrain|>json<|message|>{as_json(a)}<|call|>"
        for f, a in calls
    )


FORMATS: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v3, of V3.1": ("deepseek_v3", deepseek_v31),
    "kimi_k2": ("kimi_k2", kimi),
    "nemotron_h": ("nemotron_h", nemotron),
    "minimax_m2": ("minimax_m2", minimax),
    "gemma4": ("gemma4", gemma4),
    "functiongemma": ("functiongemma", functiongemma),
    "harmony": ("harmony", harmony),
}
KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def tools_of(calls: Calls) -> list[dict[str, Any]]:
    """Tools whose parameters have the types of the calls' arguments."""
    kinds: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        kinds.setdefault(name, {}).update(
            {key: {"type": KINDS[type(value)]} for key, value in arguments.items()}
        )
    return [
        {"type": "function", "function": {"name": name, "parameters": {"properties": of}}}
        for name, of in kinds.items()
    ]


def read(
    pieces: Sequence[str],
    calls: str | None,
    reasoning: str | None,
    tools: Sequence[Mapping[str, Any]],
) -> Answer:
    chosen = ChosenParsers(
        None if calls is None else KNOWN.named("calls", calls),
        None if reasoning is None else KNOWN.named("reasoning", reasoning),
    )
    parser = parser_for(chosen, "", tools)
    assert parser is not None
    return joined([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


@pytest.mark.parametrize("format", FORMATS)
@some
@given(data=st.data(), calls=CALLS, before=PROSE, after=PROSE)
def test_calls_are_read_as_they_were_written(
    format: str, data: st.DataObject, calls: Calls, before: str, after: str
) -> None:
    if len({name for name, _ in calls}) < len(calls):
        calls = calls[:1]  # one tool has one schema
    name, write = FORMATS[format]
    text = before + write(calls) + after
    bounds = [0, *cuts_of(data, text), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    for way in (pieces, list(text)):
        found = read(way, name, None, tools_of(calls))
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [
            (f, dict(a)) for f, a in calls
        ]
        assert found.content == before + after


def test_harmony_shows_the_messages_that_announce_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert read(list(text), "harmony", "harmony", tools) == Answer(
        "Hm.", "I look.", (("f", '{"a": 1}'),)
    )
    final = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So."
    )
    assert read(list(final), None, "harmony", ()) == Answer("Hm.", "So.", ())


def test_gemma_reasons_before_it_calls() -> None:
    text = "<|channel>thought\nHm.\n<channel|><|tool_call>call:f{}<tool_call|>"
    assert read(list(text), "gemma4", "gemma4", [{"function": {"name": "f"}}]) == Answer(
        "Hm.", "", (("f", "{}"),)
    )


def test_kimis_ids_are_the_models() -> None:
    parser = parser_for(
        ChosenParsers(KNOWN.named("calls", "kimi_k2"), None), "", [{"function": {"name": "f"}}]
    )
    assert parser is not None
    ids = [event.id for event in parser.feed(kimi([("f", {}), ("f", {})])) if hasattr(event, "id")]
    assert ids == ["functions.f:0", "functions.f:1"]


SPACE = " " * 190
HEADS = {
    "harmony": f"<|start|>{SPACE}<|channel|>final{SPACE}{SPACE}!<|message|>",
    "deepseek_v3": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>f{SPACE}{SPACE}!{{",
    "kimi_k2": f"<|tool_call_begin|>{SPACE}f{SPACE}{SPACE}!{{",
    "gemma4": f"<|tool_call>call:{SPACE}f!{{",
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_full_of_spaces_costs_no_more_than_another(name: str) -> None:
    text = HEADS[name] * 20
    tools = [{"function": {"name": "f"}}]
    assert least_cpu_s(lambda: read([text], name, None, tools), 0.2) <= 0.2


TEMPLATES = {
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}": (
        "harmony",
        "harmony",
    ),
    "{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}}{% if thinking %}<think>{% endif "
    "%}</think>": (
        "deepseek_v3",
        "think",
    ),
    "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>": (
        "kimi_k2",
        None,
    ),
    "{%- set toolcall_begin_token = '<minimax:tool_call>' -%} <think>": ("minimax_m2", "think"),
    "{{- '<|tool_call>call:' -}} <|\"|> {{ '<|channel>thought\\n<channel|>' }}": (
        "gemma4",
        "gemma4_thought",
    ),
    "<start_function_call>call:{{ name }}": ("functiongemma", None),
    'use the format <TOOLCALL>[{"name": "tool_name1"}]</TOOLCALL> <think></think>': (
        "nemotron_h",
        "think",
    ),
    "within <tool_call></tool_call> XML tags, as granite-4.0 writes them": ("hermes", None),
    "<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key></tool_call> <think>": ("glm45", "think"),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_models_template_chooses_its_parsers(template: str) -> None:
    found = KNOWN.matching("calls", template), KNOWN.matching("reasoning", template)
    assert tuple(None if one is None else one.name for one in found) == TEMPLATES[template]


NAMES_OF_VLLM: dict[Finds, Mapping[str, str | None]] = {
    "calls": vllm_names.CALLS,
    "reasoning": vllm_names.REASONING,
}


@pytest.mark.parametrize(
    ("finds", "name"), [(finds, name) for finds, names in NAMES_OF_VLLM.items() for name in names]
)
def test_each_of_vllms_names_means_a_parser_or_is_refused_by_name(finds: Finds, name: str) -> None:
    if own := NAMES_OF_VLLM[finds][name]:
        assert KNOWN.named(finds, name).name == own
        return
    with pytest.raises(
        ConfigError, match=f"no built-in parser reads the format of vLLM's parser {name}"
    ):
        KNOWN.named(finds, name)


HARMONY_TEMPLATE = (
    "{# <|start|>assistant<|channel|>analysis #}{{ tools | tojson }}{% for m in "
    "messages %}{{ m.content }}{% endfor %}"
)
HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I "
    "look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_with_gpt_oss_has_reasoning_text_and_calls(stream: bool) -> None:
    engine = ScriptedEngine()
    engine.script = Script(HARMONY_ANSWER)
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    with (
        serving_in_thread(lambda: engine) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="-", timeout=PATIENCE_S) as client,
    ):
        asked: Any = {
            "model": "fake",
            "messages": [{"role": "user", "content": "?"}],
            "tools": tools,
            "extra_body": {"chat_template": HARMONY_TEMPLATE},
        }
        if stream:
            deltas = [
                chunk.choices[0].delta
                for chunk in client.chat.completions.create(**asked, stream=True)
            ]
            calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
            reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
            told = (
                reasoning,
                "".join(delta.content or "" for delta in deltas),
                calls[0].name,
                "".join(call.arguments for call in calls),
            )
        else:
            message = client.chat.completions.create(**asked).choices[0].message
            function = message.tool_calls[0].function
            told = message.reasoning, message.content, function.name, function.arguments
    assert told == ("Hm.", "I look.", "f", '{"a": 1}')
    assert engine.last.params.skip_special_tokens is False
