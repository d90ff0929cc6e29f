"""`Intake`: validation and tokenization of requests, in an `LLMEngine` or in a front end whose engine is in another process.

`make_samples` turns a `CheckedRequest` into the core's requests, with the defaults of a model's files.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any

from dovetail.api.executor import RowPooling
from dovetail.api.sampler import RowSampling
from dovetail.config.limits import Limits
from dovetail.engine.adapter import Adapter
from dovetail.engine.constraint import Constraint
from dovetail.engine.finish import TokenWatcher
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.siblings import make_siblings
from dovetail.errors import RequestError, shown
from dovetail.front import request_checks
from dovetail.front.detokenizer import IncrementalText, StopStrings, special_names
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.pooling import PoolingFacts, PoolingIntake
from dovetail.front.prompt_source import PromptSource
from dovetail.front.request_checks import Prompt, as_ids, as_sequence, content_of, is_text
from dovetail.front.tokenizer import TokenizedText, Tokenizer
from dovetail.request.pooling import PoolingParams
from dovetail.request.request import RequestFields, token_array
from dovetail.request.sampling_params import SamplingParams, changed_unchecked, in_use
from dovetail.request.structured import Structured

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


ENABLE = "make it with enable_lora=True (`adapters: {}` in engine.yaml)"
_SEED_BITS = 64
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads the seeds of samples


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

    stop_ids = (
        (params.stop_token_ids or ())
        if params.ignore_eos
        else (*(params.stop_token_ids or ()), *defaults.eos_token_ids)
    )
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
        allowed_token_ids=None
        if params.allowed_token_ids is None
        else tuple(params.allowed_token_ids),
        bad_words=tuple(dict.fromkeys((*defaults.bad_words, *bad_words))),
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        extra_args=params.extra_args,
    )


logger = logging.getLogger("dovetail")


@dataclass(frozen=True, slots=True)
class IntakeFacts:
    """The properties of an engine that `Intake` needs. Plain values, to be sent to another process."""

    limits: Limits
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    defaults: GenerationDefaults
    executor: str  # its name, as the config has it
    sampler: str
    has_logprobs: bool = True
    extra_args: frozenset[str] = (
        frozenset()
    )  # keys of `SamplingParams.extra_args` that the sampler understands
    logits_processors: tuple[str, ...] = ()  # full names of the engine's
    has_masks: bool = False
    pooling: PoolingFacts | None = None  # None: it can't pool
    has_adapters: bool = False


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A validated request. The content of its `extra` is validated elsewhere, by models of the components."""

    request_id: str
    text: str | None  # the prompt's, if it was one
    token_ids: tuple[int, ...]
    prompt_array: NDArray[
        np.int32
    ]  # the part of it that is computed: all but padding that a classifier skips
    params: SamplingParams  # with `min_tokens` cut to the room that there is
    max_tokens: int  # with the room that the model's length leaves
    fields: RequestFields
    pooling: RowPooling | None = (
        None  # what it pools, if it does; `params` are then those of the core
    )
    indivisible: bool = False  # its prompt is computed in one step


class Intake:
    """Validates requests and resolves their defaults. `check` and `seed_of` aren't thread safe; `tokenized` is."""

    def __init__(
        self, facts: IntakeFacts, tokenizer: Callable[[], Tokenizer], seeds: random.Random
    ) -> None:
        """`tokenizer` loads it when first called. `seeds` draws those of requests that name none."""
        self.facts = facts
        self._tokenizer = tokenizer
        self._seeds = seeds
        self._warned = False  # of a second BOS

    @cached_property
    def pooling(self) -> PoolingIntake:
        """The part for requests that pool. Raises `RequestError` if the engine can't."""
        if self.facts.pooling is None:
            raise RequestError(
                f"executor {self.facts.executor} can't pool: it generates only; embeddings and scores need `local` or `tensor`"
            )
        return PoolingIntake(self.facts.pooling, self._encoded, self._tokenizer, self._check_chars)

    def check(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        fields: RequestFields,
        extra: Mapping[str, Any] | None,
    ) -> CheckedRequest:
        """Validate a request, but for the content of `extra`. Raises `RequestError`, and `ModelLoadError` if it needs a tokenizer and the model has
        none."""
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id must be a non-empty string, got {shown(request_id)}")
        adapter = None if fields.lora_request is None else fields.lora_request.lora_name
        names = {
            "request_id": request_id,
            "client": fields.client,
            "cache_salt": fields.cache_salt,
            "lora_request.lora_name": adapter,
        }
        for name, value in names.items():
            if value is not None:
                request_checks.check_name(name, value, self.facts.limits)
        if fields.lora_request is not None and not self.facts.has_adapters:
            raise RequestError(f"lora_request: this engine takes no adapters: {ENABLE}")
        request_checks.check_extra(extra, self.facts.limits)
        if isinstance(params, PoolingParams):
            return self._checked_pooling(request_id, prompt, params, fields)
        in_use(params)
        if (can := self.facts.pooling) is not None and not can.capacity.generates:
            raise RequestError(f"this model can't generate: {can.calls}")
        text, given = self._read_prompt(prompt, params)
        room = self.facts.max_model_len - 1
        if params.truncate_prompt_tokens is not None:
            given = given[
                -(room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens) :
            ]
        if len(given) > room:
            raise RequestError(
                f"the prompt has {len(given)} tokens; with max_model_len {self.facts.max_model_len} at most {room} leave room for one to generate"
            )
        token_ids, prompt_array = self._checked_ids(given)
        self._check_params(params)
        room = self.facts.max_model_len - len(token_ids)
        defaults = self.facts.defaults
        asked = defaults.max_tokens if params.max_tokens is None else params.max_tokens
        limit = room if asked is None else min(asked, room)
        rule = params.structured
        is_ruled = (
            isinstance(rule, Structured) and rule.kind is not None
        )  # which says where the answer ends
        least = params.min_tokens or (0 if is_ruled else defaults.min_tokens)
        if (least := min(least, limit)) != params.min_tokens:  # there may be less room
            params = changed_unchecked(params, min_tokens=least)
        return CheckedRequest(request_id, text, token_ids, prompt_array, params, limit, fields)

    def seed_of(self, params: SamplingParams) -> int:
        """Return the seed of a request, 64 bits: a new one if it names none."""
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(_SEED_BITS)
        return int(seed % 2**_SEED_BITS)

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return each bad word as tokens, as spelled at the start of a text and after a space. Raises `RequestError` for one that has no tokens, or
        if they are too many tokens."""
        if not (words := params.bad_words):
            return ()
        ids = self._tokenizer().encode_all(
            [*words, *(f" {word.lstrip()}" for word in words)], special_tokens=False
        )
        for word, *variants in zip(words, ids[: len(words)], ids[len(words) :], strict=True):
            if not any(variants):
                raise RequestError(
                    f"bad_words: {shown(word)} is no token of this model's tokenizer, so it can't be banned"
                )
        sequences = dict.fromkeys(tuple(variant) for variant in ids if variant)
        request_checks.at_most(
            "bad_words: the tokens of all together",
            sum(map(len, sequences)),
            self.facts.limits,
            "max_bad_word_tokens",
        )
        return tuple(sequences)

    def texts(
        self, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> list[IncrementalText | None]:
        """Return the incremental text of each sample; None without detokenization."""
        if not params.detokenize:
            return [None] * params.n
        tokenizer, stops = self._tokenizer(), None
        if params.stop:
            stops = StopStrings(
                params.stop, special_names(tokenizer) if params.skip_special_tokens else None
            )
        return [
            IncrementalText(tokenizer, params, prompt_token_ids, stops) for _ in range(params.n)
        ]

    def tokenized(self, prompt: Prompt, *, cut: bool = False) -> Prompt:
        """Return a prompt of text with its token ids, any other as it is. `cut`: its parameters truncate it. Raises `RequestError` for what can't
        be a prompt."""
        return self.source([prompt], cut=cut).all()[0] if is_text(prompt) else prompt

    def source(self, prompts: Sequence[Prompt], *, cut: bool = False) -> PromptSource:
        """Return the source of the same prompts, tokenized; batching takes a fraction of the time. `cut`: their parameters
        truncate them. Raises `RequestError` for what can't be a prompt, and for a text that is too long."""
        contents = [content_of(prompt) for prompt in prompts]
        chars = [len(content) if isinstance(content, str) else 0 for content in contents]
        for one in chars:
            self._check_chars(one, cut)
        return PromptSource(chars, lambda part: self._encoded(prompts[part]))

    def _check_chars(self, chars: int, cut: bool) -> None:
        facts = self.facts
        cut = cut or (facts.pooling is not None and facts.pooling.cut_at is not None)
        if chars:  # otherwise no tokenizer is needed
            request_checks.check_prompt_chars(
                chars, facts.limits, facts.max_model_len, self._tokenizer(), cut=cut
            )

    def _encoded(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        texts = {
            place: content
            for place, content in enumerate(map(content_of, prompts))
            if isinstance(content, str)
        }
        encoded = self._tokenizer().encode_all(list(texts.values())) if texts else []
        self._warn_of_second_bos(encoded)
        ids = iter(encoded)
        return [
            TokenizedText(texts[place], next(ids)) if place in texts else prompt
            for place, prompt in enumerate(prompts)
        ]

    def _warn_of_second_bos(self, encoded: Sequence[list[int]]) -> None:
        """Warn once if a text begins with BOS, and the tokenizer has added another."""
        if (
            self._warned
            or not encoded
            or (bos := self._tokenizer().bos_token_id) is None
            or not any(ids[:2] == [bos, bos] for ids in encoded)
        ):
            return
        self._warned = True
        logger.warning(
            "a prompt begins with two BOS tokens: one that its text has, and one that the tokenizer adds, with which the model may answer worse. "
            "Leave it out of the text; for conversations use chat(), which adds none"
        )

    def _checked_pooling(
        self, request_id: str, prompt: Prompt, params: PoolingParams, fields: RequestFields
    ) -> CheckedRequest:
        can = self.pooling.facts
        pooling = can.row_pooling(params)
        text, given = self._read_prompt(prompt, params)
        given = self.pooling.cut(given, params, is_text=text is not None)
        if len(given) > can.max_tokens:
            cut = "" if params.truncate_prompt_tokens else "; truncate_prompt_tokens=-1 cuts it"
            raise RequestError(
                f"the prompt has {len(given)} tokens, and at most {can.max_tokens} fit ({can.limit}){cut}"
            )
        token_ids, prompt_array = self._checked_ids(given)
        if isinstance(prompt, TokenizedText) and prompt.second is not None:
            pooling = dataclasses.replace(pooling, second=prompt.second)
        prompt_array = can.pooled_part(prompt_array, pooling)
        core = can.core_params(pooling)
        return CheckedRequest(
            request_id,
            text,
            token_ids,
            prompt_array,
            core,
            1,
            fields,
            pooling,
            can.capacity.indivisible,
        )

    def _read_prompt(
        self, prompt: Prompt, params: SamplingParams | PoolingParams
    ) -> tuple[str | None, Sequence[Any]]:
        """Return the prompt's text, if it is one, and its tokens, which may be anything if it is none."""
        prompt = self.tokenized(prompt, cut=request_checks.cuts(params))
        if isinstance(prompt, TokenizedText):
            return prompt.text, prompt.token_ids
        return None, as_sequence(content_of(prompt))

    def _checked_ids(self, given: Sequence[Any]) -> tuple[tuple[int, ...], NDArray[np.int32]]:
        """Return the token ids of a prompt, as a tuple and as an array."""
        if not given:
            raise RequestError("the prompt is empty: it needs at least one token")
        token_ids = as_ids(given)
        vocab_size = self.facts.vocab_size
        try:
            numbers = token_array(token_ids)
            wrong = [
                int(token)
                for token in (numbers.min(), numbers.max())
                if not 0 <= token < vocab_size
            ]
        except OverflowError:
            wrong = [max(token_ids, key=abs)]
        if wrong:
            raise RequestError(
                f"prompt token id {shown(wrong[0])} is out of the vocabulary: allowed are 0 to {vocab_size - 1}"
            )
        return token_ids, numbers

    def _check_params(self, params: SamplingParams) -> None:
        request_checks.check_params(params, self.facts.limits)
        vocab_size = self.facts.vocab_size
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            wrong = [token for token in getattr(params, name) or () if token >= vocab_size]
            if wrong:
                raise RequestError(
                    f"{name}: token id {shown(wrong[0])} is out of the vocabulary: allowed are 0 to {vocab_size - 1}"
                )
        if not self.facts.has_logprobs and (
            params.logprobs is not None or params.prompt_logprobs is not None
        ):
            raise RequestError(f"logprobs: executor {self.facts.executor} can't return them")
        if params.structured is not None and not self.facts.has_masks:
            raise RequestError(
                f"structured: executor {self.facts.executor} can't mask tokens, which a rule of the answer needs"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab_size:
                raise RequestError(
                    f"{name} must be at most the vocabulary's {vocab_size} tokens, got {getattr(params, name)}"
                )
        unknown = sorted(set(params.extra_args) - self.facts.extra_args)
        if unknown:
            known = ", ".join(sorted(self.facts.extra_args)) or "none"
            raise RequestError(
                f"extra_args: {shown(unknown[0])} means nothing to sampler {self.facts.sampler}; it understands: {known}"
            )
        if params.logits_processors:
            full_names(params.logits_processors, self.facts.logits_processors)


def full_names(asked: Iterable[str], known: Sequence[str]) -> dict[str, str]:
    """Return the full name of each logits processor that a request asks for by a full or short name, by that name. `known`: full names of the
    engine's. Raises `RequestError` for a name that isn't one of them, or stands for several, and for two names of one."""
    found: dict[str, str] = {}
    for name in asked:
        meant = [full for full in known if name in (full, full.partition(":")[2])]
        if not meant:
            theirs = (
                f"it has: {', '.join(known)}"
                if known
                else "it has none: list them in `logits_processors` of engine.yaml"
            )
            raise RequestError(f"logits_processors: this engine has no {shown(name)}; {theirs}")
        if len(meant) > 1:
            raise RequestError(
                f"logits_processors: {shown(name)} is ambiguous, it may be {' or '.join(meant)}: give the full name"
            )
        if meant[0] in found.values():
            raise RequestError(
                f"logits_processors: {meant[0]} is named twice, by its full and its short name"
            )
        found[name] = meant[0]
    return found


def make_samples(
    request: CheckedRequest,
    sampling: RowSampling,
    arrival_time: float,
    watchers: Sequence[TokenWatcher | None],
    extra: Mapping[str, Any],
    constraints: Sequence[Constraint] = (),
    adapter: Adapter | None = None,
) -> list[LiveRequest]:
    """Return a `LiveRequest` for each sample of a request, in order. `sampling` is that of the first; `watchers` has one for each, and so has
    `constraints`, unless it is empty; `extra`: distribution -> validated model. `adapter`: that of its `lora_request`."""
    params, fields = request.params, request.fields.values()
    salt, _ = fields.pop("cache_salt"), fields.pop("lora_request")
    fields |= {
        "arrival_time": arrival_time,
        "parent": None if params.n == 1 else request.request_id,
        "cache_keys": () if salt is None else (f"salt:{salt}",),
        "extra": extra,
    }
    samples = [
        LiveRequest(
            request.request_id if params.n == 1 else f"{request.request_id}#{index}",
            request.prompt_array,
            params if params.n == 1 else _params_of_sample(params, index),
            max_tokens=request.max_tokens,
            sampling=None
            if request.pooling is not None
            else sampling
            if index == 0
            else _sampling_of_sample(sampling, index),
            pooling=request.pooling,
            indivisible=request.indivisible,
            stop_ids=sampling.stop_token_ids,
            watchers=() if watcher is None else (watcher,),
            constraint=constraint,
            adapter=adapter,
            **fields,
        )
        for index, (watcher, constraint) in enumerate(
            zip(watchers, constraints or repeat(None, len(watchers)), strict=True)
        )
    ]
    if params.n > 1:
        make_siblings(samples)
    return samples


def _params_of_sample(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of one sample; only the first returns the prompt's log-probabilities."""
    return changed_unchecked(
        params, n=1, prompt_logprobs=params.prompt_logprobs if index == 0 else None
    )


def _sampling_of_sample(sampling: RowSampling, index: int) -> RowSampling:
    """Return the sampling of a later sample, which shares the lists of the first."""
    return dataclasses.replace(
        sampling, seed=(sampling.seed + index * _GOLDEN) % 2**_SEED_BITS, prompt_logprobs=None
    )
