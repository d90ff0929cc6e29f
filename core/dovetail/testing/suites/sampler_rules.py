"""`SamplerRules`: checks of rules and penalties."""

from __future__ import annotations

import numpy as np

from dovetail.api.sampler import RowSampling
from dovetail.testing.checks import check, require
from dovetail.testing.suites.sampler_bench import Row
from dovetail.testing.suites.sampler_oracle import distribution, p_value
from dovetail.testing.suites.sampler_rows import (
    LONG,
    MANY,
    SMALL,
    random_rows,
    rows_of_many,
    some_tokens,
)
from dovetail.testing.suites.sampler_subject import ALPHA, DRAWS, SamplerSubject, said

MIXED = [(7 * token % 20) / 10 - 1 for token in range(20)]  # positive and negative, all different


class SamplerRules(SamplerSubject):
    """Biases, bans and penalties."""

    @check("sampler.logit_bias", since="1.0")
    def test_logit_bias(self) -> None:
        """Each bias is added to its token's logit, in its own row."""
        self.assert_greedy(
            random_rows(
                lambda rng: {
                    "logit_bias": tuple(
                        (int(t), float(rng.integers(-8, 9))) for t in some_tokens(rng, 3)
                    )
                }
            )
        )
        self.assert_greedy(
            rows_of_many(
                lambda tokens: {
                    "logit_bias": tuple((t, float(t + 1)) for t in tokens if t < MANY // 2)
                }
            )
        )

    @check("sampler.allowed_token_ids", since="1.0")
    def test_allowed_token_ids(self) -> None:
        """Only these are sampled, even if the model gives them -inf; ids beyond the vocabulary are
        ignored."""
        self.assert_greedy(
            random_rows(lambda rng: {"allowed_token_ids": tuple(some_tokens(rng, 5)) or (3,)})
        )
        self.assert_greedy(
            rows_of_many(
                lambda tokens: {"allowed_token_ids": tuple(t for t in tokens if t < MANY // 2)}
            )
        )
        biases = (((1, -100.0), (2, -100.0)), ((2, -100.0),), ((0, 100.0), (2, -100.0)))
        self.assert_greedy(
            [
                Row(
                    [9.0, 1.0, 2.0, 8.0],
                    RowSampling(temperature=0.0, allowed_token_ids=(1, 2), logit_bias=bias),
                )
                for bias in biases
            ]
        )
        excluded = [0.0, -np.inf, -np.inf, 0.0]
        rows = [Row(excluded, RowSampling(seed=s, allowed_token_ids=(1, 2, 99))) for s in range(64)]
        came = set(self.bench(rows).tokens())
        require(
            came == {1, 2},
            f"allowed are 1 and 2, both with the logit -inf, so that they are equally likely: "
            f"{sorted(came)} came",
        )

    @check("sampler.bad_words", since="1.0")
    def test_bad_words(self) -> None:
        """The last token of a bad word isn't sampled after the others, wherever these are: in the
        prompt, the output or across both. A partial match bans nothing, and neither does a bad word
        longer than the history."""
        self.assert_greedy(
            random_rows(
                lambda rng: {
                    "bad_words": tuple(tuple(some_tokens(rng, 3)) or (5,) for _ in range(4))
                }
            )
        )
        self.assert_greedy(
            rows_of_many(lambda tokens: {"bad_words": tuple((t,) for t in tokens if t > MANY // 2)})
        )
        wants_3 = [0.0, 1.0, 0.0, 9.0]
        word = RowSampling(temperature=0.0, bad_words=((1, 2, 3),))
        said = [((0, 1, 2), ()), ((0, 1), (2,)), ((0,), (1, 2)), ((1, 2), ())]
        half = [((2,), ()), ((1, 2, 0), ()), ((0,), (2, 1)), ((0,), (2, 2)), ((0, 2), ())]
        self.assert_greedy([Row(wants_3, word, prompt, output) for prompt, output in said + half])
        alike = RowSampling(temperature=0.0, bad_words=((1, 2, 3), (1, 2, 0), (1, 2)))
        self.assert_greedy([Row(wants_3, alike, prompt, output) for prompt, output in said + half])
        long = RowSampling(temperature=0.0, bad_words=((0, 1, 2, 0, 1, 2, 0, 3),))
        self.assert_greedy([Row(wants_3, long, (first, 1, 2, 0, 1), (2, 0)) for first in (0, 1)])
        longer = RowSampling(temperature=0.0, bad_words=((*(0, 1, 2) * 20, 3),))
        self.assert_greedy(
            [Row(wants_3, longer, (first, *(1, 2, 0) * 19, 1), (2,)) for first in (0, 1)]
        )

    @check("sampler.min_tokens", since="1.0")
    def test_min_tokens(self) -> None:
        """Stop tokens aren't sampled before `min_tokens` are generated (the prompt doesn't count),
        and may be sampled afterwards."""
        self.assert_greedy(
            random_rows(
                lambda rng: {
                    "min_tokens": int(rng.choice([0, 1, 2, 3, 4, 40, LONG + 1])),
                    "stop_token_ids": tuple(some_tokens(rng, 4)),
                }
            )
        )
        banned = [
            (RowSampling(temperature=0.0, min_tokens=least, stop_token_ids=(1,)), least + more)
            for least in (1, 40, LONG)
            for more in (-1, 0)
        ]
        banned += [
            (RowSampling(temperature=0.0, min_tokens=least, stop_token_ids=(1,)), 3)
            for least in (2**8, 2**16, 2**16 + 2)
        ]
        self.assert_greedy(
            [
                Row([0.0, 9.0, 1.0], sampling, output=(0,) * generated)
                for sampling, generated in banned
            ]
        )
        self.assert_greedy(
            rows_of_many(
                lambda tokens: {
                    "min_tokens": 1,
                    "stop_token_ids": tuple(t for t in tokens if t > MANY // 2),
                }
            )
        )

    @check("sampler.bans_lifted", since="1.0")
    def test_bans_lifted(self) -> None:
        """Bans of bad words and stop tokens that would exclude all allowed tokens are lifted for
        that step: something can always be sampled."""
        only_2 = RowSampling(temperature=0.0, allowed_token_ids=(2,), bad_words=((2,),))
        all_gone = RowSampling(temperature=0.0, bad_words=((0,), (1,), (2,)))
        self.assert_greedy([Row([5.0, 1.0, 0.0], only_2), Row([5.0, 6.0, 0.0], all_gone)])

    @check("sampler.repetition_penalty", since="1.0")
    def test_repetition_penalty(self) -> None:
        """Positive logits of the tokens in prompt *and* output are divided by it, negative ones
        multiplied, once each (arXiv:1909.05858, section 4.1)."""
        self.assert_greedy(
            random_rows(
                lambda rng: {"repetition_penalty": float(rng.choice([1 / 64, 0.5, 2.0, 4.0, 64.0]))}
            )
        )

    @check("sampler.presence_penalty", since="1.0")
    def test_presence_penalty(self) -> None:
        """Subtracted once from the logit of each *generated* token, regardless of its count; the
        prompt doesn't count."""
        self.assert_greedy(
            random_rows(lambda rng: {"presence_penalty": float(rng.choice([0.5, 2.0, -1.0, -2.0]))})
        )

    @check("sampler.frequency_penalty", since="1.0")
    def test_frequency_penalty(self) -> None:
        """Subtracted from the logit of each *generated* token as often as it was generated; the
        prompt doesn't count."""
        self.assert_greedy(
            random_rows(
                lambda rng: {"frequency_penalty": float(rng.choice([0.25, 1.0, 2.0, -0.5, -2.0]))}
            )
        )

    @check("sampler.rules_together", since="1.0")
    def test_rules_together(self) -> None:
        """Applied in this order: bias, allowed ids, bad words and stop tokens; then repetition,
        presence and frequency penalty. Logprobs and other rows don't matter."""
        self.assert_greedy(
            random_rows(
                lambda rng: {
                    "logit_bias": tuple(
                        (int(t), float(rng.integers(-8, 9))) for t in some_tokens(rng, 2)
                    ),
                    "bad_words": tuple((int(t),) for t in some_tokens(rng, 3)),
                    "repetition_penalty": float(rng.choice([0.5, 1.0, 2.0])),
                    "presence_penalty": float(rng.choice([0.0, 0.5])),
                    "frequency_penalty": float(rng.choice([0.0, 0.25])),
                    "allowed_token_ids": tuple(range(2, SMALL)) if rng.random() < 0.3 else None,
                    "min_tokens": int(rng.choice([0, 4])),
                    "stop_token_ids": tuple(some_tokens(rng, 3)),
                }
            )
        )

    @check("sampler.rules_before_temperature", since="1.0")
    def test_rules_before_temperature(self) -> None:
        """Biases, bans and penalties change the logits before these are divided by the temperature,
        at any temperature. Power: a bias or penalty that is added afterwards changes its token's
        odds by a factor of at least 2, which 5,000 draws always detect."""
        output = (3, 4, 3)
        for temperature in (0.5, 2.0):
            for sampling in (
                RowSampling(
                    temperature=temperature,
                    logit_bias=((5, 1.0), (9, -1.0), (12, 1.5)),
                    repetition_penalty=2.0,
                    presence_penalty=-1.0,
                    frequency_penalty=-0.5,
                ),
                RowSampling(
                    temperature=temperature,
                    allowed_token_ids=(1, 3, 5, 6, 7, 9, 11),
                    bad_words=((3, 6), (9,)),
                    min_tokens=9,
                    stop_token_ids=(0, 1),
                ),
            ):
                counts = self.draws(MIXED, sampling, DRAWS, seeds=DRAWS, output=output)
                p = p_value(counts, distribution(MIXED, sampling, (0,), output))
                told = (
                    f"{said(sampling)} after the output {output}: {DRAWS:,} draws don't follow "
                    f"the distribution (chi-square test: p = {p:.1e})"
                )
                require(p > ALPHA, told)

    @check("sampler.stale_history", since="1.0")
    def test_stale_history(self) -> None:
        """After a row's tokens the history holds another request's: read only `num_tokens`."""
        flat = [0.0] * SMALL
        sampling = RowSampling(
            temperature=0.0, repetition_penalty=2.0, presence_penalty=1.0, bad_words=((7, 1), (1,))
        )
        wants_7 = [1.0 if token == 7 else 0.0 for token in range(SMALL)]
        self.assert_greedy(
            [Row(wants_7, sampling), Row(flat, RowSampling(temperature=0.0), prompt=(0,) * 9)]
        )
