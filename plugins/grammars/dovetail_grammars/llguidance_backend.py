"""The backend `llguidance`: the library parses as the answer grows, so that compiling is mere checking, and takes a millisecond or so.

Every grammar is written in the library's Lark dialect, with `no_forcing`: by default it would force one way of cutting certain text into tokens, and
forbid all others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from dovetail.api.grammar import Grammar, GrammarBackend, GrammarContext, GrammarSpec, Matcher, SpecKind
from dovetail.errors import DovetailError, RequestError, describe
from dovetail_grammars.forced import forced_tokens
from dovetail_grammars.formats import PATTERNS
from dovetail_grammars.lark import check_lark
from dovetail_grammars.options import WHITESPACE_AT_MOST, GrammarOptions
from dovetail_grammars.regexes import RUST, rewritten
from dovetail_grammars.specs import read_choices, read_json, read_schema, read_structural_tag, refuse

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32

HEAD = '%llguidance {"no_forcing": true}\n'
ESCAPES = 'nrbtf\\"'
ANY_TEXT = "/(?s:.*)/"


class LLGuidance(GrammarBackend):
    """See https://github.com/guidance-ai/llguidance."""

    options: GrammarOptions

    def __init__(self, options: GrammarOptions, context: GrammarContext) -> None:
        super().__init__(options, context)
        self._tokenizer = llguidance.LLTokenizer(_Vocabulary(context), eos_token=_ends(context), slices=None)
        # What a request may cost, in the library's own measures: some 20 ms to compile, and 15 ms a mask. What goes beyond ends as an error.
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._executor: Any = None  # made when several masks are filled for the first time: its threads aren't for nothing

    def compile(self, spec: GrammarSpec) -> Grammar:
        try:
            lark = HEAD + _WRITERS[spec.kind](spec, self._json_options())
            first = llguidance.LLMatcher(self._tokenizer, lark, log_level=0, limits=self._limits)
            grammar = _Grammar(first, self.context)
            grammar.begin().fill(np.zeros(-(-self.context.vocab_size // 32), dtype=np.uint32))
        except RequestError:
            raise
        except DovetailError as error:
            refuse(spec, str(error))
        except Exception as error:  # whatever a library may raise, it is this request's affair
            refuse(spec, describe(error))
        return grammar

    def fill_many(self, matchers: Sequence[Matcher], words: UInt32) -> None:
        running = [(matcher, line) for line, matcher in enumerate(cast("Sequence[_Matcher]", matchers)) if matcher.running]
        if len(running) < 2 or not self.context.stop_ids:
            super().fill_many(matchers, words)
            return
        if len(running) < len(matchers):
            words.fill(0)
        if self._executor is None:
            self._executor = llguidance.LLExecutor(self.options.threads)
        self._executor.unsafe_compute_mask_ptr([(matcher.inner, line) for matcher, line in running], words.ctypes.data, words.strides[0], len(words))
        for matcher, _ in running:
            matcher.check()

    def _json_options(self) -> Mapping[str, Any]:
        """White space, and the escapes in strings: with \\u, a key of the schema could be spelled otherwise, and have another value."""
        if self.options.whitespace == "compact":
            return {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES}
        return {"whitespace_pattern": f"[\\x20\\x0A\\x0D\\x09]{{1,{WHITESPACE_AT_MOST}}}", "json_allowed_escapes": ESCAPES}


class _Vocabulary:
    """The vocabulary as the library reads it. An id without bytes is in no text."""

    is_tokenizer_wrapper = True  # by this the library knows one
    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, context: GrammarContext) -> None:
        ends = _ends(context)
        self.eos_token_id = ends[0]
        self.tokens = [b"" if id in context.stop_ids else text or b"" for id, text in enumerate(context.token_bytes)]
        self.tokens += [b""] * (ends[-1] + 1 - len(self.tokens))

    def __call__(self, text: str) -> list[int]:
        return []  # asked only for text that is forced


def _ends(context: GrammarContext) -> list[int]:
    """Return the ids that end an answer. The library wants one: if there is none, it gets an id beyond the vocabulary."""
    return sorted(context.stop_ids) or [context.vocab_size]


class _Grammar(Grammar):
    def __init__(self, first: Any, context: GrammarContext) -> None:
        self._first, self._context = first, context

    def begin(self) -> Matcher:
        return _Matcher(self._first.deep_copy(), self._context)


class _Matcher(Matcher):
    """The library's matcher, without its own idea of the end: it takes any number of stop ids, and doesn't count them."""

    def __init__(self, inner: Any, context: GrammarContext) -> None:
        self.inner = inner
        self._context = context
        self._accepted = 0  # tokens, with a stop id
        self.running = True  # no stop id was accepted
        self._wider = None if context.stop_ids else np.zeros(context.vocab_size // 32 + 1, dtype=np.uint32)

    def fill(self, words: UInt32) -> None:
        if not self.running:
            words.fill(0)
            return
        target = words if self._wider is None else self._wider
        self.inner.unsafe_compute_mask_ptr(target.ctypes.data, target.nbytes)
        self.check()
        if self._wider is not None:
            words[:] = self._wider[: len(words)]
            if self._context.vocab_size % 32:
                words[-1] &= (1 << self._context.vocab_size % 32) - 1

    def accept(self, token: int) -> bool:
        if not self.running or not 0 <= token < self._context.vocab_size:
            return False
        if token in self._context.stop_ids:
            ends = bool(self.inner.is_accepting())
            self.running = not ends
        else:
            ends = self.inner.try_consume_tokens([token]) == 1
        self.check()
        self._accepted += ends
        return ends

    def rollback(self, tokens: int) -> None:
        if not 0 <= tokens <= self._accepted:
            raise ValueError(f"{tokens} tokens can't be taken back: {self._accepted} were accepted")
        self._accepted -= tokens
        if tokens and not self.running:
            self.running = True
            tokens -= 1
        if tokens:
            self.inner.rollback(tokens)
            self.check()

    def forced(self) -> Sequence[int]:
        return forced_tokens(self, self._context) if self.running and self.inner.compute_ff_bytes() else ()

    @property
    def complete(self) -> bool:
        return not self.running or bool(self.inner.is_stopped())

    def check(self) -> None:
        """Raise `DovetailError` if the matcher has failed: it went beyond a limit, or came to where no token of the vocabulary can go on."""
        if self.inner.is_error():
            raise DovetailError(_reason(self.inner.get_error()))


# ---- grammars in the library's dialect of Lark


def _schema(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _json_schema(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    return f"start: {_schema(_exact(spec, read_schema(spec, read_json(spec))), options)}\n"


def _exact(spec: GrammarSpec, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema, changed in place, with patterns instead of the formats that the library knows too loosely. Raises `RequestError` for what
    it gets wrong otherwise: the count of keys, and bounds less than 1 apart."""
    parts = list(_schemas(schema))
    merges = any("allOf" in part or (not _COMBINING.isdisjoint(part) and not _BOUNDS.isdisjoint(part)) for part in parts)
    for some in [parts] if merges else ([part] for part in parts):  # bounds that stand apart may meet
        _refuse_narrow(spec, some)
    for part in parts:
        _refuse_uncountable(spec, part)
        if (pattern := PATTERNS.get(str(part.get("format")))) is not None:
            del part["format"]
            part["allOf"] = [*part.get("allOf", ()), {"pattern": pattern}]
    return schema


_COMBINING = frozenset({"$ref", "anyOf", "oneOf"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords whose values have no schemas
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # whose schemas have names


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield each schema within a schema, itself first, wherever a `$ref` may lead."""
    rest: list[Any] = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            yield part
            for key, value in part.items():
                if key in _NAMED and isinstance(value, dict):
                    rest += value.values()
                elif key not in _VALUES:
                    rest.append(value)
        elif isinstance(part, list):
            rest += part


def _refuse_uncountable(spec: GrammarSpec, part: Mapping[str, Any]) -> None:
    """The library lets keys that the schema doesn't name come twice, and counts them twice."""
    least, required = part.get("minProperties"), part.get("required", ())
    if isinstance(least, int) and least > max(1, len(required)):
        refuse(spec, f"minProperties = {least}: more than one can't be told apart from a key that comes twice; name them in `required`")


def _refuse_narrow(spec: GrammarSpec, parts: Sequence[Mapping[str, Any]]) -> None:
    """The library lets an exclusive bound come that is an integer, if the other bound isn't one and less than 1 away."""

    def values(*keys: str) -> set[float]:
        return {part[key] for part in parts for key in keys if isinstance(part.get(key), int | float)}

    wrong = values("exclusiveMinimum") & {math.floor(most) for most in values("maximum", "exclusiveMaximum") if most != int(most)}
    wrong |= values("exclusiveMaximum") & {math.ceil(least) for least in values("minimum", "exclusiveMinimum") if least != int(least)}
    if wrong:
        refuse(spec, f"exclusiveMinimum or exclusiveMaximum = {min(wrong)} less than 1 from the other bound can't be kept; give one that may come")


def _json_object(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    return f"start: {_schema({'type': 'object'}, options)}\n"


def _regex(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    return f"start: {_pattern(rewritten(spec, spec.text, RUST))}\n"


def _choice(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    return f"start: CHOICE\nCHOICE: {' | '.join(_text(choice) for choice in read_choices(spec))}\n"  # a terminal, so that thousands are one automaton


def _structural_tag(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    """Free text up to a trigger, matched lazily, then one of its structures; at last free text without any trigger."""
    tag = read_structural_tag(spec)
    triggers = list(dict.fromkeys(structure.trigger for structure in tag.structures))
    tags = f"({' | '.join(f'tag_{n}' for n in range(len(triggers)))})"
    schemas = [_schema(_exact(spec, structure.schema), options) for structure in tag.structures]
    whole = [f"{_text(s.begin)} {schema} {_text(s.end)}" for s, schema in zip(tag.structures, schemas, strict=True)]
    first = f"({' | '.join(whole)})"
    if tag.stop_after_first:
        lines = [f"start: {first if tag.at_least_one else f'{tags} | rest'}"]
    else:
        lines = [f"start: {f'{first} ' if tag.at_least_one else ''}{tags}* rest"]
    for n, trigger in enumerate(triggers):
        these = [(s, schema) for s, schema in zip(tag.structures, schemas, strict=True) if s.trigger == trigger]
        bodies = [f"{_text(s.begin.removeprefix(trigger))} {schema} {_text(s.end)}" for s, schema in these]
        lines += [f"tag_{n}: head_{n} ({' | '.join(bodies)})", f"head_{n}[lazy]: {ANY_TEXT} {_text(trigger)}"]
    lines += ["rest: REST", f"REST: {ANY_TEXT} & ~({ANY_TEXT} ({' | '.join(map(_text, triggers))}) {ANY_TEXT})"]
    return "\n".join(lines) + "\n"


def _grammar(spec: GrammarSpec, options: Mapping[str, Any]) -> str:
    """The user's own Lark, or GBNF as Lark, without what would be passed over, or would let special tokens into the text."""
    try:
        lark = any_to_lark(spec.text)
    except Exception as error:  # the converter has no error of its own
        refuse(spec, f"it is neither Lark, with a rule `start`, nor GBNF, with a rule `root`: {error}")
    check_lark(spec, lark)
    return _with_json_options(spec, lark, options)


_INLINE_JSON = re.compile(r"%json\s*(?=\{)")


def _with_json_options(spec: GrammarSpec, lark: str, options: Mapping[str, Any]) -> str:
    """Have the schemas within a grammar written like others, which is without running on in white space."""
    parts, position = [], 0
    for match in _INLINE_JSON.finditer(lark):
        if match.start() < position:
            continue  # within the schema before
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, match.end())
        except (ValueError, RecursionError) as error:
            refuse(spec, f"the JSON behind %json can't be read: {error}")
        parts += [lark[position : match.start()], _schema(_exact(spec, read_schema(spec, schema)), options)]
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
    return json.dumps(text, ensure_ascii=False)


def _pattern(regex: str) -> str:
    return f"/{regex}/" if regex else '""'


def _reason(error: str) -> str:
    """Return the sentence in the library's error, without the place in our Lark and the pictures."""
    lines = [re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", line.strip()) for line in error.splitlines()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return said[0] if said else next(iter(lines), "it failed without saying why")
