"""Backend `xgrammar`: the library compiles a grammar with the whole vocabulary, so that filling a mask is mostly copying.

The library silently ignores what it doesn't support, so schemas and regular expressions are checked first.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import xgrammar

from dovetail.api.grammar import Grammar, GrammarBackend, GrammarContext, GrammarSpec, Matcher
from dovetail.errors import DovetailError, RequestError, describe
from dovetail_grammars.failing import Failing, forced_tokens, may_fail, require_none_failed
from dovetail_grammars.options import WHITESPACE_AT_MOST, GrammarOptions
from dovetail_grammars.regexes import EBNF, rewritten
from dovetail_grammars.specs import (
    check_lark,
    read_choices,
    read_json,
    read_schema,
    read_structural_tag,
    refuse,
)
from dovetail_grammars.xgrammar_schema import done_in_full

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32

COMPILING_THREADS = min(8, os.cpu_count() or 1)
_ESCAPE = ' | ("\\\\" basic_escape basic_string_sub)'
_STRING = r'"(?:[^"\\]|\\.)*"'
_PART = re.compile(
    rf"Regex\((?P<regex>{_STRING}), json_string=true\)|(?P<text>{_STRING})|(?P<others>\[\^(?:[^\]\\]|\\.)*\])|\[(?:[^\]\\]|\\.)*\]"
)
_LARK = re.compile(r"^\s*(%|start\s*(\[[^\]]*\]\s*)?:(?!:))", re.MULTILINE)

MOST_MASK_S = 0.25  # of a core; an ambiguous grammar's masks take longer with each token, without a limit of the library


class XGrammar(GrammarBackend):
    """See https://github.com/mlc-ai/xgrammar."""

    options: GrammarOptions

    def __init__(self, options: GrammarOptions, context: GrammarContext) -> None:
        super().__init__(options, context)
        vocabulary = [
            b"" if id in context.stop_ids else text or b""
            for id, text in enumerate(context.token_bytes)
        ]
        vocabulary += _parting_texts(vocabulary)
        self._masks = _Masks(context, -(-len(vocabulary) // 32))
        told = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary),
            stop_token_ids=sorted(context.stop_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(
            told, max_threads=COMPILING_THREADS, cache_enabled=False
        )  # the engine caches compiled grammars
        self._batch: Any = None  # created when several masks are first filled at once, since its threads have a cost

    def compile(self, spec: GrammarSpec) -> Grammar:
        try:
            return _Grammar(self._compiled(spec), self._masks)
        except RequestError:
            raise
        except Exception as error:  # whatever the library raises is this request's error
            refuse(spec, _reason(error))

    def fill_many(self, matchers: Sequence[Matcher], words: UInt32) -> None:
        require_none_failed(cast("Sequence[_Matcher]", matchers))
        running = [
            (matcher, line)
            for line, matcher in enumerate(cast("Sequence[_Matcher]", matchers))
            if matcher.running
        ]
        if len(running) < 2:
            super().fill_many(matchers, words)
            return
        if len(running) < len(matchers):
            words.fill(0)
        if self._batch is None:
            self._batch = xgrammar.BatchGrammarMatcher(self.options.threads or "auto")
        begun = time.monotonic()
        with self._masks.in_full(words) as wide:
            self._batch.batch_fill_next_token_bitmask(
                [matcher.inner for matcher, _ in running],
                wide.view(np.int32),
                [line for _, line in running],
            )
        for matcher, line in running:
            matcher.check(words[line])
        if time.monotonic() - begun > MOST_MASK_S:  # find out whether it is the fault of one
            super().fill_many(matchers, words)

    def _compiled(self, spec: GrammarSpec) -> Any:
        if spec.kind == "json_schema":
            return self._compiler.compile_grammar(self._json(spec, read_json(spec)))
        if spec.kind == "json_object":
            return self._compiler.compile_grammar(self._json(spec, {"type": "object"}))
        if spec.kind == "regex":
            return self._compiler.compile_grammar(f"root ::= {rewritten(spec, spec.text, EBNF)}")
        if spec.kind == "choice":
            return self._compiler.compile_grammar(
                f"root ::= {' | '.join(_text(choice) for choice in read_choices(spec))}"
            )
        if spec.kind == "structural_tag":
            return self._compiler.compile_structural_tag(self._tags(spec))
        if not _LARK.search(spec.text):
            return self._compiler.compile_grammar(spec.text)
        check_lark(spec, spec.text)
        if "%json" in spec.text:
            refuse(
                spec,
                "the backend xgrammar can't check whether it supports the schemas after %json; llguidance can",
            )
        return self._compiler.compile_lark(spec.text)

    def _json(self, spec: GrammarSpec, schema: Any, place: str = "#") -> str:
        """Return a schema as the library's grammar, mended: see `_mended`. Otherwise an additional key could be one of the schema's in another
        spelling, with an escape, and free arrays and objects would have a space after their commas."""
        text = str(
            xgrammar.Grammar.from_json_schema(_dumped(spec, schema, place), **self._json_options())
        )
        lines = []
        for line in text.splitlines():
            name = line.partition(" ::= ")[0]
            if "_addl_key" in name:
                line = line.replace(_ESCAPE, "")
            if (
                name.startswith(("basic_array_items", "basic_object_properties"))
                and self.options.whitespace == "compact"
            ):
                line = line.replace('", "', '","')
            lines.append(_PART.sub(lambda found: _mended(spec, found), line))
        return "\n".join(lines)

    def _json_options(self) -> Mapping[str, Any]:
        """Options by which objects and arrays allow additional members by default, as in JSON Schema; the library calls that not strict."""
        flexible = self.options.whitespace == "flexible"
        most = WHITESPACE_AT_MOST if flexible else None
        return {
            "any_whitespace": flexible,
            "separators": (",", ":"),
            "strict_mode": False,
            "max_whitespace_cnt": most,
        }

    def _tags(self, spec: GrammarSpec) -> Mapping[str, Any]:
        tag = read_structural_tag(spec)
        tags = []
        for structure in tag.structures:
            content = {
                "type": "grammar",
                "grammar": self._json(spec, structure.schema, structure.place),
            }
            tags.append({"begin": structure.begin, "content": content, "end": structure.end})
        flags = {"at_least_one": tag.at_least_one, "stop_after_first": tag.stop_after_first}
        if tag.separator is not None:
            separated = {
                "type": "tags_with_separator",
                "separator": tag.separator,
                "tags": tags,
                **flags,
            }
            return {"type": "structural_tag", "format": separated}
        triggers = list(dict.fromkeys(structure.trigger for structure in tag.structures))
        return {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags, **flags},
        }


class _Masks:
    """The library's masks, which may be wider than ours and have bits beyond the vocabulary. `width`: in words."""

    def __init__(self, context: GrammarContext, width: int) -> None:
        self.context, self._width = context, width
        self._last_word = np.uint32(
            (1 << ((context.vocab_size - 1) % 32 + 1)) - 1
        )  # the bits that belong to the vocabulary

    @contextmanager
    def in_full(self, words: UInt32) -> Iterator[UInt32]:
        """Yield masks [..., width] for the library to fill, and then copy them to `words`."""
        wide = (
            words
            if words.shape[-1] == self._width
            else np.zeros((*words.shape[:-1], self._width), dtype=np.uint32)
        )
        yield wide
        if wide is not words:
            words[...] = wide[..., : words.shape[-1]]
        words[..., -1] &= self._last_word

    def fill(self, matcher: Any, words: UInt32) -> None:
        with self.in_full(words) as wide:
            matcher.fill_next_token_bitmask(wide.view(np.int32).reshape(1, -1))

    def only_end(self, matcher: Any) -> bool:
        """True if only a stop id is allowed."""
        words = np.zeros(-(-self.context.vocab_size // 32), dtype=np.uint32)
        self.fill(matcher, words)
        for id in self.context.stop_ids:
            words[id // 32] &= ~np.uint32(1 << id % 32)
        return not words.any()


class _Grammar(Grammar):
    def __init__(self, compiled: Any, masks: _Masks) -> None:
        self._compiled, self._masks = compiled, masks

    def begin(self) -> Matcher:
        return _Matcher(xgrammar.GrammarMatcher(self._compiled), self._masks)


class _Matcher(Failing):
    """The library's matcher, plus a flag for accepted stop ids, since the library fills no mask after one."""

    def __init__(self, inner: Any, masks: _Masks) -> None:
        self.inner = inner
        self._masks, self._context = masks, masks.context
        self._accepted = 0  # tokens, including a stop id
        self.running = True  # no stop id has been accepted

    @may_fail
    def fill(self, words: UInt32) -> None:
        if not self.running:
            words.fill(0)
            return
        begun = time.thread_time()
        self._masks.fill(self.inner, words)
        if time.thread_time() - begun > MOST_MASK_S:
            raise DovetailError(
                f"a mask takes more than {MOST_MASK_S:g} s: it is too ambiguous for the backend xgrammar"
            )
        self.check(words)

    def check(self, words: UInt32) -> None:
        """Raise `DovetailError` if neither a token nor an end is allowed."""
        if not words.any() and not self.inner.is_completed():
            raise DovetailError("no token of the vocabulary can continue the answer")

    @may_fail
    def accept(self, token: int) -> bool:
        if not self.running or not 0 <= token < self._context.vocab_size:
            return False
        if token in self._context.stop_ids:
            accepted = bool(self.inner.is_completed())
            self.running = not accepted
        else:
            accepted = bool(self.inner.accept_token(token))
        self._accepted += accepted
        return accepted

    def rollback(self, tokens: int) -> None:
        if not 0 <= tokens <= self._accepted:
            raise ValueError(f"can't roll back {tokens} tokens: {self._accepted} were accepted")
        self._accepted -= tokens
        if tokens and not self.running:
            self.running = True
            tokens -= 1
        if tokens:
            self.inner.rollback(tokens)

    @may_fail
    def forced(self) -> Sequence[int]:
        return forced_tokens(self, self._context) if self.running else ()

    @property
    def complete(self) -> bool:
        return not self.running or (
            bool(self.inner.is_completed()) and self._masks.only_end(self.inner)
        )


def _parting_texts(vocabulary: Sequence[bytes]) -> list[bytes]:
    """Return additional texts, beyond the vocabulary, that make the library's table of common prefixes correct.

    In the sorted order of texts, the library takes a token for a continuation of an earlier one if that occurs *anywhere* in it (as `":` in `"a":`),
    and then forbids both when it forbids the first. A text between the two, which begins like the second, separates them.
    """
    added: list[bytes] = []
    while True:
        parting: list[bytes] = []
        continued: list[bytes] = []
        for text in sorted(filter(None, [*vocabulary, *added])):
            while continued and continued[-1] not in text:
                continued.pop()
            if continued and not text.startswith(continued[-1]):
                parting.append(_parting(continued[-1], text))
            continued.append(text)
        if not parting:
            return added
        added += dict.fromkeys(parting)


def _parting(before: bytes, text: bytes) -> bytes:
    """Return the prefix of `text` up to and including the first byte that differs from `before`."""
    same = next(
        (n for n, (one, other) in enumerate(zip(before, text, strict=False)) if one != other),
        min(len(before), len(text)),
    )
    return text[: same + 1]


def _mended(spec: GrammarSpec, found: re.Match[str]) -> str:
    """Return a corrected part of a grammar written by the library: regular expressions become grammars, since it misinterprets those with
    repetitions in alternatives; two-digit escapes become four-digit ones, since it reads `\\xdfe` as one; negated classes exclude surrogates,
    which UTF-8 doesn't have."""
    if found["regex"]:
        pattern = re.sub(
            r"\\(\W)", r"\1", found["regex"][1:-1]
        )  # the other escapes are the same in both
        return f"({rewritten(spec, pattern, EBNF)})"
    if found["text"]:
        return re.sub(
            r"\\(?:x([0-9a-fA-F]{2})|.)",
            lambda escape: f"\\u00{escape[1]}" if escape[1] else escape[0],
            found["text"],
        )
    return rewritten(spec, found["others"], EBNF) if found["others"] else found[0]


def _dumped(spec: GrammarSpec, schema: Any, place: str) -> str:
    return json.dumps(done_in_full(spec, read_schema(spec, schema), place), ensure_ascii=False)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _reason(error: Exception) -> str:
    """Return the library's message without its timestamp, source location and failed condition."""
    return (
        re.sub(
            r"\[[\d:]+\] \S+?:\d+: |Check failed: \(.*\) is false: ", "", str(error).splitlines()[0]
        )
        if str(error)
        else describe(error)
    )
