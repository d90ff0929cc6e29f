"""From what the core delivers to what users get: one `RequestOutput` a request and step, as its `output_kind` asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.engine.flight import Delivery, Finish
from dovetail.front.stop_strings import StopStrings
from dovetail.request import CompletionOutput, Logprob, Request, RequestMetrics, RequestOutput, TokenLogprobMap
from dovetail.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from dovetail.api.executor import HostLogprobs
    from dovetail.front.detokenizer import IncrementalText
    from dovetail.front.tokenizer import Tokenizer


class SampleOutput:
    """One sample's text and log-probabilities so far. `request._front` refers to it."""

    __slots__ = ("cumulative", "finish", "group", "index", "logprobs", "plain", "request", "sent_logprobs", "sent_tokens", "text")

    def __init__(self, group: RequestGroup, index: int, request: Request, text: IncrementalText | None) -> None:
        self.group = group
        self.index = index
        self.request = request
        self.text = text
        self.finish: Finish | None = None
        self.logprobs: list[TokenLogprobMap] | None = None if group.params.logprobs is None else []
        self.cumulative: float | None = None if group.params.logprobs is None else 0.0
        self.sent_tokens = 0  # of its tokens, already part of a delta
        self.sent_logprobs = 0
        # Nothing but tokens to report, one by one or at the end: the quick way.
        params = group.params
        self.plain = params.n == 1 and params.logprobs is None and params.prompt_logprobs is None and group.kind is not OutputKind.CUMULATIVE

    def take(self, kind: OutputKind) -> CompletionOutput:
        """What is new (delta), or all there is."""
        finish, tokens = self.finish, self.request._output_ids
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


class RequestGroup:
    """One user request: its samples, and what they have in common."""

    __slots__ = (
        "fresh",
        "kind",
        "metrics",
        "params",
        "prompt",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_id",
        "samples",
        "stops",
        "unfinished",
    )

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: Sequence[int], params: SamplingParams, arrival: float) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.kind = OutputKind(params.output_kind)
        self.stops = StopStrings(params.stop) if params.stop else None
        self.samples: list[SampleOutput] = []
        self.unfinished = params.n
        self.metrics = RequestMetrics(arrival)
        self.prompt_logprobs: list[TokenLogprobMap | None] | None = None if params.prompt_logprobs is None else [None]
        self.fresh: list[SampleOutput] = []  # changed in the present step

    def output(self) -> RequestOutput | None:
        """The output of the present step; None, if the kind says to wait."""
        kind, finished = self.kind, self.unfinished == 0
        changed, self.fresh = self.fresh, []
        if kind is OutputKind.FINAL and not finished:
            return None
        requests = [sample.request for sample in self.samples]
        self.metrics.first_scheduled_time = _earliest(r._first_scheduled_time for r in requests)
        self.metrics.first_token_time = _earliest(r._first_token_time for r in requests)
        self.metrics.preemptions = sum(r.preemptions for r in requests)
        completions = changed if kind is OutputKind.DELTA else self.samples
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [sample.take(kind) for sample in completions],
            finished,
            self.prompt_logprobs,
            requests[0]._num_cached,
            self.metrics,
        )

    def take_apart(self) -> None:
        """It is over. Its samples and their requests refer to each other: so they would wait for the garbage collector, which looks through all of
        their tokens and lets a step wait meanwhile."""
        for sample in self.samples:
            sample.request._front = sample.request._family = None
        self.samples = []


class OutputBuilder:
    """Feeds text and log-probabilities of each delivery to its samples and makes the outputs."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # of single tokens, for log-probabilities

    def build(self, delivery: Delivery, now: float) -> list[RequestOutput]:
        """In the order in which requests first appear in the delivery."""
        outputs: list[RequestOutput] = []
        finished, changed = delivery.finished, dict[RequestGroup, None]()
        for request, hosts in delivery.prompt_logprobs:
            self._add_prompt_logprobs(request._front.group, hosts)
        for request, token in zip(delivery.requests, delivery.token_ids, strict=True):
            sample: SampleOutput = request._front
            if sample.plain and request not in finished:
                if sample.text is not None and request._stopper is None:
                    sample.text.append((token,))
                if sample.group.kind is OutputKind.DELTA:
                    outputs.append(self._plain_delta(sample, request, token))
                continue
            self._feed(sample, token, finished.get(request))
            if request in delivery.logprobs:
                self._add_logprobs(sample, *delivery.logprobs[request])
            changed[sample.group] = None
            sample.group.fresh.append(sample)
        for request, finish in finished.items():
            self._finish(request._front, finish, now)
            changed[request._front.group] = None
        for group in changed:
            output = group.output()
            if output is not None:
                outputs.append(output)
        return outputs

    def _plain_delta(self, sample: SampleOutput, request: Request, token: int) -> RequestOutput:
        group = sample.group
        metrics = group.metrics
        sample.sent_tokens += 1
        if metrics.first_token_time is None:
            metrics.first_token_time, metrics.first_scheduled_time = request._first_token_time, request._first_scheduled_time
        completion = CompletionOutput(0, sample.text.take_delta() if sample.text is not None else "", (token,))
        return RequestOutput(group.request_id, group.prompt, group.prompt_token_ids, [completion], False, None, request._num_cached, metrics)

    def _feed(self, sample: SampleOutput, token: int, finish: Finish | None) -> None:
        """Its text grows by a token; not by one that stopped it, unless asked for."""
        stopped_by_it = finish is not None and finish.reason == "stop" and not isinstance(finish.stop_reason, str)
        fed_already = sample.request._stopper is not None and not stopped_by_it
        if sample.text is None or fed_already:
            return
        if not stopped_by_it or sample.group.params.include_stop_str_in_output:
            sample.text.append([token])

    def _finish(self, sample: SampleOutput, finish: Finish, now: float) -> None:
        sample.finish = finish
        if sample.text is not None:
            sample.text.flush(stopped=isinstance(finish.stop_reason, str) and finish.reason == "stop")
        group = sample.group
        group.unfinished -= 1
        group.metrics.finished_time = now
        if sample not in group.fresh:
            group.fresh.append(sample)

    def _add_logprobs(self, sample: SampleOutput, hosts: HostLogprobs, position: int) -> None:
        asked = sample.group.params.logprobs or 0
        entry = self._map(hosts, position, asked, sample.group.params.detokenize)
        if sample.logprobs is not None and sample.cumulative is not None:
            sample.logprobs.append(entry)
            sample.cumulative += float(hosts.logprobs[position, 0])

    def _add_prompt_logprobs(self, group: RequestGroup, hosts: HostLogprobs) -> None:
        if group.prompt_logprobs is None or len(group.prompt_logprobs) >= len(group.prompt_token_ids):
            return  # a re-prefill after a preemption: they are there already
        asked, detokenize = group.params.prompt_logprobs or 0, group.params.detokenize
        for position in range(len(hosts.ranks)):
            if len(group.prompt_logprobs) < len(group.prompt_token_ids):
                group.prompt_logprobs.append(self._map(hosts, position, asked, detokenize))

    def _map(self, hosts: HostLogprobs, position: int, asked: int, detokenize: bool) -> TokenLogprobMap:
        """The token itself, whose rank may be anything, then the `asked` likeliest, best first."""
        ids, values = hosts.token_ids[position].tolist(), hosts.logprobs[position].tolist()
        decoded = self._decoded if detokenize else _no_text
        entries: TokenLogprobMap = {ids[0]: Logprob(values[0], int(hosts.ranks[position]), decoded(ids[0]))}
        for rank, (token, value) in enumerate(zip(ids[1 : asked + 1], values[1 : asked + 1], strict=True), start=1):
            if token != ids[0]:
                entries[token] = Logprob(value, rank, decoded(token))
        return entries

    def _decoded(self, token: int) -> str | None:
        """Of a token by itself; half a character is U+FFFD."""
        text = self._texts.get(token)
        if text is None and self.tokenizer is not None:
            text = self._texts[token] = self.tokenizer.decode([token])
        return text


def _no_text(token: int) -> None:
    """A request that wants token ids alone."""


def _earliest(times: Iterable[Any]) -> float | None:
    return min((t for t in times if t is not None), default=None)
