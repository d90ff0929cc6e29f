"""`SamplerSuite`: checks that a sampler conforms to the contract of `dovetail.api.sampler`.

The set of possible tokens is compared exactly with an oracle (`sampler_oracle`); their frequencies,
by a chi-square test for each filter separately (a joint test hides an off-by-one), at a level of
1e-5.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dovetail.api.sampler import RowSampling
from dovetail.testing.checks import check, require
from dovetail.testing.suites.sampler_bench import Row
from dovetail.testing.suites.sampler_lines import SamplerLines
from dovetail.testing.suites.sampler_oracle import distribution, p_value
from dovetail.testing.suites.sampler_processors import SamplerProcessors
from dovetail.testing.suites.sampler_requests import SamplerRequests
from dovetail.testing.suites.sampler_rows import SORTS, VOCAB, mixed_rows
from dovetail.testing.suites.sampler_rules import SamplerRules
from dovetail.testing.suites.sampler_subject import ALPHA, SUPPORT_DRAWS, near, said
from dovetail.testing.suites.sampler_updates import SamplerUpdates

MANY_DRAWS = 20_000  # for a test that distinguishes temperatures
# one token as likely as all others together: the most sensitive to temperature at this size
HALF = [
    float(np.log(300)),
    *[0.0] * 300,
]
# each token likely enough to occur in a thousand draws, all different
SLOPE = [(7 * token % 20) / -10 for token in range(20)]
FAR_OFF = (0.004, 0.04, 30.0)  # unusual temperatures
GENTLE = [token / -1000 for token in range(400)]
# distance from a filter's limit: more than float32's error, less than that of half precision
NEAR = 1e-4
LARGEST_VOCAB = 2**17 + 2**14
ASKED = (0, 1, 3, 100)  # logprobs


class SamplerSuite(SamplerRules, SamplerRequests, SamplerUpdates, SamplerLines, SamplerProcessors):
    """Suite of samplers: sampled tokens and log-probabilities."""

    @check("sampler.output", since="1.0")
    def test_output(self) -> None:
        """`sample` returns ids of the vocabulary as int64 [n], on the logits' device, in the order
        of `lines`; for no lines, none."""
        bench = self.bench(
            [Row(np.eye(9)[i].tolist(), RowSampling(temperature=0.0)) for i in range(9)],
            places=[5, 0, 8, 1, 7, 2, 6, 3, 4],
        )
        for some in ([8, 2, 3], [], list(range(9))):
            ids = bench.sample(some).token_ids
            require(
                ids.dtype == torch.int64 and ids.device == bench.logits.device,
                f"the ids are {ids.dtype} on {ids.device}",
            )
            require(
                ids.tolist() == some,
                f"the rows {some} of the batch, whose most likely tokens are these numbers, got "
                f"{ids.tolist()}",
            )

    @check("sampler.greedy", since="1.0")
    def test_greedy(self) -> None:
        """Temperature 0 takes the largest logit for any seed; so does every filter that leaves one
        token (top_k=1, a tiny top_p, a temperature near 0)."""
        for sampling in (
            RowSampling(temperature=0.0),
            RowSampling(top_k=1),
            RowSampling(top_p=1e-9),
            RowSampling(temperature=1e-30),
        ):
            rows = [
                Row(
                    np.random.default_rng(s).permutation(300).astype(float).tolist(),
                    replace(sampling, seed=s),
                )
                for s in range(30)
            ]
            wrong = [
                seed
                for seed, (row, token) in enumerate(
                    zip(rows, self.bench(rows).tokens(), strict=True)
                )
                if token != np.argmax(row.logits)
            ]
            require(
                not wrong,
                f"{said(sampling)}: {len(wrong)} of 30 rows didn't get their largest logit",
            )

    @check("sampler.ties", since="1.0")
    def test_ties(self) -> None:
        """Ties are broken by the lowest id: in greedy rows, and at the end of what top-k and top-p
        keep. A result that depends on the order in which threads finish isn't reproducible."""
        tied = [0.0, 7.0, 3.0, 7.0, 7.0]
        for sampling in (
            RowSampling(temperature=0.0),
            RowSampling(top_k=1),
            RowSampling(top_p=0.01),
        ):
            tokens = self.bench(
                [Row(tied, replace(sampling, seed=seed)) for seed in range(20)]
            ).tokens()
            require(
                set(tokens) == {1},
                f"{said(sampling)}: of equal logits at 1, 3 and 4, {sorted(set(tokens))} were "
                f"sampled, not only the first",
            )
        self.assert_support(tied, RowSampling(top_k=2))
        self.assert_support([1.5] * 8, RowSampling(top_p=0.5))

    @check("sampler.temperature", since="1.0")
    def test_temperature(self) -> None:
        """Logits are divided by the temperature, however small or large: only 0 is greedy. Power:
        an error of 5 % is missed less than once in 10^9 (noncentral chi-square, 300 degrees of
        freedom)."""
        for temperature in (0.7, 2.0):
            self.assert_drawn_in_proportion(
                RowSampling(temperature=temperature), [x * temperature for x in HALF], MANY_DRAWS
            )
        for temperature in FAR_OFF:
            self.assert_drawn_in_proportion(
                RowSampling(temperature=temperature), [x * temperature for x in HALF]
            )

    @check("sampler.top_k", since="1.0")
    def test_top_k(self) -> None:
        """Exactly the k most likely tokens are left; 0, or more than there are, leaves all. Power:
        one token more or less is always detected, since each occurs in at least 2 % of 1,000
        draws."""
        for k in (0, 1, 2, 8, 19, 20, 50, 2**32, 2**32 + 2):
            self.assert_support(SLOPE, RowSampling(top_k=k))
        self.assert_support(GENTLE, RowSampling(top_k=300), 6_000)
        for k in (1_500, 3_000):  # a third of the draws is of the last third of those that are left
            came = np.flatnonzero(
                self.draws(
                    [token / -10_000 for token in range(4_000)], RowSampling(top_k=k), SUPPORT_DRAWS
                )
            )
            told = (
                f"top_k={k} of 4,000 tokens, the first the most likely: the last of "
                f"{SUPPORT_DRAWS} draws was token {came.max()}"
            )
            require(0.97 * k < came.max() < k, told)
        self.assert_drawn_in_proportion(RowSampling(top_k=8))

    @check("sampler.top_p", since="1.0")
    def test_top_p(self) -> None:
        """The fewest most likely tokens with a total probability of at least p are kept, including
        the one that crosses p. 1 keeps all. Sum in float32, and don't round p. Power: one token
        more or less is always detected, as for top-k."""
        reached = np.sort(distribution(SLOPE, RowSampling()))[::-1].cumsum()[[0, 6, 13]]
        for p in (0.01, 0.3, 0.5, 0.8, 0.95, 1.0, *(reached - NEAR), *(reached + NEAR)):
            self.assert_support(SLOPE, RowSampling(top_p=float(p)))
        self.assert_support([0.0, 0.0, 0.0, 0.0], RowSampling(top_p=0.5))  # reached exactly by two
        self.assert_drawn_in_proportion(RowSampling(top_p=0.8))

    @check("sampler.min_p", since="1.0")
    def test_min_p(self) -> None:
        """Tokens at least p times as likely as the most likely one are kept (not: with a
        probability of p). 0 keeps all, 1 the most likely and its ties. Power: one token more or
        less is always detected, as for top-k."""
        shares = np.exp([-0.3, -0.8, -1.4])  # of tokens of SLOPE
        for p in (0.0, 0.15, 0.5, 0.85, *(shares - NEAR), *(shares + NEAR)):
            self.assert_support(SLOPE, RowSampling(min_p=float(p)))
        self.assert_support([1.0, 3.0, 3.0, 2.0, 2.98], RowSampling(min_p=1.0))
        self.assert_drawn_in_proportion(RowSampling(min_p=0.1))

    @check("sampler.filter_order", since="1.0")
    def test_filter_order(self) -> None:
        """First temperature, then top-k, top-p and min-p, each over what the previous one kept:
        top-p uses probabilities among the tokens that top-k kept. Power: in each case another order
        keeps another set of tokens, which is always detected."""
        for sampling in (
            RowSampling(temperature=2.0, top_p=0.6),
            RowSampling(temperature=0.5, top_p=0.6),
            RowSampling(temperature=0.5, min_p=0.3),
            RowSampling(top_k=8, top_p=0.7),
            RowSampling(temperature=1.5, top_k=12, top_p=0.8, min_p=0.5),
        ):
            self.assert_support(SLOPE, sampling)
        self.assert_drawn_in_proportion(RowSampling(temperature=0.8, top_k=20, top_p=0.95))

    @check("sampler.large_vocabulary", since="1.0")
    def test_large_vocabulary(self) -> None:
        """50,000 tokens in five classes of equal logits occur in proportion. They win by the
        smallest of many random numbers, which must be exact where they are small, and independent
        between ids. Power: noise of 11 bits (half precision), whose ties exclude the rarer classes,
        is always detected, and so is noise that repeats after 2^16 ids; after 2^17, except once in
        10^6."""
        classes = np.arange(50_000) % 5
        logits = classes * -1.0
        counts = self.draws(logits.tolist(), RowSampling(), 2_000, seeds=50)
        weights = np.exp(logits) / np.exp(logits).sum()
        by_class = (np.array([x[classes == c].sum() for c in range(5)]) for x in (counts, weights))
        p = p_value(*by_class)
        require(p > ALPHA, f"rare tokens don't come in proportion (chi-square test: p = {p:.1e})")
        counts = self.draws([0.0] * LARGEST_VOCAB, RowSampling(), 128, seeds=32)
        parts = {
            f"{start} to {end - 1}": int(counts[start:end].sum())
            for start, end in ((0, 2**16), (2**16, 2**17), (2**17, LARGEST_VOCAB))
        }
        require(
            all(parts.values()),
            f"of {LARGEST_VOCAB} tokens that are equally likely came, by id: {parts}. Noise that "
            f"repeats shuts out the latter",
        )

    @check("sampler.extremes", since="1.0")
    def test_extremes(self) -> None:
        """Logits of -inf never win against others, +inf always does, no temperature produces NaN,
        and a row of only -inf or NaN gets some id of the vocabulary and affects no other row."""
        for temperature in (1e-45, 1e-20, 1e30, 1e300):
            came = set(
                self.bench(
                    [
                        Row([0.0, 5.0, -np.inf, 4.0], RowSampling(temperature=temperature, seed=s))
                        for s in range(64)
                    ]
                ).tokens()
            )
            may = {1} if temperature < 1 else {0, 1, 3}
            require(
                came == may,
                f"temperature {temperature:g}: of [0, 5, -inf, 4] the tokens {sorted(came)} came, "
                f"expected {sorted(may)}",
            )
        samplings = [
            RowSampling(),
            RowSampling(temperature=0.0),
            RowSampling(top_k=2),
            RowSampling(top_p=0.5),
            RowSampling(min_p=0.5),
        ]
        for value in (-np.inf, np.nan, np.inf):
            broken = [Row([value] * 4, sampling) for sampling in samplings]
            fine = [Row([0.0, 0.0, 9.0, 0.0], RowSampling(temperature=0.0))] * 2
            tokens = self.bench([fine[0], *broken, fine[1]]).tokens()
            require(
                all(0 <= token < 4 for token in tokens),
                f"rows of {value} got the ids {tokens}: not all are in the vocabulary of 4",
            )
            require(
                tokens[0] == tokens[-1] == 2,
                f"rows beside rows of {value} got {tokens[0]} and {tokens[-1]}; by themselves they "
                f"get 2",
            )
        for sampling in samplings:
            (token,) = self.bench([Row([0.0, -np.inf, np.inf, 5.0], sampling)]).tokens()
            require(token == 2, f"{said(sampling)}: token {token} came of [0, -inf, +inf, 5]")

    @check("sampler.dtypes", since="1.0")
    def test_dtypes(self) -> None:
        """Logits of any float dtype are sampled as their exact float32 values."""
        generator = torch.Generator().manual_seed(0)
        for dtype in (torch.bfloat16, torch.float16):
            steps = torch.stack([torch.randperm(64, generator=generator) for _ in range(32)])
            # numbers that follow each other: rounding makes ties
            neighbours = (1 + steps * torch.finfo(dtype).eps).to(dtype)
            rows = [Row(row.float().tolist(), RowSampling(temperature=0.0)) for row in neighbours]
            rows += [
                replace(row, logits=row.logits[:64])
                for row in mixed_rows()
                if row.sampling.top_k in (0, 5) and not row.sampling.bad_words
            ]
            rows = [
                replace(
                    row,
                    logits=torch.tensor(row.logits).to(dtype).float().tolist(),
                    prompt=(1,),
                    output=(2, 3),
                )
                for row in rows
            ]
            narrow = self.bench(rows, dtype=dtype).tokens()
            wide = self.bench(rows).tokens()
            require(
                narrow == wide,
                f"logits in {dtype} gave the tokens {narrow}; the same numbers in float32 give "
                f"{wide}",
            )

    @check("sampler.logprobs", since="1.0", capability="logprobs")
    def test_logprobs(self) -> None:
        """Log-probabilities are of the unmodified distribution, before temperature, filters, rules
        and penalties. Column 0 is the sampled token, followed by the k most likely, best first; its
        rank is 1 if none is more likely."""
        generator = np.random.default_rng(7)
        rows = [
            Row(
                generator.normal(size=VOCAB).tolist(),
                replace(s, logprobs=ASKED[i % 4], temperature=0.5 * s.temperature),
                (1,),
                (2, 3),
            )
            for i, s in enumerate(SORTS)
        ]
        # of unlikely tokens
        rows += [
            Row(rows[0].logits, RowSampling(temperature=50.0, seed=seed, logprobs=3))
            for seed in range(8)
        ]
        tied = np.where(np.arange(VOCAB) % 9 == 5, 4.0, rows[0].logits).tolist()
        rows.append(Row(tied, RowSampling(temperature=0.0, logprobs=1)))
        # very unlikely ones
        rows.append(
            Row(
                [200.0 * (token == 3) for token in range(VOCAB)],
                RowSampling(temperature=0.0, logprobs=2),
            )
        )
        result = self.bench(rows).sample()
        exact = torch.log_softmax(
            torch.tensor([row.logits for row in rows], dtype=torch.float64), dim=-1
        )
        require(result.logprobs is not None, "rows asked for logprobs, and none came")
        found = result.logprobs
        ids, values, ranks = (
            tensor.cpu()
            for tensor in (found.token_ids, found.logprobs, found.ranks)  # type: ignore[union-attr]
        )
        require(
            ids.shape == values.shape == (len(rows), 1 + max(ASKED)),
            f"1 + k columns are expected, k the most asked for, {max(ASKED)}; found "
            f"{list(ids.shape)}",
        )
        require(ids[:, 0].tolist() == result.token_ids.tolist(), "column 0 isn't the sampled token")
        require(near(values, exact.gather(1, ids)), "logprobs aren't those of the raw distribution")
        require(
            near(values[:, 1:], exact.topk(max(ASKED)).values),
            "columns 1 to k aren't the most likely tokens, best first",
        )
        own = exact.gather(1, ids[:, :1])
        expected = (1 + (exact > own).sum(-1)).tolist()
        require(
            ranks.tolist() == expected,
            f"the ranks of the sampled tokens are {expected}, found {ranks.tolist()}",
        )
        alone = (
            self.bench([replace(rows[0], sampling=RowSampling(temperature=0.0, logprobs=0))])
            .sample()
            .logprobs
        )
        shape = None if alone is None else list(alone.token_ids.shape)
        require(
            shape == [1, 1],
            f"one row that asks for logprobs=0 must get the column of its token; the shape is "
            f"{shape}",
        )

    @check("sampler.logprobs_harmless", since="1.0", capability="logprobs")
    def test_logprobs_harmless(self) -> None:
        """Requesting logprobs doesn't change tokens, neither the row's own nor those of others."""
        rows = mixed_rows()
        asked = [
            replace(row, sampling=replace(row.sampling, logprobs=5 if index % 3 else None))
            for index, row in enumerate(rows)
        ]
        without = self.bench(rows).tokens()
        with_them = self.bench(asked).tokens()
        require(without == with_them, f"without logprobs {without} came, with them {with_them}")
