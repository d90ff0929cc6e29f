"""The endpoint `/metrics`: encodes what `metrics` counts for all models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from dovetail_server.metrics import ServerMetrics

_MAX_ACCEPT_CHARS = 1024  # of the header; a longer one, which is slow to parse, is ignored


def metrics_route(
    sources: Callable[[], Iterable[ServerMetrics]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return the handler of `/metrics`. `sources`: returns the metrics of all models; called by any
    thread."""
    registry = CollectorRegistry()
    registry.register(Merged(sources))
    scrapes = Scrapes(registry)

    async def scraped(request: Request) -> Response:
        accept = request.headers.get("accept", "")
        if len(accept) > _MAX_ACCEPT_CHARS:
            accept = ""
        text, content_type = await scrapes.scrape(accept)
        return Response(text, headers={"content-type": content_type})

    return scraped


class Merged(Collector):
    """The metrics of several models, which a label tells apart, as if they were of one source:
    Prometheus reads each name once."""

    def __init__(self, sources: Callable[[], Iterable[Collector]]) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for source in self._sources():
            for metric in source.collect():
                known = merged.setdefault(metric.name, metric)
                if known is not metric:
                    known.samples += metric.samples
        return merged.values()


class Scrapes:
    """Encodes metrics in a thread, so that streams aren't delayed; once at a time, since each
    thread would delay the event loop. All who ask before an encoding begins share it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._turn = asyncio.Lock()
        # encodings that haven't begun, by content type
        self._next: dict[str, asyncio.Task[bytes]] = {}

    async def scrape(self, accept: str) -> tuple[bytes, str]:
        """Return the metrics as a client accepts them, and their content type."""
        encode: Callable[[CollectorRegistry], bytes]
        encode, content_type = choose_encoder(accept)
        task = self._next.get(content_type)
        if task is None:
            task = asyncio.create_task(self._encoded(encode, content_type))
            self._next[content_type] = task
        return await asyncio.shield(task), content_type

    async def _encoded(
        self, encode: Callable[[CollectorRegistry], bytes], content_type: str
    ) -> bytes:
        async with self._turn:
            del self._next[content_type]
            return await asyncio.to_thread(encode, self._registry)
