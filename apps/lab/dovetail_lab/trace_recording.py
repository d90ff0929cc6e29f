"""Observer `trace`: writes the requests of an engine as a trace that the lab replays, in Mooncake's
format. Prompts are written as hashes only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import xxhash
from pydantic import BaseModel, ConfigDict, Field

from dovetail.api.observer import (
    EngineStarted,
    EngineStopped,
    Observer,
    ObserverContext,
    RequestFinished,
)
from dovetail.errors import ConfigError, shown
from dovetail.request import Request
from dovetail.request.media import keys_between
from dovetail_lab.traces.images import written_images
from dovetail_lab.traces.objects import MOONCAKE_BLOCK
from dovetail_lab.traces.request import TraceImage

_EXACT_BITS = 53  # of a hash, so that every reader of JSON reads it exactly


class TraceRecorderOptions(BaseModel):
    """Options of the observer `trace`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        default="trace.jsonl", min_length=1, description="File to write; overwritten by each run."
    )


class TraceRecorder(Observer):
    """Writes a line when a request has completed. Those that were aborted, rejected or failed are
    left out, since how long their answers would have been is unknown."""

    options: TraceRecorderOptions

    def __init__(self, options: TraceRecorderOptions, context: ObserverContext) -> None:
        super().__init__(options, context)
        self._path = Path(options.path)
        self._file: TextIO | None = None
        self._zero = 0.0

    def on_started(self, event: EngineStarted) -> None:
        """Open the file. Raises `ConfigError` if that fails."""
        self._zero = event.time
        try:
            self._file = self._path.open("w", encoding="utf-8", buffering=1)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"observer trace: path: {shown(self.options.path)} can't be written: "
                f"{getattr(error, 'strerror', None) or error}"
            ) from None

    def on_finished(self, event: RequestFinished) -> None:
        completed = event.finish_reason in ("stop", "length") and event.request.generated > 0
        if self._file is not None and completed:
            self._file.write(json.dumps(self._row(event.request), separators=(",", ":")) + "\n")

    def on_stopped(self, event: EngineStopped) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _row(self, request: Request) -> dict[str, Any]:
        row = {
            "timestamp": round(1000 * max(0.0, request.arrival_time - self._zero), 3),
            "input_length": request.prompt_tokens,
            "output_length": request.generated,
            "hash_ids": [*_hashes(request)],
        }
        images = tuple(
            TraceImage(span.start, span.stop - span.start, span.digest.hex())
            for span in request.media
        )
        return {**row, "images": written_images(images)} if images else row


def _hashes(request: Request) -> Iterator[int]:
    """Yield the hash of each block of the prompt, and of what its K and V depend on besides."""
    keys = "\x1f".join(request.cache_keys).encode(errors="surrogatepass")
    for start in range(0, request.prompt_tokens, MOONCAKE_BLOCK):
        stop = min(start + MOONCAKE_BLOCK, request.prompt_tokens)
        tokens = request.prompt_array[start:stop].tobytes()
        digest = xxhash.xxh64(keys)
        digest.update(tokens + keys_between(request.media, start, stop))
        yield digest.intdigest() >> (64 - _EXACT_BITS)
