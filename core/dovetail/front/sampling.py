"""`SamplingIntake`: validates the parameters of a request that generates, and fills in defaults.

A request's own values come first, then those of the model's files, then neutral ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.api.sampler import RowSampling
from dovetail.errors import RequestError, shown
from dovetail.front import request_checks
from dovetail.front.detokenizer import IncrementalText, StopStrings, special_names
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.tokenizer import Tokenizer
from dovetail.request.frozen import FrozenDict
from dovetail.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dovetail.front.intake_facts import IntakeFacts

_SEED_BITS = 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the seeds of samples


class SamplingIntake:
    """Validates parameters and resolves them. Not thread safe."""

    def __init__(
        self, facts: IntakeFacts, tokenizer: Callable[[], Tokenizer], seeds: random.Random
    ) -> None:
        """`tokenizer` loads it when first called.

        `seeds` draws those of requests that name none.
        """
        self._facts = facts
        self._tokenizer = tokenizer
        self._seeds = seeds
        self._passed: SamplingParams | None = None  # the last that were found good

    def check(self, params: SamplingParams) -> None:
        """Raise `RequestError` for what this engine can't do, and beyond its limits."""
        if params is self._passed:  # those of many prompts are one object, which can't change
            return
        facts = self._facts
        request_checks.check_params(params, facts.limits)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            wrong = [token for token in getattr(params, name) or () if token >= facts.vocab_size]
            if wrong:
                raise RequestError(
                    f"{name}: token id {shown(wrong[0])} is out of the vocabulary: allowed are 0 "
                    f"to {facts.vocab_size - 1}"
                )
        self._check_logprobs(params)
        if params.deterministic and facts.not_deterministic:
            raise RequestError(
                f"deterministic: this engine can't promise it: {facts.not_deterministic}"
            )
        if params.structured is not None and not facts.has_masks:
            raise RequestError(
                f"structured: executor {facts.executor} can't mask tokens, which a rule of the "
                "answer needs"
            )
        unknown = sorted(set(params.extra_args) - facts.extra_args)
        if unknown:
            known = ", ".join(sorted(facts.extra_args)) or "none"
            raise RequestError(
                f"extra_args: {shown(unknown[0])} means nothing to sampler {facts.sampler}; it "
                f"understands: {known}"
            )
        self._passed = params

    def resolve(self, params: SamplingParams) -> RowSampling:
        """Return the sampling of a request: of its first sample, if it has several.

        Raises `RequestError` for bad words that can't be banned, and for unknown logits processors.
        """
        facts = self._facts
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(_SEED_BITS)
        words = self._bad_word_ids(params.bad_words or ())
        sampling = resolve_sampling(params, facts.defaults, int(seed % 2**_SEED_BITS), words)
        if facts.always_deterministic:
            sampling = replace(sampling, deterministic=True)
        if not (asked := params.logits_processors):
            return sampling
        names = full_names(asked, facts.logits_processors)
        processors = {full: asked[name] for name, full in names.items()}
        return replace(sampling, logits_processors=FrozenDict(processors))

    def texts(
        self, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> list[IncrementalText | None]:
        """Return the incremental text of each sample; None without detokenization."""
        if not params.detokenize:
            return [None] * params.n
        tokenizer = self._tokenizer()
        stops = None
        if params.stop:
            special = special_names(tokenizer) if params.skip_special_tokens else None
            stops = StopStrings(params.stop, special)
        return [
            IncrementalText(tokenizer, params, prompt_token_ids, stops) for _ in range(params.n)
        ]

    def _check_logprobs(self, params: SamplingParams) -> None:
        asked = (params.logprobs, params.prompt_logprobs)
        if not self._facts.has_logprobs and asked != (None, None):
            raise RequestError(f"logprobs: executor {self._facts.executor} can't return them")
        if not self._facts.samples_logprobs and params.logprobs is not None:
            raise RequestError(f"logprobs: sampler {self._facts.sampler} can't return them")
        for name, most in zip(("logprobs", "prompt_logprobs"), asked, strict=True):
            if (most or 0) > self._facts.vocab_size:
                raise RequestError(
                    f"{name} must be at most the vocabulary's {self._facts.vocab_size} tokens, got "
                    f"{most}"
                )

    def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return each word as tokens, as spelled at the start of a text and after a space.

        Raises `RequestError` for one that has no tokens, or if they are too many tokens.
        """
        if not words:
            return ()
        spaced = [f" {word.lstrip()}" for word in words]
        ids = self._tokenizer().encode_all([*words, *spaced], special_tokens=False)
        for word, *variants in zip(words, ids[: len(words)], ids[len(words) :], strict=True):
            if not any(variants):
                raise RequestError(
                    f"bad_words: {shown(word)} is no token of this model's tokenizer, so it can't "
                    "be banned"
                )
        sequences = dict.fromkeys(tuple(variant) for variant in ids if variant)
        request_checks.at_most(
            "bad_words: the tokens of all together",
            sum(map(len, sequences)),
            self._facts.limits,
            "max_bad_word_tokens",
        )
        return tuple(sequences)


def resolve_sampling(
    params: SamplingParams,
    defaults: GenerationDefaults,
    seed: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> RowSampling:
    """Resolve a request's sampling: its own values, else the model's, else neutral ones.

    `seed`: 64 bits. `bad_words`: the request's, as token sequences. Stop ids are those of the
    request and, unless `ignore_eos`, the model's EOS ids.
    """

    def pick(name: str, neutral: Any) -> Any:
        value = getattr(params, name)
        if value is None:
            value = getattr(defaults, name)
        return neutral if value is None else value

    allowed = params.allowed_token_ids
    stop_ids = tuple(params.stop_token_ids or ())
    if not params.ignore_eos:
        stop_ids += tuple(defaults.eos_token_ids)
    return RowSampling(
        temperature=float(pick("temperature", 1.0)),
        top_k=max(0, pick("top_k", 0)),
        top_p=float(pick("top_p", 1.0)),
        min_p=float(pick("min_p", 0.0)),
        seed=seed,
        repetition_penalty=float(pick("repetition_penalty", 1.0)),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias=tuple((params.logit_bias or {}).items()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(dict.fromkeys((*defaults.bad_words, *bad_words))),
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        deterministic=params.deterministic,
        extra_args=params.extra_args,
    )


def full_names(asked: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """Return the full name of each logits processor that a request names, by that name.

    `known`: full names of the engine's. Raises `RequestError` for a name that isn't one of them, or
    stands for several, and for two names of one.
    """
    found: dict[str, str] = {}
    for name in asked:
        meant = [full for full in known if name in (full, full.partition(":")[2])]
        if not meant:
            theirs = "it has none: list them in `logits_processors` of engine.yaml"
            if known:
                theirs = f"it has: {', '.join(known)}"
            raise RequestError(f"logits_processors: this engine has no {shown(name)}; {theirs}")
        if len(meant) > 1:
            raise RequestError(
                f"logits_processors: {shown(name)} is ambiguous, it may be {' or '.join(meant)}: "
                "give the full name"
            )
        if meant[0] in found.values():
            raise RequestError(
                f"logits_processors: {meant[0]} is named twice, by its full and its short name"
            )
        found[name] = meant[0]
    return found


def seed_of_sample(seed: int, index: int) -> int:
    """Return the seed of a later sample, 64 bits."""
    return int((seed + index * _GOLDEN) % 2**_SEED_BITS)
