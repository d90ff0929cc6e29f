"""`Intake`: validates and tokenizes requests where they enter, in an `LLMEngine` or in a front end
whose engine is in another process.

What it returns has passed: nothing of it is checked again, but for the values that components read
(`dovetail.front.component_values`). `Admission` adds it to the core.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dovetail.api.sampler import RowSampling
from dovetail.errors import RequestError, shown
from dovetail.front import request_checks
from dovetail.front.admission import CheckedRequest
from dovetail.front.grammars import AnswerRule
from dovetail.front.intake_facts import IntakeFacts
from dovetail.front.media.prompts import ImagePrompts, MediaPrompt
from dovetail.front.outputs import PooledReading
from dovetail.front.pooling import PoolingIntake
from dovetail.front.prompts import Prompt, PromptEncoder, as_sequence, checked_ids, content_of, cuts
from dovetail.front.sampling import SamplingIntake
from dovetail.front.tokenizer import TokenizedText, Tokenizer
from dovetail.request.media import MediaItem
from dovetail.request.pooling import PoolingParams
from dovetail.request.request import RequestFields
from dovetail.request.sampling_params import SamplingParams, changed_unchecked
from dovetail.request.structured import Structured

if TYPE_CHECKING:
    from dovetail.front.detokenizer import IncrementalText

ENABLE = "make it with enable_lora=True (`adapters: {}` in engine.yaml)"


@dataclass(frozen=True, slots=True)
class Entered:
    """A request that has passed, and what its outputs are made with, which stays where they are."""

    request: CheckedRequest
    params: SamplingParams  # as given; `min_tokens` is cut to the room that there is
    prompt: str | None  # its text, if it was one
    prompt_token_ids: list[int]  # with padding that a classifier skips
    reading: PooledReading | None = None  # of what it pools; None: it generates


class Intake:
    """Validates requests and resolves their defaults. `check` isn't thread safe."""

    def __init__(
        self, facts: IntakeFacts, tokenizer: Callable[[], Tokenizer], seeds: random.Random
    ) -> None:
        """`tokenizer` loads it when first called.

        `seeds` draws those of requests that name none.
        """
        self.facts = facts
        pools = facts.pooling
        cuts_all = pools is not None and pools.cut_at is not None
        media = facts.media
        self.images = (
            None
            if media is None
            else ImagePrompts(media, facts.limits, tokenizer, facts.max_model_len)
        )
        self.prompts = PromptEncoder(
            tokenizer,
            facts.limits,
            facts.max_model_len,
            cuts_all=cuts_all,
            images=self.images,
        )
        self._tokenizer = tokenizer
        self._sampling = SamplingIntake(facts, tokenizer, seeds)

    @cached_property
    def pooling(self) -> PoolingIntake:
        """The part for requests that pool. Raises `RequestError` if the engine can't."""
        if self.facts.pooling is None:
            raise RequestError(
                f"executor {self.facts.executor} can't pool: it generates only; embeddings and "
                "scores need `local` or `tensor`"
            )
        prompts = self.prompts
        return PoolingIntake(
            self.facts.pooling, prompts.encoded, self._tokenizer, prompts.check_chars
        )

    def check(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        fields: RequestFields,
        extra: Mapping[str, Any] | None = None,
    ) -> Entered:
        """Validate a request and resolve its defaults.

        Raises `RequestError`, and `ModelLoadError` if it needs a tokenizer and the model has none.
        """
        fields = fields.checked()
        self._check_names(request_id, fields)
        request_checks.check_extra(extra, self.facts.limits)
        if isinstance(params, PoolingParams):
            entered = self._pools(request_id, prompt, params, fields)
        else:
            entered = self._generates(request_id, prompt, params, fields)
        if not extra:
            return entered
        return replace(entered, request=replace(entered.request, extra=extra))

    def texts(self, entered: Entered) -> list[IncrementalText | None]:
        """Return the incremental text of each sample; None without detokenization."""
        return self._sampling.texts(entered.params, entered.prompt_token_ids)

    def _check_names(self, request_id: Any, fields: RequestFields) -> None:
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

    def _generates(
        self, request_id: str, prompt: Prompt, params: SamplingParams, fields: RequestFields
    ) -> Entered:
        if type(params) is not SamplingParams:  # those of other engines may be changed later
            params = changed_unchecked(params)
        facts = self.facts
        if facts.pooling is not None and not facts.pooling.capacity.generates:
            raise RequestError(f"this model can't generate: {facts.pooling.calls}")
        text, given, media = self._read_prompt(prompt, params)
        if media:
            request_checks.check_with_images(params, always=facts.always_deterministic)
        room = facts.max_model_len - 1
        if params.truncate_prompt_tokens is not None:
            kept = room if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
            given = given[-kept:]
        if len(given) > room:
            raise RequestError(
                f"the prompt has {len(given)} tokens; with max_model_len {facts.max_model_len} at "
                f"most {room} leave room for one to generate"
            )
        token_ids = checked_ids(given, facts.vocab_size)
        self._sampling.check(params)
        max_tokens = self._max_tokens(params, facts.max_model_len - len(token_ids))
        rule = None if params.structured is None else AnswerRule.of(params.structured)
        params = self._with_min_tokens(params, max_tokens)
        request = CheckedRequest(
            request_id,
            token_ids,
            self._sampling.resolve(params),
            max_tokens,
            fields,
            params,
            rule=rule,
            media=media,
        )
        return Entered(request, params, text, token_ids.tolist())

    def _max_tokens(self, params: SamplingParams, room: int) -> int:
        asked = params.max_tokens
        if asked is None:
            asked = self.facts.defaults.max_tokens
        return room if asked is None else min(asked, room)

    def _with_min_tokens(self, params: SamplingParams, max_tokens: int) -> SamplingParams:
        """Return the parameters with the `min_tokens` that holds: there may be less room."""
        least = params.min_tokens
        rule = params.structured
        if not least and not (isinstance(rule, Structured) and rule.kind is not None):
            least = self.facts.defaults.min_tokens  # a rule says where the answer ends
        least = min(least, max_tokens)
        return params if least == params.min_tokens else changed_unchecked(params, min_tokens=least)

    def _pools(
        self, request_id: str, prompt: Prompt, params: PoolingParams, fields: RequestFields
    ) -> Entered:
        can = self.pooling.facts
        pooling = can.row_pooling(params)
        text, given, media = self._read_prompt(prompt, params)
        if media:
            raise RequestError("only requests that generate take images")
        given = self.pooling.cut(given, params, is_text=text is not None)
        if len(given) > can.max_tokens:
            cut = "" if params.truncate_prompt_tokens else "; truncate_prompt_tokens=-1 cuts it"
            raise RequestError(
                f"the prompt has {len(given)} tokens, and at most {can.max_tokens} fit "
                f"({can.limit}){cut}"
            )
        token_ids = checked_ids(given, self.facts.vocab_size)
        if isinstance(prompt, TokenizedText) and prompt.second is not None:
            pooling = replace(pooling, second=prompt.second)
        seen = prompt.seen if isinstance(prompt, TokenizedText) else None
        if seen is not None and seen < len(token_ids):
            pooling = replace(pooling, seen=seen)
        core = can.core_params(pooling)
        pooled_ids = can.pooled_part(token_ids, pooling)
        request = CheckedRequest(
            request_id,
            pooled_ids,
            RowSampling(prompt_logprobs=core.prompt_logprobs),
            1,
            fields,
            core,
            pooling=pooling,
            indivisible=can.capacity.indivisible,
        )
        side = prompt.side if isinstance(prompt, TokenizedText) else None
        reading = self.pooling.reading(params, pooled_ids, side)
        return Entered(request, core, text, token_ids.tolist(), reading)

    def _read_prompt(
        self, prompt: Prompt, params: SamplingParams | PoolingParams
    ) -> tuple[str | None, Sequence[Any], tuple[MediaItem, ...]]:
        """Return the prompt's text, if it is one, its tokens, which may be anything else, and its
        images."""
        prompt = self.prompts.tokenized(prompt, cut=cuts(params))
        if isinstance(prompt, TokenizedText):
            return prompt.text, prompt.token_ids, ()
        if isinstance(prompt, MediaPrompt):
            return prompt.text, as_sequence(prompt.token_ids), prompt.media
        return None, as_sequence(content_of(prompt)), ()

    def close(self) -> None:
        """End the processes that prepare images."""
        if self.images is not None:
            self.images.close()
