"""The engines with vLLM's positions of arguments and types of outputs: lists of token ids, and
tensors of what was pooled."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import dovetail
from dovetail.compat.settable import Settable
from dovetail.compat.vllm.sampling_params import SamplingParams
from dovetail.errors import RequestError
from dovetail.front.outputs import EngineOutput
from dovetail.front.prompts import Prompt
from dovetail.front.vllm_calls import by_position
from dovetail.request.outputs import RequestOutput
from dovetail.request.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput


class LLMEngine(dovetail.LLMEngine):
    """`dovetail.LLMEngine` as vLLM's programs call it."""

    _as_ids = list

    def add_request(  # type: ignore[override]
        self,
        /,
        request_id: str,
        prompt: Prompt | None = None,
        params: dovetail.SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        *more: Any,
        inputs: Prompt | None = None,
        **named: Any,
    ) -> str:
        """Add a request, and return its id. `inputs`: the prompt's older name."""
        if (prompt is None) == (inputs is None):
            raise RequestError("add_request(): give the prompt, once, as `prompt`")
        given: Any = inputs if prompt is None else prompt
        others = by_position("add_request", more, named)
        super().add_request(request_id, given, params, arrival_time, **others)
        return request_id

    def default_sampling_params(self) -> SamplingParams:
        """Return the model's default sampling parameters."""
        return SamplingParams(**self._assembly.defaults.sampling())

    def compute(self) -> list[EngineOutput]:
        """Run a step in this thread, as `step` does."""
        return [_with_tensor(output) for output in super().compute()]


class AsyncLLMEngine(dovetail.AsyncLLMEngine):
    """`dovetail.AsyncLLMEngine` as vLLM's programs call it."""

    _engine_class = LLMEngine

    def generate(self, *args: Any, **fields: Any) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of one request, as `dovetail.AsyncLLMEngine.generate`."""
        more = by_position("generate", args[3:], fields)
        return super().generate(*map(_copied, args[:3]), **_copied_in(more))

    def encode(
        self, *args: Any, **fields: Any
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool one prompt, as `dovetail.AsyncLLMEngine.encode`."""
        more = by_position("encode", args[3:], fields)
        return super().encode(*map(_copied, args[:3]), **_copied_in(more))


class LLM(dovetail.LLM):
    """`dovetail.LLM` as vLLM's programs call it."""

    _engine_class = LLMEngine

    def chat(
        self,
        messages: Any,
        sampling_params: dovetail.SamplingParams | Sequence[dovetail.SamplingParams] | None = None,
        use_tqdm: Any = True,
        *more: Any,
        **named: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, as `dovetail.LLM.chat`."""
        others = by_position("chat", more, named)
        return super().chat(messages, sampling_params, use_tqdm, **others)

    def beam_search(
        self, prompts: Any, params: dovetail.BeamSearchParams, *more: Any, **named: Any
    ) -> list[Any]:
        """Search beams, as `dovetail.LLM.beam_search`."""
        return super().beam_search(prompts, params, **by_position("beam_search", more, named))


def _copied(value: Any) -> Any:
    """Return parameters, which may be changed later, as a copy; anything else as it is."""
    return value.clone() if isinstance(value, Settable) else value


def _copied_in(named: dict[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) for name, value in named.items()}


def _with_tensor(output: EngineOutput) -> EngineOutput:
    """Return an output with what was pooled as a tensor."""
    torch = sys.modules.get("torch")  # by which it was pooled
    if (
        isinstance(output, PoolingRequestOutput)
        and output.outputs is not None
        and torch is not None
    ):
        output.outputs = PoolingOutput(torch.tensor(output.outputs.data), output.outputs.token_ids)
    return output
