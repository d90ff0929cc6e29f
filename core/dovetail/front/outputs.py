"""From what the core delivers to what users get: one `RequestOutput` a request and step, as its `output_kind` asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dovetail.engine.flight import Delivery, Finish
from dovetail.engine.live_request import LiveRequest
from dovetail.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, TokenLogprobMap
from dovetail.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from dovetail.api.executor import HostLogprobs
    from dovetail.front.detokenizer import IncrementalText
    from dovetail.front.tokenizer import Tokenizer


class RequestGroup:
    """One user request: its samples, and what the outputs of all have in common."""

    __slots__ = ("kind", "metrics", "params", "prompt", "prompt_logprobs", "prompt_token_ids", "request_id", "samples")

    def __init__(
        self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams, samples: Sequence[LiveRequest]
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt  # its text, if it was one
        self.prompt_token_ids = prompt_token_ids
        self.params = params  # as the user gave them: `params.n` samples
        self.kind = OutputKind(params.output_kind)
        self.samples = samples
        self.metrics = RequestMetrics(samples[0].arrival_time)
        self.prompt_logprobs: list[TokenLogprobMap | None] | None = None if params.prompt_logprobs is None else [None]

    def update_metrics(self) -> None:
        """Bring `metrics` up to date, but for the time of the end."""
        metrics, samples = self.metrics, self.samples
        metrics.first_scheduled_time = _earliest(s.first_scheduled_time for s in samples)
        metrics.first_token_time = _earliest(s.first_token_time for s in samples)
        metrics.preemptions = sum(s.preemptions for s in samples)

    def take_apart(self) -> None:
        """It is over. Its samples refer to each other: so they would wait for the garbage collector, which looks through all of their tokens and lets
        a step wait meanwhile."""
        for sample in self.samples:
            sample.siblings = ()


class SampleOutput:
    """One sample's text and log-probabilities so far."""

    __slots__ = ("cumulative", "finish", "group", "index", "logprobs", "plain", "request", "sent_logprobs", "sent_tokens", "text")

    def __init__(self, group: RequestGroup, index: int, text: IncrementalText | None) -> None:
        params = group.params
        self.group = group
        self.index = index
        self.request = group.samples[index]
        self.text = text
        self.finish: Finish | None = None
        self.logprobs: list[TokenLogprobMap] | None = None if params.logprobs is None else []
        self.cumulative: float | None = None if params.logprobs is None else 0.0
        self.sent_tokens = 0  # of its tokens, already part of a delta
        self.sent_logprobs = 0
        # Nothing but tokens to report, one by one or at the end: the quick way.
        self.plain = params.n == 1 and params.logprobs is None and params.prompt_logprobs is None and group.kind is not OutputKind.CUMULATIVE

    def take(self, kind: OutputKind) -> CompletionOutput:
        """What is new (delta), or all there is."""
        finish, tokens = self.finish, self.request.output_token_ids
        text: str = ""
        if kind is OutputKind.DELTA:
            new_tokens: Sequence[int] = tokens[self.sent_tokens :].tolist()
            logprobs = None if self.logprobs is None else self.logprobs[self.sent_logprobs :]
            self.sent_tokens = len(tokens)
            self.sent_logprobs = 0 if self.logprobs is None else len(self.logprobs)
            text = self.text.take_delta() if self.text is not None else ""
        else:
            new_tokens = tuple(tokens)
            logprobs = None if self.logprobs is None else list(self.logprobs)
            text = self.text.text if self.text is not None else ""
        return CompletionOutput(
            self.index,
            text,
            new_tokens,
            self.cumulative,
            logprobs,
            finish.reason if finish else None,
            finish.stop_reason if finish else None,
        )


class LogprobLists:
    """What the host got of a step's log-probabilities, as Python's numbers: made of all rows at once, which is quicker than row by row."""

    __slots__ = ("hosts", "logprobs", "ranks", "token_ids")

    def __init__(self, hosts: HostLogprobs) -> None:
        self.hosts = hosts
        self.token_ids: list[list[int]] = hosts.token_ids.tolist()
        self.logprobs: list[list[float]] = hosts.logprobs.tolist()
        self.ranks: list[int] = hosts.ranks.tolist()


class TokenTexts(dict[int, str | None]):
    """Token id -> its text by itself, in which half a character is U+FFFD; None for all without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer

    def __missing__(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        text = self[token] = self.tokenizer.decode([token])
        return text


class OutputBuilder:
    """Feeds text and log-probabilities of each delivery to the samples that it expects, and makes the outputs."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._samples: dict[LiveRequest, SampleOutput] = {}
        self._texts = {True: TokenTexts(tokenizer), False: TokenTexts(None)}  # for log-probabilities; whether a request wants text
        self._step: LogprobLists | None = None  # the latest

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._texts[True].tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Tokenizer) -> None:
        self._texts[True].tokenizer = tokenizer

    def expect(self, group: RequestGroup, texts: Sequence[IncrementalText | None]) -> None:
        """Take note of a request that was given to the core; `texts` has one for each sample."""
        for index, (request, text) in enumerate(zip(group.samples, texts, strict=True)):
            self._samples[request] = SampleOutput(group, index, text)

    def forget(self, group: RequestGroup) -> None:
        """Nothing more will be delivered of it."""
        for request in group.samples:
            del self._samples[request]

    def ended_by(self, delivery: Delivery) -> set[RequestGroup]:
        """The requests all of whose samples have finished, by this delivery."""
        groups = {self._samples[request].group for request in delivery.finished}
        return {group for group in groups if self._has_finished(group)}

    def build(self, delivery: Delivery, now: float) -> list[RequestOutput]:
        """In the order in which requests first appear in the delivery."""
        outputs: list[RequestOutput] = []
        samples, finished, changed = self._samples, delivery.finished, dict[RequestGroup, list[SampleOutput]]()
        for request, hosts in delivery.prompt_logprobs:
            self._add_prompt_logprobs(samples[request].group, hosts)
        for request, token in zip(delivery.requests, delivery.token_ids, strict=True):
            sample = samples[request]
            if sample.plain and request not in finished:
                if sample.text is not None and request.stopper is None:
                    sample.text.append((token,))
                if sample.group.kind is OutputKind.DELTA:
                    outputs.append(self._plain_delta(sample, token))
                continue
            self._feed(sample, token, finished.get(request))
            if request in delivery.logprobs:
                self._add_logprobs(sample, *delivery.logprobs[request])
            changed.setdefault(sample.group, []).append(sample)
        for request, finish in finished.items():
            sample = samples[request]
            self._finish(sample, finish, now)
            fresh = changed.setdefault(sample.group, [])
            if sample not in fresh:
                fresh.append(sample)
        for group, fresh in changed.items():
            output = self._output(group, fresh)
            if output is not None:
                outputs.append(output)
        return outputs

    def _has_finished(self, group: RequestGroup) -> bool:
        return all(self._samples[request].finish is not None for request in group.samples)

    def _output(self, group: RequestGroup, fresh: Sequence[SampleOutput]) -> RequestOutput | None:
        """A request's output after this delivery, in which the samples `fresh` changed; None, if its kind says to wait."""
        kind, finished = group.kind, self._has_finished(group)
        if kind is OutputKind.FINAL and not finished:
            return None
        group.update_metrics()
        samples = fresh if kind is OutputKind.DELTA else [self._samples[request] for request in group.samples]
        return RequestOutput(
            group.request_id,
            group.prompt,
            group.prompt_token_ids,
            [sample.take(kind) for sample in samples],
            finished,
            group.prompt_logprobs,
            group.samples[0].cached_tokens,
            group.metrics,
        )

    def _plain_delta(self, sample: SampleOutput, token: int) -> RequestOutput:
        group, request = sample.group, sample.request
        metrics = group.metrics
        sample.sent_tokens += 1
        if metrics.first_token_time is None:
            metrics.first_token_time, metrics.first_scheduled_time = request.first_token_time, request.first_scheduled_time
        completion = CompletionOutput(0, sample.text.take_delta() if sample.text is not None else "", (token,))
        return RequestOutput(group.request_id, group.prompt, group.prompt_token_ids, [completion], False, None, request.cached_tokens, metrics)

    def _feed(self, sample: SampleOutput, token: int, finish: Finish | None) -> None:
        """Its text grows by a token; not by one that stopped it, unless asked for."""
        stopped_by_it = finish is not None and finish.reason == "stop" and not isinstance(finish.stop_reason, str)
        fed_already = sample.request.stopper is not None and not stopped_by_it
        if sample.text is None or fed_already:
            return
        if not stopped_by_it or sample.group.params.include_stop_str_in_output:
            sample.text.append([token])

    def _finish(self, sample: SampleOutput, finish: Finish, now: float) -> None:
        sample.finish = finish
        if sample.text is not None:
            sample.text.flush(stopped=isinstance(finish.stop_reason, str) and finish.reason == "stop")
        sample.group.metrics.finished_time = now

    def _add_logprobs(self, sample: SampleOutput, hosts: HostLogprobs, position: int) -> None:
        asked = sample.group.params.logprobs or 0
        if self._step is None or self._step.hosts is not hosts:
            self._step = LogprobLists(hosts)
        if sample.logprobs is not None and sample.cumulative is not None:
            sample.logprobs.append(self._map(self._step, position, asked, sample.group.params.detokenize))
            sample.cumulative += self._step.logprobs[position][0]

    def _add_prompt_logprobs(self, group: RequestGroup, hosts: HostLogprobs) -> None:
        known, params = group.prompt_logprobs, group.params
        if known is None or len(known) >= len(group.prompt_token_ids):
            return  # a re-prefill after a preemption: they are there already
        lists = LogprobLists(hosts)
        for position in range(len(lists.ranks)):
            if len(known) < len(group.prompt_token_ids):
                known.append(self._map(lists, position, params.prompt_logprobs or 0, params.detokenize))

    def _map(self, lists: LogprobLists, position: int, asked: int, detokenize: bool) -> TokenLogprobMap:
        """The token itself, whose rank may be anything, then the `asked` likeliest, best first."""
        ids, values = lists.token_ids[position], lists.logprobs[position]
        own, texts = ids[0], self._texts[detokenize]
        entries: TokenLogprobMap = {own: Logprob(values[0], lists.ranks[position], texts[own])}
        for rank in range(1, min(asked + 1, len(ids))):
            token = ids[rank]
            if token != own:
                entries[token] = Logprob(values[rank], rank, texts[token])
        return entries


def _earliest(times: Iterable[float | None]) -> float | None:
    return min((time for time in times if time is not None), default=None)
