"""Claims about the parsers of tool calls and reasoning, against an oracle that reads a whole text
with regular expressions and `json.loads`."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.parser import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from dovetail.errors import DovetailError
from dovetail.request.outputs import CompletionOutput
from dovetail_server.parsers.pieces import Malformed
from dovetail_server.parsers.reader import AnswerReader
from dovetail_server.parsers.registry import ChosenParsers, Finds, opens_reasoning, parser_for
from tests.budget import least_cpu_s
from tests.server.answers import KNOWN, parser_named
from tests.support import examples

some = examples(quick=40, full=1000)
FORMATS = ("hermes", "llama3_json", "mistral", "qwen3_coder", "glm45")
KINDS: dict[str, object] = {
    "s": {"type": "string"},
    "j": {"type": ["object", "null"]},
    "u": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "n": {"type": ["string", "null"]},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": KINDS}},
    }
    for name in ("f", "g.h")
]


class Call(NamedTuple):
    """A tool call, its arguments as the model wrote them."""

    name: str
    arguments: str


class Answer(NamedTuple):
    """A whole answer: what all deltas add up to."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


def events_of(
    pieces: list[str], tool_parser: str | None, *, thinks: bool = True, inside: bool = False
) -> list[Event]:
    parser = parser_named(tool_parser, "think" if thinks else None, tools=TOOLS, inside=inside)
    return [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]


def joined(events: list[Event]) -> Answer:
    """Add the deltas up, and check their order: a call's start, then its arguments, then the next
    call."""
    names: list[str] = []
    arguments: list[str] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(names)
            assert event.id
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, ToolCallArguments):
            assert event.index == len(names) - 1, "arguments come for the call that began last"
            assert event.text, "no delta is empty"
            arguments[-1] += event.text
        else:
            assert event.text, "no delta is empty"
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    return Answer(reasoning, content, tuple(map(Call, names, arguments)))


def parse(
    text: str, tool_parser: str | None, *, cuts: tuple[int, ...] = (), inside: bool = False
) -> Answer:
    bounds = [0, *cuts, len(text)]
    return joined(events_of([text[a:b] for a, b in pairwise(bounds)], tool_parser, inside=inside))


def by_characters(text: str, tool_parser: str | None, *, inside: bool = False) -> Answer:
    return joined(events_of(list(text), tool_parser, inside=inside))


# The oracle. It reads whole, well-formed answers and near-misses; answers that break off within a
# call have tests of their own.

DECODER = json.JSONDecoder()
MEMBER = re.compile(r'[{,]\s*("(?:[^"\\]|\\.)*")\s*:\s*')
HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?={)")


def call_at(text: str, pos: int) -> tuple[Call, int] | None:
    """Return the call whose object begins at `pos`, its arguments as they stand there, and where it
    ends."""
    try:
        value, end = DECODER.raw_decode(text, pos)
    except ValueError:
        return None
    if not isinstance(value, dict) or not value.get("name") or not isinstance(value["name"], str):
        return None
    arguments = "{}"
    while (member := MEMBER.match(text, pos)) is not None:
        _, pos = DECODER.raw_decode(text, member.end())
        if json.loads(member[1]) in ("arguments", "parameters"):
            arguments = text[member.end() : pos]
        pos += len(text[pos:]) - len(text[pos:].lstrip())
    return Call(value["name"], arguments), end


def space_at(text: str, pos: int) -> int:
    return pos + len(text[pos:]) - len(text[pos:].lstrip())


def hermes_oracle(text: str) -> tuple[str, list[Call]]:
    content, calls, pos = "", [], 0
    while (mark := text.find("<tool_call>", pos)) >= 0:
        begin = mark + len("<tool_call>")
        found = call_at(text, space_at(text, begin))
        if found is None:
            content, pos = content + text[pos:begin], begin
        else:
            content += text[pos:mark].rstrip()
            calls.append(found[0])
            pos = space_at(text, found[1])
            if text.startswith("</tool_call>", pos):
                pos = space_at(text, pos + len("</tool_call>"))
    return content + text[pos:], calls


def only_a_call(value: dict[str, object]) -> bool:
    others = {key: part for key, part in value.items() if key not in ("name", "type", "id")}
    return len(others) == 1 and isinstance(others.get("arguments", others.get("parameters")), dict)


def llama_oracle(text: str) -> tuple[str, list[Call]]:
    content, tag, rest = (
        ("", "", text) if text.lstrip().startswith("{") else text.partition("<|python_tag|>")
    )
    content, rest = (content.rstrip(), rest) if tag else ("", text)
    calls: list[Call] = []
    while (found := call_at(rest, space_at(rest, 0))) is not None and only_a_call(
        json.loads(rest[: found[1]])
    ):
        calls.append(found[0])
        rest = rest[space_at(rest, found[1]) :]
        separated = rest.startswith((";", ","))
        if not separated and call_at(rest, 0) is None:
            break
        if separated and call_at(rest, space_at(rest, 1)) is not None:
            rest = rest[1:]
    return (content + rest, calls) if calls else (text, [])


def mistral_oracle(text: str) -> tuple[str, list[Call]]:
    content, _mark, rest = text.partition("[TOOL_CALLS]")
    calls: list[Call] = []
    if (array := re.match(r"\s*\[", rest)) is not None:
        pos, end = array.end(), DECODER.raw_decode(rest, space_at(rest, 0))[1]
        while (found := call_at(rest, space_at(rest, pos))) is not None:
            calls.append(found[0])
            pos = rest.index(",", found[1]) + 1 if rest[space_at(rest, found[1])] == "," else end
        return content.rstrip() + rest[space_at(rest, end) :], calls
    while (head := HEAD.match(rest)) is not None:
        end = DECODER.raw_decode(rest, head.end())[1]
        calls.append(Call(head[1], rest[head.end() : end]))
        rest = rest[space_at(rest, end) :].removeprefix("[TOOL_CALLS]")
    return (content.rstrip() + rest, calls) if calls else (text, [])


SPACE = "[ \\t\\r\\n]*"
# what ends a value whose end tag is missing
QWEN_NEXT = rf"<parameter=(?:{'|'.join(KINDS)})>|</function>{SPACE}</tool_call>"
QWEN_VALUE = rf"((?:(?!</parameter>|{QWEN_NEXT}).)*)(?:</parameter>|(?={QWEN_NEXT}))"
QWEN_ARGUMENT = re.compile(rf"{SPACE}<parameter=([^>]*)>{QWEN_VALUE}", re.DOTALL)
GLM_NEXT = rf"<arg_key>(?:{'|'.join(KINDS)})</arg_key>{SPACE}<arg_value>|</tool_call>"
GLM_VALUE = rf"((?:(?!</arg_value>|{GLM_NEXT}).)*)(?:</arg_value>|(?={GLM_NEXT}))"
GLM_ARGUMENT = re.compile(
    rf"{SPACE}<arg_key>((?:(?!</arg_key>).)*)</arg_key>{SPACE}<arg_value>{GLM_VALUE}", re.DOTALL
)
QWEN_HEAD = re.compile(rf"{SPACE}<tool_call>{SPACE}<function=([^\s<>{{}}\"]+)>")
QWEN_END = re.compile(rf"{SPACE}</function>{SPACE}(?:</tool_call>{SPACE})?")
GLM_HEAD = re.compile(
    rf"{SPACE}<tool_call>{SPACE}([^\s<>{{}}\"]+)(?={SPACE}(?:<arg_key>|</tool_call>))"
)
GLM_END = re.compile(rf"{SPACE}</tool_call>{SPACE}")


def json_value(key: str, text: str) -> str:
    """The value as JSON: `j` takes no string, `n` takes null as well, and all others take any
    string."""
    if key == "n" and text.strip() in ("null", "None"):
        return "null"
    if key == "j":
        with contextlib.suppress(ValueError):
            json.loads(text.strip())
            return text.strip()
        if text.strip() in ("True", "False", "None"):
            return {"True": "true", "False": "false", "None": "null"}[text.strip()]
    return json.dumps(text, ensure_ascii=False)


def tagged_oracle(
    head: re.Pattern[str], argument: re.Pattern[str], end: re.Pattern[str], text: str
) -> tuple[str, list[Call]]:
    calls, content, pos = [], "", 0
    while (found := head.search(text, pos)) is not None:
        content, pos, members = content + text[pos : found.start()], found.end(), []
        while (one := argument.match(text, pos)) is not None:
            value = one[2]
            if argument is QWEN_ARGUMENT:  # its lines are markup
                value = value.removeprefix("\n").removesuffix("\n")
            members.append(
                f"{json.dumps(one[1].strip(), ensure_ascii=False)}: "
                f"{json_value(one[1].strip(), value)}"
            )
            pos = one.end()
        calls.append(Call(found[1], "{" + ", ".join(members) + "}"))
        ended = end.match(text, pos)
        assert ended is not None, "answers that break off have tests of their own"
        pos = ended.end()
    return content + text[pos:], calls


ORACLES: dict[str, Callable[[str], tuple[str, list[Call]]]] = {
    "hermes": hermes_oracle,
    "llama3_json": llama_oracle,
    "mistral": mistral_oracle,
    "qwen3_coder": partial(tagged_oracle, QWEN_HEAD, QWEN_ARGUMENT, QWEN_END),
    "glm45": partial(tagged_oracle, GLM_HEAD, GLM_ARGUMENT, GLM_END),
}


def oracle(text: str, tool_parser: str) -> Answer:
    thought = re.fullmatch(r"\s*<think>\s*(.*?)\s*</think>\s*(.*)", text, re.DOTALL)
    reasoning, rest = thought.groups() if thought else ("", text)
    content, calls = ORACLES[tool_parser](rest)
    return Answer(reasoning, content, tuple(calls))


# Answers

SHORT = {
    "hermes": [
        "Hi.",
        '<tool_call>{"name":"f","arguments":{}}</tool_call>',
        'A\n<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<"}}\n</tool_call>',
        '<tool_call>{"arguments":[1],"name":"f"}</tool_call>B',
        "a <tool_cal> <<tool_call",
        "<tool_call>no</tool_call>",
        '<think>x</think><tool_call>{"name":"f"}</tool_call>',
    ],
    "llama3_json": [
        "Hi.",
        "{",
        '{"name":"J","age":3}',
        '{"name":"f","parameters":{}}',
        ' <|python_tag|>{"name":"f","parameters":{}}',
        '{"name":"f","parameters":{}};{"name":"g","parameters":{}}',
        '{"name":"f","parameters":{}}\n{"name":"g","parameters":{}}, '
        '{"name":"h","parameters":{}}{"name":"i","parameters":{}}',
        '{"name":"f","parameters":{}}\n{"name":"J"}, or so',
        '{"name":"f","parameters":{}} , and so on',
        '<think>x</think>{"parameters":{"a":";"},"name":"f"}',
    ],
    "mistral": [
        "Hi [TOOL_CALL].",
        '[TOOL_CALLS][{"name":"f","arguments":{}}]',
        '[TOOL_CALLS] [{"name":"f","arguments":{"a":"]"}}, {"arguments":{},"name":"g"}]',
        "A [TOOL_CALLS]f{}[TOOL_CALLS]g[ARGS]{}",
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a":"}"}B',
        "[TOOL_CALLS]Hello, you",
    ],
    "qwen3_coder": [
        "Hi <function=f>.",
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        "A\n<tool_call><function=f>\n<parameter=s>\n</p\n</parameter>\n</function></tool_call>",
        "<tool_call><function=f><parameter=j>{}</parameter><parameter=u>1\n\n</parameter></function>B",
        "<tool_call><function=f><parameter=j>no</parameter></function>\n<tool_call><function=g></function>",
        "<tool_call> <function no",
        "<think>x</think><tool_call><function=f><parameter=j>True</parameter></function>",
    ],
    "glm45": [
        "Hi <arg_key>.",
        "<tool_call>f\n</tool_call>",
        "A\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>\n</a</arg_value>\n</tool_call>",
        "<tool_call>f<arg_key>j</arg_key><arg_value> [] </arg_value></tool_call>B",
        "<tool_call>f<arg_key>j</arg_key><arg_value>no</arg_value></tool_call>",
        "<tool_call>no call <tool_call>g</tool_call>",
        "<think>x</think><tool_call>f</tool_call>",
    ],
}


def cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(tool_parser, text) for tool_parser, texts in table.items() for text in texts]


@pytest.mark.parametrize(("tool_parser", "text"), cases(SHORT))
def test_an_answer_parses_as_the_oracle_reads_it(tool_parser: str, text: str) -> None:
    assert parse(text, tool_parser) == oracle(text, tool_parser)


TAKES = {"a": {"type": "string"}, "b": {"type": "string"}, "n": {"type": "integer"}}
SIMPLE = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": TAKES}}}
    for name in "fgh"
]
OF_CALLS = [one.name for one in KNOWN.built_ins if one.capabilities.calls]
MISTAKES = [
    (name, one)
    for name in OF_CALLS
    for one in getattr(KNOWN.named("calls", name).component, "malformed", ())
]


@pytest.mark.parametrize(
    ("name", "mistake"), MISTAKES, ids=[f"{name}: {one.mistake}" for name, one in MISTAKES]
)
def test_a_malformed_call_is_parsed_as_the_documentation_says(
    name: str, mistake: Malformed
) -> None:
    example = mistake.example
    for pieces in ([example.text], list(example.text)):
        parser = parser_named(name, tools=SIMPLE)
        found = joined(
            [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]
        )
        assert found == Answer("", example.content, tuple(Call(*call) for call in example.calls))


def test_each_format_states_how_it_recovers() -> None:
    assert {name for name, _ in MISTAKES} == set(OF_CALLS)


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<think>",
    "</think>",
]
NEAR_MISSES = [
    "<tool_cal",
    "</tool_call",
    "<<",
    "<",
    "[TOOL_CALL",
    "[",
    "{",
    "}",
    "<|python_tag",
    "<thin",
    "<function=",
    "</arg_",
    '"',
    "\\",
    ";",
    "\n",
    " ",
    "é",
    "\U0001f600",
    "text",
]
STRINGS = st.lists(st.sampled_from(MARKS + NEAR_MISSES) | st.text(max_size=3), max_size=3).map(
    "".join
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(STRINGS, VALUES, max_size=2)
NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True)
PROSE = st.lists(st.sampled_from(NEAR_MISSES), max_size=6).map("|".join)
SPACES = st.sampled_from(["", " ", "\n", "\n\n "])


@st.composite
def written_object(draw: st.DrawFn, *, arguments: str = "arguments") -> str:
    """Return a call's object as some model might write it."""
    members = [("name", draw(NAMES)), (arguments, draw(ARGUMENTS))]
    if draw(st.booleans()):
        members.reverse()
    return json.dumps(
        dict(members), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1]))
    )


@st.composite
def hermes_answer(draw: st.DrawFn) -> str:
    calls = draw(st.lists(written_object(), max_size=3))
    blocks = [
        f"<tool_call>{draw(SPACES)}{call}{draw(SPACES)}</tool_call>{draw(SPACES)}" for call in calls
    ]
    return "".join(block + draw(PROSE) for block in ["", *blocks])


@st.composite
def llama_answer(draw: st.DrawFn) -> str:
    calls = draw(st.lists(written_object(arguments="parameters"), max_size=3))
    tag = draw(st.sampled_from(["", "<|python_tag|>", "Well.\n<|python_tag|>"]))
    return (
        tag + f"{draw(SPACES)}{draw(st.sampled_from(['', ';', ',']))}{draw(SPACES)}".join(calls)
        if calls
        else draw(PROSE)
    )


@st.composite
def mistral_answer(draw: st.DrawFn) -> str:
    head = draw(PROSE)
    calls = draw(st.lists(written_object(), min_size=1, max_size=3))
    if draw(st.booleans()):
        return f"{head}[TOOL_CALLS]{draw(SPACES)}[{draw(SPACES)}{(draw(SPACES) + ',' + draw(SPACES)).join(calls)}{draw(SPACES)}]{draw(SPACES)}"
    named = [
        f"[TOOL_CALLS]{draw(NAMES)}{draw(st.sampled_from(['', '[ARGS]', '[CALL_ID]a1b2c3d4e[ARGS]']))}{json.dumps(draw(ARGUMENTS))}"
        for _ in calls
    ]
    return head + draw(SPACES).join(named)


KEYS = st.sampled_from([*KINDS, "other", "a key"])
OFTEN = st.sampled_from([True, True, True, False])
PLAIN = st.lists(
    st.sampled_from(
        [
            *MARKS,
            *NEAR_MISSES,
            "<function=f>",
            "<parameter=s>",
            "<arg_key>s</arg_key>",
            "</function>",
            "True",
            "null",
            "[1, 2]",
            '{"a": "b"}',
        ]
    ),
    max_size=4,
).map("".join)


@st.composite
def qwen_answer(draw: st.DrawFn) -> str:
    text = draw(PROSE)
    for _ in range(draw(st.integers(0, 3))):
        given = draw(st.lists(st.tuples(KEYS, PLAIN), max_size=3))
        ends = [draw(OFTEN) for _ in given]  # models forget end marks
        values = "".join(
            f"{draw(SPACES)}<parameter={key}>\n{value}\n{'</parameter>' * end}"
            for (key, value), end in zip(given, ends, strict=True)
        )
        name = draw(st.sampled_from(["f", "g.h"]))
        text += f"{draw(SPACES)}<tool_call>{draw(SPACES)}<function={name}>{values}{draw(SPACES)}</function>{draw(SPACES)}</tool_call>{draw(SPACES)}"
        text += draw(PROSE)
    return text


@st.composite
def glm_answer(draw: st.DrawFn) -> str:
    text = draw(PROSE)
    for _ in range(draw(st.integers(0, 3))):
        given = draw(st.lists(st.tuples(KEYS, PLAIN), max_size=3))
        values = "".join(
            f"{draw(SPACES)}<arg_key>{key}</arg_key>{draw(SPACES)}<arg_value>{value}{'</arg_value>' * draw(OFTEN)}"
            for key, value in given
        )
        text += f"{draw(SPACES)}<tool_call>{draw(st.sampled_from(['f', 'g.h']))}{values}{draw(SPACES)}</tool_call>{draw(SPACES)}{draw(PROSE)}"
    return text


ANSWERS = {
    "hermes": hermes_answer(),
    "llama3_json": llama_answer(),
    "mistral": mistral_answer(),
    "qwen3_coder": qwen_answer(),
    "glm45": glm_answer(),
}
THOUGHTS = st.just("") | PROSE.map(str.strip).map("<think>\n{}\n</think>\n\n".format)


def cuts_of(data: st.DataObject, text: str) -> tuple[int, ...]:
    if len(text) < 2:
        return ()
    return tuple(sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=20))))


@pytest.mark.parametrize("tool_parser", FORMATS)
@some
@given(data=st.data())
def test_any_answer_cut_anywhere_parses_as_the_oracle_reads_it(
    tool_parser: str, data: st.DataObject
) -> None:
    text = data.draw(THOUGHTS) + data.draw(ANSWERS[tool_parser])
    expected = oracle(text, tool_parser)
    assert parse(text, tool_parser, cuts=cuts_of(data, text)) == expected
    assert by_characters(text, tool_parser) == expected


def test_a_name_comes_before_its_arguments_are_there() -> None:
    parser = parser_named("hermes", tools=TOOLS)
    (start,) = parser.feed('<tool_call>\n{"name": "find"')
    assert isinstance(start, ToolCallStart)
    assert start.name == "find"
    assert parser.feed(', "arguments": {"a') == [ToolCallArguments(0, '{"a')]
    assert parser.feed('": 1}') == [ToolCallArguments(0, '": 1}')]
    assert parser.feed("}\n</tool_call>") == parser.finish() == []


def test_content_is_held_no_longer_than_it_may_be_a_mark() -> None:
    parser = parser_named("hermes", "think", tools=TOOLS)
    assert parser.feed("Let a") == [Content("Let a")]
    assert parser.feed(" <tool_") == []
    assert parser.feed("box") == [Content(" <tool_box")]


@pytest.mark.parametrize(
    ("tool_parser", "text", "expected"),
    [
        ("hermes", '<tool_call>{"na', Answer("", '<tool_call>{"na', ())),
        ("hermes", '<tool_call>{"name": "f"', Answer("", "", (Call("f", ""),))),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "b',
            Answer("", "", (Call("f", '{"a": "b'),)),
        ),
        ("hermes", '<tool_call>{"name": "f"}\n</tool_c', Answer("", "", (Call("f", "{}"),))),
        ("mistral", '[TOOL_CALLS]f{"a": [', Answer("", "", (Call("f", '{"a": ['),))),
        ("llama3_json", '{"name": "f", "parameters": {"a', Answer("", "", (Call("f", '{"a'),))),
        ("llama3_json", '{"name": "f"', Answer("", '{"name": "f"', ())),
        ("qwen3_coder", "<tool_call><function=f", Answer("", "<tool_call><function=f", ())),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=s>\na\n</para",
            Answer("", "", (Call("f", '{"s": "a'),)),
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=j>\n[1",
            Answer("", "", (Call("f", '{"j": '),)),
        ),
        ("glm45", "<tool_call>f\n", Answer("", "<tool_call>f\n", ())),
        ("glm45", "<tool_call>f\n<arg_key>s</arg_key><arg_va", Answer("", "", (Call("f", ""),))),
    ],
)
def test_a_call_that_is_cut_off_keeps_what_has_come_of_it(
    tool_parser: str, text: str, expected: Answer
) -> None:
    assert by_characters(text, tool_parser) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So <tool_c", Answer("", "So", ())),
        ("So <tool_call>", Answer("", "So", ())),
        ("So <tool_box", Answer("", "So <tool_box", ())),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_', Answer("", "", (Call("f", "{}"),))),
        ("<thi", Answer("", "", ())),
        ("<think>I </thi", Answer("I", "", ())),
    ],
)
@pytest.mark.parametrize("finish", ["length", "stop"])
def test_an_answer_that_is_cut_off_within_a_mark_ends_before_it(
    text: str, expected: Answer, finish: Literal["length", "stop"]
) -> None:
    for pieces in ([text], list(text)):
        reader = AnswerReader(parser_named("hermes", "think", tools=TOOLS))
        outputs = [CompletionOutput(0, piece, (1,)) for piece in pieces]
        outputs[-1].finish_reason = finish
        found = joined([event for output in outputs for event in reader.read(output)])
        assert found == (expected if finish == "length" else parse(text, "hermes")), (
            "the model may end its answer with such a text"
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>{"name": "f", oops</tool_call> so', Answer("", "oopsso", (Call("f", ""),))),
        (
            '<tool_call>{"name": "f", "arguments": {}}}</tool_call>',
            Answer("", "}", (Call("f", "{}"),)),
        ),
        (
            '<tool_call>{"name": "\\ud800", "arguments": {}}',
            Answer("", '<tool_call>{"name": "\\ud800", "arguments": {}}', ()),
        ),
        (
            '<tool_call>{"x": tru, "name": "f"}',
            Answer("", '<tool_call>{"x": tru, "name": "f"}', ()),
        ),
        ('<tool_call><tool_call>{"name": "f"}', Answer("", "<tool_call>", (Call("f", "{}"),))),
    ],
)
def test_what_is_wrong_with_a_call_costs_no_text(text: str, expected: Answer) -> None:
    assert by_characters(text, "hermes") == expected


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\na\n</think>\n\nb", False, Answer("a", "b", ())),
        ("a\n</think>\n\nb", True, Answer("a", "b", ())),
        ("<think>a</think>b", True, Answer("a", "b", ())),
        ("<think>a<tool_call>", False, Answer("a<tool_call>", "", ())),
        ("a", True, Answer("a", "", ())),
        (" a <think>b</think>", False, Answer("", " a <think>b</think>", ())),
        ("<think>\n\n</think>\n\n", False, Answer("", "", ())),
    ],
)
def test_reasoning_is_what_stands_between_its_marks_at_the_beginning(
    text: str, inside: bool, expected: Answer
) -> None:
    assert (
        by_characters(text, "hermes", inside=inside) == parse(text, None, inside=inside) == expected
    )


def test_each_call_has_an_id_of_its_own_that_its_template_takes() -> None:
    text = '<tool_call>{"name":"f"}</tool_call>' * 9
    ids = [event.id for event in events_of([text], "hermes") if isinstance(event, ToolCallStart)]
    assert len(set(ids)) == 9
    given_twice = "[TOOL_CALLS]g[CALL_ID]abc123[ARGS]{}" * 2
    events = events_of(["[TOOL_CALLS]f{}" + given_twice], "mistral")
    made, given_id, other = (event.id for event in events if isinstance(event, ToolCallStart))
    assert re.fullmatch("[A-Za-z0-9]{9}", made)
    assert given_id == "abc123"
    assert re.fullmatch("[A-Za-z0-9]{9}", other), "the model has used the id before"


# Our own words, with all the marks of Mistral Small 3's template.
MISTRAL_TEMPLATE = """{{ bos_token }}[SYSTEM_PROMPT]Answer with a JSON array of {"name", "arguments"} for calls.[/SYSTEM_PROMPT]
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- if loop.last and tools %}{{ "[AVAILABLE_TOOLS] " + tools | tojson + "[/AVAILABLE_TOOLS]" }}{% endif %}
        {{- "[INST]" + message.content + "[/INST]" }}
    {%- elif message.tool_calls %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{% if not loop.last %}, {% endif %}
        {%- endfor %}
        {{- "]" + eos_token }}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""


def test_a_template_tells_its_parsers_by_its_marks() -> None:
    templates = {
        "answer within <tool_call></tool_call> as {name, arguments}": ("hermes", None),
        "drop all up to </think>, then <tool_call> {name, arguments}": ("hermes", "think"),
        "a header <|start_header_id|> and {'name': …, \"parameters\": …}": ("llama3_json", None),
        "begin with <think>": (None, "think"),
        "results follow [TOOL_CALLS]": ("mistral", None),
        "within <tool_call>, write <function=name>": ("qwen3_coder", None),
        "{{ '<tool_call>' + tc.name }} <arg_key>{{ k }}</arg_key>, and <think></think>": (
            "glm45",
            "think",
        ),
        MISTRAL_TEMPLATE: ("mistral", None),
        "plain <|im_start|>": (None, None),
        "": (None, None),
    }
    for template, names in templates.items():
        found = KNOWN.matching("calls", template), KNOWN.matching("reasoning", template)
        assert tuple(None if one is None else one.name for one in found) == names, template


def test_a_prompt_that_opens_reasoning_is_known_by_its_end() -> None:
    marks = ("<think>", "</think>")
    assert opens_reasoning("<|im_start|>assistant\n<think>\n", marks)
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n", marks)
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n", None)


DEFINED = {
    "Point": {"type": "object"},
    "Loop": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Loop"}]},
}


@pytest.mark.parametrize(
    ("schema", "value", "written"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "integer"}, "5", "5"),
        ({"type": "integer"}, "five", '"five"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "array"}, ' ["a\\n", {"b": 1}]\n', '["a\\n", {"b": 1}]'),
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', '{"x": 1}'),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, "None", "null"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", '"5"'),
        ({"enum": [1, 2]}, "2", "2"),
        ({"enum": ["1", "2"]}, "2", '"2"'),
        ({"enum": [1, "2", None]}, "1", "1"),
        ({"enum": [1, "2", None]}, "2", '"2"'),
        ({"enum": [1, "2", None]}, "null", "null"),
        ({"enum": ["null", None]}, "null", '"null"'),
        ({"const": 5}, "5", "5"),
        ({"const": "5"}, "5", '"5"'),
        ({"anyOf": [{"const": 5}, {"const": "five"}]}, "5", "5"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, " None\n", "null"),
        ({"type": ["string", "null"]}, "nullable", '"nullable"'),
        ({"type": ["string", "null"]}, "", '""'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
        ({"type": ["string", "boolean"]}, "False", "false"),
        ({"type": ["string", "integer"]}, "5", '"5"'),
        ({"type": "string", "enum": ["a", None]}, "null", '"null"'),
        ({"type": "string", "anyOf": [{"minLength": 3}, {"format": "date"}]}, "5", '"5"'),
        ({"properties": {"x": {}}}, '{"x": 1}', '{"x": 1}'),
        ({"required": ["x"]}, '{"x": 1}', '{"x": 1}'),
        ({"items": {}}, "[1]", "[1]"),
        ({"minimum": 1}, "5", "5"),
        ({"pattern": "^5"}, "5", '"5"'),
        ({"allOf": [{"$ref": "#/$defs/Point"}, {"description": "where"}]}, '{"x": 1}', '{"x": 1}'),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {}]}, "5", '"5"'),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"type": 7}, "5", '"5"'),
        ({"enum": []}, "5", '"5"'),
        (True, "5", '"5"'),
        ({"$ref": "#/nowhere"}, "5", '"5"'),
        ({}, "5", '"5"'),
        ("no schema", "5", '"5"'),
    ],
)
@pytest.mark.parametrize("tool_parser", ["qwen3_coder", "glm45"])
def test_an_arguments_type_is_the_schemas(
    tool_parser: str, schema: object, value: str, written: str
) -> None:
    parameters = {"properties": {"a": schema}, "$defs": DEFINED}
    parser = parser_named(
        tool_parser, tools=[{"function": {"name": "f", "parameters": parameters}}]
    )
    tags = {
        "qwen3_coder": f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>",
        "glm45": f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>",
    }
    assert joined([*parser.feed(tags[tool_parser]), *parser.finish()]) == Answer(
        "", "", (Call("f", f'{{"a": {written}}}'),)
    )


def test_parameters_that_are_not_named_follow_additional_properties() -> None:
    for schema, written in (
        ({"additionalProperties": {"type": "integer"}}, "5"),
        ({"additionalProperties": True}, '"5"'),
        ({}, '"5"'),
    ):
        parser = parser_named("qwen3_coder", tools=[{"name": "f", "parameters": schema}])
        answer = joined(
            [
                *parser.feed(
                    "<tool_call><function=f><parameter=a>5</parameter></function></tool_call>"
                ),
                *parser.finish(),
            ]
        )
        assert answer.calls == (Call("f", f'{{"a": {written}}}'),)


def test_schemas_are_read_in_linear_time() -> None:
    wide = [{"$ref": f"#/$defs/{level}"} for level in "bcd" for _ in range(1000)]
    definitions = {
        level: {"anyOf": [{"$ref": f"#/$defs/{chr(ord(level) + 1)}"}] * 1000} for level in "abcdef"
    }
    parameters = {
        "properties": {"a": {"anyOf": wide}},
        "$defs": {**definitions, "g": {"type": "integer"}},
    }

    def parse() -> None:
        parser = parser_named(
            "qwen3_coder", tools=[{"function": {"name": "f", "parameters": parameters}}]
        )
        parser.feed(
            "<tool_call><function=f><parameter=a>5</parameter></function></tool_call>" * 100
        )

    assert least_cpu_s(parse, 1.0) <= 1.0


def test_a_nullable_string_goes_out_once_it_is_no_null() -> None:
    parser = parser_named("qwen3_coder", tools=TOOLS)
    parser.feed("<tool_call><function=f><parameter=n>")
    assert parser.feed("nu") == []
    assert parser.feed("mber") == [ToolCallArguments(0, '"number')]


def test_a_string_goes_out_as_it_comes() -> None:
    parser = parser_named("qwen3_coder", tools=TOOLS)
    parser.feed("<tool_call>\n<function=f>\n<parameter=s>\n")
    assert parser.feed('say "hi') == [ToolCallArguments(0, 'say \\"hi')]
    assert parser.feed("\n") == []
    assert parser.feed("there") == [ToolCallArguments(0, "\\nthere")]


@pytest.mark.parametrize(
    ("finds", "name", "told"),
    [
        ("calls", "hermse", r"tool_parser: unknown parser 'hermse', did you mean hermes\?"),
        ("reasoning", "thnk", r"reasoning_parser: unknown parser 'thnk', did you mean think\?"),
        ("calls", "fcfs", "there is a component of that name, of kind scheduler"),
        (
            "calls",
            "think",
            "tool_parser: parser think doesn't find tool calls; parsers that do: harmony, "
            "deepseek_v3, kimi_k2, ",
        ),
        (
            "reasoning",
            "hermes",
            "reasoning_parser: parser hermes doesn't find reasoning; parsers that do: harmony, "
            "gemma4_thought, think",
        ),
        ("calls", "{name: hermes, depth: 3}", "tool_parser.depth: unknown option"),
        ("calls", "{name: hermes", "tool_parser: can't read"),
        ("calls", "{depth: 3}", "tool_parser: expected a parser's name"),
        ("calls", "", "tool_parser: unknown parser ''"),
    ],
)
def test_a_name_that_will_not_do_is_refused_with_those_that_would(
    finds: Finds, name: str, told: str
) -> None:
    with pytest.raises(DovetailError, match=told):
        KNOWN.named(finds, name)


def test_without_tools_and_reasoning_there_is_nothing_to_parse() -> None:
    assert parser_for(ChosenParsers(KNOWN.named("calls", "hermes"), None), "", None) is None
