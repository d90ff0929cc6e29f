"""Backend `llguidance`: the library parses incrementally, so compiling only validates and takes
about a millisecond.

Every grammar is written in the library's Lark dialect, with `no_forcing`: by default the library
would force one tokenization of certain text and forbid all others.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import finalize

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from dovetail.api.grammar import (
    SPEC_KINDS,
    Grammar,
    GrammarBackend,
    GrammarCapabilities,
    GrammarContext,
    GrammarSpec,
    Matcher,
    SpecKind,
)
from dovetail.errors import DovetailError, RequestError, describe
from dovetail_grammars.deep_threads import in_deep_thread
from dovetail_grammars.failing import Failing, require_none_failed
from dovetail_grammars.llguidance_matcher import HEAD, Fill, Lanes, LLGrammar, LLMatcher
from dovetail_grammars.mask_processes import (
    Groups,
    MaskProcesses,
    RemoteMatcher,
    end_fill,
    end_step,
    grouped,
    start_fill,
    start_step,
)
from dovetail_grammars.options import WHITESPACE_AT_MOST, GrammarOptions
from dovetail_grammars.positions import Tracker
from dovetail_grammars.regexes import Ranges, demands, rewritten
from dovetail_grammars.schemas import (
    BOUNDS,
    EXCLUSIVE_BOUNDS,
    PATTERNS,
    Subschema,
    checked_parts,
    literals,
    refuse_others,
    shown,
)
from dovetail_grammars.specs import (
    NOT_SYNTAX,
    check_lark,
    decoder,
    read_choices,
    read_json,
    read_schema,
    read_structural_tag,
    refuse,
)
from dovetail_grammars.string_tokens import StringTokens

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32

ESCAPES = 'nrbtf\\"'
# Largest `multipleOf`: it needs a state per remainder, and 20 ms to compile; a million would take
# ten seconds.
MAX_MULTIPLE = 10_000
# of the parser for one mask: an ambiguous grammar takes time that is quadratic in them
MOST_ITEMS = 20_000
BLAMING_S = 0.5  # time limit for compiling parts of a schema separately to find the faulty one
# Compile time of grammars that processes get: each compiles them again, while the engine waits
SHARED_WITHIN_S = 0.02
ANY_TEXT = "/(?s:.*)/"


class LLGuidance(GrammarBackend):
    """See https://github.com/guidance-ai/llguidance."""

    capabilities = GrammarCapabilities(kinds=SPEC_KINDS, rollback=True, forced=True)
    options: GrammarOptions

    def __init__(self, options: GrammarOptions, context: GrammarContext) -> None:
        super().__init__(options, context)
        self._strings = StringTokens(context)
        self._tokenizer = _tokenizer(context, None)
        self._rest = None if self._strings.spelling is None else _tokenizer(self._strings.rest, [])
        self._fill = Fill(context, self._strings, options.threads)
        self._processes = (
            MaskProcesses(options.processes, options, context) if options.processes else None
        )

    def compile(self, spec: GrammarSpec) -> Grammar:
        options = self._json_options()
        begun = time.perf_counter()
        try:
            lark = HEAD + _WRITERS[spec.kind](spec, options)
            grammar = self.compiled(lark)
        except RequestError:
            raise
        except DovetailError as error:
            refuse(spec, self._blamed(spec, options, str(error)))
        except Exception as error:  # whatever the library raises is this request's error
            refuse(spec, describe(error))
        if self._processes is None or time.perf_counter() - begun > SHARED_WITHIN_S:
            return grammar
        return SharedGrammar(grammar, self._processes, lark)

    def prepare(self) -> None:
        """Make what grammars share."""
        if self._rest is not None:
            _ = self._strings.lengths

    def compiled(self, lark: str) -> LLGrammar:
        """Return a grammar written in the library's Lark. Raises `DovetailError` if it is
        wrong."""
        grammar = LLGrammar(self._fill, Lanes(partial(self._made, self._tokenizer, lark)))
        grammar.begin().fill(np.zeros(-(-self.context.vocab_size // 32), dtype=np.uint32))
        tracker = self._tracker(lark)
        return (
            grammar
            if tracker is None
            else LLGrammar(
                self._fill, grammar.whole, Lanes(partial(self._made, self._rest, lark)), tracker
            )
        )

    def _made(self, tokenizer: Any, lark: str, most_states: int) -> Any:
        # Limits per request, in the library's units: some 20 ms to compile, and 30 ms per mask.
        # Exceeding them is an error.
        limits = llguidance.LLParserLimits(
            verbose_errors=False, max_lexer_states=most_states, step_max_items=MOST_ITEMS
        )
        make = partial(llguidance.LLMatcher, tokenizer, lark, log_level=0, limits=limits)
        return in_deep_thread(make, len(lark))

    def _tracker(self, lark: str) -> Tracker | None:
        """Return a tracker if the grammar is only a schema with strings of bounded length."""
        head = f"{HEAD}start: %json "
        if self._rest is None or not lark.startswith(head) or '"maxLength"' not in lark:
            return None
        with suppress(ValueError):  # more follows after the schema
            return Tracker(json.loads(lark.removeprefix(head)))
        return None

    def _blamed(self, spec: GrammarSpec, options: Mapping[str, Any], reason: str) -> str:
        """Return why a schema can't be compiled, with the place and the values that the library
        doesn't report: those of the first part that fails on its own."""
        parts = _parts(spec)
        if reason.startswith("oneOf: "):
            places = [part.place for part in parts if "oneOf" in part.schema]
            return f"{' or '.join(places[:3])}: {reason}"
        until = time.monotonic() + BLAMING_S
        for part in parts:
            for rule in _rules_of(part.schema):
                if time.monotonic() > until:
                    return reason
                try:
                    self.compiled(
                        f"{HEAD}start: {_schema([Subschema('#', rule, rule)], options)}\n"
                    )
                except DovetailError as error:
                    keywords = ", ".join(shown(key, value) for key, value in rule.items())
                    return f"{part.place}: {keywords}: {error}"
        return reason.replace(
            "nothing follows it", "no value satisfies the schema: its parts contradict each other"
        )

    def accept_many(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        if self._processes is None:
            return self._fill.accept(cast("Sequence[LLMatcher]", matchers), tokens)
        here, groups = grouped(matchers)
        start_step(groups, tokens)
        accepted = [False] * len(matchers)
        local = cast("list[LLMatcher]", [matchers[index] for index in here])
        states = self._fill.accept(local, [tokens[index] for index in here])
        for index, state in zip(here, states, strict=True):
            accepted[index] = state
        end_step(groups, accepted)
        return accepted

    def fill_many(self, matchers: Sequence[Matcher], words: UInt32) -> None:
        if self._processes is None:
            self._fill(cast("Sequence[LLMatcher]", matchers), words)
        else:
            self.start_fill(matchers, words)()

    def start_fill(self, matchers: Sequence[Matcher], words: UInt32) -> Callable[[], None]:
        if self._processes is not None:
            here, groups = grouped(matchers)
            if groups:
                return self._start(matchers, words, here, groups)
        return self._fill.start(cast("Sequence[LLMatcher]", matchers), words)

    def _start(
        self, matchers: Sequence[Matcher], words: UInt32, here: Sequence[int], groups: Groups
    ) -> Callable[[], None]:
        """Do as `start_fill` if processes follow some of the answers."""
        require_none_failed(cast("Sequence[Failing]", matchers))
        start_fill(groups)
        own = np.empty((len(here), words.shape[1]), np.uint32)
        wait = self._fill.start(cast("list[LLMatcher]", [matchers[i] for i in here]), own)

        def finish() -> None:
            try:
                end_fill(groups)
            finally:
                wait()
            assert self._processes is not None
            if not here:
                self._processes.copy(cast("Sequence[RemoteMatcher]", matchers), words)
                return
            words[here] = own
            for places, members in groups.values():
                rows = np.empty((len(members), words.shape[1]), np.uint32)
                self._processes.copy(members, rows)
                words[places] = rows

        return finish

    def _json_options(self) -> Mapping[str, Any]:
        """Options for white space and string escapes: with \\u, a key of the schema could be
        spelled differently, with another value."""
        if self.options.whitespace == "compact":
            return {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES}
        return {
            "whitespace_pattern": f"[\\x20\\x0A\\x0D\\x09]{{1,{WHITESPACE_AT_MOST}}}",
            "json_allowed_escapes": ESCAPES,
        }


class SharedGrammar(Grammar):
    """Compiled grammar whose answers processes may follow."""

    def __init__(self, inner: LLGrammar, processes: MaskProcesses, lark: str) -> None:
        self._inner = inner
        self._processes = processes
        self._lark = lark
        self._number = next(processes.grammars)
        finalize(self, processes.forget, self._number)

    def begin(self) -> Matcher:
        ticket = self._processes.ticket()
        matcher = self._processes.begin(self._number, self._lark) or LLMatcher(self._inner)
        matcher.ticket = ticket
        return matcher


def _tokenizer(context: GrammarContext, slices: list[str] | None) -> Any:
    return llguidance.LLTokenizer(_Vocabulary(context), eos_token=_ends(context), slices=slices)


class _Vocabulary:
    """Vocabulary in the library's form. Ids without bytes occur in no text."""

    is_tokenizer_wrapper = True  # the library recognizes it by this
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, context: GrammarContext) -> None:
        ends = _ends(context)
        self.eos_token_id = ends[0]
        self.tokens = [
            b"" if id in context.stop_ids else text or b""
            for id, text in enumerate(context.token_bytes)
        ]
        self.tokens += [b""] * (ends[-1] + 1 - len(self.tokens))

    def __call__(self, text: str) -> list[int]:
        return []  # called only for forced text


def _ends(context: GrammarContext) -> list[int]:
    """Return the ids that end an answer.

    The library requires one; the default is an id beyond the vocabulary.
    """
    return sorted(context.stop_ids) or [context.vocab_size]


# ---- grammars in the library's dialect of Lark


def _schema(parts: Sequence[Subschema], options: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**parts[0].schema, 'x-guidance': options})}"


def _json_schema(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    return f"start: {_schema(_exact(spec, read_schema(spec, read_json(spec))), options)}\n"


def _parts(spec: GrammarSpec) -> Sequence[Subschema]:
    """Return the parts of all schemas in a spec, except those in a grammar."""
    if spec.kind == "json_schema":
        return _exact(spec, read_schema(spec, read_json(spec)))
    if spec.kind == "structural_tag":
        return [
            part
            for one in read_structural_tag(spec).structures
            for part in _exact(spec, one.schema, one.place)
        ]
    return []


def _rules_of(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the keywords of a schema that contain no schemas, then its key patterns."""
    if not _OF_VALUES.isdisjoint(schema):
        yield {key: value for key, value in schema.items() if key in _OF_VALUES}
    for pattern in schema.get("patternProperties", ()):
        yield {"patternProperties": {pattern: {}}, "type": "object"}


def _exact(spec: GrammarSpec, schema: dict[str, Any], place: str = "#") -> Sequence[Subschema]:
    """Return the parts of a schema, itself first, modified in place: formats that the library
    checks too loosely become patterns. Raises `RequestError` for features that the library doesn't
    support or gets wrong."""
    parts = checked_parts(spec, schema, place)
    for part in parts:
        refuse_others(spec, part)
        _refuse_rounded(spec, part)
        _refuse_unwritten(spec, part)
        _refuse_uncountable(spec, part)
    merges = any(
        "allOf" in part.schema
        or (not _COMBINING.isdisjoint(part.schema) and not _BOUNDED.isdisjoint(part.schema))
        for part in parts
    )
    for some in (
        [parts] if merges else ([part] for part in parts)
    ):  # bounds in separate parts may be merged
        _refuse_narrow(spec, some)
    for part in parts:
        if (pattern := PATTERNS.get(str(part.schema.get("format")))) is not None:
            del part.schema["format"]
            part.schema["allOf"] = [*part.schema.get("allOf", ()), {"pattern": pattern}]
    return parts


_COMBINING = frozenset({"$ref", "anyOf", "oneOf"})
_BOUNDED = BOUNDS | {"multipleOf"}
# keywords that contain no schemas
_OF_VALUES = frozenset(
    {"type", "const", "enum", *_BOUNDED, "minLength", "maxLength", "pattern", "format"}
)


def _refuse_rounded(spec: GrammarSpec, part: Subschema) -> None:
    """Reject numbers that the library would round: it reads them as doubles, some as the next one,
    with 64 bits for integers and 32 for multiples."""
    inexact = "the backend llguidance can't keep this number exactly"
    for key in BOUNDS & part.schema.keys():
        if not _is_kept(part.schema[key], excluded=key in EXCLUSIVE_BOUNDS):
            part.refuse(spec, key, inexact)
    for key, values in (
        ("const", [part.schema.get("const")]),
        ("enum", part.schema.get("enum", ())),
    ):
        for value in literals(list(values)):
            if not isinstance(value, str) and not _is_kept(value):
                part.refuse(spec, key, inexact, value)
    if "multipleOf" in part.schema:
        if (multiple := _decimal(part.schema["multipleOf"])) is None:
            part.refuse(spec, "multipleOf", inexact)
        if multiple[0] > MAX_MULTIPLE:
            part.refuse(
                spec,
                "multipleOf",
                f"the backend llguidance can't do it with digits that are more than {MAX_MULTIPLE}",
            )


def _is_kept(value: float, *, excluded: bool = False) -> bool:
    """Return True if the library rounds neither the number nor, if it is `excluded`, its
    successor."""
    if isinstance(value, float) and _as_read(value) != value:
        return False
    if isinstance(value, float) and not value.is_integer():
        return True
    if abs(value) <= 2**53 - excluded or (value == 2**63 - 1 and not excluded):
        return True
    # the shortest digits of the double
    return not excluded and abs(value) < 2**63 and Decimal(repr(float(value))) == Decimal(value)


def _as_read(value: float) -> float:
    """Return a double as serde_json parses its digits: as an integer, multiplied or divided by a
    power of ten, each rounded."""
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    read = float(int("".join(map(str, digits))))
    left = int(exponent)
    while left < 0:
        read /= float(f"1e{min(-left, 308)}")
        left += 308
    return (-read if sign else read) * float(f"1e{max(0, int(exponent))}")


def _decimal(value: float) -> tuple[int, int] | None:
    """Return `multipleOf` as the library represents it: (integer, number of times that it was
    multiplied by ten). None if that isn't the same number."""
    scaled = min(abs(float(value)), 2.0**32) if abs(value) < 2**32 else 2.0**32
    power = 0
    while scaled < 2**32 and scaled % 1:
        scaled = scaled * 10
        power += 1
    return (
        (int(scaled), power)
        if Fraction(int(scaled), 10**power) == abs(Fraction(repr(value)))
        else None
    )


# written only as \u escapes, in JSON or by the library
_UNWRITTEN: Ranges = [
    (0x00, 0x07),
    (0x0B, 0x0B),
    (0x0E, 0x1F),
    (0x7F, 0x7F),
]


def _refuse_unwritten(spec: GrammarSpec, part: Subschema) -> None:
    """Reject characters without an escape in `ESCAPES`: the library would omit them."""
    unwritten = "the backend llguidance can't write such a character in a string"
    for key, values in (
        ("const", [part.schema.get("const")]),
        ("enum", part.schema.get("enum", ())),
    ):
        for value in literals(list(values)):
            if isinstance(value, str) and any(
                first <= ord(character) <= last for character in value for first, last in _UNWRITTEN
            ):
                part.refuse(spec, key, unwritten, value)
    if demands(part.schema.get("pattern", ""), _UNWRITTEN):
        part.refuse(spec, "pattern", unwritten)
    for pattern in part.schema.get("patternProperties", ()):
        if demands(pattern, _UNWRITTEN):
            part.refuse(spec, "patternProperties", unwritten, pattern)


def _refuse_uncountable(spec: GrammarSpec, part: Subschema) -> None:
    """Reject property counts that the library gets wrong: it allows unnamed keys twice, and counts
    both."""
    if part.schema.get("minProperties", 0) > max(1, len(part.schema.get("required", ()))):
        part.refuse(
            spec,
            "minProperties",
            "more than one can't be distinguished from a repeated key; name them in `required`",
        )


def _refuse_narrow(spec: GrammarSpec, parts: Sequence[Subschema]) -> None:
    """Reject bounds and multiples that the library gets wrong: it allows an exclusive integer bound
    if the other bound is no integer and less than 1 away, and it combines multiples in 32 bits."""

    def values(*keys: str) -> set[float]:
        return {part.schema[key] for part in parts for key in keys if key in part.schema}

    wrong = values("exclusiveMinimum") & {
        math.floor(most) for most in values("maximum", "exclusiveMaximum") if most != int(most)
    }
    wrong |= values("exclusiveMaximum") & {
        math.ceil(least) for least in values("minimum", "exclusiveMinimum") if least != int(least)
    }
    if wrong:
        refuse(
            spec,
            f"exclusiveMinimum or exclusiveMaximum = {min(wrong)} less than 1 from the other bound "
            "can't be kept; use an inclusive one",
        )
    multiples = [multiple for value in values("multipleOf") if (multiple := _decimal(value))]
    power = max((power for _, power in multiples), default=0)
    scaled = [number * 10 ** (power - behind) for number, behind in multiples]
    if len(scaled) > 1 and (math.prod(scaled) >= 2**32 or math.lcm(*scaled) > MAX_MULTIPLE):
        refuse(
            spec,
            f"multipleOf = {' and '.join(map(str, sorted(values('multipleOf'))))}: "
            "the backend llguidance can't combine these",
        )


def _json_object(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    return f"start: {_schema(_exact(spec, {'type': 'object'}), options)}\n"


def _regex(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    return f"start: {_pattern(rewritten(spec))}\n"


def _choice(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    # A terminal, so that thousands of choices form one automaton.
    return f"start: CHOICE\nCHOICE: {' | '.join(_text(choice) for choice in read_choices(spec))}\n"


def _structural_tag(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    """Return the grammar: only structures, with a separator; or free text up to a trigger, matched
    lazily, then one of its structures, and finally free text without any trigger."""
    tag = read_structural_tag(spec)
    triggers = list(dict.fromkeys(structure.trigger for structure in tag.structures))
    tags = f"({' | '.join(f'tag_{n}' for n in range(len(triggers)))})"
    schemas = [
        _schema(_exact(spec, structure.schema, structure.place), options)
        for structure in tag.structures
    ]
    whole = [
        f"{_text(s.begin)} {schema} {_text(s.end)}"
        for s, schema in zip(tag.structures, schemas, strict=True)
    ]
    first = f"({' | '.join(whole)})"
    if tag.separator is not None:
        several = "(one)" if tag.stop_after_first else f"(one ({_text(tag.separator)} one)*)"
        return f"start: {several}{'' if tag.at_least_one else '?'}\none: {first}\n"
    if tag.stop_after_first:
        lines = [f"start: {first if tag.at_least_one else f'{tags} | rest'}"]
    else:
        lines = [f"start: {f'{first} ' if tag.at_least_one else ''}{tags}* rest"]
    for n, trigger in enumerate(triggers):
        these = [
            (s, schema)
            for s, schema in zip(tag.structures, schemas, strict=True)
            if s.trigger == trigger
        ]
        bodies = [
            f"{_text(s.begin.removeprefix(trigger))} {schema} {_text(s.end)}" for s, schema in these
        ]
        lines += [
            f"tag_{n}: head_{n} ({' | '.join(bodies)})",
            f"head_{n}[lazy]: {ANY_TEXT} {_text(trigger)}",
        ]
    lines += [
        "rest: REST",
        f"REST: {ANY_TEXT} & ~({ANY_TEXT} ({' | '.join(map(_text, triggers))}) {ANY_TEXT})",
    ]
    return "\n".join(lines) + "\n"


def _grammar(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    """Return the user's Lark, or GBNF converted to Lark.

    Rejects what would be ignored, or would allow special tokens.
    """
    try:
        lark = any_to_lark(spec.text)
    except Exception as error:  # the converter has no specific exception
        refuse(
            spec, f"it is neither Lark, with a rule `start`, nor GBNF, with a rule `root`: {error}"
        )
    check_lark(spec, lark)
    return _with_json_options(spec, lark, options)


_INLINE_JSON = re.compile(rf"{NOT_SYNTAX.pattern}|(?P<json>%json\s*(?=\{{))")


def _with_json_options(spec: GrammarSpec, lark: str, options: Mapping[str, Any]) -> str:
    """Apply the JSON options to the schemas within a grammar, so that their white space is bounded,
    too."""
    parts = []
    position = 0
    while (match := _INLINE_JSON.search(lark, position)) is not None:
        if match["json"] is None:
            parts.append(lark[position : match.end()])
            position = match.end()
            continue
        try:
            schema, end = decoder(spec).raw_decode(lark, match.end())
        except RequestError:
            raise
        except (ValueError, RecursionError) as error:
            refuse(spec, f"the JSON after %json can't be read: {error}")
        parts += [
            lark[position : match.start()],
            _schema(_exact(spec, read_schema(spec, schema)), options),
        ]
        position = end
    return "".join([*parts, lark[position:]])


_WRITERS: Mapping[SpecKind, Callable[[GrammarSpec, Mapping[str, Any]], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "grammar": _grammar,
    "choice": _choice,
    "structural_tag": _structural_tag,
}


def _text(text: str) -> str:
    """Return text as a string literal of the library's Lark: like JSON's, with different escapes of
    control characters."""
    escaped = re.sub(
        r"\\(?:u00(..)|.)",
        lambda escape: f"\\x{escape[1]}" if escape[1] else escape[0],
        json.dumps(text, ensure_ascii=False),
    )
    return escaped.replace("\x7f", r"\x7f")


def _pattern(regex: str) -> str:
    return f"/{regex}/" if regex else '""'
