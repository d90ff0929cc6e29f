"""`LLM`: offline generation, embeddings and scores, for lists of prompts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from tqdm.auto import tqdm  # in a notebook a widget

from dovetail.base.checks import BINARY, is_integer
from dovetail.config.engine import EngineConfig
from dovetail.errors import EngineDeadError, RequestError, shown
from dovetail.front import engine_info
from dovetail.front.beam_search import BeamSearchOutput, beam_search
from dovetail.front.chat import ChatFrontEnd, ChatOptions
from dovetail.front.chat_messages import Message
from dovetail.front.engine_thread import Aborted, Unread
from dovetail.front.llm_engine import LLMEngine
from dovetail.front.outputs import EngineOutput
from dovetail.front.pooling import ScorePlan, paired
from dovetail.front.prompts import Prompt, cuts, with_images
from dovetail.front.vllm_args import translated
from dovetail.front.vllm_calls import check_call
from dovetail.front.vllm_methods import SaysWhatIsMissing
from dovetail.request.lora import LoRARequest
from dovetail.request.outputs import RequestOutput
from dovetail.request.pooling import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    SparseEmbeddingRequestOutput,
    Task,
)
from dovetail.request.sampling_params import (
    BeamSearchParams,
    OutputKind,
    SamplingParams,
    changed_unchecked,
)

O = TypeVar("O", bound=EngineOutput, covariant=True)  # noqa: E741
Bar = Callable[..., Any]  # makes a progress bar, as the class `tqdm` does
P = TypeVar("P", SamplingParams, PoolingParams)


class LLM(SaysWhatIsMissing):
    """An engine for offline use. Thread safe: requests of concurrent calls are batched together.

    ```python
    outputs = LLM("demo").generate(["ROMEO:", "JULIET:"], SamplingParams(max_tokens=50))
    ```

    On a GPU, the first step of each size is recorded as a CUDA graph, unless `cuda_graphs` is
    False: until `generate` returns, no other thread should synchronize the device, which may raise
    `torch.AcceleratorError` there.
    """

    _engine_class = LLMEngine

    def __init__(self, model: str | Path | EngineConfig = "demo", **overrides: Any) -> None:
        """`model`: "demo", a local directory, a hub id, an `engine.yaml` or an `EngineConfig`.
        `overrides`: any key of `engine.yaml`, e.g. `scheduler="priority"`, or one of vLLM's
        arguments that `dovetail.front.vllm_args` supports; they replace those of the file."""
        source = model if isinstance(model, str | Path | EngineConfig) else {"model": model}
        self.engine = self._engine_class.from_config(source, **translated(overrides))
        self.engine.run_in_thread()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine!r})"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Bar = True,
        *,
        extra: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        predicted_tokens: int | Sequence[int | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        multi_modal_data: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete one prompt or a list, each text or token ids, with one `SamplingParams` for all
        or one for each. So are `extra`, `predicted_tokens`, `lora_request` and `priority`, which
        `LLMEngine.add_request` describes. `use_tqdm`: show a progress bar, or what makes one.

        `multi_modal_data`: the images of each prompt, `{"image": …}` with one or a list: each an
        image of Pillow, a path, the bytes of a file, or a `data:` URL. `mm_processor_kwargs`: of
        the checkpoint's image processor. A prompt that is a mapping may have both itself.

        Returns an output for each prompt, in the order of the prompts, whatever the `output_kind`.
        Raises `RequestError` if any is invalid, before anything is computed; prompts with images
        are prepared while others are computed, and one that is invalid aborts these. Raises
        `EngineDeadError` if the engine fails or is closed meanwhile. Ctrl-C aborts the requests;
        the engine stays usable. Python's garbage collector is paused until the first step has run.
        """
        if others:
            check_call("generate", others)
        prompts = _as_list(prompts)
        if multi_modal_data is not None or mm_processor_kwargs:
            prompts = _with_images(prompts, multi_modal_data, mm_processor_kwargs)
        params = _sampling_of_each(sampling_params, len(prompts), OutputKind.FINAL)
        fields = _fields_of_each(
            len(prompts),
            extra=extra,
            predicted_tokens=predicted_tokens,
            lora_request=lora_request,
            priority=priority,
        )
        with _no_collection() as begun:
            parts = self.engine.tokenized_in_parts(prompts, cut=any(map(cuts, params)))
            return self._collected(parts, params, fields, begun, use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        extra: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        predicted_tokens: int | Sequence[int | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> OutputStream[RequestOutput]:
        """Generate like `generate`, but return an iterator of deltas: each output holds what is new
        for the prompt at its `prompt_index`.

        Raises `RequestError` at once if a prompt is invalid. Closing the iterator, or leaving its
        `with` block, aborts unfinished requests.
        """
        prompts = _as_list(prompts)
        params = _sampling_of_each(sampling_params, len(prompts), OutputKind.DELTA)
        fields = _fields_of_each(
            len(prompts), extra=extra, predicted_tokens=predicted_tokens, lora_request=lora_request
        )
        tokenized = self.engine.all_tokenized(prompts, cut=any(map(cuts, params)))
        stream = OutputStream[RequestOutput](self.engine)
        stream.add(tokenized, params, fields)
        return stream

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Bar = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        extra: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        predicted_tokens: int | Sequence[int | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, with the model's chat template or the given
        one. The other options are those of `dovetail.front.chat.ChatOptions` and of `generate`.
        Parts of a message may be images: of type "image", with what `generate` takes, "image_url"
        or "image_pil". Raises `RequestError` if there is no template, it rejects a conversation, or
        an option is invalid."""
        if others:
            check_call("chat", others)
        options = ChatOptions(
            tools=tools,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        conversations = _conversations(messages)
        params = _sampling_of_each(sampling_params, len(conversations), OutputKind.FINAL)
        prompts: list[Prompt] = [
            *self._chat.prompts(conversations, options, cut=any(map(cuts, params)))
        ]
        return self.generate(
            prompts,
            params,
            use_tqdm,
            extra=extra,
            predicted_tokens=predicted_tokens,
            lora_request=lora_request,
            mm_processor_kwargs=mm_processor_kwargs,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | Bar = False,
        concurrency_limit: int | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """Return the most probable answers to one prompt or a list, each text or token ids, as beam
        search finds them.

        Returns an output for each prompt, in order. `concurrency_limit`: the most prompts searched
        at a time; None: as many as `max_num_seqs` admits, counting beams. `lora_request`: as
        `generate` takes it. Raises and ends as `generate` does; concurrent calls share steps.
        """
        if others:
            check_call("beam_search", others)
        prompts = _as_list(prompts)
        adapters = [
            fields.get("lora_request")
            for fields in _fields_of_each(len(prompts), lora_request=lora_request)
        ]

        def generate(
            beams: list[Prompt], one: SamplingParams, adapters: list[LoRARequest | None]
        ) -> list[RequestOutput]:
            return self.generate(beams, one, use_tqdm=False, lora_request=adapters)

        with _bar(use_tqdm, total=len(prompts), desc="prompts", unit="prompt") as bar:
            return beam_search(
                self.engine, generate, prompts, adapters, params, concurrency_limit, bar.update
            )

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Bar = True,
        pooling_task: Task | None = None,
        prompt_name: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool the states of one prompt or a list, each text or token ids, with one `PoolingParams`
        for all or one for each.

        `truncate_prompt_tokens` and `pooling_task` are the parameters of these names
        (`task`) for all prompts. `prompt_name`: the prompt stored in the checkpoint to put before
        each text; None: its default one, for embeddings, if it has one. Returns an output for each
        prompt, in order, whose `outputs.data` is what was pooled as an array. `lora_request`: as
        `generate` takes it. Raises and ends as `generate` does.
        """
        if others:
            check_call("encode", others, PoolingParams)
        prompts = _as_list(prompts)
        changes = {"truncate_prompt_tokens": truncate_prompt_tokens, "task": pooling_task}
        params = [
            _with(one, changes)
            for one in _one_each(pooling_params, len(prompts), PoolingParams, "pooling_params")
        ]
        prompts = self.engine.pooling.source(prompts, params, prompt_name).all()
        with _no_collection() as begun:
            fields = _fields_of_each(len(prompts), lora_request=lora_request)
            return self._collected([(slice(None), prompts)], params, fields, begun, use_tqdm)

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return a reward model's numbers for each token of each prompt: `encode` with
        `pooling_task="token_classify"`, and its other options."""
        return self.encode(prompts, pooling_params, pooling_task="token_classify", **options)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Bar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        prompt_name: str | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt: `outputs.embedding`, a list of floats. Arguments as
        those of `encode`."""
        if others:
            check_call("embed", others, PoolingParams)
        given: dict[str, Any] = {
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "use_tqdm": use_tqdm,
        }
        given |= {"prompt_name": prompt_name, "lora_request": lora_request}
        return [
            EmbeddingRequestOutput.from_base(one)
            for one in self.encode(prompts, pooling_params, pooling_task="embed", **given)
        ]

    def embed_sparse(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Bar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[SparseEmbeddingRequestOutput]:
        """Return the lexical weights of each prompt, of a model that has them, such as BGE-M3:
        `outputs.weights`, a weight for each token id. Arguments as those of `encode`."""
        if others:
            check_call("embed_sparse", others, PoolingParams)
        given: dict[str, Any] = {
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "use_tqdm": use_tqdm,
            "lora_request": lora_request,
        }
        return [
            SparseEmbeddingRequestOutput.from_base(one)
            for one in self.encode(prompts, pooling_params, pooling_task="embed_sparse", **given)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Bar = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of a classifier's labels for each prompt: `outputs.probs`.
        Arguments as those of `encode`."""
        if others:
            check_call("classify", others, PoolingParams)
        given: dict[str, Any] = {
            "truncate_prompt_tokens": truncate_prompt_tokens,
            "use_tqdm": use_tqdm,
            "lora_request": lora_request,
        }
        return [
            ClassificationRequestOutput.from_base(one)
            for one in self.encode(prompts, pooling_params, pooling_task="classify", **given)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | Bar = True,
        pooling_params: PoolingParams | None = None,
        template: str | None = None,
        chat_template: str | None = None,
        lora_request: LoRARequest | None = None,
        **others: Any,
    ) -> list[ScoringRequestOutput]:
        """Return a score, `outputs.score`, for a query and each of several documents, or for each
        of several queries and its document.

        A model that scores pairs gets a pair as its tokenizer has it, or in the `template`, a text
        with {query} and {document}; by default that of the config. Of an embedding model the score
        is the cosine of both embeddings, made with the prompts that the checkpoint stores for
        queries and documents. Of a model of late interaction, or with the task "token_embed", it is
        MaxSim of the vectors of all tokens. Raises and ends as `generate` does.
        """
        if others:
            check_call("score", others, PoolingParams)
        if chat_template is not None:
            raise RequestError(
                "score(): chat_template: it takes a `template` instead, a text with {query} and, "
                "after it, {document}"
            )
        if not isinstance(pooling_params, PoolingParams | None):
            raise RequestError(f"pooling_params must be PoolingParams, got {shown(pooling_params)}")
        if isinstance(lora_request, list | tuple):
            raise RequestError(
                "score(): lora_request: it takes one adapter for all pairs, got a list"
            )
        pairs = paired(data_1, data_2)
        params = _with(
            pooling_params or PoolingParams(), {"truncate_prompt_tokens": truncate_prompt_tokens}
        )
        plan = self.engine.pooling.plan_scores(pairs, params, template)
        prompts = plan.prompts.all()
        count = len(prompts)
        fields = _fields_of_each(count, lora_request=lora_request)
        with _no_collection() as begun:
            each = [plan.params] * count
            outputs: list[PoolingRequestOutput[PoolingOutput]] = self._collected(
                [(slice(None), prompts)], each, fields, begun, use_tqdm
            )
        return [_score_of(pair, outputs, plan) for pair in range(len(pairs))]

    @cached_property
    def _chat(self) -> ChatFrontEnd:
        engine = self.engine
        return ChatFrontEnd(
            engine.tokenizer,
            engine.config.limits,
            engine.capacity.max_model_len,
            images=engine.images,
            local=True,
        )

    @property
    def llm_engine(self) -> LLMEngine:
        """The same as `engine`."""
        return self.engine

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, as `LLMEngine.get_tokenizer` does."""
        return self.engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's default sampling parameters, from its `generation_config.json`, if it
        has one."""
        return self.engine.default_sampling_params()

    def get_metrics(self) -> list[engine_info.Metric]:
        """Return the counts of `LLMEngine.stats` as a list of metrics."""
        return engine_info.metrics(self.engine.stats())

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Do what `LLMEngine.reset_prefix_cache` does."""
        return self.engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def close(self) -> None:
        """Close the engine, as `LLMEngine.close` does."""
        if "_chat" in vars(self):  # it was used
            self._chat.close()
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _collected(
        self,
        parts: Iterable[tuple[slice, Sequence[Prompt]]],
        params: Sequence[SamplingParams] | Sequence[PoolingParams],
        fields: Sequence[Mapping[str, Any]],
        begun: Callable[[], None],
        use_tqdm: bool | Bar,
    ) -> list[Any]:
        """Add requests, as `OutputStream` does, and wait until all have finished. Return their
        outputs in order. `parts`: consecutive prompts and their places; requests of one part are
        computed while the next is made."""
        outputs: dict[int, Any] = {}
        speed = _Speed(self.engine)  # before the first step, which may compute all prompts
        stream = OutputStream[Any](self.engine)
        with stream, _bar(use_tqdm, total=len(params), desc="requests", unit="req") as bar:
            for part, prompts in parts:
                stream.add(prompts, params[part], fields[part], begun)
            for output in stream:
                outputs[output.prompt_index] = output
                bar.set_postfix_str(speed.text(), refresh=False)
                bar.update()
        return [outputs[place] for place in range(len(params))]


class OutputStream(Generic[O]):
    """An iterator of outputs, and a context that ends with `close`. One thread reads it. The engine
    doesn't wait for the reader: deltas that it hasn't read are joined, for each prompt."""

    def __init__(self, engine: LLMEngine) -> None:
        self._thread = engine.run_in_thread()
        self._engine = engine
        # places of prompts whose `Unread` has something
        self._ready: SimpleQueue[int] = SimpleQueue()
        # of unfinished requests, by the place of the prompt
        self._readers: dict[int, Unread] = {}
        self._ids = list[str]()  # of all requests, in the order of the prompts

    def add(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams] | Sequence[PoolingParams],
        fields: Sequence[Mapping[str, Any]],
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        """Add all requests or none, before any of them is computed, under new ids; `begun` is
        called after the next step. `fields`: other arguments of `LLMEngine.add_request`, by name.
        Raises as that does; the stream is closed then."""
        engine = self._engine
        thread = self._thread
        readers = {
            place: Unread(
                partial(self._ready.put, place),
                joins=getattr(one, "output_kind", None) is OutputKind.DELTA,
            )
            for place, one in enumerate(params, len(self._ids))
        }
        self._readers |= readers

        def add() -> None:
            new = engine.new_ids(len(readers))
            engine.add_list(zip(new, prompts, params, fields, strict=True))
            self._ids.extend(new)
            for request_id, unread in zip(new, readers.values(), strict=True):
                thread.read(request_id, unread)
            thread.submit(begun)

        try:
            thread.call(add)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> OutputStream[O]:
        return self

    def __next__(self) -> O:
        """Wait for the next output. Raises `EngineDeadError` if the engine has failed or was
        closed, `RequestError` if another caller aborted a request, and Ctrl-C; the stream is closed
        then."""
        try:
            while self._readers:
                place = self._ready.get()
                output, end = self._readers[place].take()
                if output is not None:
                    output.prompt_index = place
                    if output.finished:
                        del self._readers[place]
                    elif end is not None:
                        self._ready.put(place)  # the next call raises it
                    return cast(O, output)  # that of a request with such parameters
                if isinstance(end, Aborted):
                    raise RequestError("a request of this call was aborted by another caller")
                if end is not None:
                    raise EngineDeadError(f"the engine died while it generated: {end}") from end
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Abort what is unfinished; nothing more comes. Idempotent. Takes no lock and waits for
        nothing, so that finalizers may call it."""
        readers = self._readers
        self._readers = {}
        self._thread.abandon(self._ids, readers)

    def __enter__(self) -> OutputStream[O]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class _Speed:
    """The speeds that the progress bar shows beside the count."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._begun = time.perf_counter()
        self._before = engine.stats()

    def text(self) -> str:
        stats = self._engine.core.stats
        elapsed = max(time.perf_counter() - self._begun, 1e-9)
        prefill = (stats.prefill_tokens - self._before.prefill_tokens) / elapsed
        decode = (stats.decode_tokens - self._before.decode_tokens) / elapsed
        return f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"


def _bar(use_tqdm: bool | Bar, **options: Any) -> Any:
    """Make a progress bar: of the caller's class, or tqdm's, hidden if `use_tqdm` is false."""
    if callable(use_tqdm):
        return use_tqdm(**options)
    return tqdm(**options, disable=not use_tqdm, dynamic_ncols=True)


def _as_list(prompts: Any) -> list[Prompt]:
    """Return a list of prompts; a list that begins with an integer is one prompt, and so is a
    one-dimensional array."""
    if isinstance(prompts, str | BINARY | Mapping) or getattr(prompts, "ndim", 2) < 2:
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts must be text, token ids, or a list of these, got {shown(prompts)}"
        )
    prompts = list(prompts)
    return [prompts] if prompts and is_integer(prompts[0]) else prompts


def _with_images(
    prompts: Sequence[Prompt], data: Any, options: Mapping[str, Any] | None
) -> list[Prompt]:
    """Return prompts with their images, and with options of the image processor. Raises
    `RequestError`."""
    images = _fields_of_each(len(prompts), multi_modal_data=data)
    return [
        with_images(prompt, one.get("multi_modal_data"), options or {})
        for prompt, one in zip(prompts, images, strict=True)
    ]


@contextmanager
def _no_collection() -> Iterator[Callable[[], None]]:
    """Pause Python's garbage collector until the function that is yielded is called, or the block
    ends: it would free nothing while the device waits."""
    collect = gc.enable if gc.isenabled() else lambda: None
    gc.disable()
    try:
        yield collect
    finally:
        collect()


def _one_each(params: Any, count: int, kind: type[P], name: str) -> list[P]:
    """Return the parameters of each of `count` prompts, which are of that class. Raises
    `RequestError`."""
    if params is None or isinstance(params, kind):
        return [params or kind()] * count
    if not isinstance(params, Sequence) or not all(isinstance(one, kind) for one in params):
        raise RequestError(
            f"{name} must be {kind.__name__}, or a list with one for each prompt, got "
            f"{shown(params)}"
        )
    if len(params) != count:
        raise RequestError(
            f"{name} must be one or one for each prompt: got {len(params)} for {count} prompts"
        )
    return list(params)


def _sampling_of_each(params: Any, count: int, kind: OutputKind) -> list[SamplingParams]:
    """Do as `_one_each`, with outputs of that kind."""
    each = _one_each(params, count, SamplingParams, "sampling_params")
    if each and all(one is each[0] for one in each):
        return [changed_unchecked(each[0], output_kind=kind)] * count
    return [changed_unchecked(one, output_kind=kind) for one in each]


def _with(params: PoolingParams, changes: Mapping[str, Any]) -> PoolingParams:
    """Return parameters with those changes that aren't None. Raises `RequestError` for one that
    says otherwise."""
    for name, value in changes.items():
        before = getattr(params, name)
        if value is not None and before not in (None, value):
            raise RequestError(
                f"{name}: the call says {shown(value)}, and its PoolingParams {shown(before)}"
            )
    wanted = {name: value for name, value in changes.items() if value is not None}
    return replace(params, **wanted) if wanted else params


def _score_of(
    pair: int, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], plan: ScorePlan
) -> ScoringRequestOutput:
    """Return the score of a pair of texts, with the ids, tokens and metrics of what was computed
    for it."""
    mine = [outputs[place] for place in plan.of_pair(pair)]
    failed = next((one for one in mine if one.outputs is None), None)
    return ScoringRequestOutput(
        "_".join(one.request_id for one in mine),
        None
        if failed is not None
        else ScoringOutput(
            plan.score([one.outputs.data for one in mine if one.outputs is not None])
        ),
        [token for one in mine for token in one.prompt_token_ids],
        num_cached_tokens=sum(one.num_cached_tokens for one in mine),
        finish_reason=(failed or mine[-1]).finish_reason,
        stop_reason=(failed or mine[-1]).stop_reason,
        metrics=mine[-1].metrics,
        prompt_index=pair,
        end_reason=(failed or mine[-1]).end_reason,
    )


def _fields_of_each(count: int, **given: Any) -> list[dict[str, Any]]:
    """Return the fields of each of `count` requests, by name; each is given once for all of them,
    or in a list of one for each. Raises `RequestError`."""
    fields: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in given.items():
        if value is None:
            continue
        each = value if isinstance(value, list | tuple) else [value] * count
        if len(each) != count:
            raise RequestError(
                f"{name} must be one or one for each prompt: got {len(each)} for {count} prompts"
            )
        for place, one in enumerate(each):
            fields[place][name] = one
    return fields


def _conversations(messages: Any) -> Sequence[Any]:
    """Return a list of conversations, given one (a list of messages) or several."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(
            f'messages must be a list like [{{"role": "user", "content": "…"}}], or a list of such '
            f"lists, got {shown(messages)}"
        )
    return (
        messages
        if all(isinstance(one, Sequence) and not isinstance(one, str | bytes) for one in messages)
        else [messages]
    )
