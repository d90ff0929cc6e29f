"""`SamplerUpdates`: checks of rows that come and go, of many calls, and of ids beyond 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from dovetail.api.sampler import RowSampling
from dovetail.testing.checks import check, require
from dovetail.testing.suites.holding import require_bounded
from dovetail.testing.suites.process_state import (
    process_state,
    require_untouched_by_first_use,
)
from dovetail.testing.suites.sampler_bench import Bench, Row
from dovetail.testing.suites.sampler_oracle import changed_logits, distribution
from dovetail.testing.suites.sampler_requests import NEW_RULES
from dovetail.testing.suites.sampler_rows import (
    SORTS,
    VOCAB,
    mixed_rows,
    random_rows,
    some_tokens,
)
from dovetail.testing.suites.sampler_subject import SUPPORT_DRAWS, SamplerSubject, said

CALLS = 1_000
REQUESTS = 150  # before a sampler's size is taken
LARGE_VOCAB = 200_000
LARGE_IDS = (70_001, 131_077, 199_999)  # unlike their lowest 16 bits, and 17
MANY_DRAFTS = 20
REPEATS = (255, 256, 300, 65_536)
FILTERED = [token / -10 for token in range(20)]
FILTERED_RULES: dict[str, Any] = {
    "logit_bias": ((15, 2.0), (16, 1.95)),
    "bad_words": ((0,), (2,)),
    "presence_penalty": 1.0,
}


class SamplerUpdates(SamplerSubject):
    """Rows that return, many calls, large ids, and rules with drafts and filters."""

    @check("sampler.other_rows", since="1.0")
    def test_other_rows(self) -> None:
        """`update` changed what a row gets that is neither removed nor added; or a row that was
        removed didn't get its parameters when it came again, in its own row or in another's."""
        rows = [*mixed_rows(), *_rows_with_one_rule()]
        bench = self.bench(rows)
        expected = bench.tokens()
        own = [row.sampling for row in rows]
        for first in range(3):
            self._require_others_kept(bench, own, bench.places[first::3], expected)
        bench.update(bench.places, bench.places, own[::-1])
        for place, row in zip(bench.places, rows[::-1], strict=True):
            bench.tell(place, row.prompt, row.output)
        bench.logits = bench.logits.flip(0)
        require(
            bench.tokens() == expected[::-1], "rows that exchanged their requests got other tokens"
        )

    @staticmethod
    def _require_others_kept(
        bench: Bench, own: Sequence[RowSampling], gone: Sequence[int], expected: Sequence[int]
    ) -> None:
        """Let rows go, be given to others, and come again."""
        others = [SORTS[place % len(SORTS)] for place in gone]
        kept = [place for place in bench.places if place not in gone]
        steps: dict[str, tuple[Sequence[int], Sequence[int], Sequence[RowSampling]]] = {
            "some rows were removed": (gone, [], []),
            "other requests began in some rows": ([], gone, others),
            "these ended": (gone, [], []),
        }
        for what, (removed, added, samplings) in steps.items():
            bench.update(removed, added, samplings)
            for place, token in zip(kept, bench.tokens(kept), strict=True):
                require(
                    token == expected[place],
                    f"{said(own[place])}: token {token} came after {what}, and "
                    f"{expected[place]} before",
                )
        bench.update([], gone, [own[place] for place in gone])
        require(bench.tokens() == expected, "rows that came again got other tokens than before")
        for place in gone:  # as after an error: each row by itself
            bench.update([place], [place], [own[place]])
        require(bench.tokens() == expected, "rows that were added again got other tokens")

    @check("sampler.many_calls", since="1.0")
    def test_many_calls(self) -> None:
        """A row's tokens changed after hundreds of calls of `sample` and `update`, though its
        request, logits and history are the same."""
        flat = [0.0] * 64
        rules = RowSampling(seed=3, logit_bias=((1, 9.0),), frequency_penalty=0.5)
        samplings = (RowSampling(seed=1), RowSampling(seed=2, top_k=20), rules)
        bench = self.bench([Row(flat, sampling, (0,), (1, 2)) for sampling in samplings] * 2)
        expected = bench.tokens()
        for call in range(CALLS):
            if call % 4 == 0:
                bench.update([3, 4, 5], [3, 4, 5], [RowSampling(seed=call + n) for n in range(3)])
            found = bench.tokens([0, 1, 2])
            require(
                found == expected[:3],
                f"call {call + 2} of sample() gave {found}, the first {expected[:3]}",
            )
        bench.update([3, 4, 5], [3, 4, 5], samplings)
        require(bench.tokens() == expected, f"{CALLS} calls later the same requests got others")

    @check("sampler.forgets", since="1.0")
    def test_forgets(self) -> None:
        """After many requests the sampler keeps more than before. Drop what belongs to a row once
        it is in `removed`, or given to another request."""
        bench = self.bench([Row([0.0] * 64, RowSampling(seed=seed)) for seed in range(4)])
        numbers = count()

        def use(times: int) -> None:
            for number in islice(numbers, times):
                sampling = RowSampling(
                    seed=number,
                    temperature=1.0 + number % 7,
                    logit_bias=((number % 64, 1.0),),
                    bad_words=((number % 64, 3),),
                )
                bench.update([number % 4], [number % 4], [sampling])
                bench.tokens([number % 4])

        require_bounded(bench.sampler, use, REQUESTS, 4 * REQUESTS, "requests that were removed")

    @check("sampler.process_untouched", since="1.0")
    def test_process_untouched(self) -> None:
        """The sampler changed what belongs to the whole process: torch's random numbers, default
        dtype, threads or modes, those of numpy or `random`, print options, loggers, or another
        setting. Compute noise from the seed."""
        rows = mixed_rows()
        torch.rand(())  # if it seeds torch, that shows
        before = process_state(self.component_class)
        self.bench(rows).tokens()
        for name, value in process_state(self.component_class).items():
            require(value == before[name], f"{name} isn't what it was before")

    @check("sampler.first_use", since="1.1")
    def test_first_use(self) -> None:
        """The first use of the sampler in a process changed a setting of the whole process, such as
        the precision of torch's matrix products; or each use registered a function at exit."""
        require_untouched_by_first_use(self, {"device": self.device})

    def use_once(self) -> None:
        self.bench(mixed_rows()).tokens()

    @check("sampler.large_ids", since="1.0")
    def test_large_ids(self) -> None:
        """In a vocabulary of 200,000 tokens, an id beyond 16 or 17 bits was taken for another, in a
        rule, in the history, or in the result. Keep ids in 32 bits."""
        for large in LARGE_IDS:
            small = large % 2**16
            logits = [0.0] * LARGE_VOCAB
            logits[small] = 2.0
            logits[large] = 3.0
            cases = _cases_of_large(large)
            rows = [
                Row(logits, RowSampling(temperature=0.0, **fields), (0,), output)
                for fields, output, _ in cases
            ]
            bench = self.bench(rows)
            for row, token, (_, _, is_large) in zip(rows, bench.tokens(), cases, strict=True):
                expected = large if is_large else small
                require(
                    token == expected,
                    f"{said(row.sampling)} after {row.output}: token {token} came, expected "
                    f"{expected}, of {large} and {small}, the two with the largest logits",
                )
            if self.declares("logprobs"):
                asked = RowSampling(temperature=0.0, logprobs=2)
                top = self.bench([Row(logits, asked)]).sample().logprobs
                ids = None if top is None else top.token_ids[0].tolist()
                require(
                    ids == [large, large, small],
                    f"log-probabilities of the ids {ids} came, expected {[large, large, small]}",
                )

    @check("sampler.draft_rules", since="1.0", capability="drafts")
    def test_draft_rules(self) -> None:
        """A rule or penalty of a line after drafts isn't that of a row whose output ends with
        these: `min_tokens` counts them, penalties and bad words find them, up to
        `context.max_drafts`."""
        rng = np.random.default_rng(9)
        lines: list[Row] = []
        places: list[int] = []
        for place, row in enumerate(random_rows(_some_rules)):
            most = MANY_DRAFTS if place % 20 == 0 else place % 4
            drafts = tuple(int(token) for token in rng.integers(0, len(row.logits), most))
            lines += [replace(row, drafts=drafts[:ahead]) for ahead in range(1 + most)]
            places += [place] * (1 + most)
        self.assert_greedy(lines, places)

    @check("sampler.many_repeats", since="1.1")
    def test_many_repeats(self) -> None:
        """A token that was generated 255 to 300 times, or 65,536 times, was penalised as one that
        was generated less often. `frequency_penalty` is multiplied by the count, however large."""
        rows = []
        for times in REPEATS:
            logits = [0.0, 0.0, 0.0, 0.0]
            logits[1] = times * 0.5
            for more in (-0.25, 0.25):
                logits[2] = more
                sampling = RowSampling(temperature=0.0, frequency_penalty=0.5)
                rows.append(Row((*logits[:3], -9.0), sampling, (3,), (1,) * times))
        for row, token in zip(rows, self.bench(rows).tokens(), strict=True):
            values = changed_logits(row.logits, row.sampling, row.prompt, row.output)
            require(
                values[token] == values.max(),
                f"frequency_penalty=0.5 after {len(row.output)} times the token 1: the logits "
                f"{list(row.logits)} become {values.tolist()}, and token {token} came",
            )

    @check("sampler.rules_before_filters", since="1.0")
    def test_rules_before_filters(self) -> None:
        """Top-k, top-p and min-p keep the most likely tokens of the logits after rules and
        penalties, not of those that were given."""
        output = (1, 4)
        for fields in ({"top_k": 4}, {"top_p": 0.3}, {"min_p": 0.85}, {"top_k": 6, "top_p": 0.6}):
            sampling = RowSampling(**fields, **FILTERED_RULES)
            counts = self.draws(
                FILTERED, sampling, SUPPORT_DRAWS, seeds=SUPPORT_DRAWS, output=output
            )
            came = np.flatnonzero(counts).tolist()
            may = np.flatnonzero(distribution(FILTERED, sampling, (0,), output)).tolist()
            require(
                came == may,
                f"{said(sampling)} after the output {output}: the tokens {may} may come, and "
                f"{came} came",
            )

    @check("sampler.not_for_it", since="1.0")
    def test_not_for_it(self) -> None:
        """Parameters that others apply changed the result: `prompt_logprobs`, the arguments of
        `logits_processors`, and `stop_token_ids` without `min_tokens`."""
        rows = mixed_rows()
        others = [
            replace(
                row,
                sampling=replace(
                    row.sampling,
                    prompt_logprobs=3,
                    logits_processors={"some": {"amount": 2.0}},
                    stop_token_ids=row.sampling.stop_token_ids or tuple(range(500)),
                ),
            )
            for row in rows
        ]
        expected = self.bench(rows).tokens()
        found = self.bench(others).sample()
        require(
            found.token_ids.tolist() == expected,
            f"with parameters that others apply {found.token_ids.tolist()} came, without "
            f"{expected}",
        )
        require(found.logprobs is None, "log-probabilities came, and no row asked for them")


def _rows_with_one_rule() -> list[Row]:
    """Return greedy rows, each with a rule without which it gets another token."""
    logits = [0.0, 1.0, 2.0, 1.5, *[-9.0] * (VOCAB - 4)]
    return [
        Row(logits, RowSampling(temperature=0.0, **fields), (0,), (2, 2))
        for fields, _ in NEW_RULES.values()
    ]


def _cases_of_large(large: int) -> list[tuple[dict[str, Any], tuple[int, ...], bool]]:
    """Return fields of requests, outputs, and whether the large id comes, which has the largest
    logit, or the small one."""
    small = large % 2**16
    return [
        ({}, (), True),
        ({"top_k": 1}, (), True),
        ({"logit_bias": ((large, -2.5),)}, (), False),
        ({"logit_bias": ((small, 0.5),)}, (), True),
        ({"allowed_token_ids": (9, large)}, (), True),
        ({"allowed_token_ids": (9, small)}, (), False),
        ({"bad_words": ((large,),)}, (), False),
        ({"bad_words": ((small,),)}, (), True),
        ({"bad_words": ((large, large),)}, (large,), False),
        ({"bad_words": ((large, large),)}, (small,), True),
        ({"min_tokens": 5, "stop_token_ids": (large,)}, (9,), False),
        ({"min_tokens": 5, "stop_token_ids": (small,)}, (9,), True),
        *(
            ({field: 4.0}, (token,), token == small)
            for field in ("repetition_penalty", "presence_penalty", "frequency_penalty")
            for token in (large, small)
        ),
    ]


def _some_rules(rng: np.random.Generator) -> dict[str, Any]:
    """Return one to all rules, each as often as not."""
    stop = tuple(some_tokens(rng, 3))
    rules: list[dict[str, Any]] = [
        {"logit_bias": tuple((t, float(rng.integers(-8, 9))) for t in some_tokens(rng, 2))},
        {"bad_words": tuple(tuple(some_tokens(rng, 3)) or (5,) for _ in range(8))},
        {"repetition_penalty": float(rng.choice([0.5, 2.0, 4.0]))},
        {"presence_penalty": float(rng.choice([0.5, 2.0, -1.0]))},
        {"frequency_penalty": float(rng.choice([0.5, 2.0, -1.0]))},
        {"allowed_token_ids": tuple(some_tokens(rng, 6)) or (3,)},
        {"min_tokens": int(rng.integers(1, 12)), "stop_token_ids": stop},
    ]
    chosen = [rule for rule in rules if rng.random() < 0.5] or rules[4:5]
    return {name: value for rule in chosen for name, value in rule.items()}
