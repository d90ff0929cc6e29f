"""`OutputListener`: one of an exchange's requests to the engine."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from dovetail.errors import DovetailError
from dovetail.request.outputs import RequestMetrics, RequestOutput
from dovetail.request.pooling import PoolingRequestOutput
from dovetail_server.admission import Ticket
from dovetail_server.errors import error_of_end, http_error
from dovetail_server.exchange import Exchange
from dovetail_server.protocol.openai_common import TokenCounts
from dovetail_server.request_meter import RequestMeter


class OutputListener:
    """`Listener` to one of an exchange's requests to the engine. Subclasses implement `take`."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.ticket: Ticket | None = None
        self.meter: RequestMeter | None = None
        self.begun = self.ended = False
        self.times: RequestMetrics | None = None  # updated as the request proceeds
        self.finish_reasons: list[str] = []
        self.is_plain = False
        self._around = b"", b""  # what surrounds a token's text, if `is_plain`
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    @property
    def reasoning_tokens(self) -> int | None:
        """None: unknown."""
        return None

    @property
    def counts(self) -> TokenCounts:
        return TokenCounts(
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            self.reasoning_tokens,
            0 if self.times is None else self.times.restored_tokens,
        )

    def take(self, output: RequestOutput) -> None:
        """Process new output. An error fails the exchange and aborts its requests."""
        raise NotImplementedError

    def on_output(self, output: Any) -> None:
        if self.meter is not None:
            self.meter.saw(output)
        if not self.begun:
            self._begin(output)
        self.ended = output.finished
        for sample in output.outputs:
            self.completion_tokens += len(sample.token_ids)
            if sample.finish_reason is not None:
                self.finish_reasons.append(sample.finish_reason)
                if (error := error_of_end(sample)) is not None:
                    self.exchange.fail(error)
                    return
        try:
            self.take(output)
        except Exception as error:  # must not affect other requests
            self.exchange.fail(http_error(error))
            return
        if output.finished:
            self.exchange.listener_ended()

    def tell_plainly(self, before: bytes, after: bytes) -> None:
        """From now on, write the JSON text of each plain token between these bytes.

        For streams of one sample.
        """
        self._around = before, after
        self.is_plain = True

    def on_text(self, text: str, tokens: int) -> None:
        self.completion_tokens += tokens
        if self.meter is not None:
            self.meter.saw_tokens(tokens)
        if text and (stream := self.exchange.stream) is not None:
            before, after = self._around
            stream.write(b"%b%b%b" % (before, orjson.dumps(text), after))

    def on_error(self, error: DovetailError) -> None:
        self.ended = True
        if self.meter is not None:
            self.meter.ended("error")
        self.exchange.fail(error)

    def _begin(self, output: RequestOutput | PoolingRequestOutput[Any]) -> None:
        self.begun = True
        self.times = output.metrics
        self.prompt_tokens = len(output.prompt_token_ids)
        self.cached_tokens = output.num_cached_tokens
        if self.exchange.record.first_output is None:
            self.exchange.record.first_output = time.monotonic()
        if self.ticket is not None:
            self.ticket.leave(begun=True)


class PooledListener(OutputListener):
    """Listener to a request that pools."""

    # Once it has ended; as `PoolingOutput` has them.
    data: NDArray[np.float32]
    token_ids: NDArray[np.int32] | None

    def on_output(self, output: Any) -> None:
        if self.meter is not None:
            self.meter.saw_pooled(output)
        self._begin(output)
        self.ended = True
        self.finish_reasons.append(output.finish_reason or "stop")
        if (error := error_of_end(output)) is not None:
            self.exchange.fail(error)
            return
        self.data = output.outputs.data
        self.token_ids = output.outputs.token_ids
        self.exchange.listener_ended()
