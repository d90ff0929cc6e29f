"""`ParserSuite`: checks that a parser conforms to the contract of `dovetail.api.parser`.

The parser's own examples, their beginnings, and random mixtures of their parts and marks are cut in
many ways. Needs no torch.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any, NamedTuple

from dovetail.api.parser import (
    MAX_HELD,
    CallForm,
    Content,
    Event,
    Parser,
    ParserContext,
    ParserExample,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from dovetail.errors import describe, shown
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites import odd_texts
from dovetail.testing.suites.proportional import require_proportional

MIXED = 120  # random mixtures of parts
PARTS = 8  # of a mixture, at most
PAIRS = 250  # pairs of cuts of an example, at most
SLACK = 1_000  # characters that may be held back beyond MAX_HELD, and that prose may lag behind
NEAR_MISSES = (
    "<",
    "<<",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ";",
    ":",
    ",",
    "|",
    "\n",
    " ",
    "\t",
    "\0",
    "\ufffd",
    "é",
    "e\u0301",
    "\U0001f600",
    "text",
    "null",
)
WORDS = "The cat sat on the mat and looked at \U0001f600 for a while. "
FIRST = "Well, alpha "
BETWEEN = " mu, between "
LAST = " omega at last"
ODD_SCHEMAS: tuple[Any, ...] = (
    "no schema",
    None,
    [],
    {"properties": "none"},
    {"properties": {"a": {"$ref": "#/nowhere"}}},
    {"$ref": "#"},
    {"anyOf": [1]},
)
LONG_NAME = "f_" + 90 * "n"  # above clients' usual limit
NAMES = ("f", "get_weather-2", "g.h", LONG_NAME)
# answers that are no calls, and begin as models like to
ORDINARY = (
    '{"name": "f", "arguments": {}}',
    '[{"name": "f", "parameters": {}}]',
    "<p>Hello</p><tool>",
    "```json\n{}\n```",
    "`f(x)` and f(a=1)",
    "Action: f, Function: g, call: h",
    "(1) first | second; # third",
)
# arguments that differ from what any library would write for the same values
VERBATIM = (
    '{ "a":  [1.0, 1e2] ,"b":"\\u00e9\\/é" }',
    f'{{"long": "{MAX_HELD // 2 * "x"}"}}',
)
# so long that a parser which emits whole calls gives up, wherever the text is cut
TOO_LONG = f'{{"long": "{(MAX_HELD + 5_000) * "x"}"}}'
ARGUMENTS = ("{}", '{"a": "}\\"<]"}', '{\n "a": [1, {"b": null}],\n "c": "é"\n}')


class Answer(NamedTuple):
    """A whole answer: what all events add up to."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]


class ParserSuite(Suite):
    """Examples, their beginnings, and mixtures of their parts, cut in many ways."""

    kind = "parser"

    def declares(self, capability: str) -> bool:
        return bool(self._forms) if capability == "call_form" else super().declares(capability)

    @check("parser.examples", since="1.0")
    def test_it_finds_what_its_examples_say(self) -> None:
        """An example wasn't parsed as it says; or the class lacks examples: of a call with
        arguments, of reasoning followed by content (each if it finds them), and of text that is
        only content; or it declares neither calls nor reasoning."""
        can = self.capabilities
        examples = self._examples
        require(
            can.calls or can.reasoning,
            "it finds neither calls nor reasoning: declare capabilities = "
            "ParserCapabilities(calls=True), or reasoning=",
        )
        require(
            not can.calls or any(text != "{}" for one in examples for _, text in one.calls),
            "no example has a call with arguments",
        )
        require(
            not can.reasoning or any(one.reasoning and one.content for one in examples),
            "no example has reasoning, and content after it",
        )
        require(
            any(one.content == one.text != "" for one in examples), "no example is only content"
        )
        for example in examples:
            found = self._parse([example.text])
            expected = Answer(example.reasoning, example.content, tuple(example.calls))
            require(
                found == expected,
                f"{example.text!r} is parsed as {found}; the example says {expected}",
            )

    @check("parser.raises_nothing", since="1.0")
    def test_no_text_and_no_tools_make_it_raise(self) -> None:
        """The constructor or a method raised. The text may be anything, and end anywhere; tools
        come from the client, and may have no parameters or an invalid schema."""
        odd = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name in self._functions
            for schema in ODD_SCHEMAS
        ]
        bare = [{"type": "function", "function": {"name": name}} for name in self._functions]
        tools: list[Sequence[Mapping[str, Any]]] = [self._tools, bare, *([one] for one in odd)]
        for number, text in enumerate(self._texts):
            for starts in (False, True):
                try:
                    self._parse([text], tools=tools[number % len(tools)], starts=starts)
                except Exception as error:
                    fail(f"after {text!r} it raised {describe(error)}", error)

    @check("parser.chunking", since="1.0")
    def test_the_cuts_between_pieces_change_nothing(self) -> None:
        """A text cut into other pieces was parsed differently. Hold back text that may be part of a
        mark, and no more. Pieces may be empty, or one character."""
        for example in self._examples:
            whole = self._parse([example.text])
            bounds = range(1, len(example.text))
            pairs = list(combinations(bounds, 2))
            for pair in pairs[:: max(1, len(pairs) // PAIRS)]:
                self._require_same(example.text, pair, whole)
            for spared in bounds:
                self._require_same(
                    example.text, [bound for bound in bounds if bound != spared], whole
                )
        chance = random.Random(1)
        for number, text in enumerate(self._texts):
            starts = number % 2 == 1
            whole = self._parse([text], starts=starts)
            self._require_same(text, range(1, len(text)), whole, starts=starts)
            # some of them twice: empty pieces
            cuts = sorted(chance.choices(range(len(text) + 1), k=min(6, len(text))))
            self._require_same(text, cuts, whole, starts=starts)

    @check("parser.events", since="1.0")
    def test_events_come_in_order(self) -> None:
        """An event isn't one of `dovetail.api.parser`; or has no text; or a call is numbered
        otherwise than 0, 1, 2 …, or begins twice, or has no id or name, or the id of another call
        of the answer; or arguments belong to another call than the last one."""
        for number, text in enumerate([*(one.text for one in self._examples), *self._texts]):
            parser = self._made(starts=number % 2 == 1)
            ids = list[str]()
            for event in [
                *(event for char in text for event in parser.feed(char)),
                *parser.finish(),
            ]:
                match event:
                    case Content(str(piece)) | Reasoning(str(piece)):
                        require(piece, f"{text!r}: {event} is empty")
                    case ToolCallStart(index, str(id), str(name)):
                        require(
                            index == len(ids), f"{text!r}: {event} comes after {len(ids)} calls"
                        )
                        require(
                            id and name and (id not in ids or text.count(id) > 1),
                            f"{text!r}: {event} lacks an id or name, or has the id of another "
                            f"call: {ids}",
                        )
                        ids.append(id)
                    case ToolCallArguments(index, str(piece)):
                        require(
                            piece and index == len(ids) - 1,
                            f"{text!r}: {event} comes after {len(ids)} calls, or is empty",
                        )
                    case _:
                        fail(f"{text!r}: {event!r} isn't an event of dovetail.api.parser")

    @check("parser.content", since="1.0")
    def test_what_is_neither_call_nor_reasoning_is_content(self) -> None:
        """An answer without calls and reasoning isn't content character by character, with the
        marks in it; or the text before, between or after examples is missing or changed. Emit
        held-back text in `finish`, and when it turns out not to be a call."""
        for text in (WORDS, *odd_texts.TEXTS, *self._texts):
            parser = self._made()
            found = _added_up([*parser.feed(text), *parser.finish()])
            if not (
                found.calls
                or found.reasoning
                or any(mark in text for mark in self.capabilities.reasoning or ())
            ):
                require(
                    found.content == text,
                    f"{text!r} has no call, but its content is {found.content!r}",
                )
        for example in self._examples:
            before = self._parse([FIRST, example.text])
            after = self._parse([example.text, LAST])
            require(
                before.content.startswith(FIRST.strip()),
                f"{FIRST + example.text!r}: the content is {before.content!r}",
            )
            parser = self._made()
            parser.feed(example.text)
            if not (parser.in_call or parser.in_reasoning):
                require(
                    after.content.endswith(LAST.strip()),
                    f"{example.text + LAST!r}: the content is {after.content!r}",
                )
                for other in self._examples:
                    found = self._parse([example.text, BETWEEN, other.text])
                    require(
                        BETWEEN.strip() in found.content,
                        f"{example.text + BETWEEN + other.text!r}: the content is "
                        f"{found.content!r}",
                    )

    @check("parser.no_tools", since="1.0")
    def test_without_tools_nothing_is_a_call(self) -> None:
        """A call was found although the request has no tools. Then all text, marks included, is
        content or reasoning."""
        for text in (*(one.text for one in self._examples), *self._texts):
            found = self._parse([text], tools=())
            require(not found.calls, f"{text!r}: without tools, it found {found.calls}")
            require(
                self.capabilities.reasoning or found.content == text,
                f"{text!r}: without tools, its content is {found.content!r}",
            )

    @check("parser.in_call", since="1.0", capability="calls")
    def test_it_knows_when_a_call_is_cut_off(self) -> None:
        """After a prefix of an example, `in_call` isn't True exactly if the arguments of the last
        call are incomplete JSON."""
        for example in self._examples:
            if not all(_is_json(text) for _, text in example.calls):
                continue  # the model wrote something wrong
            for end in range(len(example.text) + 1):
                parser = self._made()
                calls = _added_up([*parser.feed(example.text[:end]), *parser.finish()]).calls
                inside = bool(calls) and not _is_json(calls[-1][1])
                require(
                    parser.in_call == inside,
                    f"after {example.text[:end]!r}, with the calls {calls}, in_call is "
                    f"{parser.in_call}",
                )

    @check("parser.verbatim", since="1.0", capability="calls")
    def test_calls_are_as_the_model_wrote_them(self) -> None:
        """An example's call with a longer name, or with other JSON for its arguments where the
        example has them as they are, isn't found, or is changed. Emit arguments as they are
        written."""
        for example in self._examples:
            if len(example.calls) != 1:
                continue
            [(name, arguments)] = example.calls
            if not (_is_json(arguments) and arguments.startswith('{"')):
                continue
            before, verbatim, _ = example.text.partition(arguments)
            if not verbatim or before.count(name) != 1:
                continue
            tools = [{"type": "function", "function": {"name": LONG_NAME}}]
            for other in (*VERBATIM, TOO_LONG):
                text = example.text.replace(arguments, other).replace(name, LONG_NAME)
                pieces = [text[:7], text[7:-4], text[-4:]]
                found = self._parse([text], tools)
                require(
                    other == TOO_LONG or found.calls == ((LONG_NAME, other),),
                    f"{shown(text)} is parsed as {shown(found.calls)}",
                )
                require(
                    self._parse(pieces, tools) == found,
                    f"{shown(text)} is parsed differently in three pieces",
                )

    @check("parser.reasoning", since="1.0", capability="reasoning")
    def test_reasoning_is_between_the_marks(self) -> None:
        """Text between the marks of `capabilities.reasoning` isn't reasoning, or what comes after
        isn't content; with `starts_in_reasoning`, without the first mark; or `in_reasoning` is
        wrong before the first mark, within, or after the last."""
        begin, end = self.capabilities.reasoning
        for starts in (False, True):
            first = "" if starts else begin
            parser = self._made(starts=starts)
            require(
                parser.in_reasoning == starts,
                f"before any text, in_reasoning is {parser.in_reasoning}, starts_in_reasoning "
                f"{starts}",
            )
            events = list(parser.feed(f"{first}A thought"))
            require(
                parser.in_reasoning,
                f"after {first}A thought, with starts_in_reasoning={starts}, in_reasoning is False",
            )
            events += parser.feed(end[:1])
            require(
                parser.in_reasoning or len(end) == 1,
                f"after the beginning of the last mark, {end!r}, in_reasoning is False",
            )
            events += parser.feed(f"{end[1:]}So.")
            require(not parser.in_reasoning, f"after {end!r} and a word, in_reasoning is True")
            found = _added_up([*events, *parser.finish()])
            require(
                found == Answer("A thought", "So.", ()),
                f"{first}A thought{end}So., with starts_in_reasoning={starts}, is parsed as "
                f"{found}",
            )
            open_end = self._parse([f"{first}A thought"], starts=starts)
            require(
                open_end == Answer("A thought", "", ()),
                f"{first}A thought, with starts_in_reasoning={starts}, is parsed as {open_end}",
            )

    @check("parser.separate", since="1.0")
    def test_answers_dont_disturb_each_other(self) -> None:
        """Two answers parsed in turns differ from each parsed separately: parsers share mutable
        state, in the class or module."""
        for one, other in pairwise([*self._examples, *self._examples[:1]]):
            parsers = [(self._made(), example.text, list[Event]()) for example in (one, other)]
            for place in range(max(len(one.text), len(other.text))):
                for parser, text, events in parsers:
                    events += parser.feed(text[place : place + 1])
            for parser, text, events in parsers:
                found = _added_up([*events, *parser.finish()])
                require(
                    found == self._parse([text]),
                    f"{text!r}, in turns with another answer, is parsed as {found}",
                )

    @check("parser.streams", since="1.0")
    def test_plain_text_is_not_held_back(self) -> None:
        """In prose, events lag far behind the text: content, or reasoning with
        `starts_in_reasoning`. Emit text that can't be a mark any more."""
        for starts in (False, True) if self.capabilities.reasoning else (False,):
            parser = self._made(starts=starts)
            fed = 0
            emitted = 0
            for _ in range(100):
                emitted += sum(
                    len(event.text)
                    for event in parser.feed(WORDS)
                    if isinstance(event, Content | Reasoning)
                )
                fed += len(WORDS)
                require(
                    emitted >= fed - SLACK,
                    f"after {fed} characters of prose, it has emitted {emitted}",
                )

    @check("parser.held", since="1.0")
    def test_what_is_held_back_has_a_limit(self) -> None:
        """Much more than `MAX_HELD` characters of a long text that looks like the beginning of a
        call were held back; or the result depends on how the text was cut. Give up exactly where
        the limit is reached, even inside a piece."""
        for pattern, more in self._endless:
            text = pattern + (more * MAX_HELD)[: MAX_HELD + 3 * SLACK]
            parser = self._made()
            events = list[Event]()
            for begin in range(0, len(text), 997):
                events += parser.feed(text[begin : begin + 997])
            last = parser.finish()
            held = sum(len(event.text) for event in last if isinstance(event, Content | Reasoning))
            require(
                held <= MAX_HELD + SLACK,
                f"of {pattern!r} and {more!r}, again and again, {held} characters were held back",
            )
            require(
                _added_up([*events, *last]) == self._parse([text]),
                f"{pattern!r} and {more!r}, again and again, are parsed differently in pieces",
            )

    @check("parser.linear", since="1.0")
    def test_time_is_proportional_to_length(self) -> None:
        """A text eight times as long took far more than eight times the time. Don't search the
        whole text again for each piece."""
        for pattern in ("<", WORDS, *self._marks):
            require_proportional(pattern, self._seconds)

    @check("parser.call_form", since="1.0", capability="call_form")
    def test_it_reads_the_calls_that_a_model_is_constrained_to(self) -> None:
        """A call in the form that `call_form` returns isn't parsed as that call and nothing else;
        or the text before its arguments doesn't begin with `trigger`."""
        for form in self._forms:
            require(
                isinstance(form, CallForm),
                f"call_form returned {form!r}, expected a CallForm or None",
            )
            for arguments in (*ARGUMENTS, *VERBATIM):
                calls = [(name, arguments) for name in NAMES]
                for written in [*([call] for call in calls), *([] if form.single else [calls])]:
                    texts = [
                        before + text + after
                        for name, text in written
                        for before, after in (form.around(name),)
                    ]
                    require(
                        all(text.startswith(form.trigger) for text in texts),
                        f"{texts} don't begin with {form.trigger!r}",
                    )
                    found = self._parse(
                        [form.separator.join(texts)],
                        tools=[{"type": "function", "function": {"name": name}} for name in NAMES],
                    )
                    require(
                        found == Answer("", "", tuple(written)),
                        f"{form.separator.join(texts)!r} is parsed as {found}",
                    )

    @check("parser.call_marked", since="1.0", capability="call_form")
    def test_ordinary_text_does_not_begin_like_a_marked_call(self) -> None:
        """`call_form` returned a form that is `marked`, but answers in prose, JSON, code or HTML
        begin like its calls, so the model couldn't write them. Set `marked` only if the trigger is
        a mark that nothing else contains."""
        for form in self._forms:
            for text in ORDINARY if form.marked else ():
                require(
                    not form.trigger or form.trigger not in text,
                    f"the form is marked, but {text!r}, which is no call, has its trigger "
                    f"{form.trigger!r}",
                )
            require(not form.marked or form.trigger, "the form is marked, but its trigger is empty")

    @cached_property
    def _forms(self) -> list[Any]:
        """Return the forms that `call_form` returns for the templates that it recognises, leaving
        out None."""
        templates = ["\n".join(texts) for texts in self.capabilities.templates or ((),)]
        return [
            form
            for template in templates
            if (form := self.component_class.call_form(template)) is not None
        ]

    @property
    def _examples(self) -> Sequence[ParserExample]:
        return tuple(self.component_class.examples)

    @cached_property
    def _functions(self) -> list[str]:
        return [
            *dict.fromkeys(name for example in self._examples for name, _ in example.calls),
            "f",
        ]

    @cached_property
    def _tools(self) -> list[Mapping[str, Any]]:
        """Tools that take the arguments of the examples' calls."""
        properties: dict[str, dict[str, Any]] = {name: {} for name in self._functions}
        for name, text in (call for example in self._examples for call in example.calls):
            given = json.loads(text) if _is_json(text) else None
            if isinstance(given, dict):
                properties[name] |= {key: {"type": _type_of(value)} for key, value in given.items()}
        return [
            {
                "type": "function",
                "function": {"name": name, "parameters": {"type": "object", "properties": of}},
            }
            for name, of in properties.items()
        ]

    @cached_property
    def _marks(self) -> list[str]:
        can = self.capabilities
        return [
            *dict.fromkeys(
                [*(can.reasoning or ()), *(text for texts in can.templates for text in texts)]
            )
        ]

    @cached_property
    def _endless(self) -> list[tuple[str, str]]:
        """Beginnings of texts that never end, and what comes again and again."""
        beginnings = [
            one.text[: len(one.text) * part // 6]
            for one in self._examples
            if one.calls
            for part in range(1, 6)
        ]
        halves = [one.text[: len(one.text) // 2] for one in self._examples if one.calls]
        return [
            *((mark, mark) for mark in self._marks),
            *((text, text) for text in halves),
            *((text, "x") for text in beginnings),
        ]

    @cached_property
    def _texts(self) -> list[str]:
        """Beginnings of examples, and mixtures of parts."""
        chance = random.Random(0)
        whole = [one.text for one in self._examples]
        parts = [
            *NEAR_MISSES,
            *whole,
            *self._marks,
            *(mark[: len(mark) // 2 + 1] for mark in self._marks),
        ]
        texts = [text[:end] for text in whole for end in range(0, len(text), 3)]
        for _ in range(MIXED):
            slices = [
                text[
                    slice(
                        *sorted((chance.randrange(len(text) + 1), chance.randrange(len(text) + 1)))
                    )
                ]
                for text in whole
            ]
            texts.append(
                "".join(
                    chance.choice(chance.choice((parts, slices or parts)))
                    for _ in range(chance.randint(1, PARTS))
                )
            )
        return texts

    def _made(
        self, tools: Sequence[Mapping[str, Any]] | None = None, *, starts: bool = False
    ) -> Parser:
        parser: Parser = self.make(ParserContext(self._tools if tools is None else tools, starts))
        return parser

    def _parse(
        self,
        pieces: Sequence[str],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        starts: bool = False,
    ) -> Answer:
        parser = self._made(tools, starts=starts)
        return _added_up(
            [*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()]
        )

    def _require_same(
        self, text: str, cuts: Iterable[int], whole: Answer, *, starts: bool = False
    ) -> None:
        pieces = [text[a:b] for a, b in pairwise((0, *cuts, len(text)))]
        found = self._parse(pieces, starts=starts)
        require(found == whole, f"in pieces, {pieces} is parsed as {found}; whole, as {whole}")

    def _seconds(self, text: str) -> float:
        parser = self._made()
        begun = time.thread_time()
        for begin in range(0, len(text), 64):
            parser.feed(text[begin : begin + 64])
        parser.finish()
        return time.thread_time() - begun


def _added_up(events: Sequence[Event]) -> Answer:
    """Add events up. Raises `CheckFailed` for arguments before any call."""
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append((event.name, []))
        elif isinstance(event, ToolCallArguments):
            require(calls, f"{event} comes before any call")
            calls[-1][1].append(event.text)
    reasoning, content = (
        "".join(event.text for event in events if isinstance(event, of))
        for of in (Reasoning, Content)
    )
    return Answer(reasoning, content, tuple((name, "".join(pieces)) for name, pieces in calls))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _type_of(value: Any) -> str:
    types: Mapping[type, str] = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return types.get(type(value), "null")
