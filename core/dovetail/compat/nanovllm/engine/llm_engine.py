"""nano-vllm's engine: the caller adds requests and runs the steps; a step returns what has finished
and its number of tokens."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dovetail
from dovetail.compat.nanovllm.sampling_params import SamplingParams
from dovetail.engine.stats import EngineStats
from dovetail.errors import RequestError, shown
from dovetail.front.outputs import EngineOutput
from dovetail.front.prompts import Prompt
from dovetail.front.vllm_args import translated
from dovetail.front.vllm_methods import MissingMethodError
from dovetail.request.outputs import RequestOutput
from dovetail.request.sampling_params import OutputKind, changed_unchecked

logger = logging.getLogger("dovetail")

# as nano-vllm: a step computes prompts or decodes, never both
PREFILL_FIRST = "dovetail:prefill_first"
INTERNALS = ("block_manager", "config", "events", "model_runner", "ps", "scheduler")


class LLMEngine:
    """An engine with nano-vllm's methods.

    ```python
    llm = LLM("demo")
    llm.add_request("ROMEO:", SamplingParams(max_tokens=50))
    while not llm.is_finished():
        outputs, num_tokens = llm.step()
        for seq_id, token_ids in outputs:
            print(llm.tokenizer.decode(token_ids))
    ```
    """

    def __init__(self, model: str | Path, **kwargs: Any) -> None:
        """`model`: "demo", a local directory, a hub id or an `engine.yaml`. `kwargs`: nano-vllm's
        arguments, or those of `dovetail.LLM`. Raises `ConfigError` for one that can't be honoured.

        The scheduler is `prefill_first`, unless another is chosen.
        """
        config = dovetail.EngineConfig.load(model, **translated(kwargs))
        if "scheduler" not in config.model_fields_set:
            config = dovetail.EngineConfig.load(config, scheduler=PREFILL_FIRST)
        self._llm = llm = dovetail.LLM(config)
        self.engine = llm.engine  # has the config and statistics
        self._close = weakref.finalize(self, llm.close)  # also at interpreter exit
        self._seq_ids = itertools.count()
        self._finished: list[EngineOutput] = []  # not returned yet

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine!r})"

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return self._llm.get_tokenizer()

    def add_request(self, prompt: Prompt, sampling_params: dovetail.SamplingParams) -> int:
        """Add a request: a text or token ids. Return its id, which `step` returns with its tokens.
        Raises `RequestError` if it is invalid, and `EngineDeadError` after `exit`."""
        seq_id = next(self._seq_ids)
        params = changed_unchecked(_single(sampling_params), output_kind=OutputKind.FINAL)
        self.engine.add_request(f"seq-{seq_id}", prompt, params)
        return seq_id

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run a step. Return (id, token ids) of each request that has finished, and the number of
        tokens of the step: positive for a prefill step, negative for decodes, 0 if there was
        nothing to compute.

        Under a scheduler that mixes both in a step, the number is that of the prefill. Raises
        `EngineDeadError` after `exit`, or if the engine has failed.
        """
        num_tokens = self.engine.run_in_thread().call(self._step)
        outputs = self._finished
        self._finished = []
        return [(_seq_id(output), _token_ids(output)) for output in outputs], num_tokens

    def _step(self) -> int:
        """Step, in the engine's thread, until a step's results are in; with overlap the first call
        only submits one. Return the number of tokens. What has finished is kept in `_finished`, so
        that a Ctrl-C loses nothing."""
        engine = self.engine
        before = engine.stats()
        while True:
            self._finished += engine.step()
            num_tokens = _tokens_between(before, engine.stats())
            if num_tokens or self._finished or not engine.has_unfinished_requests():
                return num_tokens

    def is_finished(self) -> bool:
        """Return True if no request is unfinished, and `step` has returned all."""
        return not self._finished and not self.engine.has_unfinished_requests()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: dovetail.SamplingParams | Sequence[dovetail.SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """Complete one prompt or a list, each text or token ids, with one `SamplingParams` for all
        or one for each. Return a dict with "text" and "token_ids" for each prompt, in order.

        Requests of `add_request` are computed along with them; `step` returns these. Raises as
        `dovetail.LLM.generate`.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        for one in params if isinstance(params, Sequence) else [params]:
            _single(one)
        outputs = self._llm.generate(prompts, params, use_tqdm)
        return [{"text": output["text"], "token_ids": _token_ids(output)} for output in outputs]

    def exit(self) -> None:
        """Abort unfinished requests, end all processes and release the model. Idempotent; also
        called at interpreter exit."""
        self._close()

    def __getattr__(self, name: str) -> Any:
        if name in INTERNALS:
            instead = "that is inside of nano-vllm; `engine` has core, config and capacity"
        elif not name.startswith("_") and hasattr(dovetail.LLM, name):
            instead = "nano-vllm has no such method: use dovetail.LLM, which has it"
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise MissingMethodError(f"{type(self).__name__}.{name}: {instead}")


def _single(params: Any) -> Any:
    """Return parameters that ask for one answer: nano-vllm's results have no room for more. Raises
    `RequestError`."""
    if not isinstance(params, dovetail.SamplingParams):
        raise RequestError(
            f"sampling_params must be SamplingParams, or a list of them, got {shown(params)}"
        )
    if params.n != 1:
        raise RequestError(
            f"n must be 1, got {params.n}: a result has one answer; dovetail.LLM returns several"
        )
    return params


def _tokens_between(before: EngineStats, after: EngineStats) -> int:
    """Return nano-vllm's number of tokens of the steps between two snapshots."""
    prefill = after.prefill_tokens - before.prefill_tokens
    return prefill or before.generated_tokens - after.generated_tokens


def _seq_id(output: EngineOutput) -> int:
    return int(output.request_id.rpartition("-")[2])


def _token_ids(output: EngineOutput) -> list[int]:
    """Return the tokens of a finished request. Logs the error that ended it, if one did:
    nano-vllm's results have no place for it."""
    assert isinstance(output, RequestOutput)  # as its parameters sample
    answer = output.outputs[0]
    if answer.finish_reason in ("error", "rejected"):
        logger.error(
            "request %s ended as %r: %s",
            output.request_id,
            answer.finish_reason,
            answer.stop_reason,
        )
    return list(answer.token_ids)


__all__ = ["LLMEngine"]
