"""From what the core delivers to what users get: one `RequestOutput` a request and step, as its
`output_kind` asks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, islice, zip_longest
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from dovetail.end_reason import EndReason
from dovetail.engine.finish import Finish
from dovetail.front.logprobs import LogprobLog
from dovetail.front.token_texts import TokenTexts, texts_of_prompt
from dovetail.request.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    TokenLogprobMap,
)
from dovetail.request.pooling import PoolingOutput, PoolingRequestOutput
from dovetail.request.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dovetail.api.executor import HostLogprobs
    from dovetail.front.detokenizer import IncrementalText
    from dovetail.front.tokenizer import Tokenizer
    from dovetail.request.media import MediaItem


class SampleState(Protocol):
    """The progress of one sample, as outputs tell of it: a `LiveRequest`, or what is known of one
    that is in another process."""

    output: array[int]
    first_scheduled_time: float | None
    first_token_time: float | None

    @property
    def arrival_time(self) -> float: ...

    @property
    def preemptions(self) -> int: ...

    @property
    def pauses(self) -> Sequence[float]: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def restored_tokens(self) -> int: ...


# Tokens of an answer that is delivered at its end: one by one they take several times as long
READ_TOGETHER = 32

S = TypeVar("S", bound=SampleState)
K = TypeVar("K")


class News(Protocol):
    """The news of a step: a `Delivery`, or what a frame of another process says.

    The keys of `finished` are `SampleState`s.
    """

    @property
    def requests(self) -> Sequence[SampleState]: ...

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def finished(self) -> Mapping[Any, Finish]: ...

    @property
    def logprobs(self) -> Sequence[tuple[SampleState, HostLogprobs, int]]: ...

    @property
    def prompt_logprobs(self) -> Sequence[tuple[SampleState, HostLogprobs]]: ...

    @property
    def pooled(self) -> Sequence[tuple[SampleState, NDArray[np.float32]]]: ...


EngineOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]
PooledReading = Callable[["NDArray[np.float32]"], PoolingOutput]


class RequestGroup(Generic[S]):
    """One user request: its samples, and what the outputs of all have in common."""

    __slots__ = (
        "kind",
        "metrics",
        "params",
        "prompt",
        "prompt_log",
        "prompt_logprobs",
        "prompt_token_ids",
        "reading",
        "request_id",
        "runs",
        "samples",
        "unfinished",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        samples: Sequence[S],
        *,
        reading: PooledReading | None = None,
        media: Sequence[MediaItem] = (),
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt  # its text, if it was one
        self.prompt_token_ids = prompt_token_ids
        self.params = params  # as the user gave them: `params.n` samples
        # of what was pooled; None: it generates. Otherwise its output is a `PoolingRequestOutput`
        self.reading = reading
        self.runs = [run for item in media for run in item.runs]  # of placeholders in the prompt
        self.kind = OutputKind(params.output_kind)
        self.samples = samples
        self.unfinished = len(samples)  # how many of them have yet to finish
        self.metrics = RequestMetrics(samples[0].arrival_time)
        self.prompt_logprobs: list[TokenLogprobMap | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self.prompt_log: LogprobLog | None = None  # once there are any

    def update_metrics(self) -> None:
        """Bring `metrics` up to date, but for the time of the end."""
        metrics = self.metrics
        samples = self.samples
        scheduled = [s.first_scheduled_time for s in samples if s.first_scheduled_time is not None]
        began = [s.first_token_time for s in samples if s.first_token_time is not None]
        metrics.first_scheduled_time = min(scheduled, default=None)
        metrics.first_token_time = min(began, default=None)
        metrics.preemptions = sum([s.preemptions for s in samples])
        metrics.restored_tokens = samples[0].restored_tokens
        if pauses := samples[0].pauses:
            metrics.pauses = tuple(zip_longest(pauses[::2], pauses[1::2]))


class SampleOutput:
    """One sample's text and log-probabilities so far."""

    __slots__ = (
        "finish",
        "group",
        "index",
        "logprobs",
        "plain",
        "pooled",
        "request",
        "sent_tokens",
        "text",
        "unread",
        "watches",
    )

    def __init__(
        self,
        group: RequestGroup[Any],
        index: int,
        text: IncrementalText | None,
        log: LogprobLog | None,
    ) -> None:
        params = group.params
        self.group = group
        self.index = index
        self.request = group.samples[index]
        self.text = text
        # the engine shows its tokens to the text before they come here
        self.watches = text is not None and bool(params.stop)
        self.unread: list[int] = []  # tokens that aren't part of the text yet
        self.finish: Finish | None = None
        self.pooled: NDArray[np.float32] | None = None  # its result, if it pools
        self.logprobs = log
        self.sent_tokens = 0  # of its tokens, already part of a delta
        # Nothing but tokens to report, one by one or at the end: the quick way.
        self.plain = (
            params.n == 1
            and params.logprobs is None
            and params.prompt_logprobs is None
            and group.kind is not OutputKind.CUMULATIVE
        )

    def read(self) -> None:
        """Make text of the tokens that aren't."""
        if self.text is not None and self.unread:
            self.text.append(self.unread)
            self.unread = []

    def read_later(self, tokens: Sequence[int]) -> None:
        """Detokenize these tokens when the text is taken, or when there are many."""
        if self.text is not None:
            self.unread.extend(tokens)
            if len(self.unread) >= READ_TOGETHER:
                self.read()

    def take(
        self, kind: OutputKind, as_ids: Callable[[Iterable[int]], Sequence[int]]
    ) -> CompletionOutput:
        """What is new (delta), or all there is."""
        self.read()
        finish = self.finish
        tokens = self.request.output
        text = ""
        log = self.logprobs
        logprobs: Sequence[TokenLogprobMap] | None = None
        if kind is OutputKind.DELTA:
            new_tokens: Sequence[int] = tokens[self.sent_tokens :].tolist()
            self.sent_tokens = len(tokens)
            if log is not None:
                logprobs = log.drain()
            if self.text is not None:
                text = self.text.take_delta()
        else:
            new_tokens = as_ids(tokens)
            if log is not None:
                logprobs = log.read()
            if self.text is not None:
                text = self.text.text
        return CompletionOutput(
            self.index,
            text,
            new_tokens,
            None if log is None else log.cumulative,
            logprobs,
            finish.reason.finish_reason if finish else None,
            finish.stop_reason if finish else None,
            finish.reason if finish else None,
        )


class OutputBuilder:
    """Feeds text and log-probabilities of each delivery to the samples that it expects, and makes
    the outputs."""

    def __init__(
        self, tokenizer: Tokenizer | None, as_ids: Callable[[Iterable[int]], Sequence[int]] = tuple
    ) -> None:
        """`as_ids`: the type of the token ids in outputs."""
        self._samples: dict[SampleState, SampleOutput] = {}
        self._as_ids = as_ids
        self.tokenizer = tokenizer

    def expect(self, group: RequestGroup[Any], texts: Sequence[IncrementalText | None]) -> None:
        """Take note of a request that was given to the core; `texts` has one for each sample."""
        for index, (request, text) in enumerate(zip(group.samples, texts, strict=True)):
            log = None if group.params.logprobs is None else self._log_of(group)
            self._samples[request] = SampleOutput(group, index, text, log)

    def forget(self, group: RequestGroup[Any]) -> None:
        """Nothing more will be delivered of it. No-op for a request that isn't expected."""
        for request in group.samples:
            self._samples.pop(request, None)

    def text_of(self, request: SampleState) -> IncrementalText | None:
        """Return the text of a sample whose deltas may be taken by its `delta_of`, instead of by
        deliveries: of a request for text and nothing else. None for another."""
        sample = self._samples[request]
        return (
            sample.text
            if sample.plain and sample.group.kind is OutputKind.DELTA and not sample.watches
            else None
        )

    def take_ended(self, delivery: News) -> list[RequestGroup[Any]]:
        """Return the requests all of whose samples have finished, by this delivery, and forget
        them."""
        ended: list[RequestGroup[Any]] = []
        for request in delivery.finished:
            sample = self._samples.get(request)
            if sample is not None and not sample.group.unfinished:
                ended.append(sample.group)
                self.forget(sample.group)
        return ended

    def build(self, delivery: News, now: float) -> list[EngineOutput]:
        """Return outputs in the order in which requests first appear in the delivery."""
        samples = self._samples
        finished = delivery.finished
        outputs: list[EngineOutput] = []
        changed: dict[RequestGroup[Any], list[SampleOutput]] = {}
        self._note_values(delivery)
        for request, tokens in by_sample(delivery.requests, delivery.token_ids):
            sample = samples[request]
            if not sample.plain or request in finished:
                self._feed(sample, tokens, finished.get(request))
                changed.setdefault(sample.group, []).append(sample)
            elif sample.group.kind is OutputKind.DELTA:
                outputs.append(self._plain_delta(sample, tokens))
            elif not sample.watches:
                sample.read_later(tokens)
        for request, finish in finished.items():
            sample = samples[request]
            self._finish(sample, finish, now)
            fresh = changed.setdefault(sample.group, [])
            if sample not in fresh:
                fresh.append(sample)
        for group, fresh in changed.items():
            output: EngineOutput | None
            if group.reading is None:
                output = self._output(group, fresh)
            else:
                output = self._pooled(group, group.reading, fresh[0])
            if output is not None:
                outputs.append(output)
        return outputs

    def _note_values(self, delivery: News) -> None:
        """Keep log-probabilities and pooled values for the outputs that will show them."""
        for request, hosts in delivery.prompt_logprobs:
            self._add_prompt_logprobs(self._samples[request].group, hosts)
        for request, hosts, position in delivery.logprobs:
            if (log := self._samples[request].logprobs) is not None:
                log.add(hosts, position)
        for request, data in delivery.pooled:
            self._samples[request].pooled = data

    def _output(
        self, group: RequestGroup[Any], fresh: Sequence[SampleOutput]
    ) -> RequestOutput | None:
        """A request's output after this delivery, in which the samples `fresh` changed; None, if
        its kind says to wait."""
        kind = group.kind
        finished = not group.unfinished
        if kind is OutputKind.FINAL and not finished:
            return None
        group.update_metrics()
        samples = fresh
        if kind is not OutputKind.DELTA:
            samples = [self._samples[request] for request in group.samples]
        return RequestOutput(
            group.request_id,
            group.prompt,
            group.prompt_token_ids,
            [sample.take(kind, self._as_ids) for sample in samples],
            finished,
            group.prompt_logprobs,
            group.samples[0].cached_tokens,
            group.metrics,
        )

    def _pooled(
        self, group: RequestGroup[Any], reading: PooledReading, sample: SampleOutput
    ) -> EngineOutput:
        group.update_metrics()
        finish = sample.finish
        data = sample.pooled
        return PoolingRequestOutput(
            group.request_id,
            None if data is None else reading(data),
            group.prompt_token_ids,
            num_cached_tokens=group.samples[0].cached_tokens,
            prompt=group.prompt,
            finish_reason=finish.reason.finish_reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            metrics=group.metrics,
            end_reason=finish.reason if finish else None,
        )

    def _plain_delta(self, sample: SampleOutput, tokens: Sequence[int]) -> RequestOutput:
        group = sample.group
        request = sample.request
        metrics = group.metrics
        if sample.text is not None and not sample.watches:
            sample.text.append(tokens)
        sample.sent_tokens += len(tokens)
        if metrics.first_token_time is None:
            metrics.first_token_time = request.first_token_time
            metrics.first_scheduled_time = request.first_scheduled_time
            metrics.restored_tokens = request.restored_tokens
        text = "" if sample.text is None else sample.text.take_delta()
        completion = CompletionOutput(0, text, self._as_ids(tokens))
        return RequestOutput(
            group.request_id,
            group.prompt,
            group.prompt_token_ids,
            [completion],
            False,
            None,
            request.cached_tokens,
            metrics,
        )

    def _feed(self, sample: SampleOutput, tokens: Sequence[int], finish: Finish | None) -> None:
        """Its text grows by `tokens`; not by a last one that stopped it, unless asked for."""
        stopped_by_it = (
            finish is not None
            and finish.reason is EndReason.STOP
            and not isinstance(finish.stop_reason, str)
            and not finish.keeps_token
        )
        if sample.text is None or (sample.watches and not stopped_by_it):
            return
        if sample.watches:
            tokens = tokens[-1:]  # it has seen the others
        if stopped_by_it and not sample.group.params.include_stop_str_in_output:
            tokens = tokens[:-1]
        sample.read_later(tokens)

    def _finish(self, sample: SampleOutput, finish: Finish, now: float) -> None:
        sample.group.unfinished -= sample.finish is None
        sample.finish = finish
        if sample.logprobs is not None:
            sample.logprobs.end()
        if sample.text is not None:
            sample.read()
            sample.text.flush(
                stopped=isinstance(finish.stop_reason, str) and finish.reason is EndReason.STOP
            )
        sample.group.metrics.finished_time = now

    def _add_prompt_logprobs(self, group: RequestGroup[Any], hosts: HostLogprobs) -> None:
        known = group.prompt_logprobs
        if known is None:
            return
        if group.prompt_log is None:
            group.prompt_log = self._prompt_log_of(group)
        # 0 in a re-prefill after a preemption: they are there already
        left = len(group.prompt_token_ids) - len(known)
        added = min(left, len(hosts.ranks))
        for position in range(added):
            group.prompt_log.add(hosts, position)
        if added == left:
            group.prompt_log.end()
        first = len(known)
        known.extend(group.prompt_log.drain())
        for start, count in group.runs:  # placeholders aren't predicted
            for place in range(max(start, first), min(start + count, len(known))):
                known[place] = None

    def _log_of(self, group: RequestGroup[Any]) -> LogprobLog:
        """Return the log of a sample of a request that asks for log-probabilities."""
        params = group.params
        tokenizer = self.tokenizer
        asked = params.logprobs or 0
        if tokenizer is None or not params.detokenize:
            return LogprobLog(asked, None)
        texts = TokenTexts(tokenizer, params.skip_special_tokens, group.prompt_token_ids)
        return LogprobLog(asked, texts)

    def _prompt_log_of(self, group: RequestGroup[Any]) -> LogprobLog:
        asked = group.params.prompt_logprobs or 0
        tokenizer = self.tokenizer
        if tokenizer is None or not group.params.detokenize:
            return LogprobLog(asked, None)
        texts = texts_of_prompt(tokenizer, group.prompt, group.prompt_token_ids)
        texts.append(group.prompt_token_ids[:1])
        return LogprobLog(asked, texts)


def by_sample(
    samples: Sequence[K], token_ids: Sequence[int]
) -> Iterable[tuple[K, tuple[int, ...]]]:
    """Return each sample with its new tokens, as those of one follow each other: nearly always a
    single one."""
    if not any(map(is_, samples, islice(samples, 1, None))):
        return zip(samples, zip(token_ids, strict=True), strict=True)
    pairs = groupby(zip(samples, token_ids, strict=True), key=itemgetter(0))
    return [(sample, tuple([token for _, token in pair])) for sample, pair in pairs]
