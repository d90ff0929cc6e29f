"""`LLM`: generate for a list of prompts and be done."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from dovetail.engine.llm_engine import LLMEngine, Prompt
from dovetail.errors import EngineDeadError, RequestError
from dovetail.request import OutputKind, RequestOutput, SamplingParams

Message = Mapping[str, str]  # {"role": "user", "content": "…"}


class LLM:
    """An engine for offline use.

    outputs = LLM("demo").generate(["ROMEO:", "JULIET:"], SamplingParams(max_tokens=50))
    """

    def __init__(self, model: str | Path = "demo", **overrides: Any) -> None:
        """`model`: "demo", a local directory or a hub id. `overrides`: any key of `engine.yaml`, e.g. `scheduler="priority"`.
        A whole config goes through `LLM(**config)` or `LLMEngine.from_config`."""
        self.engine = LLMEngine.from_config({"model": str(model)}, **overrides)
        self._requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: one or a list, each text or token ids; with one `SamplingParams`, or one each.

        Returns an output for each prompt, in the order of the prompts. Raises `RequestError` if any is wrong, before anything is computed,
        and `EngineDeadError` if the engine fails on the way.
        """
        prompts = _as_list(prompts)
        params = _one_each(sampling_params, len(prompts))
        ids = [f"generate-{self._requests + i}" for i in range(len(prompts))]
        self._requests += len(prompts)
        try:
            for request_id, prompt, one in zip(ids, prompts, params, strict=True):
                self.engine.add_request(request_id, prompt, replace(one, output_kind=OutputKind.FINAL))
            outputs = self._run(len(ids), use_tqdm)
        except BaseException:  # an interrupt too: leave nothing behind for the next call
            self.engine.abort_request(ids)
            raise
        return [outputs[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, with the model's chat template. Raises `RequestError` if the model has none."""
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [self.engine.tokenizer.apply_chat_template(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self, count: int, use_tqdm: bool) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        with tqdm(total=count, desc="requests", unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
            speed = _Speed(self.engine)
            while len(outputs) < count:
                for output in self.engine.step():
                    outputs[output.request_id] = output
                    self._check(output)
                    bar.update()
                bar.set_postfix_str(speed.text(), refresh=False)
        return outputs

    def _check(self, output: RequestOutput) -> None:
        for sample in output.outputs:
            if sample.finish_reason == "error":
                raise EngineDeadError(f"request {output.request_id} failed: {sample.stop_reason}")


class _Speed:
    """What the progress bar says beside the count."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._begun = time.perf_counter()
        self._before = engine.stats()

    def text(self) -> str:
        stats, elapsed = self._engine.core.stats, max(time.perf_counter() - self._begun, 1e-9)
        prefill = (stats.prefill_tokens - self._before.prefill_tokens) / elapsed
        decode = (stats.decode_tokens - self._before.decode_tokens) / elapsed
        return f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and all(type(token) is int for token in prompts) else prompts


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"sampling_params must be one or one for each prompt: got {len(params)} for {count} prompts")
    return list(params)
