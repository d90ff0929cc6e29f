"""`Admission`: the one way of requests into an engine's core, of `LLMEngine` and of the server's
engine process. `CheckedRequest`: a request that has passed `Intake`, as messages carry it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.api.executor import RowPooling
from dovetail.api.sampler import RowSampling
from dovetail.end_reason import EndReason
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.siblings import make_siblings
from dovetail.errors import RequestError
from dovetail.front.grammars import AnswerRule
from dovetail.front.request_checks import at_most
from dovetail.front.sampling import seed_of_sample
from dovetail.request.lora import LoRARequest
from dovetail.request.media import MediaItem
from dovetail.request.request import RequestFields
from dovetail.request.sampling_params import SamplingParams, changed_unchecked

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dovetail.engine.adapter import Adapter
    from dovetail.engine.constraint import Constraint
    from dovetail.engine.finish import TokenWatcher
    from dovetail.front.assembly import Assembly


# a rule, the number of samples, and in whose turn the rule is compiled
ConstraintsOf = Callable[[AnswerRule, int, Hashable], "Sequence[Constraint]"]


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A validated request with all defaults filled in: all that an engine must know of it."""

    request_id: str
    prompt_ids: NDArray[np.int32]  # [tokens] that are computed
    sampling: RowSampling  # of the first sample
    max_tokens: int
    fields: RequestFields
    params: SamplingParams  # as policies and observers see them; `n` samples
    rule: AnswerRule | None = None
    pooling: RowPooling | None = None  # what it pools; it ends with its prompt then
    indivisible: bool = False  # its prompt is computed in one step
    extra: Mapping[str, Any] | None = None  # `Admission` validates it
    media: tuple[MediaItem, ...] = ()  # images of its prompt, ascending


class Admission:
    """Adds checked requests to the core of an engine. Called in the engine's thread."""

    def __init__(
        self,
        assembly: Assembly,
        constraints_of: ConstraintsOf | None = None,
        adapter_of: Callable[[LoRARequest], Adapter] | None = None,
    ) -> None:
        """The last two take the place of the assembly's, which compile rules and load adapters."""
        self._core = assembly.core
        self._values = assembly.values
        self._limits = assembly.config.limits
        self._counted: set[LiveRequest] = set()  # the first sample of each, until `ended`
        self._constraints_of = constraints_of or assembly.rules.constraints
        self._adapter_of = adapter_of or assembly.adapter

    def admit(
        self,
        request: CheckedRequest,
        watchers: Sequence[TokenWatcher | None] = (),
        client: Hashable = None,
        *,
        exempt: bool = False,
    ) -> list[LiveRequest]:
        """Add a request to the core; return its samples in order.

        `watchers`: one for each sample, unless empty. `client`: in whose turn its rule is compiled.
        `exempt`: `limits.max_waiting` doesn't count it.

        Raises, without side effects:

        - `RequestError` beyond `max_waiting`, for an id in use, and for what components refuse;
        - `UnsupportedError` and other errors of a grammar backend that can't be used;
        - `EngineDeadError` if the engine has failed.
        """
        if not exempt:
            unfinished = len(self._counted) + 1
            full = EndReason.QUEUE_FULL
            at_most("unfinished requests", unfinished, self._limits, "max_waiting", full)
        samples = self._samples(request, watchers, client)
        for place, sample in enumerate(samples):
            try:
                self._core.add(sample)
            except RequestError:  # the id is in use
                for added in samples[:place]:
                    self._core.abort(added)
                raise
        if not exempt:
            self._counted.add(samples[0])
        return samples

    def ended(self, samples: Sequence[LiveRequest]) -> None:
        """Forget a request whose samples have all ended.

        Breaks the reference cycle between them: the garbage collector would traverse all of their
        tokens, and delay a step.
        """
        self._counted.discard(samples[0])
        for sample in samples:
            sample.siblings = ()
            sample.gates.clear()  # of one that was aborted before it was shown

    def _samples(
        self, request: CheckedRequest, watchers: Sequence[TokenWatcher | None], client: Hashable
    ) -> list[LiveRequest]:
        """Return a `LiveRequest` for each sample."""
        n = request.params.n
        fields = request.fields
        lora = fields.lora_request
        came = fields.arrival_time if fields.arrival_time is not None else self._core.clock.now()
        shared: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "pooling": request.pooling,
            "indivisible": request.indivisible,
            "stop_ids": request.sampling.stop_token_ids,
            "arrival_time": self._core.earliest_arrival(came),
            "priority": fields.priority,
            "client": fields.client,
            "deadline": fields.deadline,
            "predicted_tokens": fields.predicted_tokens,
            "ttft_deadline": fields.ttft_deadline,
            "tbt_s": fields.tbt_s,
            "cache_keys": self._cache_keys(request),
            "media": tuple([item.span for item in request.media]),
            "items": request.media,
            "extra": self._values.extra(request.extra) if request.extra else {},
            "adapter": None if lora is None else self._adapter_of(lora),
            "parent": None if n == 1 else request.request_id,
        }
        sampling = request.sampling
        if sampling.logits_processors or sampling.extra_args:
            sampling = self._values.sampling(sampling)
        rule = request.rule
        constraints = [None] * n if rule is None else self._constraints_of(rule, n, client)
        samples = [
            LiveRequest(
                request.request_id if n == 1 else f"{request.request_id}#{index}",
                request.prompt_ids,
                _params_of_sample(request.params, index),
                sampling=None if request.pooling is not None else _of_sample(sampling, index),
                watchers=[one for one in watchers[index : index + 1] if one is not None],
                constraint=constraints[index],
                **shared,
            )
            for index in range(n)
        ]
        if n > 1:
            make_siblings(samples)
        return samples

    def _cache_keys(self, request: CheckedRequest) -> tuple[str, ...]:
        salt = request.fields.cache_salt
        keys = () if salt is None else (f"salt:{salt}",)
        if request.sampling.deterministic:  # other requests' K and V have other bits
            keys = (*keys, "deterministic")
        if self._core.kv.capabilities.media:
            return keys
        return (*keys, *[f"media:{item.digest.hex()}" for item in request.media])


def _params_of_sample(params: SamplingParams, index: int) -> SamplingParams:
    """Return those of one sample; only the first returns the prompt's log-probabilities."""
    if params.n == 1:
        return params
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return changed_unchecked(params, n=1, prompt_logprobs=prompt_logprobs)


def _of_sample(sampling: RowSampling, index: int) -> RowSampling:
    """Return the sampling of one sample, which shares the lists of the first."""
    if index == 0:
        return sampling
    return replace(sampling, seed=seed_of_sample(sampling.seed, index), prompt_logprobs=None)
