"""`ExecutorDrafts`: checks of steps with drafts, as speculative decoding has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_sampling import sampling_ways
from dovetail.testing.suites.executor_subject import (
    LENGTHS,
    MOST_DRAFTS,
    SEEDED,
    SETTINGS,
    ExecutorSubject,
    require_same,
)

STEPS = 3
COUNT = 2 + STEPS * (1 + MOST_DRAFTS)  # tokens that requests generate
ROOM = COUNT + MOST_DRAFTS
Drafter = Callable[[int], bool]  # whether the n-th draft of a step is right

DRAFTERS: Mapping[str, Drafter] = {
    "that are all right": lambda n: True,
    "that are all wrong": lambda n: False,
    "of which every second is right": lambda n: n % 2 == 0,
    "of which the last is wrong": lambda n: n < MOST_DRAFTS - 1,
}


class ExecutorDrafts(ExecutorSubject):
    """Steps with drafts. `Capacity.max_lines` tells whether an executor checks them."""

    @check("executor.drafts", since="1.0", capability="drafts")
    def test_drafts_change_no_token(self) -> None:
        """Requests with drafts generated other tokens than one by one, or got more or fewer of them
        than the drafts that were right, and one. A row keeps the tokens of its lines up to the
        first that differs from its draft; the next step begins after the last of them, and
        overwrites the K and V of other drafts."""
        with self._shared_bench(max_drafts=MOST_DRAFTS) as bench:
            expected = self._expected(bench, *LENGTHS)
            for which, right in DRAFTERS.items():
                self._begin(bench, *LENGTHS)
                for _ in range(STEPS):
                    drafts = {name: _drafts(bench, name, expected[name], right) for name in "cab"}
                    result = bench.check(drafts)
                    kept = next((n for n in range(MOST_DRAFTS) if not right(n)), MOST_DRAFTS)
                    told = (
                        f"with {MOST_DRAFTS} drafts {which}, rows got {result.counts} tokens, "
                        f"expected {1 + kept}"
                    )
                    require(
                        result.counts is not None and result.counts.tolist() == [1 + kept] * 3, told
                    )
                bench.decode("b", "c", "a")
                self._end(bench, expected, f"with drafts {which}")

    @check("executor.drafts_beside", since="1.0", capability="drafts")
    def test_rows_with_drafts_do_not_depend_on_others_nor_others_on_them(self) -> None:
        """In steps in which rows check different numbers of drafts, and others compute prompts,
        parts of these, or one token, a request generated other tokens than by itself; or one that
        began on the blocks of another, where right drafts had been computed, did."""
        with self._shared_bench(max_drafts=MOST_DRAFTS) as bench:
            expected = self._expected(bench, *LENGTHS)
            self._begin(bench, "a", "b")
            self._add(bench, "c", room=ROOM)
            for chunk, rights in (
                (20, [True, False, True]),
                (LENGTHS["c"] - 20, [True] * MOST_DRAFTS),
            ):
                drafts = {
                    "b": _drafts(bench, "b", expected["b"], rights.__getitem__, len(rights)),
                    "a": [],
                }
                bench.check(drafts, c=chunk)
            bench.check({"a": [], "c": _drafts(bench, "c", expected["c"], lambda n: True, 2)})
            bench.check(
                {"c": [], "b": [], "a": _drafts(bench, "a", expected["a"], lambda n: n != 1, 2)}
            )
            bench.decode("c", "a")
            request = bench.requests["c"]
            bench.add(
                "next",
                request.tokens,
                prompt_len=request.prompt_len,
                computed=request.computed,
                blocks=request.blocks,
                seed=request.sampling.seed,
            )
            done = len(bench.tokens["c"])
            bench.prefill("next")
            require_same(
                bench,
                "next",
                expected["c"][done:],
                "on the blocks of another, some of whose tokens had been drafts",
            )
            self._end(bench, expected, "beside rows with more or fewer drafts, and prompts")

    @check("executor.drafts_sampling", since="1.0", capability="drafts")
    def test_each_line_is_sampled_with_the_drafts_before_it(self) -> None:
        """With drafts, requests with a temperature, penalties, bad words or `min_tokens` generated
        other tokens than one by one. The n-th line of a row is sampled as if the drafts before it
        were known: they count for noise, penalties and rules."""
        with self._shared_bench(max_drafts=MOST_DRAFTS) as bench:
            if not self.declares("samples"):
                return
            (likely,) = bench.alone("a", self._prompt(bench, "a"), 1)
            ways = sampling_ways(likely)
            expected: dict[str, list[int]] = {}
            for which in (None, "that are all right", "of which every second is right"):
                for name, fields in ways.items():
                    bench.add(name, self._prompt(bench, "a"), room=ROOM, **fields)
                bench.prefill(*ways)
                if which is None:
                    bench.decode(*ways, steps=COUNT - 1)
                    expected = {name: list(bench.tokens[name]) for name in ways}
                for _ in range(0 if which is None else STEPS):
                    bench.check(
                        {
                            name: _drafts(bench, name, expected[name], DRAFTERS[which or ""])
                            for name in ways
                        }
                    )
                self._end(bench, expected, f"with drafts {which}")

    @check("executor.drafts_logprobs", since="1.0", capability="drafts")
    def test_each_yielded_token_has_its_log_probabilities(self) -> None:
        """`Result.logprobs` of a step with drafts must have a line for each token that its rows
        yielded, row by row, and none for other lines; with the log-probabilities that the token has
        without drafts."""
        with self._shared_bench(max_drafts=MOST_DRAFTS) as bench:
            if not self.declares("logprobs"):
                return
            plain = []
            bench.add("a", self._prompt(bench, "a"), logprobs=2, room=ROOM)
            for _ in range(6):
                logprobs = bench.prefill("a").logprobs
                plain.append(None if logprobs is None else logprobs.logprobs[0])
            expected = bench.tokens.pop("a")
            bench.remove("a")
            self._add(bench, "b", room=ROOM)
            bench.add("a", self._prompt(bench, "a"), logprobs=2, room=ROOM)
            bench.prefill("a", "b")
            result = bench.check({"b": [], "a": _drafts(bench, "a", expected, lambda n: n < 2, 3)})
            if result.logprobs is None:
                fail("a row asks for logprobs, and Result.logprobs is None")
            told = (
                f"rows that yielded {result.token_ids.tolist()} have the log-probabilities of "
                f"{result.logprobs.token_ids[:, 0].tolist()}"
            )
            require(result.logprobs.token_ids[:, 0].tolist() == result.token_ids.tolist(), told)
            for line, exact in zip(result.logprobs.logprobs[1:], plain[1:4], strict=True):
                told = f"without drafts a token's log-probabilities are {exact}, with them {line}"
                require(exact is not None and bool(np.allclose(line, exact, atol=1e-4)), told)

    @check("executor.drafts_masks", since="1.0", capability="drafts")
    def test_masks_are_of_lines(self) -> None:
        """In a late step with drafts a line sampled a token that its mask forbids, or a line
        without a mask another than it would. `Masks.lines` counts all lines of the batch, row by
        row; rows that yield no token have none."""
        with self._shared_bench(max_drafts=MOST_DRAFTS) as bench:
            if not self.declares("masks"):
                return
            expected = self._expected(bench, *LENGTHS)
            last = bench.capacity.vocab_size - 1
            self._begin(bench, "a", "b")
            self._add(bench, "c", room=ROOM)
            drafts = {
                name: _drafts(bench, name, expected[name], lambda n: True, 3) for name in "ab"
            }
            bench.submit({"c": 20, "b": 1, "a": 1}, drafts=drafts, late=True)
            bench.sample(
                {
                    ("b", 0): [expected["b"][1]],
                    ("b", 2): [last],
                    ("a", 1): sorted({expected["a"][2], last}),
                }
            )
            result = bench.collect()
            told = (
                "with a mask on the third line of b, which allows another token than its draft, "
                "and one on the second of a, which allows its own"
            )
            require(
                result.counts is not None and result.counts.tolist() == [0, 3, 4],
                f"{told}, rows got {result.counts} tokens, expected 0, 3 and 4",
            )
            require(
                bench.tokens["b"] == [*expected["b"][:3], last],
                f"{told}, b generated {bench.tokens['b']}",
            )
            bench.tokens.pop("b")
            bench.remove("b")
            bench.prefill("a", "c")
            self._end(bench, {name: expected[name] for name in "ac"}, told)

    @check("executor.drafts_limits", since="1.0", capability="drafts")
    def test_as_many_lines_as_declared_can_be_checked(self) -> None:
        """A step with `Capacity.max_lines` lines, or with drafts up to the last token of the
        longest sequence, failed or gave other tokens."""
        with self._shared_bench(max_drafts=MOST_DRAFTS) as bench:
            lines = bench.capacity.max_lines
            rows = SETTINGS["max_num_seqs"]
            require(
                lines >= rows, f"max_lines is {lines}, and each of {rows} rows may sample a token"
            )
            share = min(MOST_DRAFTS, lines // rows - 1)
            prompts = {f"r{row}": bench.prompt(5, variant=row) for row in range(rows)}
            expected = {
                name: bench.alone(name, prompt, 2 + share, room=2 + share)
                for name, prompt in prompts.items()
            }
            for name, prompt in prompts.items():
                bench.add(name, prompt, room=2 + share)
            bench.prefill(*prompts)
            more = iter(range(min(lines - rows * (1 + share), rows if share < MOST_DRAFTS else 0)))
            bench.check(
                {
                    name: _drafts(
                        bench,
                        name,
                        expected[name],
                        lambda n: True,
                        share + (next(more, None) is not None),
                    )
                    for name in prompts
                }
            )
            self._end(bench, expected, f"in a step of {lines} lines")
            longest = bench.capacity.max_model_len
            whole = bench.alone("whole", bench.prompt(longest - 4), 4, room=4, seed=1)
            bench.add("drafted", bench.prompt(longest - 4), room=4, seed=1)
            bench.prefill("drafted")
            bench.check({"drafted": whole[1:4]})
            require_same(bench, "drafted", whole, f"where the last of {longest} tokens were drafts")

    def _expected(self, bench: Bench, *names: str) -> dict[str, list[int]]:
        """Return the tokens of each, one by one."""
        return {
            name: bench.alone(
                name, self._prompt(bench, name), COUNT, room=ROOM, **SEEDED.get(name, {})
            )
            for name in names
        }

    def _begin(self, bench: Bench, *names: str) -> None:
        self._add(bench, *names, room=ROOM)
        bench.prefill(*names)

    def _end(self, bench: Bench, expected: Mapping[str, Sequence[int]], how: str) -> None:
        """Require these tokens, and remove the requests."""
        for name, tokens in expected.items():
            require_same(bench, name, list(tokens), how)
            bench.tokens.pop(name)
        bench.remove(*expected)


def _drafts(
    bench: Bench, name: str, expected: Sequence[int], right: Drafter, count: int = MOST_DRAFTS
) -> list[int]:
    """Return up to `count` drafts for a request that generates `expected`: of each, whether it is
    right."""
    comes = expected[len(bench.tokens[name]) :][:count]
    return [
        token if right(n) else (token + 1) % bench.capacity.vocab_size
        for n, token in enumerate(comes)
    ]
