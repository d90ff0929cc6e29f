"""`ParserSuite`: checks that a parser conforms to the contract of `dovetail.api.parser`.

The parser's own examples, their beginnings, and random mixtures of their parts and marks are cut in
many ways. Needs no torch.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import combinations, pairwise
from typing import Any

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
from dovetail.testing.elsewhere import HASH_SEEDS, answer_elsewhere
from dovetail.testing.suite import Suite
from dovetail.testing.suites import odd_texts
from dovetail.testing.suites.parser_answers import (
    DEEP,
    HALF_MARKS,
    MANY_DIGITS,
    ODD_JSON,
    Answer,
    added_up,
    in_order,
    is_json,
    is_within,
    pieces_of,
    renamed,
    tools_with,
    with_other_calls,
    without_space,
)
from dovetail.testing.suites.proportional import require_proportional

MIXED = 120  # random mixtures of parts
PARTS = 8  # of a mixture, at most
PAIRS = 250  # pairs of cuts of an example, at most
SLACK = 1_000  # characters that may be held back beyond MAX_HELD
LAG = 100  # characters that prose may lag behind
BROKEN_LAG = 64  # characters beyond the longest mark that text after a broken mark may lag behind
BREAKS = "~"  # a character that is rare in marks
MANY = 1_200  # answers, more than any small count that a parser might keep
TIMES = 300  # that an example comes in one answer
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
FIRST = "Well,  alpha\n \n\tand \U0001f600 "
BETWEEN = " mu,\t\n\n  between "
LAST = " omega  at\n \n last"
ODD_SCHEMAS: tuple[Any, ...] = (
    "no schema",
    None,
    [],
    {"properties": "none"},
    {"properties": {"a": {"$ref": "#/nowhere"}}},
    {"$ref": "#"},
    {"anyOf": [1]},
    {"$ref": 5},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"allOf": "none", "oneOf": {}},
)
# of one value of a schema
ODD_TYPES: tuple[Any, ...] = (
    None,
    True,
    "string",
    [],
    {"type": {"a": 1}},
    {"type": ["string", ["integer"], None]},
    {"type": 5, "enum": 5},
    {"enum": [[], {}, None]},
    {"anyOf": [True, "a", {"type": []}]},
    {"const": {"a": []}, "type": "other"},
    {"$ref": "#/properties"},
    {"items": 1, "properties": [], "additionalProperties": "a", "required": {"a": 1}},
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
_EVENTS = "dovetail.testing.suites.parser_answers:all_in_order"
ARGUMENTS = ("{}", '{"a": "}\\"<]"}', '{\n "a": [1, {"b": null}],\n "c": "é"\n}')


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
        """The constructor or a method raised. The text may be anything, and end anywhere; JSON
        may be too deep or have too many digits for Python's reader; tools come from the client,
        and may have no parameters or an invalid schema."""
        odd = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name in self._functions
            for schema in (
                *ODD_SCHEMAS,
                *({"properties": dict.fromkeys(self._keys, of)} for of in ODD_TYPES),
            )
        ]
        bare = [{"type": "function", "function": {"name": name}} for name in self._functions]
        tools: list[Sequence[Mapping[str, Any]]] = [self._tools, bare, *([one] for one in odd)]
        for number, text in enumerate([*self._texts, *self._hostile]):
            for starts in (False, True):
                try:
                    self._parse([text], tools=tools[number % len(tools)], starts=starts)
                except Exception as error:
                    fail(f"after {shown(text)} it raised {describe(error)}", error)

    @check("parser.chunking", since="1.0")
    def test_the_cuts_between_pieces_change_nothing(self) -> None:
        """A text cut into other pieces was parsed differently, or gave its events in another order. Hold back text that may be part of a
        mark, and no more. Pieces may be empty, or one character."""
        for example in self._examples:
            whole = self._events([example.text])
            bounds = range(1, len(example.text))
            pairs = list(combinations(bounds, 2))
            for pair in pairs[:: max(1, len(pairs) // PAIRS)]:
                self._require_same(example.text, pair, whole)
            self._require_same(example.text, sorted([*bounds, *bounds]), whole)  # empty pieces
            for spared in bounds:
                self._require_same(
                    example.text, [bound for bound in bounds if bound != spared], whole
                )
        chance = random.Random(1)
        for number, text in enumerate([*self._texts, *odd_texts.TEXTS]):
            starts = number % 2 == 1
            whole = self._events([text], starts=starts)
            self._require_same(text, range(1, len(text)), whole, starts=starts)
            # some of them twice: empty pieces
            cuts = sorted(chance.choices(range(len(text) + 1), k=min(6, len(text))))
            self._require_same(text, cuts, whole, starts=starts)

    @check("parser.events", since="1.0")
    def test_events_come_in_order(self) -> None:
        """`feed` or `finish` didn't return a sequence; or an event isn't one of `dovetail.api.parser`; or has no text; or a call is numbered
        otherwise than 0, 1, 2 …, or begins twice, or has no id or name, or the id of another call
        of the answer; or arguments belong to another call than the last one; or a text isn't valid
        Unicode, as halves of surrogate pairs aren't; or reasoning or a call was found, which the
        capabilities don't declare."""
        texts = [*(one.text for one in self._examples), *self._texts, *self._hostile]
        for number, text in enumerate(texts):
            for pieces in (text, [text]):
                ids = list[str]()
                for event in self._events(pieces, starts=number % 2 == 1):
                    self._require_event(text, event, ids)

    def _require_event(self, text: str, event: Event, ids: list[str]) -> None:
        """Require that an event may follow calls with these ids, and add its own."""
        told = shown(text)
        match event:
            case Content(str(piece)) | Reasoning(str(piece)):
                require(piece, f"{told}: {event} is empty")
            case ToolCallStart(index, str(id), str(name)):
                require(index == len(ids), f"{told}: {event} comes after {len(ids)} calls")
                require(
                    id and name and (id not in ids or text.count(id) > 1),
                    f"{told}: {event} lacks an id or name, or has the id of another call: "
                    f"{shown(ids)}",
                )
                ids.append(id)
            case ToolCallArguments(index, str(piece)):
                require(
                    piece and index == len(ids) - 1,
                    f"{told}: {event} comes after {len(ids)} calls, or is empty",
                )
            case _:
                fail(f"{told}: {event!r} isn't an event of dovetail.api.parser")
        for piece in pieces_of(event):
            require(
                not any("\ud800" <= char <= "\udfff" for char in piece),
                f"{told}: {event!r:.200} isn't valid Unicode",
            )
        can = self.capabilities
        require(
            can.reasoning if isinstance(event, Reasoning) else can.calls or _is_content(event),
            f"{told}: {event} is of a kind that the capabilities don't declare",
        )

    @check("parser.content", since="1.0")
    def test_what_is_neither_call_nor_reasoning_is_content(self) -> None:
        """An answer without calls and reasoning isn't content character by character, with the
        marks in it; or the text before, between or after examples is missing, changed or
        in another place. Emit held-back text in `finish`, and when it turns out not to be a call."""
        for text in (WORDS, *odd_texts.TEXTS, *self._texts):
            parser = self._made()
            found = added_up([*parser.feed(text), *parser.finish()])
            if not (
                found.calls
                or found.reasoning
                or any(mark in text for mark in self.capabilities.reasoning or ())
            ):
                require(
                    found.content == text,
                    f"{text!r} has no call, but its content is {found.content!r}",
                )
            for part in (found.content, found.reasoning):
                require(is_within(part, text), f"{part!r} was found, which isn't in {text!r}")
        for example in self._examples:
            self._require_around(example)
            parser = self._made()
            parser.feed(example.text)
            if not (parser.in_call or parser.in_reasoning):
                for other in self._examples:
                    self._require_between(example, other)

    def _require_around(self, example: ParserExample) -> None:
        """Require that text before and after an example is content, in this order."""
        before = self._events([FIRST, example.text])
        require(
            in_order(before)[0][0] == "Content"
            and in_order(before)[0][1].startswith(FIRST.strip()),
            f"{FIRST + example.text!r} is parsed as {in_order(before)}",
        )
        parser = self._made()
        parser.feed(example.text)
        if not (parser.in_call or parser.in_reasoning):
            after = self._events([example.text, LAST])
            require(
                in_order(after)[-1][0] == "Content"
                and in_order(after)[-1][1].endswith(LAST.strip()),
                f"{example.text + LAST!r} is parsed as {in_order(after)}",
            )

    def _require_between(self, example: ParserExample, other: ParserExample) -> None:
        """Require that text between two examples is content, and what it separates is whole if
        they are found."""
        text = example.text + BETWEEN + other.text
        found = self._parse([text])
        require(BETWEEN.strip() in found.content, f"{text!r}: the content is {found.content!r}")
        is_known = other.calls or other.content == other.text
        if is_known and found.calls == (*example.calls, *other.calls) and not other.reasoning:
            content = example.content + BETWEEN + other.content
            require(
                without_space(found.content) == without_space(content),
                f"{text!r}: the content is {found.content!r}, expected {content!r}",
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
        for example in self._examples:
            found = self._parse([example.text], tools=())
            missing = [
                arguments
                for _, arguments in example.calls
                if arguments in example.text and arguments not in found.content
            ]
            require(
                found.reasoning == example.reasoning and not missing,
                f"{example.text!r}: without tools, it found {found}, without {missing}",
            )

    @check("parser.in_call", since="1.0", capability="calls")
    def test_it_knows_when_a_call_is_cut_off(self) -> None:
        """After a prefix of an example, `in_call` isn't True exactly if the arguments of the last
        call are incomplete JSON; or a call was found whose name isn't complete."""
        for example in self._examples:
            if not all(is_json(text) for _, text in example.calls):
                continue  # the model wrote something wrong
            for end in range(len(example.text) + 1):
                self._require_cut_off(example, end)

    def _require_cut_off(self, example: ParserExample, end: int) -> None:
        """Check an example's calls and `in_call` if it ends after `end` characters."""
        told = f"after {example.text[:end]!r}"
        parser = self._made()
        events = list(parser.feed(example.text[:end]))
        before = parser.in_call
        last = parser.finish()
        calls = added_up([*events, *last]).calls
        inside = bool(calls) and not is_json(calls[-1][1])
        require(
            parser.in_call == inside, f"{told}, with the calls {calls}, in_call is {parser.in_call}"
        )
        require(
            before == inside or not all(map(_is_content, last)),
            f"{told}, before finish, with the calls {calls}, in_call is {before}",
        )
        names = [name for name, _ in example.calls]
        require(
            [name for name, _ in calls] == names[: len(calls)]
            and calls[:-1] == tuple(example.calls)[: len(calls)][:-1],
            f"{told}, the calls are {calls}; of the whole example, {example.calls}",
        )

    @check("parser.verbatim", since="1.0", capability="calls")
    def test_calls_are_as_the_model_wrote_them(self) -> None:
        """An example's call with a longer name, or with other JSON for its arguments where the
        example has them as they are, isn't found, or is changed. Emit arguments as they are
        written."""
        for example in self._examples:
            for name in (LONG_NAME, "get_weather-2", "F", "f__9", "7"):
                others: Sequence[str] = VERBATIM[:1]
                if name == LONG_NAME:
                    others = (*VERBATIM, *self._odd_json(example), TOO_LONG)
                for text, arguments in with_other_calls(example, name, others):
                    self._require_verbatim(text, name, arguments)

    def _odd_json(self, example: ParserExample) -> list[str]:
        """Return odd arguments; with line breaks only if a call like the example's may have any:
        some formats end a call with its line."""
        plain = '{"a":\n1}'
        tools = tools_with(["F"], {})
        reads_lines = all(
            self._parse([text], tools).calls == (("F", plain),)
            for text, _ in with_other_calls(example, "F", (plain,))
        )
        return [one for one in ODD_JSON if reads_lines or "\n" not in one]

    def _require_verbatim(self, text: str, name: str, arguments: str) -> None:
        """Require that a text has the one call, unless it is too long, in three pieces too."""
        tools = tools_with([name], {})
        found = self._parse([text], tools)
        require(
            arguments == TOO_LONG or found.calls == ((name, arguments),),
            f"{shown(text)} is parsed as {shown(found.calls)}",
        )
        require(
            self._parse([text[:7], text[7:-4], text[-4:]], tools) == found,
            f"{shown(text)} is parsed differently in three pieces",
        )

    @check("parser.tools", since="1.0", capability="calls")
    def test_other_tools_change_nothing(self) -> None:
        """With further tools, some named alike, or after answers with other tools of the same
        names, an example was parsed differently; or the tools were changed. They belong to one
        request: keep nothing about them by name for longer than an answer."""
        for number, example in enumerate(self._examples):
            names = [
                other
                for name, _ in example.calls
                for other in (name[:-1], f"{name}_", name.swapcase(), name[1:], f"{name}x")
                if other and other not in self._functions
            ]
            many = tools_with([*names, *(f"other_{one}" for one in range(300))], {})
            whole = self._parse([example.text])
            for tools in ([*many, *self._tools], [*self._tools, *many]):
                before = copy.deepcopy(tools)
                require(
                    self._parse([example.text], tools) == whole,
                    f"{example.text!r} is parsed differently with other tools: {shown(tools)}",
                )
                require(tools == before, f"{example.text!r}: the tools were changed")
            self._require_own_types(example, number)

    def _require_own_types(self, example: ParserExample, number: int) -> None:
        """Require that an example's call doesn't depend on the types that a tool of the same name
        had in an answer before."""
        keys = [key for _, text in example.calls if is_json(text) for key in _keys_of(text)]
        types = ("string", "integer", "object")
        found: dict[str, list[str]] = {}
        for order in (types, types[::-1]):
            # no answer before had these names
            names = {
                old: f"first_{order[0]}_{number}_{at}" for at, (old, _) in enumerate(example.calls)
            }
            text = renamed(example, names)
            for type_ in order if names and text else ():
                tools = tools_with([*names.values()], {key: {"type": type_} for key in keys})
                arguments = [given for _, given in self._parse([text or ""], tools).calls]
                require(
                    found.setdefault(type_, arguments) == arguments,
                    f"{text!r}, whose tools take values of type {type_}, has the arguments "
                    f"{arguments}, and after other answers {found[type_]}",
                )

    @check("parser.long", since="1.0")
    def test_long_answers_are_parsed_like_short_ones(self) -> None:
        """An example after a long text, or that comes hundreds of times in an answer, is parsed
        differently, or its calls don't have ids of their own. Don't give up looking for marks."""
        for example in self._examples:
            short = self._parse([WORDS, "\n", example.text])
            long = self._parse([WORDS * 1_200, "\n", example.text])
            require(
                long == short._replace(content=WORDS * 1_199 + short.content),
                f"{example.text!r} after {len(WORDS) * 1_200} characters is parsed as "
                f"{shown(long)}, and after {len(WORDS)} as {shown(short)}",
            )
            self._require_many(example)

    def _require_many(self, example: ParserExample) -> None:
        """Require that an example which comes again and again is found each time, if it is twice;
        and in pieces too."""
        text = example.text * TIMES
        if self._parse([example.text * 2]).calls != example.calls * 2:
            return
        events = self._events([text])
        found = added_up(events)
        require(
            found.calls == example.calls * TIMES,
            f"{TIMES} times {example.text!r} has {len(found.calls)} calls: {shown(found.calls)}",
        )
        ids = {event.id for event in events if isinstance(event, ToolCallStart)}
        require(
            len(ids) == len(found.calls) or any(text.count(id) > 1 for id in ids),
            f"{TIMES} times {example.text!r} has {len(found.calls)} calls with {len(ids)} ids",
        )
        pieces = [text[begin : begin + 61] for begin in range(0, len(text), 61)]
        require(
            in_order(self._events(pieces)) == in_order(events),
            f"{TIMES} times {example.text!r} is parsed differently in pieces",
        )

    @check("parser.reasoning", since="1.0", capability="reasoning")
    def test_reasoning_is_between_the_marks(self) -> None:
        """Text between the marks of `capabilities.reasoning` isn't reasoning, or what comes after
        isn't content; with `starts_in_reasoning`, without the first mark; or `in_reasoning` is
        wrong before the first mark, within, or after the last. Both texts are as they were
        written."""
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
            found = added_up([*events, *parser.finish()])
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
            self._require_inside(starts)
            for text in (*odd_texts.TEXTS, WORDS * 1_200):
                self._require_reasoning(text, starts)

    def _require_inside(self, starts: bool) -> None:
        """Check `in_reasoning` after each beginning of an answer that comes whole."""
        begin, end = self.capabilities.reasoning
        first = "" if starts else begin
        text = f"{first}A thought{end}So."
        ends_at = len(text) - len("So.")
        for cut in range(len(text) + 1):
            parser = self._made(starts=starts)
            events = list(parser.feed(text[:cut]))
            found = [parser.in_reasoning]
            events += parser.finish()
            found.append(parser.in_reasoning)
            inside = len(first) <= cut < ends_at
            # a shorter mark, with which the last one begins, may end the reasoning
            is_ended = added_up(events).content == text[ends_at - len(end) : cut] != ""
            require(
                found == [inside, inside] or (is_ended and found == [False, False]),
                f"after {text[:cut]!r}, with starts_in_reasoning={starts}, in_reasoning is "
                f"{found[0]}, and after finish {found[1]}",
            )

    def _require_reasoning(self, text: str, starts: bool) -> None:
        """Require that a text is found unchanged in reasoning, and after it."""
        begin, end = self.capabilities.reasoning
        first = "" if starts else begin
        whole = f"{first}A{text}B{end}C{text}D"
        if any(mark in f"A{text}B" for mark in self._marks):
            return
        for pieces in ([whole], [whole[at : at + 5] for at in range(0, len(whole), 5)]):
            found = self._parse(pieces, starts=starts)
            require(
                found == Answer(f"A{text}B", f"C{text}D", ()),
                f"{shown(whole)}, with starts_in_reasoning={starts}, is parsed as {shown(found)}",
            )

    @check("parser.separate", since="1.0")
    def test_answers_dont_disturb_each_other(self) -> None:
        """Two answers parsed in turns differ from each parsed separately: parsers share mutable
        state, in the class or module; or parsers whose answers have ended are kept."""
        for one, other in pairwise([*self._examples, *self._examples[:1]]):
            parsers = [(self._made(), example.text, list[Event]()) for example in (one, other)]
            for place in range(max(len(one.text), len(other.text))):
                for parser, text, events in parsers:
                    events += parser.feed(text[place : place + 1])
            for parser, text, events in parsers:
                found = added_up([*events, *parser.finish()])
                require(
                    found == self._parse([text]),
                    f"{text!r}, in turns with another answer, is parsed as {found}",
                )
        self._require_as_before()

    def _require_as_before(self) -> None:
        """Require that an answer after hundreds of others is parsed as before, and that no parser
        is kept."""
        before = [self._parse([example.text]) for example in self._examples]
        for _ in range(MANY // (len(self._examples) + 1) + 1):
            for example, whole in zip(self._examples, before, strict=True):
                found = self._parse([example.text])
                require(
                    found == whole, f"{example.text!r}, after many answers, is parsed as {found}"
                )
        gc.collect()
        kept = sum(isinstance(made, self.component_class) for made in gc.get_objects())
        require(kept <= MANY // 10, f"after {MANY} answers, {kept} parsers are still kept")

    @check("parser.processes", since="1.0")
    def test_another_process_parses_the_same(self) -> None:
        """In a process with another string hash seed, an example was parsed differently. Front ends
        would differ: don't depend on the order of a set."""
        texts = [*(one.text for one in self._examples), *self._texts[:200]]
        mine = [[list(pair) for pair in in_order(self._events([text]))] for text in texts]
        for seed in HASH_SEEDS:
            found = answer_elsewhere(
                self,
                _EVENTS,
                self._tools,
                texts,
                what="another process can't parse",
                hash_seed=seed,
            )
            for text, here, there in zip(texts, mine, found, strict=True):
                require(
                    here == there,
                    f"{text!r} is parsed as {here}; in a process with the hash seed {seed}, as "
                    f"{there}",
                )

    @check("parser.streams", since="1.0")
    def test_plain_text_is_not_held_back(self) -> None:
        """In prose, events lag far behind the text: content, or reasoning with
        `starts_in_reasoning` or after its mark; at the beginning, or after an example. Emit text that can't be a mark any more."""
        for starts in (False, True) if self.capabilities.reasoning else (False,):
            self._require_streamed("", self._made(starts=starts))
            self._require_streamed("", self._made((), starts=starts))
        for begin in (self.capabilities.reasoning or ())[:1]:
            self._require_streamed(f"{begin}A", self._made())
        for example in self._examples:
            if example.calls and all(is_json(text) for _, text in example.calls):
                self._require_streamed(f"{example.text}\n", self._made())

    def _require_streamed(self, before: str, parser: Parser) -> None:
        """Require that prose after a text is emitted soon."""
        parser.feed(before)
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
                emitted >= fed - LAG,
                f"after {before!r} and {fed} characters of prose, it has emitted {emitted} of them",
            )

    @check("parser.broken_marks", since="1.1")
    def test_text_after_a_broken_mark_is_not_held_back(self) -> None:
        """After the beginning of a mark and a character that can't continue it, prose lags more
        than 64 characters and a mark's length behind. Once the text can't be a mark any more, emit
        it, instead of waiting for the end of the line or another character."""
        marks = self._marks
        may_lag = max(map(len, marks), default=0) + BROKEN_LAG
        beginnings = dict.fromkeys(mark[:end] for mark in marks for end in range(1, len(mark)))
        for beginning in beginnings:
            broken = beginning + BREAKS
            if not any(mark in broken or mark.startswith(broken) for mark in marks):
                for before in ("", "Well, "):
                    self._require_soon(f"{before}{broken} {WORDS * 5}", may_lag)

    def _require_soon(self, text: str, may_lag: int) -> None:
        """Require that a text is emitted at most `may_lag` characters late."""
        parser = self._made()
        emitted = 0
        for fed, character in enumerate(text, start=1):
            emitted += sum(
                len(event.text)
                for event in parser.feed(character)
                if isinstance(event, Content | Reasoning)
            )
            require(
                fed - emitted <= may_lag,
                f"of {shown(text[:fed])}, in single characters, {fed - emitted} characters are "
                f"held back",
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
                added_up([*events, *last]) == self._parse([text]),
                f"{pattern!r} and {more!r}, again and again, are parsed differently in pieces",
            )

    @check("parser.linear", since="1.0")
    def test_time_is_proportional_to_length(self) -> None:
        """A text eight times as long took far more than eight times the time. Don't search the
        whole text again for each piece."""
        for pattern in ("<", " ", "\n", WORDS, *self._marks, *(one.text for one in self._examples)):
            require_proportional(pattern, self._seconds)
        for before, more in self._endless:
            require_proportional(more, partial(self._seconds, before=before))

    @check("parser.call_form", since="1.0", capability="call_form")
    def test_it_reads_the_calls_that_a_model_is_constrained_to(self) -> None:
        """A call in the form that `call_form` returns isn't parsed as that call and nothing else,
        whatever the texts in its arguments are (the format's marks too), or, with `marked`, after
        content; or it raised for another template; or the text before its arguments doesn't begin with `trigger`."""
        for form in self._forms:
            require(
                isinstance(form, CallForm),
                f"call_form returned {form!r}, expected a CallForm or None",
            )
            for arguments in (*ARGUMENTS, *VERBATIM, *ODD_JSON, self._with_marks(form)):
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
                    self._require_calls("", form.separator.join(texts), written)
                    if form.marked:
                        self._require_calls(FIRST, form.separator.join(texts), written)
        for template in ("", "{{", *odd_texts.TEXTS[:20]):
            form = self.component_class.call_form(template)
            require(
                form is None or isinstance(form, CallForm),
                f"call_form({template!r}) returned {form!r}",
            )

    def _require_calls(self, before: str, text: str, calls: Sequence[tuple[str, str]]) -> None:
        """Require that a text has these calls after the content before it."""
        found = self._parse([before, text], tools_with(NAMES, {}))
        require(
            found._replace(content=found.content.strip())
            == Answer("", before.strip(), tuple(calls)),
            f"{shown(before + text)} is parsed as {shown(found)}",
        )

    def _with_marks(self, form: CallForm) -> str:
        """Return arguments with the format's own marks in a text."""
        around = [part.strip() for part in form.around("f")]
        return json.dumps({"a": [*around, form.trigger, *self._marks]}, ensure_ascii=False)

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
            given = json.loads(text) if is_json(text) else None
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

    @cached_property
    def _keys(self) -> list[str]:
        """Names of arguments in the examples."""
        texts = [text for example in self._examples for _, text in example.calls if is_json(text)]
        return ["a", *dict.fromkeys(key for text in texts for key in _keys_of(text))]

    @cached_property
    def _hostile(self) -> list[str]:
        """Calls that Python's JSON can't read, or whose name or arguments aren't valid Unicode."""
        names: dict[str, tuple[str, ...]] = {"f": (DEEP, MANY_DIGITS, HALF_MARKS)}
        # the long ones once: a name changes nothing about them
        names |= dict.fromkeys(("\\ud83d", "\\udc00g"), (HALF_MARKS,))
        return [
            text
            for example in self._examples
            for name, odd in names.items()
            for text, _ in with_other_calls(example, name, odd)
        ]

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
        return added_up(self._events(pieces, tools, starts=starts))

    def _events(
        self,
        pieces: Sequence[str],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        starts: bool = False,
    ) -> list[Event]:
        parser = self._made(tools, starts=starts)
        events = list[Event]()
        for piece in pieces:
            events += _as_list(parser.feed(piece))
            if len(pieces) > 1:  # reading a property changes nothing
                _ = (parser.in_call, parser.in_reasoning)
        return [*events, *_as_list(parser.finish())]

    def _require_same(
        self, text: str, cuts: Iterable[int], whole: Sequence[Event], *, starts: bool = False
    ) -> None:
        pieces = [text[a:b] for a, b in pairwise((0, *cuts, len(text)))]
        found = self._events(pieces, starts=starts)
        require(
            in_order(found) == in_order(whole),
            f"in pieces, {shown(pieces)} is parsed as {shown(in_order(found))}; whole, as "
            f"{shown(in_order(whole))}",
        )

    def _seconds(self, text: str, before: str = "") -> float:
        parser = self._made()
        parser.feed(before)
        begun = time.thread_time()
        for begin in range(0, len(text), 64):
            parser.feed(text[begin : begin + 64])
        parser.finish()
        return time.thread_time() - begun


def _as_list(events: Sequence[Event]) -> list[Event]:
    if not isinstance(events, Sequence):  # only then are they shown, which takes long
        fail(f"feed or finish returned {events!r:.200}, not a sequence")
    return list(events)


def _is_content(event: Event) -> bool:
    return isinstance(event, Content)


def _keys_of(text: str) -> list[str]:
    given = json.loads(text)
    return list(given) if isinstance(given, dict) else []


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
