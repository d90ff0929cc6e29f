"""`GrammarSuite`: checks that a grammar backend conforms to the contract of `dovetail.api.grammar`.

Masks over a vocabulary of some 150 tokens are compared with those of languages whose texts are
known: see `grammar_oracle`. Languages without such a list, like JSON with its many spellings, are
tested by generating random answers under the masks and parsing them. Needs no torch.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from threading import Barrier
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dovetail.api.grammar import (
    SPEC_KINDS,
    Grammar,
    GrammarBackend,
    GrammarContext,
    GrammarSpec,
    Matcher,
    SpecKind,
)
from dovetail.errors import DovetailError, RequestError, shown
from dovetail.testing.checks import Absent, check, fail, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites import odd_texts
from dovetail.testing.suites.grammar_oracle import (
    ALIKE,
    BROKEN,
    CASES,
    CHARACTERS,
    CLASSES,
    CONTEXT,
    KEYWORDS,
    NESTS,
    NO_OBJECTS,
    OBJECTS,
    REGEXES,
    SCHEMAS,
    STRINGS,
    SYNTAXES,
    TAGS,
    Case,
    ids_of,
    spellings,
    text_of,
    vocabulary,
)

if TYPE_CHECKING:
    from dovetail.api.grammar import UInt32

OFTEN = 300  # specs that a backend compiles
EVERY = 7  # ids from one to the next that is tried though a mask forbids it
STATES = 60  # states per case whose masks are compared
STEPS = 12  # tokens per random answer
ANSWERS = 20  # random answers per schema
LONG = 400  # maximum tokens of a random JSON answer
FEW = 12  # states per case that are compared with other vocabularies
BEGINS = 20  # calls of `begin`, of which the fastest counts
BEGINS_WITHIN_S = 1e-3
# if even the fastest of the first `BEGINS` calls takes this long, checks try fewer places and
# answers
SLOW_BEGIN_S = 0.01
SHARED_CASES = 12  # whose grammars threads share
MANY = 33  # matchers of one call of `fill_many`, at most
BRANCHES = 6  # tokens tried one after the other at a place
THREADS = 4
WALKS = 3  # of each thread
RUN = 100  # consecutive characters of white space that must be impossible
TRIVIAL: dict[SpecKind, str] = {  # a valid spec of each kind
    "json_schema": "{}",
    "json_object": "",
    "regex": "a",
    "grammar": 'start: "a"',
    "choice": '["a"]',
    "structural_tag": '{"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": '
    '["<f"]}',
}
STUCK = (  # without a token for "q", matchers get stuck before it
    GrammarSpec("regex", "bq"),
    GrammarSpec("choice", '["bq", "bqx"]'),
    GrammarSpec("grammar", 'start: "b" "q"'),
    GrammarSpec("grammar", 'root ::= "b" "q"'),
    GrammarSpec("json_schema", '{"const": "bq"}'),
)


T = TypeVar("T")

# backend -> calls of `begin` in this process, and seconds of the fastest
_begun: dict[type, tuple[int, float]] = {}


class GrammarSuite(Suite):
    """Masks compared token by token, answers written at random, broken specs, several threads."""

    kind = "grammar"

    def declares(self, capability: str) -> bool:
        """Return True for a kind of spec among `capabilities.kinds` too."""
        return (
            capability in self.capabilities.kinds
            if capability in SPEC_KINDS
            else super().declares(capability)
        )

    @check("grammar.mask", since="1.0")
    def test_a_mask_has_just_what_may_come(self) -> None:
        """A mask allows a token that leads to no text of the language, or lacks one that does;
        including tokens that split a character or span several parts of the grammar, and other ids
        with the same bytes. A stop id's bit is 1 exactly if the text is complete."""
        for case, matcher, text in self._places():
            self._require_mask(case, matcher, text)

    @check("grammar.never_text", since="1.0")
    def test_what_is_no_text_never_comes(self) -> None:
        """A token with None or empty bytes is allowed; or a stop id because its bytes would fit,
        although the text isn't complete."""
        free = [matcher for _, matcher, _ in self._places()] + [
            self._begin(spec) for spec in self._json_specs()
        ]
        for matcher in free:
            silent = {id for id in _allowed(matcher) - CONTEXT.stop_ids if not text_of(id)}
            require(not silent, f"ids {sorted(silent)} are allowed, which are never text")

    @check("grammar.words", since="1.0")
    def test_all_words_are_written(self) -> None:
        """`fill` leaves old words, or sets bits beyond the vocabulary. Write every word, and clear
        the rest of the last one."""
        for stops, padding in ((2, 3), (1, 0), (3, 31)):
            context = vocabulary(stops=stops, padding=padding)
            matcher = self._backend_of(context).compile(self._some_spec()).begin()
            zeros = _empty(context)
            ones = ~_empty(context)
            matcher.fill(zeros)
            matcher.fill(ones)
            require((zeros == ones).all(), "a mask depends on what was in the words before")
            beyond = np.unpackbits(ones.view(np.uint8), bitorder="little")[context.vocab_size :]
            require(
                not beyond.any(), f"with a vocabulary of {context.vocab_size}, bits beyond it are 1"
            )

    @check("grammar.fill_pure", since="1.0")
    def test_filling_changes_nothing(self) -> None:
        """The second mask at a position differs from the first, or the answer continues differently
        after a mask was filled."""
        for case in self._cases:
            often = self._begin(case.spec)
            once = self._begin(case.spec)
            for token in self._random_tokens(case.spec):
                first = _mask(often)
                require((_mask(often) == first).all(), f"{case}: two masks of one place differ")
                require(
                    often.accept(token) == once.accept(token),
                    f"{case}: {text_of(token)!r} is accepted only with a mask before, or only "
                    f"without",
                )
            require(
                (_mask(often) == _mask(once)).all(),
                f"{case}: the mask differs from that of an answer for which none was asked before",
            )

    @check("grammar.accept", since="1.0")
    def test_it_accepts_just_what_the_mask_allows(self) -> None:
        """`accept` returns False for a token that the mask allows, or True for one that it forbids
        (or that doesn't exist), or a rejected token changes the state."""
        for case, matcher, text in self._places():
            before = _mask(matcher)
            allowed = _allowed(matcher)
            for token in {
                *range(0, CONTEXT.vocab_size, EVERY),
                CONTEXT.vocab_size,
                CONTEXT.vocab_size + 1000,
                -1,
                *CONTEXT.stop_ids,
            } - allowed:
                require(
                    matcher.accept(token) is False,
                    f"{case}, after {text!r}: {token} is accepted, which the mask forbids",
                )
            require(
                (_mask(matcher) == before).all(),
                f"{case}, after {text!r}: refused tokens changed the mask",
            )
            for token in random.Random(0).sample(sorted(allowed), min(3, len(allowed))):
                other = self._at(case.spec, text)
                require(
                    other.accept(token) is True,
                    f"{case}, after {text!r}: {token} ({text_of(token)!r}) isn't accepted, which "
                    f"the mask allows",
                )

    @check("grammar.end", since="1.0")
    def test_nothing_comes_behind_a_stop_id(self) -> None:
        """A stop id isn't accepted where the text is complete; or after it a token is still allowed
        or forced, or `complete` is False; including after another answer of the same grammar has
        begun."""
        for case, matcher, text in self._places():
            if case.language.has(text):
                stop = random.Random(len(text)).choice(sorted(CONTEXT.stop_ids))
                require(
                    matcher.accept(stop),
                    f"{case}: {text!r} is complete, and the stop id {stop} isn't accepted",
                )
                for other in (False, True):
                    where = (
                        f"{case}: after the stop "
                        f"id{', and the beginning of another answer' * other},"
                    )
                    require(
                        not _allowed(matcher),
                        f"{where} {len(_allowed(matcher))} tokens are allowed",
                    )
                    require(matcher.complete, f"{where} complete is False")
                    require(not matcher.forced(), f"{where} {list(matcher.forced())} are forced")
                    for token in (stop, 1, 2):
                        require(not matcher.accept(token), f"{where} {token} is accepted")
                    other_matcher = self._begin(case.spec)
                    self._require_mask(case, other_matcher, b"")
                    for token in sorted(_allowed(other_matcher))[:1]:
                        other_matcher.accept(token)

    @check("grammar.complete", since="1.0")
    def test_complete_is_where_only_an_end_may_come(self) -> None:
        """`complete` is True although a token other than a stop id is allowed, or False where none
        is: the answer would run one step too long."""
        for case, matcher, text in self._places():
            only_end = not case.language.allowed(text) - CONTEXT.stop_ids
            require(
                matcher.complete == only_end,
                f"{case}, after {text!r}: complete is {matcher.complete}",
            )

    @check("grammar.rollback", since="1.0", capability="rollback")
    def test_tokens_can_be_taken_back(self) -> None:
        """After `rollback` the masks differ from the previous ones, or those after replacing the
        removed tokens are wrong; a stop id can't be rolled back, or a rejected one is counted; or
        more tokens than were accepted can be rolled back."""
        for case in self._cases:
            chance = random.Random(1)
            matcher = self._begin(case.spec)
            masks = [_mask(matcher)]
            tokens = list[int]()
            for turn in range(4):
                for token in self._random_tokens(case.spec, matcher, chance):
                    refused = [
                        id
                        for id in (*sorted(CONTEXT.stop_ids), CONTEXT.vocab_size)
                        if not masks[-1][id // 32] >> id % 32 & 1
                    ]
                    require(
                        not any(map(matcher.accept, refused)),
                        f"{case}: one of {refused} is accepted, which the mask forbids",
                    )
                    require(
                        matcher.accept(token),
                        f"{case}: {text_of(token)!r} isn't accepted, which the mask allows",
                    )
                    masks.append(_mask(matcher))
                    tokens.append(token)
                at_once = turn % 2 == 1  # one token is replaced by another, without a mask between
                back = min(1, len(tokens)) if at_once else chance.randrange(len(masks))
                matcher.rollback(back)
                masks = masks[: len(masks) - back]
                taken = tokens[len(tokens) - back :]
                tokens = tokens[: len(tokens) - back]
                there = at_once or (_mask(matcher) == masks[-1]).all()
                require(
                    there,
                    f"{case}: after taking {back} back, the mask isn't the one that was there",
                )
                others = [token for token in sorted(_ids(masks[-1])) if [token] != taken[:1]]
                for token in chance.sample(others, min(1, len(others))):
                    require(
                        matcher.accept(token),
                        f"{case}: {text_of(token)!r} isn't accepted after taking {back} back, "
                        f"which the mask allows",
                    )
                    masks.append(_mask(matcher))
                    tokens.append(token)
                    fresh = self._begin(case.spec)
                    behind = (
                        all(map(fresh.accept, tokens))
                        and (masks[-1] == _mask(fresh)).all()
                        and matcher.complete == fresh.complete
                    )
                    require(
                        behind,
                        f"{case}: after taking {taken} back, and {token}, it isn't where those "
                        f"tokens lead: {tokens}",
                    )
            _require_value_error(
                partial(matcher.rollback, len(masks)),
                f"{case}: one token more than were accepted is taken back",
            )
            matcher.rollback(len(masks) - 1)
            require(
                (_mask(matcher) == masks[0]).all(),
                f"{case}: after taking all back, the first mask isn't there",
            )
        for case, matcher, text in self._places(FEW):
            if case.language.has(text):
                before = (_mask(matcher), matcher.complete)
                stop = min(CONTEXT.stop_ids)
                require(
                    matcher.accept(stop) and not matcher.accept(stop),
                    f"{case}, after {text!r}: a stop id isn't accepted once, and not again",
                )
                matcher.rollback(1)
                there = (_mask(matcher) == before[0]).all() and matcher.complete == before[1]
                require(
                    there,
                    f"{case}, after {text!r}: after taking back a stop id, and not the second, "
                    f"which was refused, it isn't where it was",
                )

    @check("grammar.forced", since="1.0", capability="forced")
    def test_forced_tokens_are_the_only_ones(self) -> None:
        """`forced` returns a token although another, or the end, is allowed (possibly with one stop
        id, or none); or it changes the matcher; or it never returns any, although it is
        declared."""
        found = 0
        for stops in (0, 1):
            for case, matcher, text in self._places_with(vocabulary(stops=stops)):
                if not case.language.allowed(text) - CONTEXT.stop_ids:
                    require(
                        not matcher.forced(),
                        f"{case}, after {text!r}, with {stops} stop ids: {list(matcher.forced())} "
                        f"are forced at the end",
                    )
        for case, matcher, text in self._places():
            before = _mask(matcher)
            forced = list(matcher.forced())
            require(
                (_mask(matcher) == before).all(),
                f"{case}, after {text!r}: forced() changed the mask",
            )
            for token in forced:
                allowed = _allowed(matcher)
                require(
                    allowed == {token},
                    f"{case}, after {text!r}: {token} isn't forced: {len(allowed)} tokens are "
                    f"allowed",
                )
                matcher.accept(token)
            found += len(forced)
        require(
            found,
            "forced() never found a token, though some places allow just one: don't declare "
            "`forced`",
        )

    @check("grammar.forced_again", since="1.1", capability="forced")
    def test_forced_tokens_follow_a_rollback(self) -> None:
        """After `rollback` and another token, `forced` returns a token although another, or the
        end, is allowed, such as what it returned before. Key what you keep by all tokens accepted,
        not by their number."""
        if not self.declares("rollback"):
            raise Absent("rollback")
        for case, matcher, text in self._places():
            branches = [id for id in sorted(case.language.allowed(text)) if text_of(id)]
            for branch in branches[:BRANCHES]:
                require(
                    matcher.accept(branch),
                    f"{case}, after {text!r}: {text_of(branch)!r} isn't accepted after a rollback",
                )
                forced = list(matcher.forced())
                for token in forced:
                    allowed = _allowed(matcher)
                    require(
                        allowed == {token},
                        f"{case}, after {text + text_of(branch)!r} in place of a token that was "
                        f"taken back: {token} isn't forced: {len(allowed)} tokens are allowed",
                    )
                    matcher.accept(token)
                matcher.rollback(1 + len(forced))

    @check("grammar.separate", since="1.0")
    def test_matchers_dont_disturb_each_other(self) -> None:
        """Tokens accepted by one answer change the masks of another with the same grammar: they
        share mutable state."""
        for case in self._cases:
            grammar = self._compiled(case.spec)
            one = grammar.begin()
            chance = random.Random(2)
            first = _mask(one)
            for token in self._random_tokens(case.spec, None, chance):
                one.accept(token)
                require(
                    (_mask(grammar.begin()) == first).all(),
                    f"{case}: the first mask of an answer depends on where another one is",
                )

    @check("grammar.begin", since="1.0")
    def test_an_answer_begins_at_once(self) -> None:
        """The fastest of several calls of `begin` took a millisecond or more. It is called while a
        step waits, for each sample of a request: move slow work to `compile`."""
        if self._begins_slowly:
            fastest_s = _begun[self.component_class][1]
            self.note(
                f"begin takes {1e3 * fastest_s:.0f} ms at least: after {BEGINS} calls, all checks "
                f"tried fewer places and answers"
            )
        for case in self._cases:
            grammar = self._compiled(case.spec)
            took = list[float]()
            for _ in range(BEGINS):
                before = time.perf_counter()
                grammar.begin()
                took.append(time.perf_counter() - before)
            require(
                min(took) < BEGINS_WITHIN_S,
                f"{case}: the fastest of {BEGINS} calls of begin took {1e3 * min(took):.1f} ms; it "
                f"takes microseconds",
            )

    @check("grammar.same_text", since="1.0")
    def test_a_text_of_another_kind_is_another_spec(self) -> None:
        """Two specs with the same text, one of them a regular expression, or two regular
        expressions that differ in case or white space, have the same first mask; or of two choices
        or schemas that differ in one character, or come after hundreds of others, one allows the
        other's text: cache compiled grammars by kind and whole text."""
        backend = self._backend_of(CONTEXT)
        for specs in ALIKE:
            if all(self.declares(spec.kind) and self._compiles(spec) for spec in specs):
                one, other = (_allowed(backend.compile(spec).begin()) for spec in specs)
                require(
                    one != other,
                    f"{specs[0]} and, compiled later, {specs[1]} have the same first mask",
                )
        numbered = tuple(f"{'-' * 40}{number:04}" for number in range(OFTEN))
        for kind, written in SPECS_OF_A_TEXT.items():
            if self.declares(kind):
                for texts in (*odd_texts.ALIKE, numbered):
                    self._require_apart([GrammarSpec(kind, written(text)) for text in texts], texts)

    def _require_apart(self, specs: Sequence[GrammarSpec], texts: Sequence[str]) -> None:
        """Require that each of these specs, of one text each, allows it and not the others'."""
        backend = self._backend_of(BYTES)
        try:
            grammars = [backend.compile(spec) for spec in specs]
        except RequestError:
            return
        says = [
            text if spec.kind == "choice" else _in_json(text)
            for spec, text in zip(specs, texts, strict=True)
        ]
        for at, grammar in enumerate(grammars):
            # of many, those that come next, and the first
            for other in {at, (at + 1) % len(says), 0}:
                require(
                    _writes(grammar, says[other]) == (other == at),
                    f"{shown(specs[at])}, compiled with {len(specs) - 1} others, "
                    f"{'forbids' if other == at else 'allows'} {shown(says[other])}",
                )

    @check("grammar.failed", since="1.0")
    def test_an_answer_that_cant_go_on_fails_for_good_and_alone(self) -> None:
        """No token of the vocabulary fits, and the text isn't complete, but `fill` didn't raise
        `DovetailError` with a reason; or `fill`, `accept` or `forced` didn't after one of them had;
        or `fill_many` didn't for several answers with that one; or `complete` was True; or `forced`
        failed before that position; or other answers, possibly of the same grammar, were
        disturbed."""
        context = vocabulary(without=b"q")
        backend = self._backend_of(context)
        specs = [spec for spec in STUCK if self.declares(spec.kind)]
        for spec in specs:
            try:
                grammar = backend.compile(spec)
                neighbour = grammar.begin()
                first = _mask(neighbour, context)
            except DovetailError:
                if spec.kind == "grammar":
                    continue  # in the other syntax
                raise
            forced = list(neighbour.forced())
            require(
                (_mask(neighbour, context) == first).all(),
                f"{spec}: forced() gives {forced} before it gets stuck, and changes the mask",
            )
            for order in (
                ("fill", "accept", "forced"),
                ("forced", "fill", "accept"),
                ("accept", "forced", "fill"),
            ):
                matcher = grammar.begin()
                for token in ids_of('"b' if spec.kind == "json_schema" else "b"):
                    require(
                        matcher.accept(token),
                        f"{spec}: {text_of(token)!r} isn't accepted, which the mask allows",
                    )
                require(
                    not matcher.complete,
                    f"{spec}: complete is True where the text isn't, since no token fits",
                )
                calls: dict[str, Callable[[], object]] = {
                    "fill": partial(matcher.fill, _empty(context)),
                    "accept": partial(matcher.accept, ids_of("b")[0]),
                    "forced": matcher.forced,
                }
                failed = ""
                called = [name for name in order if name != "forced" or self.declares("forced")]
                for name in (*called, *called):
                    reason = _reason(calls[name])
                    must = failed or name == "fill"
                    require(
                        reason or not must,
                        f"{spec}: where no token fits, {name} doesn't raise DovetailError with a "
                        f"reason{failed}",
                    )
                    failed = failed or (f", though {name} had" if reason else "")
                require(not matcher.complete, f"{spec}: complete is True, though it failed")
                for some in ((neighbour, matcher), (matcher, neighbour)):
                    words = np.zeros((2, len(first)), dtype=np.uint32)
                    require(
                        _reason(partial(backend.fill_many, some, words)),
                        f"{spec}: fill_many with one that failed doesn't raise DovetailError",
                    )
                    require(
                        _reason(calls["fill"]),
                        f"{spec}: fill doesn't raise any more after fill_many",
                    )
                for other in (neighbour, grammar.begin()):
                    require(
                        (_mask(other, context) == first).all(),
                        f"{spec}: after one has failed, the mask of another of the same grammar "
                        f"changed",
                    )

    @check("grammar.threads", since="1.0")
    def test_several_threads_compile_at_once(self) -> None:
        """Several threads compiled grammars at the same time, and one compilation raised or gave
        the masks of another grammar: don't share state between compilations."""
        specs = [case.spec for case in self._cases] * 4
        backend = self._backend_of(CONTEXT)
        with ThreadPoolExecutor(8) as pool:
            grammars = list(pool.map(backend.compile, specs))
        for spec, grammar in zip(specs, grammars, strict=True):
            matcher = grammar.begin()
            expected = self._begin(spec)
            for token in self._random_tokens(spec):
                require(
                    (_mask(matcher) == _mask(expected)).all(),
                    f"{spec}: compiled among others at the same time, it has other masks",
                )
                matcher.accept(token)
                expected.accept(token)

    @check("grammar.shared", since="1.0")
    def test_several_threads_share_a_grammar(self) -> None:
        """Matchers of one grammar, each used by a thread of its own at the same time, raised or
        wrote other masks than by themselves. Keep what changes in the matcher, not in the
        grammar."""
        for case in self._cases[:SHARED_CASES]:
            grammar = self._backend.compile(case.spec)
            walks = [self._walk(case.spec, grammar, seed) for seed in range(THREADS)]
            again = partial(_walks_again, grammar, Barrier(THREADS))
            with ThreadPoolExecutor(THREADS) as pool:
                for (tokens, _), same in zip(walks, pool.map(again, walks), strict=True):
                    require(same, f"{case}: beside other threads, the masks of {tokens} differ")

    @check("grammar.fill_many", since="1.0")
    def test_many_masks_at_once_are_the_same(self) -> None:
        """`fill_many` writes other masks than `fill`, or to other rows; including if one of the
        answers has ended, or if there is only one."""
        places = {id(matcher): (case, matcher, text) for case, matcher, text in self._places(8)}
        matchers = [matcher for _, matcher, _ in places.values()]
        ended = [matcher for matcher in matchers if matcher.accept(min(CONTEXT.stop_ids))]
        require(ended, "the suite's places have none where an answer may end")
        for some in (matchers, matchers[:1], ended[:1], ended[:2], [*matchers[::-1]]):
            words = ~np.zeros((len(some), len(_empty(CONTEXT))), dtype=np.uint32)
            self._backend.fill_many(some, words)
            for line, (matcher, mask) in enumerate(zip(some, words, strict=True)):
                case, _, text = places[id(matcher)]
                where = (
                    f"{case}, after {text!r}{' and a stop id' * (matcher in ended)}: number "
                    f"{line} of {len(some)} masks at once"
                )
                found = _ids(mask)
                wanted = _allowed(matcher)
                require(
                    found == wanted,
                    f"{where} isn't the one that fill writes: {_difference(found, wanted)}",
                )

    @check("grammar.fill_numbers", since="1.1")
    def test_any_number_of_masks_at_once_is_right(self) -> None:
        """`fill_many` of some number of answers, from 1 to 33, writes other masks than `fill`, or
        leaves rows as they were. A backend that splits answers into groups must fill the last group
        too."""
        matchers = list[Matcher]()
        while len(matchers) < MANY:
            matchers += [matcher for _, matcher, _ in self._places(8)]
        expected = np.stack([_mask(matcher) for matcher in matchers[:MANY]])
        for number in range(1, MANY + 1):
            words = np.full_like(expected[:number], 0xFFFFFFFF)
            self._backend.fill_many(matchers[:number], words)
            for line, (found, wanted) in enumerate(zip(words, expected, strict=False)):
                require(
                    (found == wanted).all(),
                    f"row {line} of {number} masks at once isn't the mask that fill writes",
                )

    @check("grammar.accept_many", since="1.1")
    def test_tokens_accepted_together_are_accepted_as_one_by_one(self) -> None:
        """`accept_many` says that it advanced an answer whose mask forbids the token, or that has
        failed or ended; or changes one that it says it left as it was; or later masks differ from
        those after `accept`; or it raises."""
        together = [matcher for _, matcher, _ in self._places(8)]
        apart = [matcher for _, matcher, _ in self._places(8)]
        chance = random.Random(5)
        for number in (1, 2, len(together), len(together), MANY, len(together)):
            tokens = [self._likely_token(matcher, chance) for matcher in apart[:number]]
            advanced = self._backend.accept_many(together[:number], tokens)
            require(
                len(advanced) == len(tokens),
                f"accept_many of {len(tokens)} answers returns {len(advanced)} values",
            )
            for matcher, twin, token, done in zip(together, apart, tokens, advanced, strict=False):
                accepted = twin.accept(token)
                what = f"token {token}, which accept {'accepts' if accepted else 'rejects'}"
                require(accepted or not done, f"accept_many advanced an answer by {what}")
                require(
                    done or matcher.accept(token) == accepted,
                    f"accept_many said that it left an answer as it was before {what}: it didn't",
                )
                require(
                    (_mask(matcher) == _mask(twin)).all() and matcher.complete == twin.complete,
                    f"accept_many, which returned {done}, left another answer behind {what}",
                )
        for backend, answers, failed in self._stuck():
            token = ids_of("b")[0]
            require(
                not backend.accept_many(answers, [token] * len(answers))[failed],
                "accept_many advanced an answer that had failed",
            )

    @check("grammar.start_fill", since="1.1")
    def test_masks_that_are_started_are_there_in_the_end(self) -> None:
        """When the function that `start_fill` returns has returned, masks differ from those that
        `fill` writes, or rows are as they were; or neither raised `DovetailError` for an answer
        that has failed."""
        matchers = list[Matcher]()
        while len(matchers) < MANY:
            matchers += [matcher for _, matcher, _ in self._places(8)]
        expected = np.stack([_mask(matcher) for matcher in matchers[:MANY]])
        for number in (*range(1, MANY + 1), MANY, MANY):
            words = np.full_like(expected[:number], 0xFFFFFFFF)
            wait = self._backend.start_fill(matchers[:number], words)
            if wait is None:
                continue
            wait()
            for line, (found, wanted) in enumerate(zip(words, expected, strict=False)):
                require(
                    (found == wanted).all(),
                    f"row {line} of {number} masks that were started isn't the mask that fill "
                    f"writes",
                )
        for backend, answers, _ in self._stuck():
            words = np.zeros((len(answers), len(_empty(CONTEXT))), dtype=np.uint32)
            require(
                _reason(partial(_start_and_wait, backend, answers, words)),
                "start_fill with an answer that failed doesn't raise DovetailError",
            )

    def _likely_token(self, matcher: Matcher, chance: random.Random) -> int:
        """Return a token, which is mostly allowed."""
        allowed = sorted(_allowed(matcher))
        if not allowed or chance.random() < 0.2:
            return chance.randrange(CONTEXT.vocab_size)
        return chance.choice(allowed)

    def _stuck(self) -> Iterator[tuple[GrammarBackend, Sequence[Matcher], int]]:
        """Yield answers of which one has failed, with its index and their backend."""
        context = vocabulary(without=b"q")
        backend = self._backend_of(context)
        for spec in STUCK:
            if not self.declares(spec.kind):
                continue
            try:
                grammar = backend.compile(spec)
            except DovetailError:
                continue  # in the other syntax
            answers = [grammar.begin() for _ in range(MANY)]
            for token in ids_of('"b' if spec.kind == "json_schema" else "b"):
                answers[1].accept(token)
            require(
                _reason(partial(answers[1].fill, _empty(context))),
                f"{spec}: where no token fits, fill doesn't raise DovetailError with a reason",
            )
            yield backend, answers, 1

    @check("grammar.no_stop_ids", since="1.0")
    def test_a_model_may_have_no_stop_id(self) -> None:
        """Without stop ids in the context, the backend can't be constructed, or a mask has other
        tokens than with them, or `complete` differs, or tokens can't be rolled back."""
        context = vocabulary(stops=0, padding=5)
        for case, matcher, text in self._places_with(context):
            where = f"{case}, after {text!r}, without stop ids"
            wanted = case.language.allowed(text) - CONTEXT.stop_ids
            found = _allowed(matcher, context) - case.language.open
            require(found == wanted, f"{where}: {_difference(found, wanted)}")
            require(matcher.complete == (not wanted), f"{where}: complete is {matcher.complete}")
            for id in range(CONTEXT.vocab_size - len(CONTEXT.stop_ids), context.vocab_size + 2):
                require(not matcher.accept(id), f"{where}: {id} is accepted, which is no token")
            if text and self.declares("rollback"):
                matcher.rollback(len(text))
                wanted = case.language.allowed(b"") - CONTEXT.stop_ids
                found = _allowed(matcher, context) - case.language.open
                require(
                    found == wanted,
                    f"{where}, and after taking all back: {_difference(found, wanted)}",
                )

    @check("grammar.refuses", since="1.0")
    def test_what_it_cant_do_it_refuses(self) -> None:
        """`compile` raises something other than `RequestError` for a spec that is invalid, or isn't
        regular, or describes no text; or it compiles it; or the error's text is empty. The text is
        all that the user sees."""
        for kind in SPEC_KINDS:
            declared = self.declares(kind)
            for text in BROKEN.get(kind, ()) if declared else (TRIVIAL[kind],):
                told = f"{kind} {text[:60]!r}"
                try:
                    self._backend.compile(GrammarSpec(kind, text))
                except RequestError as error:
                    require(str(error).strip(), f"{told} is refused without a reason")
                else:
                    fail(
                        f"{told} is compiled, though it "
                        f"{'is wrong' if declared else 'is of a kind that the backend does not declare'}"
                    )

    @check("grammar.grammars", since="1.0", capability="grammar")
    def test_grammars_are_context_free(self) -> None:
        """Neither Lark's nor GBNF's syntax is compiled, or a grammar that counts (equally many "a"
        and "b") allows something else, possibly if the start rule isn't the first."""
        compiled = {
            name: cases for name, cases in SYNTAXES.items() if self._compiles(cases[0].spec)
        }
        require(compiled, "neither Lark nor GBNF is compiled")
        for case in (case for cases in compiled.values() for case in cases):
            for _, matcher, text in self._places_of(case):
                self._require_mask(case, matcher, text)
        self.note(f"grammars in the syntax of {' and '.join(compiled)}")

    @check("grammar.structural_tags", since="1.0", capability="structural_tag")
    def test_structural_tags_follow_their_flags(self) -> None:
        """With `at_least_one`, `stop_after_first`, a `separator`, or two structures that begin with
        the same text, a mask is wrong. Reject options that aren't supported."""
        for case in (*self._cases, *(case for case in TAGS if self._compiles(case.spec))):
            for text in case.language.examples():
                self._require_mask(case, self._at(case.spec, text), text)

    @check("grammar.regexes", since="1.0", capability="regex")
    def test_regular_expressions_are_those_of_python(self) -> None:
        """A regular expression matches a text that `re.fullmatch` with the flag ASCII doesn't, or
        the other way round. Check classes, alternatives where one is a prefix of the other,
        repetitions, flags, and characters of several bytes. Reject features that aren't
        supported."""
        for pattern in (*CLASSES, *REGEXES):
            spec = GrammarSpec("regex", pattern)
            if self._compiles(spec):
                for text in self._some((*STRINGS, *CHARACTERS * (pattern in CLASSES))):
                    matches = re.fullmatch(pattern, text, re.ASCII) is not None
                    require(
                        self._takes(spec, text) == matches,
                        f"{pattern!r} takes {text!r}: {not matches}; for Python's re, it's "
                        f"{matches}",
                    )

    @check("grammar.keywords", since="1.0", capability="json_schema")
    def test_each_keyword_is_followed_or_refused_wherever_it_stands(self) -> None:
        """A JSON Schema keyword was compiled, possibly within another schema, and a value that it
        forbids can be written, or one exactly at its limit can't. Lengths count code points, not
        bytes. Reject unsupported keywords at any depth."""
        for known in self._some(KEYWORDS):
            for place, (nested, around) in NESTS.items():
                spec = GrammarSpec("json_schema", json.dumps(nested(known.schema)))
                if self._compiles(spec):
                    for value in known.right:
                        require(
                            self._can_write(spec, around(value)),
                            f"{spec.text}, with the keyword in {place}: {around(value)!r} can't be "
                            f"written",
                        )
                    for value in known.wrong:
                        require(
                            not self._can_write(spec, around(value)),
                            f"{spec.text}, with the keyword in {place}: {around(value)!r} can be "
                            f"written",
                        )

    @check("grammar.json_schema", since="1.0", capability="json_schema")
    def test_json_follows_its_schema(self) -> None:
        """A value that satisfies the schema can't be written in any of the usual spellings, one
        that doesn't can, or an answer of random allowed tokens isn't JSON, or doesn't satisfy
        it."""
        for number, known in enumerate(SCHEMAS):
            spec = GrammarSpec("json_schema", json.dumps(known.schema))
            for value in known.right:
                require(self._can_write(spec, value), f"{spec.text}: {value!r} can't be written")
            for value in known.wrong:
                require(not self._can_write(spec, value), f"{spec.text}: {value!r} can be written")
            self._require_answers(spec, known.follows, random.Random(number))

    @check("grammar.json_object", since="1.0", capability="json_object")
    def test_json_objects_are_objects(self) -> None:
        """An object can't be written in any of the usual spellings, something other than an object
        can, or a random answer isn't an object."""
        spec = GrammarSpec("json_object")
        for value in OBJECTS:
            require(self._can_write(spec, value), f"the object {value!r} can't be written")
        for value in NO_OBJECTS:
            require(not self._can_write(spec, value), f"{value!r} can be written")
        self._require_answers(spec, lambda value: isinstance(value, dict), random.Random(0))

    @check("grammar.white_space", since="1.0")
    def test_no_answer_runs_on_in_white_space(self) -> None:
        """In JSON, a hundred consecutive characters of white space are possible outside of strings.
        Models get stuck in it: bound it."""
        for spec in self._json_specs():
            for begun in ("", "{", '{"a"', '{"a":', '{"a":1', '{"a":1,'):
                for space in (" ", "\n", "  ", "\t"):
                    matcher = self._begin(spec)
                    run = 0
                    if not all(matcher.accept(token) for token in ids_of(begun)):
                        continue
                    tokens = [
                        id for id in range(CONTEXT.vocab_size) if text_of(id) == space.encode()
                    ]
                    while run < RUN and matcher.accept(tokens[0]):
                        run += len(space)
                    require(
                        run < RUN,
                        f"{spec.kind}: {run} characters of white space are possible after "
                        f"{begun!r}",
                    )

    # ---- the component under test

    @cached_property
    def _backend(self) -> GrammarBackend:
        return self._backend_of(CONTEXT)

    def _backend_of(self, context: GrammarContext) -> GrammarBackend:
        backend: GrammarBackend = self.make(context)
        return backend

    @cached_property
    def _grammars(self) -> dict[GrammarSpec, Grammar]:
        return {}

    def _compiled(self, spec: GrammarSpec) -> Grammar:
        if spec not in self._grammars:
            self._grammars[spec] = self._backend.compile(spec)
        return self._grammars[spec]

    def _compiles(self, spec: GrammarSpec) -> bool:
        try:
            self._compiled(spec)
        except RequestError:
            return False
        return True

    def _begin(self, spec: GrammarSpec) -> Matcher:
        grammar = self._compiled(spec)
        before = time.perf_counter()
        matcher = grammar.begin()
        calls, fastest_s = _begun.get(self.component_class, (0, float("inf")))
        _begun[self.component_class] = calls + 1, min(fastest_s, time.perf_counter() - before)
        return matcher

    @property
    def _begins_slowly(self) -> bool:
        calls, fastest_s = _begun.get(self.component_class, (0, 0.0))
        return calls >= BEGINS and fastest_s >= SLOW_BEGIN_S

    def _some(self, many: Sequence[T]) -> Sequence[T]:
        """Return `many`, or few of them if `begin` is slow."""
        return many[::FEW] if self._begins_slowly else many

    def _at(self, spec: GrammarSpec, text: bytes) -> Matcher:
        matcher = self._begin(spec)
        for token in ids_of(text):
            require(matcher.accept(token), f"{spec}: {text!r} can't be written byte by byte")
        return matcher

    # ---- test cases

    @cached_property
    def _cases(self) -> Sequence[Case]:
        """Cases of the declared kinds."""
        cases = [case for case in CASES if self.declares(case.spec.kind)]
        cases += [
            case
            for case, *_ in SYNTAXES.values()
            if self.declares("grammar") and self._compiles(case.spec)
        ]
        if not cases:
            raise Absent("regex")
        return cases

    def _some_spec(self) -> GrammarSpec:
        return self._cases[-1].spec

    def _json_specs(self) -> list[GrammarSpec]:
        specs = [GrammarSpec("json_object")] + [
            GrammarSpec("json_schema", text)
            for text in ("{}", '{"type": "object", "properties": {"a": {}}, "required": ["a"]}')
        ]
        return [spec for spec in specs if self.declares(spec.kind)]

    def _places(self, states: int = STATES) -> Iterator[tuple[Case, Matcher, bytes]]:
        """Yield each case with matchers at some places, and the text before."""
        for case in self._cases:
            yield from self._places_of(case, states)

    def _places_with(self, context: GrammarContext) -> Iterator[tuple[Case, Matcher, bytes]]:
        """Yield matchers for another vocabulary, which differs from `CONTEXT` only in stop ids."""
        backend = self._backend_of(context)
        for case in self._cases:
            grammar = backend.compile(case.spec)
            for _, _, text in self._places_of(case, FEW):
                matcher = grammar.begin()
                for token in ids_of(text):
                    require(
                        matcher.accept(token),
                        f"{case}, with {len(context.stop_ids)} stop ids: {text!r} can't be written "
                        f"byte by byte",
                    )
                yield case, matcher, text

    def _places_of(self, case: Case, states: int = STATES) -> Iterator[tuple[Case, Matcher, bytes]]:
        """Yield matchers at places of which the oracle knows all: those that few tokens lead to
        first, then some at random."""
        chance = random.Random(3)
        seen = {b""}
        rest = [b""]
        for done in range(states):
            if not rest or (self._begins_slowly and done >= FEW // 4):
                return
            text = rest.pop(0 if len(seen) < states // 2 else chance.randrange(len(rest)))
            yield case, self._at(case.spec, text), text
            further = {
                text + text_of(id) for id in case.language.allowed(text) if text_of(id)
            } - seen
            known = sorted(longer for longer in further if case.language.knows(longer))
            seen.update(known)
            rest += chance.sample(known, min(8, len(known)))

    def _random_tokens(
        self, spec: GrammarSpec, matcher: Matcher | None = None, chance: random.Random | None = None
    ) -> Iterator[int]:
        """Yield allowed tokens one after the other; `matcher` accepts each of them."""
        chance = chance or random.Random(4)
        own = matcher is None
        at = self._begin(spec) if matcher is None else matcher
        for _ in range(STEPS):
            allowed = sorted(_allowed(at))
            if not allowed:
                return
            token = chance.choice(allowed)
            if own:
                at.accept(token)
            yield token

    def _walk(self, spec: GrammarSpec, grammar: Grammar, seed: int) -> tuple[list[int], list[Any]]:
        """Return a random answer's tokens, and the masks along it."""
        tokens = list(self._random_tokens(spec, chance=random.Random(seed)))
        return tokens, _masks_along(grammar.begin(), tokens)

    def _require_mask(self, case: Case, matcher: Matcher, text: bytes) -> None:
        wanted = case.language.allowed(text)
        found = _allowed(matcher) - case.language.open
        require(found == wanted, f"{case}, after {text!r}: {_difference(found, wanted)}")

    def _can_write(self, spec: GrammarSpec, value: Any) -> bool:
        return any(self._takes(spec, text) for text in spellings(value))

    def _takes(self, spec: GrammarSpec, text: str) -> bool:
        matcher = self._begin(spec)
        return all(matcher.accept(token) for token in ids_of(text)) and matcher.accept(
            min(CONTEXT.stop_ids)
        )

    def _require_answers(
        self, spec: GrammarSpec, follows: Callable[[Any], bool], chance: random.Random
    ) -> None:
        """Write answers with random allowed tokens, after a while preferring those that end
        strings, lists and objects."""
        ended = 0
        for _ in range(ANSWERS // 10 if self._begins_slowly else ANSWERS):
            text, complete = self._random_answer(spec, chance)
            if complete:
                ended += 1
                try:
                    value = json.loads(text.decode())
                except ValueError as error:
                    fail(
                        f"{spec.kind} {spec.text}: {text!r} was allowed, which isn't JSON: {error}"
                    )
                require(
                    follows(value),
                    f"{spec.kind} {spec.text}: {text!r} was allowed, which doesn't follow it",
                )
        require(ended, f"{spec.kind} {spec.text}: no answer came to an end within {LONG} tokens")

    def _random_answer(self, spec: GrammarSpec, chance: random.Random) -> tuple[bytes, bool]:
        matcher = self._begin(spec)
        text = b""
        for step in range(LONG):
            allowed = _allowed(matcher)
            if allowed & CONTEXT.stop_ids and (matcher.complete or chance.random() < 0.5):
                return text, True
            tokens = sorted(allowed - CONTEXT.stop_ids)
            if not tokens:
                fail(f"{spec.kind} {spec.text}: nothing is allowed after {text!r}")
            ending = (
                [token for token in tokens if text_of(token) in (b'"', b"}", b"]", b"1")]
                if step > STEPS
                else []
            )
            token = chance.choice(ending or tokens)
            require(
                matcher.accept(token),
                f"{spec.kind} {spec.text}: {text_of(token)!r} after {text!r} isn't accepted, which "
                f"the mask allows",
            )
            text += text_of(token)
        return text, False


def _start_and_wait(backend: GrammarBackend, matchers: Sequence[Matcher], words: UInt32) -> None:
    """Fill masks by `start_fill`, or if it returns None by `fill_many`."""
    wait = backend.start_fill(matchers, words)
    if wait is None:
        backend.fill_many(matchers, words)
    else:
        wait()


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# a vocabulary of all bytes
BYTES = GrammarContext([*(bytes([byte]) for byte in range(256)), b"<end>"], frozenset([256]), 257)
SPECS_OF_A_TEXT: dict[SpecKind, Callable[[str], str]] = {
    "choice": lambda text: json.dumps([text]),
    "json_schema": lambda text: json.dumps({"const": text}),
}


def _writes(grammar: Grammar, text: str) -> bool:
    """Return True if a grammar over `BYTES` allows a text, and its end."""
    matcher = grammar.begin()
    return all(map(matcher.accept, text.encode())) and matcher.accept(256)


def _empty(context: GrammarContext) -> UInt32:
    return np.zeros(-(-context.vocab_size // 32), dtype=np.uint32)


def _mask(matcher: Matcher, context: GrammarContext = CONTEXT) -> UInt32:
    words = _empty(context)
    matcher.fill(words)
    return words


def _masks_along(matcher: Matcher, tokens: Sequence[int]) -> list[Any]:
    """Return the masks before each token, and after the last."""
    masks = [_mask(matcher).tolist()]
    for token in tokens:
        matcher.accept(token)
        masks.append(_mask(matcher).tolist())
    return masks


def _walks_again(grammar: Grammar, ready: Barrier, walk: tuple[list[int], list[Any]]) -> bool:
    """Return True if the masks along a walk are those of before, each time."""
    ready.wait()
    tokens, masks = walk
    return all(_masks_along(grammar.begin(), tokens) == masks for _ in range(WALKS))


def _allowed(matcher: Matcher, context: GrammarContext = CONTEXT) -> set[int]:
    """Return the ids whose bits are 1. Raises `CheckFailed` for ids beyond the vocabulary."""
    return _ids(_mask(matcher, context), context)


def _ids(words: UInt32, context: GrammarContext = CONTEXT) -> set[int]:
    bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    beyond = [bit for bit in bits if bit >= context.vocab_size]
    require(not beyond, f"with a vocabulary of {context.vocab_size}, the bits {beyond} are 1")
    return set(bits)


def _difference(found: set[int], wanted: set[int]) -> str:
    more, fewer = (
        [text_of(id) or id for id in sorted(ids)][:5] for ids in (found - wanted, wanted - found)
    )
    return "; ".join(
        [f"{more} are allowed but must not be"] * bool(more)
        + [f"{fewer} are forbidden but must not be"] * bool(fewer)
    )


def _require_value_error(call: Callable[[], object], otherwise: str) -> None:
    try:
        call()
    except ValueError:
        return
    fail(otherwise)


def _reason(call: Callable[[], object]) -> str:
    """Return the text of the `DovetailError` that the call raises; nothing if it raises none."""
    try:
        call()
    except DovetailError as error:
        return str(error).strip()
    return ""
