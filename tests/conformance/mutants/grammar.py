"""Grammar backends with one thing wrong each."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.api.grammar import Grammar, GrammarBackend, GrammarContext, GrammarSpec, Matcher
from dovetail.errors import DovetailError, RequestError
from dovetail_grammars.llguidance_backend import LLGuidance
from dovetail_grammars.options import GrammarOptions
from tests.conformance.mutants import mutant

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32


class Wrapped(Matcher):
    """A matcher that is right."""

    def __init__(self, real: Matcher, context: GrammarContext) -> None:
        self.real, self.context = real, context

    def fill(self, words: UInt32) -> None:
        self.real.fill(words)

    def accept(self, token: int) -> bool:
        return self.real.accept(token)

    def rollback(self, tokens: int) -> None:
        self.real.rollback(tokens)

    def forced(self) -> Sequence[int]:
        return self.real.forced()

    @property
    def complete(self) -> bool:
        return self.real.complete

    def change(self, words: UInt32, changes: Mapping[int, bool]) -> None:
        """Set some bits of a mask."""
        for id, bit in changes.items():
            words[id // 32] = int(words[id // 32]) & ~(1 << id % 32) | bit << id % 32

    def allowed(self) -> list[int]:
        words = np.zeros(-(-self.context.vocab_size // 32), dtype=np.uint32)
        self.real.fill(words)
        return list(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


class WrappedGrammar(Grammar):
    def __init__(self, real: Grammar, matcher: type[Wrapped], context: GrammarContext) -> None:
        self.real, self.matcher, self.context = real, matcher, context

    def begin(self) -> Matcher:
        return self.matcher(self.real.begin(), self.context)


class OneByOne(LLGuidance):
    """Has matchers of another class, which its base can't use together."""

    accept_many = GrammarBackend.accept_many
    start_fill = GrammarBackend.start_fill
    fill_many = GrammarBackend.fill_many


class Wrapping(OneByOne):
    """Begins matchers of another class."""

    matcher: type[Wrapped] = Wrapped

    def compile(self, spec: GrammarSpec) -> Grammar:
        return WrappedGrammar(super().compile(spec), self.matcher, self.context)


@mutant(caught_by="grammar.mask")
class ForbidsPartsOfCharacters(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def fill(self, words: UInt32) -> None:
            self.real.fill(words)
            parts = [
                id
                for id, text in enumerate(self.context.token_bytes)
                if text and text.decode(errors="ignore").encode() != text
            ]
            self.change(words, dict.fromkeys(parts, False))


@mutant(caught_by="grammar.mask")
class KnowsOneIdForAText(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def fill(self, words: UInt32) -> None:
            self.real.fill(words)
            tokens = list(self.context.token_bytes)
            self.change(
                words,
                {id: False for id, text in enumerate(tokens) if text and tokens.index(text) < id},
            )


@mutant(caught_by="grammar.mask")
class HasOneStopId(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def fill(self, words: UInt32) -> None:
            self.real.fill(words)
            self.change(words, dict.fromkeys(sorted(self.context.stop_ids)[1:], False))


@mutant(caught_by="grammar.mask")
class ForcesOneTokenization(OneByOne):
    """Leaves the library's own habit alone, as far as one byte goes."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        return WrappedGrammar(super().compile(spec), _LongestOnly, self.context)


class _LongestOnly(Wrapped):
    def fill(self, words: UInt32) -> None:
        self.real.fill(words)
        texts = {
            id: self.context.token_bytes[id] or b""
            for id in self.allowed()
            if id not in self.context.stop_ids
        }
        longest = max(texts.values(), key=len, default=b"")
        if len(longest) > 1:
            self.change(
                words,
                {
                    id: False
                    for id, text in texts.items()
                    if text != longest and longest.startswith(text)
                },
            )


@mutant(caught_by="grammar.mask")
class TakesAStopIdForItsText(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def fill(self, words: UInt32) -> None:
            self.real.fill(words)
            tokens, stops = list(self.context.token_bytes), self.context.stop_ids
            may = [
                id
                for id in stops
                if (text := tokens[id]) is not None
                and tokens.index(text) != id
                and tokens.index(text) in self.allowed()
            ]
            self.change(words, dict.fromkeys(may, True))


@mutant(caught_by="grammar.mask")
class ComposesCharacters(Wrapping):
    """Takes e and a combining accent for é, as far as choices go."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        return super().compile(GrammarSpec(spec.kind, spec.text.replace(r"e\u0301", "é")))


@mutant(caught_by="grammar.never_text")
class AllowsEmptyTokens(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def fill(self, words: UInt32) -> None:
            self.real.fill(words)
            self.change(
                words, {id: True for id, text in enumerate(self.context.token_bytes) if text == b""}
            )


@mutant(caught_by="grammar.words")
class AddsToTheWords(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def fill(self, words: UInt32) -> None:
            before = words.copy()
            self.real.fill(words)
            words |= before


@mutant(caught_by="grammar.words")
class SetsBitsBeyondTheVocabulary(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def fill(self, words: UInt32) -> None:
            self.real.fill(words)
            self.change(words, dict.fromkeys(range(self.context.vocab_size, 32 * len(words)), True))


@mutant(caught_by="grammar.fill_pure")
class GoesOnWhenItFills(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def fill(self, words: UInt32) -> None:
            self.real.fill(words)
            if allowed := self.allowed():
                self.real.accept(allowed[0])


@mutant(caught_by="grammar.accept")
class AcceptsAnything(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def accept(self, token: int) -> bool:
            self.real.accept(token)
            return True


@mutant(caught_by="grammar.accept")
class StartsAgainWhenItRefuses(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        accepted = 0

        def accept(self, token: int) -> bool:
            if self.real.accept(token):
                self.accepted += 1
                return True
            self.real.rollback(self.accepted)
            self.accepted = 0
            return False


@mutant(caught_by="grammar.accept")
class CountsFromTheEnd(Wrapping):
    """Takes a negative id as Python takes an index."""

    class matcher(Wrapped):  # noqa: N801
        def accept(self, token: int) -> bool:
            return self.real.accept(self.allowed()[token] if token < 0 else token)


@mutant(caught_by="grammar.end")
class GoesOnBehindAStopId(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def accept(self, token: int) -> bool:
            return (
                token in self.allowed()
                if token in self.context.stop_ids
                else self.real.accept(token)
            )


@mutant(caught_by="grammar.end")
class ForcesAStopIdAgain(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def forced(self) -> Sequence[int]:
            return self.real.forced() or (
                [min(self.context.stop_ids)] if self.context.stop_ids and not self.allowed() else []
            )


class _OneSpare(Grammar):
    def __init__(self, real: Grammar) -> None:
        self.real = real
        self.last: Matcher | None = None

    def begin(self) -> Matcher:
        if self.last is None or not self.last.complete:
            self.last = self.real.begin()
            return self.last
        try:
            while True:
                self.last.rollback(1)
        except ValueError:
            return self.last


@mutant(caught_by="grammar.end")
class BeginsAgainWithOneThatHasEnded(LLGuidance):
    def compile(self, spec: GrammarSpec) -> Grammar:
        return _OneSpare(super().compile(spec))


@mutant(caught_by="grammar.complete")
class IsCompleteWhereItMayEnd(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        @property
        def complete(self) -> bool:
            return bool(self.context.stop_ids & set(self.allowed()))


@mutant(caught_by="grammar.complete")
class WaitsForTheStopId(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        @property
        def complete(self) -> bool:
            return not self.allowed()


@mutant(caught_by="grammar.rollback")
class TakesBackOneTokenLess(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def rollback(self, tokens: int) -> None:
            self.real.rollback(max(0, tokens - 1))


@mutant(caught_by="grammar.rollback")
class TakesBackWhatThereIs(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def rollback(self, tokens: int) -> None:
            while tokens:
                try:
                    self.real.rollback(tokens)
                    return
                except ValueError:
                    tokens -= 1


@mutant(caught_by="grammar.rollback")
class KeepsTheLastMaskByLength(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        accepted = 0
        length = -1  # at which the last mask was filled

        def fill(self, words: UInt32) -> None:
            if self.accepted != self.length:
                self.length, self.last = self.accepted, words
                self.real.fill(words)
                self.last = words.copy()
            words[:] = self.last

        def accept(self, token: int) -> bool:
            accepted = self.real.accept(token)
            self.accepted += accepted
            return accepted

        def rollback(self, tokens: int) -> None:
            self.real.rollback(tokens)
            self.accepted -= tokens


@mutant(caught_by="grammar.rollback")
class CountsRefusedStopIds(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        refused = 0

        def accept(self, token: int) -> bool:
            accepted = self.real.accept(token)
            self.refused = (
                self.refused + 1 if not accepted and token in self.context.stop_ids else 0
            )
            return accepted

        def rollback(self, tokens: int) -> None:
            self.real.rollback(max(0, tokens - self.refused))


@mutant(caught_by="grammar.forced")
class ForcesTheOnlyStopId(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def forced(self) -> Sequence[int]:
            allowed = self.allowed()
            return allowed if len(allowed) == 1 else self.real.forced()


@mutant(caught_by="grammar.forced")
class ForcesWhatMayCome(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def forced(self) -> Sequence[int]:
            return self.allowed()[:1]


@mutant(caught_by="grammar.forced")
class MovesToWhatIsForced(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def forced(self) -> Sequence[int]:
            tokens = self.real.forced()
            return [token for token in tokens if self.real.accept(token)]


@mutant(caught_by="grammar.forced")
class NeverForces(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def forced(self) -> Sequence[int]:
            return ()


@mutant(caught_by="grammar.forced_again")
class KeepsWhatIsForcedByNumber(Wrapping):
    """Forced tokens are kept by the number of accepted ones, also after a rollback."""

    class matcher(Wrapped):  # noqa: N801
        def __init__(self, real: Matcher, context: GrammarContext) -> None:
            super().__init__(real, context)
            self.kept: dict[int, Sequence[int]] = {}
            self.accepted = 0

        def accept(self, token: int) -> bool:
            done = self.real.accept(token)
            self.accepted += done
            return done

        def rollback(self, tokens: int) -> None:
            self.real.rollback(tokens)
            self.accepted -= tokens

        def forced(self) -> Sequence[int]:
            if self.accepted not in self.kept:
                self.kept[self.accepted] = list(self.real.forced())
            return self.kept[self.accepted]


class _OneMatcher(Grammar):
    def __init__(self, real: Grammar) -> None:
        self.matcher = real.begin()

    def begin(self) -> Matcher:
        return self.matcher


@mutant(caught_by="grammar.separate")
class HasOneMatcherForAll(LLGuidance):
    def compile(self, spec: GrammarSpec) -> Grammar:
        return _OneMatcher(super().compile(spec))


class _SlowlyBegun(Grammar):
    def __init__(self, real: Grammar) -> None:
        self.real = real

    def begin(self) -> Matcher:
        time.sleep(0.002)
        return self.real.begin()


@mutant(caught_by="grammar.begin")
class CompilesWhenItBegins(LLGuidance):
    def compile(self, spec: GrammarSpec) -> Grammar:
        return _SlowlyBegun(super().compile(spec))


@mutant(caught_by="grammar.same_text")
class KeepsGrammarsByText(LLGuidance):
    def __init__(self, options: GrammarOptions, context: GrammarContext) -> None:
        super().__init__(options, context)
        self.kept: dict[str, Grammar] = {}

    def compile(self, spec: GrammarSpec) -> Grammar:
        if spec.text not in self.kept:
            self.kept[spec.text] = super().compile(spec)
        return self.kept[spec.text]


@mutant(caught_by="grammar.failed")
class AllowsNothingWhereNothingFits(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def fill(self, words: UInt32) -> None:
            try:
                self.real.fill(words)
            except DovetailError:
                words.fill(0)


@mutant(caught_by="grammar.failed")
class RefusesOnceItHasFailed(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def accept(self, token: int) -> bool:
            try:
                return self.real.accept(token)
            except DovetailError:
                return False


@mutant(caught_by="grammar.failed")
class ForcesNothingOnceItHasFailed(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def forced(self) -> Sequence[int]:
            try:
                return self.real.forced()
            except DovetailError:
                return ()


@mutant(caught_by="grammar.failed", error=IndexError)
class FailsInItsOwnWords(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        def fill(self, words: UInt32) -> None:
            try:
                self.real.fill(words)
            except DovetailError:
                raise IndexError("no token") from None


@mutant(caught_by="grammar.failed")
class IsCompleteOnceItHasFailed(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        @property
        def complete(self) -> bool:
            try:
                return self.real.complete or not self.allowed()
            except DovetailError:
                return True


@mutant(caught_by="grammar.failed")
class PassesOverAFailedOneAmongMany(Wrapping):
    def fill_many(self, matchers: Sequence[Matcher], words: UInt32) -> None:
        for matcher, line in zip(matchers, words, strict=True):
            try:
                matcher.fill(line)
            except DovetailError:
                line.fill(0)


@mutant(caught_by="grammar.failed", error=DovetailError)
class FailsTogether(OneByOne):
    """One answer's failure is its grammar's."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        class Together(Wrapped):
            failure = ""

            def fill(self, words: UInt32) -> None:
                if Together.failure:
                    raise DovetailError(Together.failure)
                try:
                    self.real.fill(words)
                except DovetailError as error:
                    Together.failure = str(error)
                    raise

        return WrappedGrammar(super().compile(spec), Together, self.context)


@mutant(caught_by="grammar.threads")
class KeepsTheSpecThatItCompiles(LLGuidance):
    def compile(self, spec: GrammarSpec) -> Grammar:
        self.spec = spec
        time.sleep(0.002)
        return super().compile(self.spec)


@mutant(caught_by="grammar.shared")
class FillsTheMemoryOfItsGrammar(OneByOne):
    """Writes masks to memory that all matchers of a grammar share, and copies them afterwards."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        shared = np.zeros(-(-self.context.vocab_size // 32), np.uint32)

        class Filling(Wrapped):
            def fill(self, words: UInt32) -> None:
                self.real.fill(shared)
                time.sleep(0.0001)
                words[:] = shared

        return WrappedGrammar(super().compile(spec), Filling, self.context)


@mutant(caught_by="grammar.fill_many")
class FillsInAnotherOrder(LLGuidance):
    def fill_many(self, matchers: Sequence[Matcher], words: UInt32) -> None:
        super().fill_many(matchers[::-1], words)


@mutant(caught_by="grammar.fill_many")
class FillsAlsoWhatHasEnded(LLGuidance):
    def fill_many(self, matchers: Sequence[Matcher], words: UInt32) -> None:
        super().fill_many(matchers, words)
        words[~words.any(axis=1), 0] = 1


@mutant(caught_by="grammar.no_stop_ids", error=ValueError)
class NeedsAStopId(LLGuidance):
    def __init__(self, options: GrammarOptions, context: GrammarContext) -> None:
        self.stop_id = min(context.stop_ids)
        super().__init__(options, context)


@mutant(caught_by="grammar.no_stop_ids")
class WaitsForAStopIdThatIsNot(Wrapping):
    class matcher(Wrapped):  # noqa: N801
        @property
        def complete(self) -> bool:
            return bool(self.context.stop_ids) and self.real.complete


@mutant(caught_by="grammar.refuses")
class AllowsAnythingInstead(LLGuidance):
    def compile(self, spec: GrammarSpec) -> Grammar:
        try:
            return super().compile(spec)
        except RequestError:
            return super().compile(GrammarSpec("regex", "(?s:.*)"))


@mutant(caught_by="grammar.refuses")
class GivesNoReason(LLGuidance):
    def compile(self, spec: GrammarSpec) -> Grammar:
        try:
            return super().compile(spec)
        except RequestError:
            raise RequestError("") from None


@mutant(caught_by="grammar.refuses", error=ValueError)
class RaisesErrorsOfItsOwn(LLGuidance):
    def compile(self, spec: GrammarSpec) -> Grammar:
        try:
            return super().compile(spec)
        except RequestError as error:
            raise ValueError(str(error)) from None


class Respecified(LLGuidance):
    """Compiles another spec than it is given."""

    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        return spec

    def compile(self, spec: GrammarSpec) -> Grammar:
        return super().compile(self.instead(spec))


@mutant(caught_by="grammar.grammars")
class CantCount(Respecified):
    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        return GrammarSpec("regex", "a*cb*") if spec.kind == "grammar" else spec


@mutant(caught_by="grammar.grammars")
class StartsWithTheFirstRule(Respecified):
    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        return (
            GrammarSpec(spec.kind, re.sub(r"\broot\b", "other", spec.text).replace("pair", "root"))
            if "pair ::=" in spec.text
            else spec
        )


@mutant(caught_by="grammar.structural_tags")
class GoesOnAfterTheFirst(Respecified):
    """Stops only if the answer also begins with a structure."""

    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        if spec.kind != "structural_tag" or "at_least_one" in spec.text or "separator" in spec.text:
            return spec
        return GrammarSpec(
            spec.kind, spec.text.replace('"stop_after_first": true', '"stop_after_first": false')
        )


@mutant(caught_by="grammar.structural_tags")
class KeepsStructuresByTheirBegin(Respecified):
    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        if (
            spec.kind != "structural_tag"
            or not isinstance(tag := json.loads(spec.text or "0"), dict)
            or "structures" not in tag
        ):
            return spec
        tag["structures"] = [
            *{
                structure["begin"]: structure
                for structure in tag["structures"]
                if "begin" in structure
            }.values()
        ]
        return GrammarSpec(spec.kind, json.dumps(tag))


@mutant(caught_by="grammar.regexes")
class HasLineBreaksInAnyCharacter(Respecified):
    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        return GrammarSpec(spec.kind, "(?s:.)") if spec == GrammarSpec("regex", ".") else spec


@mutant(caught_by="grammar.regexes")
class TakesTheFirstAlternative(Respecified):
    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        return (
            GrammarSpec(spec.kind, spec.text.replace("(a|ab)(", "a("))
            if spec.kind == "regex"
            else spec
        )


@mutant(caught_by="grammar.regexes")
class HasWordsInAllScripts(Respecified):
    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        return GrammarSpec(spec.kind, r"[\wéä]") if spec == GrammarSpec("regex", r"\w") else spec


class Reschemed(Respecified):
    """Compiles another schema than it is given: each part may be another."""

    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        return schema

    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        if spec.kind != "json_schema" or not spec.text.endswith("}") or len(spec.text) > 1000:
            return spec
        return GrammarSpec(spec.kind, json.dumps(self._within(json.loads(spec.text), 0)))

    def _within(self, value: Any, depth: int) -> Any:
        if isinstance(value, list):
            return [self._within(one, depth) for one in value]
        return (
            self.part({key: self._within(one, depth + 1) for key, one in value.items()}, depth)
            if isinstance(value, dict)
            else value
        )


@mutant(caught_by="grammar.keywords")
class PassesOverKeywordsWithin(Reschemed):
    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        return {key: value for key, value in schema.items() if not (depth and key == "uniqueItems")}


@mutant(caught_by="grammar.keywords")
class PassesOverKeywordsOfDefinitions(Reschemed):
    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        definitions = {
            name: {key: v for key, v in one.items() if key != "not"}
            for name, one in schema.get("$defs", {}).items()
        }
        return {**schema, "$defs": definitions} if definitions else schema


@mutant(caught_by="grammar.keywords", soon=True)
class HasExclusiveBoundsThatMayCome(Reschemed):
    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        return {
            "maximum" if key == "exclusiveMaximum" else key: value for key, value in schema.items()
        }


@mutant(caught_by="grammar.keywords")
class RoundsBounds(Reschemed):
    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        return {
            key: round(value, 1) if key == "maximum" and isinstance(value, float) else value
            for key, value in schema.items()
        }


@mutant(caught_by="grammar.keywords")
class CountsAccentsWithTheirLetters(Reschemed):
    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        if "maxLength" not in schema or "minLength" in schema:
            return schema
        return {"type": "string", "pattern": f"^(.\u0301?){{0,{schema['maxLength']}}}$"}


@mutant(caught_by="grammar.json_schema")
class PassesOverMaximums(Respecified):
    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        return GrammarSpec(spec.kind, spec.text.replace("maximum", "largest"))


@mutant(caught_by="grammar.json_schema")
class HasNoFurtherProperties(Respecified):
    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        if spec.kind != "json_schema" or "additionalProperties" not in spec.text:
            return spec
        return GrammarSpec(
            spec.kind, json.dumps({**json.loads(spec.text), "additionalProperties": False})
        )


@mutant(caught_by="grammar.json_object")
class TakesAnyJSONForAnObject(Respecified):
    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        return GrammarSpec("json_schema", "{}") if spec.kind == "json_object" else spec


@mutant(caught_by="grammar.white_space")
class HasWhiteSpaceWithoutEnd(LLGuidance):
    def _json_options(self) -> Mapping[str, Any]:
        return {"whitespace_flexible": True}


@mutant(caught_by="grammar.mask")
class JoinsChoicesToARegex(Respecified):
    """And doesn't escape them, if that is a regular expression."""

    def instead(self, spec: GrammarSpec) -> GrammarSpec:
        if spec.kind != "choice" or "\\" in spec.text:
            return spec
        return GrammarSpec("regex", "|".join(f"({text})" for text in json.loads(spec.text)))


@mutant(caught_by="grammar.keywords")
class TakesAFalseConstForNone(Reschemed):
    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        return {key: value for key, value in schema.items() if key != "const" or value}


@mutant(caught_by="grammar.keywords")
class TakesLimitsOfZeroForNone(Reschemed):
    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        return {
            key: value
            for key, value in schema.items()
            if not (key in ("maxItems", "maxLength", "maximum", "minimum") and value == 0)
        }


@mutant(caught_by="grammar.keywords")
class RequiresWhatIsDescribed(Reschemed):
    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        if "required" not in schema:
            return schema
        return {
            **schema,
            "required": [
                name for name in schema["required"] if name in schema.get("properties", {})
            ],
        }


@mutant(caught_by="grammar.keywords")
class PassesOverWhatStandsBesideARef(Reschemed):
    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        return {
            key: value
            for key, value in schema.items()
            if "$ref" not in schema or key in ("$ref", "$defs")
        }


@mutant(caught_by="grammar.keywords")
class TakesAFalseSchemaForTrue(Reschemed):
    def part(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return schema
        return {**schema, "properties": {name: one or {} for name, one in properties.items()}}


@mutant(caught_by="grammar.same_text")
class KeepsGrammarsByStrippedText(LLGuidance):
    def __init__(self, options: GrammarOptions, context: GrammarContext) -> None:
        super().__init__(options, context)
        self.kept: dict[GrammarSpec, Grammar] = {}

    def compile(self, spec: GrammarSpec) -> Grammar:
        key = GrammarSpec(spec.kind, spec.text.strip())
        if key not in self.kept:
            self.kept[key] = super().compile(spec)
        return self.kept[key]


@mutant(caught_by="grammar.mask")
class AllowsIdsBeyondTheVocabulary(SetsBitsBeyondTheVocabulary):
    """As another check sees it."""


class Keeps(LLGuidance):
    """Keeps compiled grammars, by a key that is too short."""

    def compile(self, spec: GrammarSpec) -> Grammar:
        kept: dict[Any, Grammar] = self.__dict__.setdefault("kept", {})
        key = self.key(spec)
        if key not in kept:
            kept[key] = super().compile(spec)
        return kept[key]

    def key(self, spec: GrammarSpec) -> Any:
        raise NotImplementedError


@mutant(caught_by="grammar.same_text")
class KeepsByTheBeginning(Keeps):
    def key(self, spec: GrammarSpec) -> Any:
        return spec.kind, spec.text[:48]


@mutant(caught_by="grammar.same_text", soon=True)
class KeepsByBothEnds(Keeps):
    def key(self, spec: GrammarSpec) -> Any:
        return spec.kind, len(spec.text), spec.text[:24], spec.text[-24:]


@mutant(caught_by="grammar.same_text")
class KeepsByItsLetters(Keeps):
    def key(self, spec: GrammarSpec) -> Any:
        return spec.kind, "".join(sorted(spec.text))


@mutant(caught_by="grammar.same_text")
class KeepsUntilItIsFull(Keeps):
    """Gives what it made last when it has made many."""

    def key(self, spec: GrammarSpec) -> Any:
        known = self.__dict__.setdefault("known", {})
        return known.setdefault((spec.kind, spec.text), min(len(known), 256))


@mutant(caught_by="grammar.fill_numbers")
class LeavesOutTheLastOfMany(LLGuidance):
    """From eight matchers on, those after the last whole group of four aren't filled."""

    def fill_many(self, matchers: Sequence[Matcher], words: UInt32) -> None:
        count = len(matchers) if len(matchers) < 8 else len(matchers) // 4 * 4
        super().fill_many(matchers[:count], words[:count])


@mutant(caught_by="grammar.accept_many")
class AcceptsWhatIsForbiddenAmongMany(LLGuidance):
    def accept_many(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        return [True] * len(super().accept_many(matchers, tokens))


@mutant(caught_by="grammar.accept_many")
class AdvancesManyTwice(LLGuidance):
    """Says nothing of those that it advanced."""

    def accept_many(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        return [False] * len(super().accept_many(matchers, tokens))


@mutant(caught_by="grammar.accept_many")
class AdvancesInAnotherOrder(LLGuidance):
    def accept_many(self, matchers: Sequence[Matcher], tokens: Sequence[int]) -> Sequence[bool]:
        return super().accept_many(matchers[::-1], tokens)[::-1]


@mutant(caught_by="grammar.start_fill")
class EndsBeforeItsMasksAreFilled(LLGuidance):
    def start_fill(self, matchers: Sequence[Matcher], words: UInt32) -> Callable[[], None] | None:
        return lambda: None


@mutant(caught_by="grammar.start_fill")
class StartsWithTheLastMasksOnly(LLGuidance):
    """From nine on, the last eight."""

    def start_fill(self, matchers: Sequence[Matcher], words: UInt32) -> Callable[[], None] | None:
        return super().start_fill(matchers[-8:], words[-8:])


@mutant(caught_by="grammar.start_fill")
class StartsWhatHasFailed(LLGuidance):
    def start_fill(self, matchers: Sequence[Matcher], words: UInt32) -> Callable[[], None] | None:
        with suppress(DovetailError):
            return super().start_fill(matchers, words)
        return lambda: None
