"""`Choices`: the listener of OpenAI's completions and chat, whose answers are choices. It collects
them whole, or streams them as chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import orjson

from dovetail.request.outputs import CompletionOutput, RequestOutput
from dovetail_server.exchange import Exchange
from dovetail_server.listeners import OutputListener
from dovetail_server.protocol.openai_common import OpenAIFields, StreamOptions, TokenCounts
from dovetail_server.streams import DONE, event


class ChunkStream:
    """The stream of one HTTP request, shared by the choices of all its prompts."""

    def __init__(self, exchange: Exchange, body: OpenAIFields, head: dict[str, Any]) -> None:
        self._head, self.options = head, body.stream_options or StreamOptions()
        self.write = exchange.begin_stream().write

    def chunk(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if used is not None or self.options.include_usage:
            chunk["usage"] = used
        return event(chunk)

    def finish(self, listeners: Sequence[OutputListener]) -> None:
        """Write what follows the last choice."""
        self.write(
            (self.chunk([], usage_of(listeners)) if self.options.include_usage else b"") + DONE
        )


class Choices(OutputListener):
    """Choices of one prompt's samples, numbered from `first`.

    Plain text of a stream goes out between two ready-made pieces of JSON; everything else is built
    from dicts.
    """

    text_field: ClassVar[dict[str, Any]]  # a choice's field for text, with "@" in place of the text

    def __init__(
        self,
        exchange: Exchange,
        body: OpenAIFields,
        n: int,
        stream: ChunkStream | None,
        *,
        first: int = 0,
        is_plain: bool,
    ) -> None:
        """`stream` None: the choices are returned whole. `is_plain`: a token adds nothing but its
        text."""
        super().__init__(exchange)
        self._first, self._stream, self._token_ids = first, stream, bool(body.return_token_ids)
        self._counts = stream is not None and stream.options.continuous_usage_stats
        self._plain = stream is not None and is_plain and not self._token_ids and not self._counts
        self._begun = [False] * n
        self._prefixes = []
        self._suffix = b""
        if stream is not None and self._plain:
            for index in range(n):
                prefix, _, self._suffix = stream.chunk(
                    [self._choice(index, **self.text_field)]
                ).partition(b'"@"')
                self._prefixes.append(prefix)

    def choices_of(
        self, sample: CompletionOutput, output: RequestOutput, *, is_first: bool
    ) -> list[dict[str, Any]]:
        """Return the choices of a stream that an output adds, one per chunk."""
        raise NotImplementedError

    def collect(self, sample: CompletionOutput, output: RequestOutput, *, is_first: bool) -> None:
        """Collect an output of a request that isn't streamed."""
        raise NotImplementedError

    def take(self, output: RequestOutput) -> None:
        stream = self._stream
        for sample in output.outputs:
            index = sample.index
            if (
                stream is not None
                and self._plain
                and sample.finish_reason is None
                and self._begun[index]
            ):
                if sample.text:
                    stream.write(
                        b"%b%b%b" % (self._prefixes[index], orjson.dumps(sample.text), self._suffix)
                    )
                continue
            is_first = not self._begun[index]
            self._begun[index] = True
            if stream is None:
                self.collect(sample, output, is_first=is_first)
                continue
            if is_first and self._plain and len(self._begun) == 1:
                self.tell_plainly(self._prefixes[0], self._suffix)
            if choices := self.choices_of(sample, output, is_first=is_first):
                used = usage_of([self]) if self._counts else None
                stream.write(b"".join(stream.chunk([choice], used) for choice in choices))

    def _choice(self, index: int, **fields: Any) -> dict[str, Any]:
        return {"index": self._first + index, **fields, "logprobs": None, "finish_reason": None}


def token_ids_of_prompt(output: RequestOutput) -> list[int]:
    return [int(token) for token in output.prompt_token_ids]


def usage_of(listeners: Sequence[OutputListener]) -> dict[str, Any]:
    """Return OpenAI's usage, summed over the prompts of a request."""
    counts = [listener.counts for listener in listeners]
    prompt, completion, cached = (sum(one[field] or 0 for one in counts) for field in range(3))
    restored = sum(one.restored for one in counts)
    return TokenCounts(prompt, completion, cached, counts[0].reasoning, restored).openai_usage()
