"""`SamplerSuite`: it checks that a sampler keeps the contract of `dovetail.api.sampler`.

What is left to choose from is compared exactly with an oracle (`sampler_oracle`); how often each token comes, by a chi-square test for each filter
alone (a joint test hides an off-by-one), at a level of 1e-5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.sampler import RowSampling, SampledTokens
from dovetail.testing.checks import Untried, check, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites.sampler_bench import Bench, Row, draws
from dovetail.testing.suites.sampler_oracle import changed_logits, distribution, p_value
from dovetail.testing.suites.sampler_rows import MANY, SMALL, SORTS, VOCAB, mixed_rows, random_rows, rows_of_many, some_tokens

ALPHA = 1e-5  # a right sampler fails a chi-square test once in so many
DRAWS = 5_000  # for a chi-square test, where it is known which tokens may come
MANY_DRAWS = 20_000  # for one that tells temperatures apart
SUPPORT_DRAWS = 1_000
LOGITS = (np.random.default_rng(1).normal(size=40) * 1.5).tolist()
HALF = [float(np.log(300)), *[0.0] * 300]  # one token as likely as all others together: no logits of this size tell temperatures apart as well
SLOPE = [(7 * token % 20) / -10 for token in range(20)]  # each token likely enough to be seen in a thousand draws, no two alike
GENTLE = [token / -1000 for token in range(400)]
NEAR = 1e-4  # to where a filter ends: more than float32's error, less than that of half precision
LARGEST_VOCAB = 2**17 + 2**14
ASKED = (0, 1, 3, 20)  # logprobs
SOME_SEED = 0x5DEECE66D1234567


class SamplerSuite(Suite):
    """Runs on `device`: by default a GPU if there is one, else the CPU. A sampler must do on both."""

    kind = "sampler"
    settings = Suite.settings | {"device"}

    device: ClassVar[str | None] = None

    @property
    def place(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def bench(self, rows: Sequence[Row], places: Sequence[int] | None = None, dtype: torch.dtype = torch.float32) -> Bench:
        return Bench(self.make, rows, places, dtype=dtype, device=self.place)

    def draws(self, logits: Sequence[float], sampling: RowSampling, count: int, **fields: Any) -> NDArray[np.int64]:
        return draws(self.make, logits, sampling, count, device=self.place, **fields)

    def assert_support(self, logits: Sequence[float], sampling: RowSampling, count: int = SUPPORT_DRAWS) -> None:
        """So many draws bring exactly the tokens that may come; each of those must have a probability of 20 / count or so."""
        came = set(np.flatnonzero(self.draws(logits, sampling, count)).tolist())
        may = set(np.flatnonzero(distribution(logits, sampling)).tolist())
        require(
            came == may,
            f"{_said(sampling)}: the tokens {sorted(may)} may come; {sorted(came - may)} came besides, {sorted(may - came)} never came",
        )

    def assert_drawn_in_proportion(self, sampling: RowSampling, logits: Sequence[float] = LOGITS, count: int = DRAWS) -> None:
        p = p_value(self.draws(logits, sampling, count), distribution(logits, sampling))
        require(p > ALPHA, f"{_said(sampling)}: {count:,} draws don't follow the distribution (chi-square test: p = {p:.1e}, allowed from {ALPHA})")

    def assert_greedy(self, rows: Sequence[Row]) -> None:
        """Each row gets the best of its changed logits."""
        for row, token in zip(rows, self.bench(rows).tokens(), strict=True):
            values = changed_logits(row.logits, row.sampling, row.prompt, row.output)
            require(
                token == int(values.argmax()),
                f"{_said(row.sampling)} after the prompt {row.prompt} and the output {row.output}: token {token} came, but the logits "
                f"{np.round(row.logits, 3).tolist()} become {np.round(values, 3).tolist()}, so that {int(values.argmax())} is right",
            )

    # ---- what is sampled

    @check("sampler.output", since="0.1")
    def test_output(self) -> None:
        """`sample` returns ids of the vocabulary as int64 [n], on the logits' device, in the order of `rows`; of no rows, none."""
        bench = self.bench([Row(np.eye(9)[i].tolist(), RowSampling(temperature=0.0)) for i in range(9)], places=[5, 0, 8, 1, 7, 2, 6, 3, 4])
        for some in ([8, 2, 3], [], list(range(9))):
            ids = bench.sample(some).token_ids
            require(ids.dtype == torch.int64 and ids.device == bench.logits.device, f"the ids are {ids.dtype} on {ids.device}")
            require(ids.tolist() == some, f"the rows {some} of the batch, whose likeliest tokens are these numbers, got {ids.tolist()}")

    @check("sampler.greedy", since="0.1")
    def test_greedy(self) -> None:
        """Temperature 0 takes the largest logit, whatever the seed; so does every filter that leaves one token (top_k=1, a tiny top_p, a
        temperature next to 0)."""
        for sampling in (RowSampling(temperature=0.0), RowSampling(top_k=1), RowSampling(top_p=1e-9), RowSampling(temperature=1e-30)):
            rows = [Row(np.random.default_rng(s).permutation(300).astype(float).tolist(), replace(sampling, seed=s)) for s in range(30)]
            wrong = [seed for seed, (row, token) in enumerate(zip(rows, self.bench(rows).tokens(), strict=True)) if token != np.argmax(row.logits)]
            require(not wrong, f"{_said(sampling)}: {len(wrong)} of 30 rows didn't get their largest logit")

    @check("sampler.ties", since="0.1")
    def test_ties(self) -> None:
        """Equal logits are told apart by id, the lowest first: in greedy rows, and at the end of what top-k and top-p keep. A result that depends
        on the order in which threads finish can't be repeated."""
        tied = [0.0, 7.0, 3.0, 7.0, 7.0]
        for sampling in (RowSampling(temperature=0.0), RowSampling(top_k=1), RowSampling(top_p=0.01)):
            tokens = self.bench([Row(tied, replace(sampling, seed=seed)) for seed in range(20)]).tokens()
            require(set(tokens) == {1}, f"{_said(sampling)}: of equal logits at 1, 3 and 4, {sorted(set(tokens))} came, not the first alone")
        self.assert_support(tied, RowSampling(top_k=2))
        self.assert_support([1.5] * 8, RowSampling(top_p=0.5))

    @check("sampler.temperature", since="0.1")
    def test_temperature(self) -> None:
        """Logits are divided by the temperature. Power: one that is wrong by 5 % is missed less than once in 10^9 (noncentral chi-square, 300
        degrees of freedom)."""
        for temperature in (0.7, 2.0):
            self.assert_drawn_in_proportion(RowSampling(temperature=temperature), [x * temperature for x in HALF], MANY_DRAWS)

    @check("sampler.top_k", since="0.1")
    def test_top_k(self) -> None:
        """Exactly k tokens are left, the likeliest; 0, or more than there are, leaves all. Power: one token more or less is always seen, since each
        comes in 2 % of 1,000 draws and more."""
        for k in (0, 1, 2, 8, 19, 20, 50):
            self.assert_support(SLOPE, RowSampling(top_k=k))
        self.assert_support(GENTLE, RowSampling(top_k=300), 6_000)
        self.assert_drawn_in_proportion(RowSampling(top_k=8))

    @check("sampler.top_p", since="0.1")
    def test_top_p(self) -> None:
        """The fewest tokens, likeliest first, whose probability reaches p: the one that crosses p stays. 1 leaves all. Sum in float32, and don't
        round p. Power: one token more or less is always seen, as for top-k."""
        reached = np.sort(distribution(SLOPE, RowSampling()))[::-1].cumsum()[[0, 6, 13]]
        for p in (0.01, 0.3, 0.5, 0.8, 0.95, 1.0, *(reached - NEAR), *(reached + NEAR)):
            self.assert_support(SLOPE, RowSampling(top_p=float(p)))
        self.assert_support([0.0, 0.0, 0.0, 0.0], RowSampling(top_p=0.5))  # reached exactly by two
        self.assert_drawn_in_proportion(RowSampling(top_p=0.8))

    @check("sampler.min_p", since="0.1")
    def test_min_p(self) -> None:
        """Tokens stay that are at least p times as likely as the likeliest one (not: as likely as p). 0 leaves all, 1 the likeliest and its
        equals. Power: one token more or less is always seen, as for top-k."""
        shares = np.exp([-0.3, -0.8, -1.4])  # of tokens of SLOPE
        for p in (0.0, 0.15, 0.5, 0.85, *(shares - NEAR), *(shares + NEAR)):
            self.assert_support(SLOPE, RowSampling(min_p=float(p)))
        self.assert_support([1.0, 3.0, 3.0, 2.0], RowSampling(min_p=1.0))
        self.assert_drawn_in_proportion(RowSampling(min_p=0.1))

    @check("sampler.filter_order", since="0.1")
    def test_filter_order(self) -> None:
        """First temperature, then top-k, top-p and min-p, each over what the one before left: top-p counts shares of the tokens that top-k kept.
        Power: in each case another order leaves another set of tokens, which is always seen."""
        for sampling in (
            RowSampling(temperature=2.0, top_p=0.6),
            RowSampling(temperature=0.5, top_p=0.6),
            RowSampling(temperature=0.5, min_p=0.3),
            RowSampling(top_k=8, top_p=0.7),
            RowSampling(temperature=1.5, top_k=12, top_p=0.8, min_p=0.5),
        ):
            self.assert_support(SLOPE, sampling)
        self.assert_drawn_in_proportion(RowSampling(temperature=0.8, top_k=20, top_p=0.95))

    @check("sampler.large_vocabulary", since="0.1")
    def test_large_vocabulary(self) -> None:
        """50,000 tokens in five classes of equal logits come in proportion. They win by the smallest of many random numbers, which must be exact
        where they are small, and each id's own. Power: noise of 11 bits (half precision), whose ties shut out the rarer classes, is always seen, and
        so is noise that begins again after 2^16 ids; after 2^17, but once in 10^6."""
        classes = np.arange(50_000) % 5
        logits = classes * -1.0
        counts = self.draws(logits.tolist(), RowSampling(), 2_000, seeds=50)
        weights = np.exp(logits) / np.exp(logits).sum()
        by_class = (np.array([x[classes == c].sum() for c in range(5)]) for x in (counts, weights))
        p = p_value(*by_class)
        require(p > ALPHA, f"rare tokens don't come in proportion (chi-square test: p = {p:.1e})")
        counts = self.draws([0.0] * LARGEST_VOCAB, RowSampling(), 128, seeds=32)
        parts = {f"{start} to {end - 1}": int(counts[start:end].sum()) for start, end in ((0, 2**16), (2**16, 2**17), (2**17, LARGEST_VOCAB))}
        require(
            all(parts.values()), f"of {LARGEST_VOCAB} tokens that are equally likely came, by id: {parts}. Noise that repeats shuts out the latter"
        )

    @check("sampler.extremes", since="0.1")
    def test_extremes(self) -> None:
        """Logits of -inf never win against others, +inf always does, no temperature makes NaN, and a row of nothing but -inf or NaN gets some id of
        the vocabulary and harms no other row."""
        for temperature in (1e-45, 1e-20, 1e30, 1e300):
            came = set(self.bench([Row([0.0, 5.0, -np.inf, 4.0], RowSampling(temperature=temperature, seed=s)) for s in range(64)]).tokens())
            may = {1} if temperature < 1 else {0, 1, 3}
            require(came == may, f"temperature {temperature:g}: of [0, 5, -inf, 4] the tokens {sorted(came)} came, expected {sorted(may)}")
        samplings = [RowSampling(), RowSampling(temperature=0.0), RowSampling(top_k=2), RowSampling(top_p=0.5), RowSampling(min_p=0.5)]
        for value in (-np.inf, np.nan, np.inf):
            broken = [Row([value] * 4, sampling) for sampling in samplings]
            fine = [Row([0.0, 0.0, 9.0, 0.0], RowSampling(temperature=0.0))] * 2
            tokens = self.bench([fine[0], *broken, fine[1]]).tokens()
            require(all(0 <= token < 4 for token in tokens), f"rows of {value} got the ids {tokens}: not all are in the vocabulary of 4")
            require(tokens[0] == tokens[-1] == 2, f"rows beside rows of {value} got {tokens[0]} and {tokens[-1]}; alone they get 2")
        for sampling in samplings:
            (token,) = self.bench([Row([0.0, -np.inf, np.inf, 5.0], sampling)]).tokens()
            require(token == 2, f"{_said(sampling)}: token {token} came of [0, -inf, +inf, 5]")

    @check("sampler.dtypes", since="0.1")
    def test_dtypes(self) -> None:
        """Logits may come in any float dtype, and are sampled as the float32 numbers that they are."""
        generator = torch.Generator().manual_seed(0)
        for dtype in (torch.bfloat16, torch.float16):
            steps = torch.stack([torch.randperm(64, generator=generator) for _ in range(32)])
            neighbours = (1 + steps * torch.finfo(dtype).eps).to(dtype)  # numbers that follow each other: rounding makes ties
            rows = [Row(row.float().tolist(), RowSampling(temperature=0.0)) for row in neighbours]
            rows += [replace(row, logits=row.logits[:64]) for row in mixed_rows() if row.sampling.top_k in (0, 5) and not row.sampling.bad_words]
            rows = [replace(row, logits=torch.tensor(row.logits).to(dtype).float().tolist(), prompt=(1,), output=(2, 3)) for row in rows]
            narrow, wide = self.bench(rows, dtype=dtype).tokens(), self.bench(rows).tokens()
            require(narrow == wide, f"logits in {dtype} gave the tokens {narrow}; the same numbers in float32 give {wide}")

    # ---- rules and penalties

    @check("sampler.logit_bias", since="0.1")
    def test_logit_bias(self) -> None:
        """Each bias is added to its token's logit, in its own row."""
        self.assert_greedy(random_rows(lambda rng: {"logit_bias": tuple((int(t), float(rng.integers(-8, 9))) for t in some_tokens(rng, 3))}))
        self.assert_greedy(rows_of_many(lambda tokens: {"logit_bias": tuple((t, float(t + 1)) for t in tokens if t < MANY // 2)}))

    @check("sampler.allowed_token_ids", since="0.1")
    def test_allowed_token_ids(self) -> None:
        """Only these come, also when the model gives them -inf; ids beyond the vocabulary are passed over."""
        self.assert_greedy(random_rows(lambda rng: {"allowed_token_ids": tuple(some_tokens(rng, 5)) or (3,)}))
        self.assert_greedy(rows_of_many(lambda tokens: {"allowed_token_ids": tuple(t for t in tokens if t < MANY // 2)}))
        excluded = [0.0, -np.inf, -np.inf, 0.0]
        rows = [Row(excluded, RowSampling(seed=s, allowed_token_ids=(1, 2, 99))) for s in range(64)]
        came = set(self.bench(rows).tokens())
        require(came == {1, 2}, f"allowed are 1 and 2, both with the logit -inf, so that they are equally likely: {sorted(came)} came")

    @check("sampler.bad_words", since="0.1")
    def test_bad_words(self) -> None:
        """The last token of a bad word doesn't come after its others, wherever these stand: in the prompt, the output or across. Half a word bans
        nothing, and neither does one longer than the history."""
        self.assert_greedy(random_rows(lambda rng: {"bad_words": tuple(tuple(some_tokens(rng, 3)) or (5,) for _ in range(4))}))
        self.assert_greedy(rows_of_many(lambda tokens: {"bad_words": tuple((t,) for t in tokens if t > MANY // 2)}))
        wants_3, word = [0.0, 1.0, 0.0, 9.0], RowSampling(temperature=0.0, bad_words=((1, 2, 3),))
        said = [((0, 1, 2), ()), ((0, 1), (2,)), ((0,), (1, 2)), ((1, 2), ())]
        half = [((2,), ()), ((1, 2, 0), ()), ((0,), (2, 1)), ((0,), (2, 2)), ((0, 2), ())]
        self.assert_greedy([Row(wants_3, word, prompt, output) for prompt, output in said + half])
        long = RowSampling(temperature=0.0, bad_words=((0, 1, 2, 0, 1, 2, 0, 3),))
        self.assert_greedy([Row(wants_3, long, (first, 1, 2, 0, 1), (2, 0)) for first in (0, 1)])

    @check("sampler.min_tokens", since="0.1")
    def test_min_tokens(self) -> None:
        """Stop tokens don't come before `min_tokens` are generated (the prompt doesn't count), and may come from then on."""
        self.assert_greedy(random_rows(lambda rng: {"min_tokens": int(rng.integers(0, 5)), "stop_token_ids": tuple(some_tokens(rng, 4))}))
        self.assert_greedy(rows_of_many(lambda tokens: {"min_tokens": 1, "stop_token_ids": tuple(t for t in tokens if t > MANY // 2)}))

    @check("sampler.bans_lifted", since="0.1")
    def test_bans_lifted(self) -> None:
        """Bad words and stop tokens that would leave nothing of what is allowed are lifted for that step: something can always be sampled."""
        only_2 = RowSampling(temperature=0.0, allowed_token_ids=(2,), bad_words=((2,),))
        all_gone = RowSampling(temperature=0.0, bad_words=((0,), (1,), (2,)))
        self.assert_greedy([Row([5.0, 1.0, 0.0], only_2), Row([5.0, 6.0, 0.0], all_gone)])

    @check("sampler.repetition_penalty", since="0.1")
    def test_repetition_penalty(self) -> None:
        """Positive logits of the tokens in prompt *and* output are divided by it, negative ones multiplied, once each (arXiv:1909.05858,
        section 4.1)."""
        self.assert_greedy(random_rows(lambda rng: {"repetition_penalty": float(rng.choice([0.5, 2.0, 4.0]))}))

    @check("sampler.presence_penalty", since="0.1")
    def test_presence_penalty(self) -> None:
        """Subtracted once from the logit of each *generated* token, however often it came; the prompt doesn't count."""
        self.assert_greedy(random_rows(lambda rng: {"presence_penalty": float(rng.choice([0.5, 2.0, -1.0]))}))

    @check("sampler.frequency_penalty", since="0.1")
    def test_frequency_penalty(self) -> None:
        """Subtracted from the logit of each *generated* token as often as it was generated; the prompt doesn't count."""
        self.assert_greedy(random_rows(lambda rng: {"frequency_penalty": float(rng.choice([0.25, 1.0, -0.5]))}))

    @check("sampler.rules_together", since="0.1")
    def test_rules_together(self) -> None:
        """Applied in this order: bias, allowed ids, bad words and stop tokens; then repetition, presence and frequency penalty. Logprobs and other
        rows don't matter."""
        self.assert_greedy(
            random_rows(
                lambda rng: {
                    "logit_bias": tuple((int(t), float(rng.integers(-8, 9))) for t in some_tokens(rng, 2)),
                    "bad_words": tuple((int(t),) for t in some_tokens(rng, 3)),
                    "repetition_penalty": float(rng.choice([0.5, 1.0, 2.0])),
                    "presence_penalty": float(rng.choice([0.0, 0.5])),
                    "frequency_penalty": float(rng.choice([0.0, 0.25])),
                    "allowed_token_ids": tuple(range(2, SMALL)) if rng.random() < 0.3 else None,
                }
            )
        )

    @check("sampler.stale_history", since="0.1")
    def test_stale_history(self) -> None:
        """Behind a row's tokens the history holds what another request left there: read `num_tokens` of it."""
        flat = [0.0] * SMALL
        sampling = RowSampling(temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0, bad_words=((7, 1), (1,)))
        wants_7 = [1.0 if token == 7 else 0.0 for token in range(SMALL)]
        self.assert_greedy([Row(wants_7, sampling), Row(flat, RowSampling(temperature=0.0), prompt=(0,) * 9)])

    # ---- seeds, rows and batches

    @check("sampler.seed", since="0.1")
    def test_seed(self) -> None:
        """The same seed gives the same tokens, other seeds and other output positions give others; the prompt's length has no part in it. All 64 bits
        count."""
        flat = [0.0] * 1000
        seeds = [*range(40), *(SOME_SEED ^ 1 << bit for bit in range(64)), SOME_SEED]
        one, two = (self.streams(seeds) for _ in range(2))
        require(one == two, "a second sampler gave other tokens for the same seeds")
        told = f"{len(seeds)} seeds, of which many differ from another in one bit, gave only {len(set(one))} different sequences of three tokens"
        require(len(set(one)) == len(seeds), told)
        positions = [*range(20), *(1 << bit for bit in range(5, 17))]
        by_position = [self.bench([Row(flat, RowSampling(seed=s), output=(0,) * n) for s in (1, 2, 3)]).tokens() for n in positions]
        told = f"at the output positions {positions} three seeds gave only {len(set(map(tuple, by_position)))} different triples of tokens"
        require(len(set(map(tuple, by_position))) == len(positions), f"{told}: positions share their noise")
        by_prompt = self.bench([Row(flat, RowSampling(seed=3), prompt=(1,) * n) for n in range(1, 9)]).tokens()
        require(len(set(by_prompt)) == 1, f"the first token changes with the prompt's length: {by_prompt}")
        require(len(self.bench([Row(flat, RowSampling(seed=s)) for s in (-(2**63), 2**64 - 1)]).tokens()) == 2, "seeds of 64 bits")

    def streams(self, seeds: Sequence[int]) -> list[tuple[int, ...]]:
        """The first three tokens of each, of 1,000 that are equally likely."""
        steps = [self.bench([Row([0.0] * 1000, RowSampling(seed=seed), output=(0,) * n) for seed in seeds]).tokens() for n in range(3)]
        return list(zip(*steps, strict=True))

    @check("sampler.row", since="0.1")
    def test_row(self) -> None:
        """A request's tokens don't depend on the row that it has: noise is a function of seed, output position and vocabulary id alone."""
        rows = mixed_rows()
        here, there = self.bench(rows).tokens(), self.bench(rows, places=np.random.default_rng(1).permutation(60)[: len(rows)].tolist()).tokens()
        changed = [_said(row.sampling) for row, a, b in zip(rows, here, there, strict=True) if a != b]
        require(not changed, f"in other rows of the executor other tokens came: {changed}")

    @check("sampler.batch", since="0.1")
    def test_batch(self) -> None:
        """A request's tokens don't depend on what shares its batch: how many rows, which, in what order."""
        rows = mixed_rows()
        bench = self.bench(rows)
        together = bench.tokens()
        order = np.random.default_rng(2).permutation(len(rows)).tolist()
        batches = {"reversed": [*range(len(rows))][::-1], "shuffled": order, "some": order[:5], **{f"{i} alone": [i] for i in range(len(rows))}}
        for name, some in batches.items():
            for index, token in zip(some, bench.tokens(some), strict=True):
                require(
                    token == together[index],
                    f"{_said(rows[index].sampling)}: token {together[index]} among {len(rows)} rows, {token} in another batch ({name})",
                )

    @check("sampler.preemption", since="0.1")
    def test_preemption(self) -> None:
        """A request that was preempted comes back in another row, its output part of the history that is rebuilt, and goes on with the same
        tokens: a sampler keeps nothing of a request but its parameters."""
        logits = np.random.default_rng(0).normal(size=64).tolist()
        sampling = RowSampling(seed=11, frequency_penalty=0.5, bad_words=((3, 4),))
        runs = [self.run_on(logits, sampling, preempted) for preempted in (None, 4, 9)]
        require(runs[0] == runs[1] == runs[2], f"not preempted: {runs[0]}; preempted after 4 tokens: {runs[1]}; after 9: {runs[2]}")
        require(len(set(runs[0])) > 3, f"12 tokens of one request are nearly all the same: {runs[0]}")

    def run_on(self, logits: list[float], sampling: RowSampling, preempted_after: int | None) -> list[int]:
        """12 tokens of one request, which is in row 0 until it is preempted, then in row 5."""
        neighbour, prompt = Row(logits, RowSampling(seed=2), prompt=(0,) * 30), (1, 2)
        bench = self.bench([Row(logits, sampling, prompt), *[neighbour] * 6])
        place = 0
        output: list[int] = []
        for step in range(12):
            if step == preempted_after:
                bench.sampler.update([0, 5], [(0, neighbour.sampling)])
                bench.sampler.update([], [(5, sampling)])
                bench.tell(0, neighbour.prompt, ())
                place = 5
            bench.tell(place, prompt, output)
            output += bench.tokens([place, 1])[:1]
        return output

    @check("sampler.reused_rows", since="0.1")
    def test_reused_rows(self) -> None:
        """A row that is given to another request, even in the same `update`, keeps nothing of the one before: no penalty, no ban, no logprobs, no
        seed."""
        logits = [0.0, 1.0, 2.0, 1.5]
        full = RowSampling(
            temperature=0.0, bad_words=((2,),), repetition_penalty=4.0, logit_bias=((0, 9.0),), allowed_token_ids=(0, 1), logprobs=1, min_tokens=9
        )
        bench = self.bench([Row(logits, full, prompt=(2, 2))] * 2)
        bench.sample()
        bench.sampler.update([0, 1], [(0, RowSampling(temperature=0.0)), (1, RowSampling(temperature=0.0, top_k=3))])
        again = bench.sample()
        require(again.token_ids.tolist() == [2, 2], f"rows given to greedy requests got {again.token_ids.tolist()}, expected [2, 2]")
        require(again.logprobs is None, "logprobs came that only the request before had asked for")
        flat = [Row([0.0] * 1000, RowSampling(seed=seed)) for seed in (1, 2)]
        bench, fresh = self.bench(flat[:1]), self.bench(flat[1:])
        bench.sampler.update([0], [(0, flat[1].sampling)])
        require(bench.tokens() == fresh.tokens(), "a row that was given to another request still has the seed of the one before")

    # ---- logprobs

    @check("sampler.logprobs", since="0.1", capability="logprobs")
    def test_logprobs(self) -> None:
        """Log-probabilities are of the raw distribution, before temperature, filters, rules and penalties. Column 0 is the sampled token, then come
        the k likeliest, best first; its rank is 1 if none is likelier."""
        generator = np.random.default_rng(7)
        rows = [
            Row(generator.normal(size=VOCAB).tolist(), replace(s, logprobs=ASKED[i % 4], temperature=0.5 * s.temperature), (1,), (2, 3))
            for i, s in enumerate(SORTS)
        ]
        tied = np.where(np.arange(VOCAB) % 9 == 5, 4.0, rows[0].logits).tolist()
        rows.append(Row(tied, RowSampling(temperature=0.0, logprobs=1)))
        result = self.bench(rows).sample()
        exact = torch.log_softmax(torch.tensor([row.logits for row in rows], dtype=torch.float64), dim=-1)
        require(result.logprobs is not None, "rows asked for logprobs, and none came")
        found = result.logprobs
        ids, values, ranks = (tensor.cpu() for tensor in (found.token_ids, found.logprobs, found.ranks))  # type: ignore[union-attr]
        require(
            ids.shape == values.shape == (len(rows), 1 + max(ASKED)),
            f"1 + k columns are expected, k the most asked for, {max(ASKED)}; found {list(ids.shape)}",
        )
        require(ids[:, 0].tolist() == result.token_ids.tolist(), "column 0 isn't the sampled token")
        require(_near(values, exact.gather(1, ids)), "logprobs aren't those of the raw distribution")
        require(_near(values[:, 1:], exact.topk(max(ASKED)).values), "columns 1 to k aren't the likeliest tokens, best first")
        own = exact.gather(1, ids[:, :1])
        expected = (1 + (exact > own).sum(-1)).tolist()
        require(ranks.tolist() == expected, f"the ranks of the sampled tokens are {expected}, found {ranks.tolist()}")

    @check("sampler.logprobs_harmless", since="0.1", capability="logprobs")
    def test_logprobs_harmless(self) -> None:
        """Asking for logprobs changes no token, and one row that asks changes none of the others."""
        rows = mixed_rows()
        asked = [replace(row, sampling=replace(row.sampling, logprobs=5 if index % 3 else None)) for index, row in enumerate(rows)]
        without, with_them = self.bench(rows).tokens(), self.bench(asked).tokens()
        require(without == with_them, f"without logprobs {without} came, with them {with_them}")

    # ---- graphs

    @check("sampler.captured", since="0.1", capability="cuda_graph")
    def test_captured(self) -> None:
        """Where `capturable` says yes, `sample_captured` gives the tokens of `sample`, and rows that are padding (`max_rows`) get some id of the
        vocabulary and change nothing."""
        bench = self.bench(mixed_rows())
        places = [place for place in bench.places if bench.sampler.capturable(np.array([place]))]
        require(places, "capturable() said no to every row, plain ones too")
        sampled, captured = bench.tokens(places), bench.captured(places)
        require(sampled == captured, f"sample() gave {sampled}, sample_captured() {captured}")
        padded = bench.captured([*places, bench.max_rows, bench.max_rows])
        require(padded[:-2] == sampled, "padding rows changed the tokens of others")
        require(all(0 <= token < VOCAB for token in padded), f"padding rows got {padded[-2:]}, which isn't in the vocabulary")

    @check("sampler.capturable", since="0.1", capability="cuda_graph")
    def test_capturable(self) -> None:
        """`capturable` says no to rows of which `sample_captured` would leave something out: logprobs, rules or penalties that it doesn't do. One
        such row among others is enough."""
        more: tuple[dict[str, Any], ...] = (
            {"logit_bias": ((0, 9.0),)},
            {"bad_words": ((1,),)},
            {"repetition_penalty": 8.0},
            {"presence_penalty": 2.0},
            {"frequency_penalty": 2.0},
            {"allowed_token_ids": (0,)},
            {"min_tokens": 9, "stop_token_ids": (1,)},
        )
        logits, plain = [0.0, 3.0, 2.5], RowSampling(temperature=0.0)
        for fields in more:
            bench = self.bench([Row(logits, plain, (0,), (1, 1)), Row(logits, replace(plain, **fields), (0,), (1, 1))])
            if bench.sampler.capturable(bench.host_rows):
                require(bench.captured() == bench.tokens(), f"capturable() said yes to {fields}, but sample_captured() leaves it out")
        bench = self.bench([Row(logits, plain), Row(logits, replace(plain, logprobs=0))])
        require(not bench.sampler.capturable(bench.host_rows), "capturable() said yes to a row that asks for logprobs, which a graph can't return")

    @check("sampler.graph", since="0.1", capability="cuda_graph")
    def test_graph(self) -> None:
        """A captured graph replays for other rows and other requests: parameters are read where `update` put them, at the same addresses."""
        if not self.place.startswith("cuda"):
            raise Untried("cuda_graph", f"the suite runs on {self.place}")
        rows = [row for row in mixed_rows() if self.bench([row]).sampler.capturable(np.array([0]))]
        bench = self.bench(rows)
        index = torch.tensor(bench.places, device=self.place)
        bench.sampler.sample_captured(bench.logits.clone(), index)
        torch.cuda.synchronize()
        graph, logits = torch.cuda.CUDAGraph(), bench.logits.clone()
        with torch.cuda.graph(graph):
            out = bench.sampler.sample_captured(logits, index)
        bench.sampler.update(bench.places, [(place, replace(row.sampling, seed=9)) for place, row in zip(bench.places, rows, strict=True)])
        logits.copy_(bench.logits)
        graph.replay()
        require(out.tolist() == bench.tokens(), f"replayed for other seeds: {out.tolist()}, sample() gives {bench.tokens()}")

    @check("sampler.fully_captured", since="0.1", capability="cuda_graph_full")
    def test_fully_captured(self) -> None:
        """Where `fully_capturable` says yes, `sample_fully_captured` gives all that `sample` does: the tokens, and the log-probabilities of each row
        that asks for some, at least as many columns as it asks for. Rows that are padding (`max_rows`) get some id of the vocabulary and change
        nothing."""
        bench, rows = self.fully_capturable([row for asked in (None, 0, 3, 50) for row in _asking(mixed_rows(), asked)])
        expected, captured = bench.sample(), bench.fully_captured()
        _require_same(rows, captured, expected)
        padded = bench.fully_captured([*bench.places, bench.max_rows, bench.max_rows])
        _require_same(rows, padded, expected, "with padding behind them, ")
        ids = padded.token_ids[len(rows) :].tolist()
        require(all(0 <= token < VOCAB for token in ids), f"padding rows got {ids}, which isn't in the vocabulary")

    @check("sampler.full_graph", since="0.1", capability="cuda_graph_full")
    def test_full_graph(self) -> None:
        """A graph of `sample_fully_captured` replays for other requests too: rules, penalties, and how many log-probabilities they ask for, are read
        where `update` put them, at the same addresses."""
        if not self.place.startswith("cuda"):
            raise Untried("cuda_graph_full", f"the suite runs on {self.place}")
        bench, rows = self.fully_capturable(_asking(mixed_rows(), 2))
        bench.fully_captured()
        torch.cuda.synchronize()
        graph, logits = torch.cuda.CUDAGraph(), bench.logits.clone()
        with torch.cuda.graph(graph):
            out = bench.sampler.sample_fully_captured(logits, bench.rows)
        others = [replace(row, sampling=replace(row.sampling, seed=9, logit_bias=((4, 30.0),), logprobs=index % 3)) for index, row in enumerate(rows)]
        bench.sampler.update(bench.places, [(place, row.sampling) for place, row in zip(bench.places, others, strict=True)])
        logits.copy_(bench.logits)
        graph.replay()
        _require_same(others, out, bench.sample(), "replayed for other requests, ")

    def fully_capturable(self, rows: Sequence[Row]) -> tuple[Bench, list[Row]]:
        """Return a bench of those of `rows` that may be captured in full, and these rows."""
        bench = self.bench(rows)
        some = [row for place, row in zip(bench.places, rows, strict=True) if bench.sampler.fully_capturable(np.array([place]))]
        if not some:
            raise Untried("cuda_graph_full", f"fully_capturable() says no to every row on {self.place}")
        return self.bench(some), some


def _asking(rows: Sequence[Row], logprobs: int | None) -> list[Row]:
    return [replace(row, sampling=replace(row.sampling, logprobs=logprobs)) for row in rows]


def _require_same(rows: Sequence[Row], captured: SampledTokens, sampled: SampledTokens, when: str = "") -> None:
    """Require the same token of each row, and as many equal log-probabilities as the row asks for."""
    tokens, expected = captured.token_ids[: len(rows)].tolist(), sampled.token_ids.tolist()
    require(tokens == expected, f"{when}sample() gave {expected}, sample_fully_captured() {tokens}")
    for place, row in enumerate(rows):
        if row.sampling.logprobs is None:
            continue
        ours, theirs = captured.logprobs, sampled.logprobs
        require(ours is not None and theirs is not None, f"{when}{_said(row.sampling)}: no log-probabilities came")
        columns = slice(1 + min(row.sampling.logprobs, VOCAB))
        same = (
            ours.token_ids[place, columns].tolist() == theirs.token_ids[place, columns].tolist()  # type: ignore[union-attr]
            and ours.ranks[place] == theirs.ranks[place]  # type: ignore[union-attr]
            and _near(ours.logprobs[place, columns].cpu(), theirs.logprobs[place, columns].double().cpu())  # type: ignore[union-attr]
        )
        require(same, f"{when}{_said(row.sampling)}: the log-probabilities of sample_fully_captured() aren't those of sample()")


def _near(values: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool(((values.double() - exact).abs() < 1e-5).all())


def _said(sampling: RowSampling) -> str:
    """Return the parameters that aren't neutral, as text."""
    neutral = RowSampling()
    fields = {name: getattr(sampling, name) for name in RowSampling.__dataclass_fields__}
    changed = [f"{name}={value}" for name, value in fields.items() if value != getattr(neutral, name)]
    return ", ".join(changed) or "temperature=1.0"
