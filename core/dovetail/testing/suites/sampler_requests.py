"""`SamplerRequests`: checks of seeds, rows and batches: a request's tokens depend only on the
request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from dovetail.api.sampler import RowSampling
from dovetail.errors import RequestError, describe, shown
from dovetail.front.component_values import validated_extra_args
from dovetail.request.frozen import frozen
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.sampler_bench import Row
from dovetail.testing.suites.sampler_rows import mixed_rows
from dovetail.testing.suites.sampler_subject import SamplerSubject, said

SOME_SEED = 0x5DEECE66D1234567
# of the logits 0, 1, 2, 1.5 after the output 2, 2: fields, and the token that they lead to
NEW_RULES: dict[str, tuple[dict[str, Any], int]] = {
    "bias": ({"logit_bias": ((0, 9.0),)}, 0),
    "bad word": ({"bad_words": ((2,),)}, 3),
    "choice of allowed ids": ({"allowed_token_ids": (0, 1)}, 1),
    "stop token before min_tokens": ({"min_tokens": 9, "stop_token_ids": (2, 3)}, 1),
    "repetition penalty": ({"repetition_penalty": 4.0}, 3),
    "presence penalty": ({"presence_penalty": 1.0}, 3),
    "frequency penalty": ({"frequency_penalty": 1.5}, 3),
}

JUNK: tuple[Any, ...] = (  # values that a request may give for a key of `extra_args`
    *(None, True, -1, 0, 2**70, -1.5, 1e308, math.nan, math.inf, "", "x", "1", "\0" * 5_000),
    *([], [[]], ["x", 1, None], [0] * 5_000, {}, {"x": {"y": [None]}}),
)


class SamplerRequests(SamplerSubject):
    """Seeds, rows, batches, preemptions, and the values of `extra_args`."""

    @check("sampler.seed", since="1.0")
    def test_seed(self) -> None:
        """The same seed gives the same tokens; other seeds and output positions give others; the
        prompt's length doesn't matter. All 64 bits count."""
        flat = [0.0] * 1000
        seeds = [*range(40), *(SOME_SEED ^ 1 << bit for bit in range(64)), SOME_SEED]
        one, two = (self.streams(seeds) for _ in range(2))
        require(one == two, "a second sampler gave other tokens for the same seeds")
        told = (
            f"{len(seeds)} seeds, of which many differ from another in one bit, gave only "
            f"{len(set(one))} different sequences of three tokens"
        )
        require(len(set(one)) == len(seeds), told)
        positions = [*range(20), *(1 << bit for bit in range(5, 17))]
        by_position = [
            self.bench(
                [Row(flat, RowSampling(seed=s), output=(0,) * n) for s in (1, 2, 3)]
            ).tokens()
            for n in positions
        ]
        told = (
            f"at the output positions {positions} three seeds gave only "
            f"{len(set(map(tuple, by_position)))} different triples of tokens"
        )
        require(
            len(set(map(tuple, by_position))) == len(positions),
            f"{told}: positions share their noise",
        )
        by_prompt = self.bench(
            [Row(flat, RowSampling(seed=3), prompt=(1,) * n) for n in range(1, 9)]
        ).tokens()
        require(
            len(set(by_prompt)) == 1,
            f"the first token changes with the prompt's length: {by_prompt}",
        )
        require(
            len(
                self.bench([Row(flat, RowSampling(seed=s)) for s in (-(2**63), 2**64 - 1)]).tokens()
            )
            == 2,
            "seeds of 64 bits",
        )

    def streams(self, seeds: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the first three tokens of each seed, out of 1,000 equally likely ones."""
        steps = [
            self.bench(
                [Row([0.0] * 1000, RowSampling(seed=seed), output=(0,) * n) for seed in seeds]
            ).tokens()
            for n in range(3)
        ]
        return list(zip(*steps, strict=True))

    @check("sampler.row", since="1.0")
    def test_row(self) -> None:
        """A request's tokens don't depend on its row: noise is a function of seed, output position
        and vocabulary id only."""
        rows = mixed_rows()
        here = self.bench(rows).tokens()
        there = self.bench(
            rows, places=np.random.default_rng(1).permutation(60)[: len(rows)].tolist()
        ).tokens()
        changed = [
            said(row.sampling) for row, a, b in zip(rows, here, there, strict=True) if a != b
        ]
        require(not changed, f"in other rows of the executor other tokens came: {changed}")

    @check("sampler.batch", since="1.0")
    def test_batch(self) -> None:
        """A request's tokens don't depend on its batch: the number, content or order of other
        rows."""
        rows = mixed_rows()
        bench = self.bench(rows)
        together = bench.tokens()
        order = np.random.default_rng(2).permutation(len(rows)).tolist()
        batches = {
            "reversed": [*range(len(rows))][::-1],
            "shuffled": order,
            "some": order[:5],
            **{f"{i} alone": [i] for i in range(len(rows))},
        }
        for name, some in batches.items():
            for index, token in zip(some, bench.tokens(some), strict=True):
                require(
                    token == together[index],
                    f"{said(rows[index].sampling)}: token {together[index]} among {len(rows)} "
                    f"rows, {token} in another batch ({name})",
                )

    @check("sampler.preemption", since="1.0")
    def test_preemption(self) -> None:
        """A preempted request returns in another row, with its output in the rebuilt history, and
        continues with the same tokens: a sampler keeps nothing of a request except its
        parameters."""
        logits = np.random.default_rng(0).normal(size=64).tolist()
        sampling = RowSampling(seed=11, frequency_penalty=0.5, bad_words=((3, 4),))
        runs = [self.run_on(logits, sampling, preempted) for preempted in (None, 4, 9)]
        require(
            runs[0] == runs[1] == runs[2],
            f"not preempted: {runs[0]}; preempted after 4 tokens: {runs[1]}; after 9: {runs[2]}",
        )
        require(
            len(set(runs[0])) > 3, f"12 tokens of one request are nearly all the same: {runs[0]}"
        )

    def run_on(
        self, logits: list[float], sampling: RowSampling, preempted_after: int | None
    ) -> list[int]:
        """Return 12 tokens of one request, in row 0 until it is preempted, then in row 5."""
        neighbour = Row(logits, RowSampling(seed=2), prompt=(0,) * 30)
        prompt = (1, 2)
        bench = self.bench([Row(logits, sampling, prompt), *[neighbour] * 6])
        place = 0
        output: list[int] = []
        for step in range(12):
            if step == preempted_after:
                bench.update([0, 5], [0], [neighbour.sampling])
                bench.update([], [5], [sampling])
                bench.tell(0, neighbour.prompt, ())
                place = 5
            bench.tell(place, prompt, output)
            output += bench.tokens([place, 1])[:1]
        return output

    @check("sampler.read_only", since="1.0")
    def test_read_only(self) -> None:
        """The history, `lines` or `host_rows` was modified. The executor writes the history, after
        sampling; only logits may be overwritten."""
        rows = mixed_rows()
        bench = self.bench(rows, places=range(len(rows))[::-1])
        given = {
            name: getattr(bench.history, name)
            for name in ("token_ids", "num_tokens", "prompt_lens")
        }
        given |= {
            "rows": bench.lines.rows,
            "ahead": bench.lines.ahead,
            "host_rows": torch.from_numpy(bench.host_rows),
        }
        before = {name: values.clone() for name, values in given.items()}
        bench.launched(bench.logits, bench.lines, bench.host_rows)
        for name, values in given.items():
            require(torch.equal(values, before[name]), f"sample() changed {name}")
        bench.sampler.capture_for(bench.host_rows)
        require(
            torch.equal(given["host_rows"], before["host_rows"]), "capture_for() changed host_rows"
        )

    @check("sampler.reused_rows", since="1.0")
    def test_reused_rows(self) -> None:
        """A row given to another request, even in the same `update`, keeps nothing of the previous
        one: no penalty, ban, logprobs or seed. A row in both `removed` and `added` has the new
        request's parameters: removals come first."""
        logits = [0.0, 1.0, 2.0, 1.5]
        full = RowSampling(
            temperature=0.0,
            bad_words=((2,),),
            repetition_penalty=4.0,
            logit_bias=((0, 9.0),),
            allowed_token_ids=(0, 1),
            logprobs=1,
            min_tokens=9,
        )
        bench = self.bench([Row(logits, full, prompt=(2, 2))] * 2)
        bench.sample()
        greedy = RowSampling(temperature=0.0)
        bench.update([0, 1], [0, 1], [greedy, replace(greedy, top_k=3)])
        again = bench.sample()
        require(
            again.token_ids.tolist() == [2, 2],
            f"rows given to greedy requests got {again.token_ids.tolist()}, expected [2, 2]",
        )
        require(again.logprobs is None, "logprobs came that only the request before had asked for")
        for name, (fields, expected) in NEW_RULES.items():
            bench = self.bench([Row(logits, RowSampling(temperature=0.0), (0,), (2, 2))])
            bench.update([0], [0], [RowSampling(temperature=0.0, **fields)])
            (token,) = bench.tokens()
            require(
                token == expected,
                f"a row removed and added in one update, with a {name}, got token {token}, "
                f"expected {expected}",
            )
        flat = [Row([0.0] * 1000, RowSampling(seed=seed)) for seed in (1, 2)]
        bench = self.bench(flat[:1])
        fresh = self.bench(flat[1:])
        bench.update([0], [0], [flat[1].sampling])
        require(
            bench.tokens() == fresh.tokens(),
            "a row that was given to another request still has the seed of the one before",
        )

    @check("sampler.extra_args", since="1.0", capability="extra_args")
    def test_extra_args(self) -> None:
        """An invalid value of a key in `extra_args` was accepted, and `update` or `sample` raised,
        or a model accepts every value. Validate it on arrival: set
        `SamplerCapabilities.extra_args_model` to a pydantic model, with a strict type and a range
        for each key. Clients see its errors; any value that it accepts, and without a model any
        value at all, must be sampled, and must not change other rows' tokens."""
        model = self.capabilities.extra_args_model
        fine = Row([0.0] * 50, RowSampling(seed=3))
        (alone,) = self.bench([fine]).tokens()
        for key in self.capabilities.extra_args:
            taken = [values for junk in JUNK if (values := _taken(model, key, junk)) is not None]
            for values in taken:
                row = Row(fine.logits, RowSampling(seed=4, extra_args=values))
                try:
                    bench = self.bench([fine, row, fine, row])
                    before, token, after, again = bench.tokens()
                    bench.update([1], [1], [fine.sampling])
                    reused = bench.tokens([1])[0]
                except Exception as error:
                    fail(f"extra_args {shown(dict(values))}: {describe(error)}", error)
                require(
                    0 <= token < 50,
                    f"extra_args {shown(dict(values))}: token {token} came, of a vocabulary of 50",
                )
                told = (
                    f"extra_args {shown(dict(values))}: other rows got the tokens {before} and "
                    f"{after}; by themselves they get {alone}"
                )
                require(before == after == alone, told)
                require(
                    token == again,
                    f"extra_args {shown(dict(values))}: two rows with the same parameters got the "
                    f"tokens {token} and {again}",
                )
                told = (
                    f"extra_args {shown(dict(values))}: the row's next request, without any, "
                    f"got token {reused}; by itself it gets {alone}"
                )
                require(reused == alone, told)
            require(
                model is None or len(taken) < len(JUNK),
                f"extra_args[{key!r}] takes every one of {len(JUNK)} values, from -1 and {{}} to "
                f"'x'",
            )


def _taken(model: type[BaseModel] | None, key: str, junk: Any) -> Mapping[str, Any] | None:
    """Return `extra_args` as the sampler gets them; None if the request is refused on arrival."""
    given = frozen({key: junk})
    try:
        values: Mapping[str, Any] = given if model is None else validated_extra_args(model, given)
    except RequestError:
        return None
    return values
