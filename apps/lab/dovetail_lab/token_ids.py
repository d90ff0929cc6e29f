"""Token ids for requests with only known lengths, and sometimes shared prefixes: real ids, so that
the real prefix cache finds them.

A *stream* is an endless text. Its ids are a function of (stream, position) only, so two requests
that contain the same span of a stream share those tokens, and a KV-cache manager that hashes ids
finds the prefix by itself. The tokens of an image are those of a stream of its picture, so that
whatever compares ids tells pictures apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dovetail.request.media import MediaItem
from dovetail_lab.traces.request import Span, TraceRequest, stream_of

STOP_ID = 0  # not in any stream: an executor samples it to end an answer before `max_tokens`

TokenIds = NDArray[np.int32]


def prompt_ids(request: TraceRequest, vocab_size: int) -> TokenIds:
    """Return the prompt's ids [prompt_tokens], from 1 to vocab_size - 1."""
    return _ids(request, 0, request.prompt_tokens, vocab_size)


def media_items(request: TraceRequest) -> tuple[MediaItem, ...]:
    """Return the prompt's images as the engine sees them, without pixels."""
    return tuple(
        [
            MediaItem(
                kind="image",
                digest=image.stream.to_bytes(8, "big"),
                runs=((image.start, image.rows),),
                tensors={},
            )
            for image in request.images
        ]
    )


def output_ids(request: TraceRequest, vocab_size: int) -> TokenIds:
    """Return the answer's ids [output_tokens], from 1 to vocab_size - 1; a later turn of the chat
    has them in its history."""
    return _ids(
        request, request.prompt_tokens, request.prompt_tokens + request.output_tokens, vocab_size
    )


def _ids(request: TraceRequest, start: int, end: int, vocab_size: int) -> TokenIds:
    """Return the ids at positions `start` to `end` of prompt plus output."""
    parts = []
    position = 0
    own = Span(stream_of("request", request.id), 0, end)
    for stream, first, tokens in (*request.spans, own):
        low = max(start, position)
        high = min(end, position + tokens)
        if low < high:
            parts.append(_stream_ids(stream, first + low - position, high - low, vocab_size))
        position += tokens
    ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
    for image in request.images:
        low = max(start, image.start)
        high = min(end, image.stop)
        if low < high:
            of_picture = _stream_ids(image.stream, low - image.start, high - low, vocab_size)
            ids[low - start : high - start] = of_picture
    return ids


def _stream_ids(stream: int, start: int, count: int, vocab_size: int) -> TokenIds:
    """SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA '14):
    its state is a counter, so any position can be computed directly."""
    x = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(stream)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x %= np.uint64(vocab_size - 1)
    return (x + np.uint64(1)).astype(np.int32)
