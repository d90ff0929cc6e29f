"""The hash chain of a request's full blocks: what a block is found by.

A block's hash covers its tokens and the hash before it, hence every token up to its end; the chain begins with a hash of the request's
`cache_keys`. 128 bits make an accidental collision a matter of 1 in 10^20 for a billion blocks; XXH3 is no defence against somebody who
constructs one on purpose.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from dovetail.request import Request

TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a chain lends to another whose request begins alike, without keeping its own request."""

    root: bytes
    prompt: NDArray[np.int64]  # [tokens]
    hashes: list[bytes]  # the chain's own, which grows

    def same_tokens(self, prompt: NDArray[np.int64]) -> int:
        """With how many both begin."""
        most = min(len(self.prompt), len(prompt))
        differ = self.prompt[:most] != prompt[:most]
        return int(differ.argmax()) if differ.any() else most


class HashChain:
    """Hashes of one request's blocks, each computed once: `hashes[i]` is that of tokens 0 … (i + 1) * block_size - 1."""

    __slots__ = ("_block_size", "_root", "_seed", "hashes", "request")

    def __init__(self, request: Request, block_size: int, seed: int, like: Beginning | None = None) -> None:
        """Hashes that are in `like` already are taken from there: from a chain with the same `block_size` and `seed`."""
        self.request = request
        self._block_size = block_size
        self._seed = seed
        self._root = xxh3_128_digest(repr(request.cache_keys).encode(), seed)
        self.hashes: list[bytes] = []
        if like is not None and like.root == self._root:
            self.hashes = like.hashes[: like.same_tokens(request.prompt_array) // block_size]

    @property
    def beginning(self) -> Beginning:
        return Beginning(self._root, self.request.prompt_array, self.hashes)

    def extend(self, num_blocks: int) -> list[bytes]:
        """The hashes of at least the first `num_blocks` blocks, which must be full of known tokens."""
        hashes = self.hashes
        if len(hashes) >= num_blocks:
            return hashes
        data = _token_bytes(self.request, len(hashes) * self._block_size, num_blocks * self._block_size)
        width, seed = self._block_size * TOKEN_BYTES, self._seed
        parent = hashes[-1] if hashes else self._root
        for start in range(0, len(data), width):
            parent = xxh3_128_digest(parent + data[start : start + width], seed)
            hashes.append(parent)
        return hashes


def _token_bytes(request: Request, start: int, end: int) -> bytes:
    """Token ids `start` … `end` - 1 of prompt and output, `TOKEN_BYTES` each."""
    prompt, data = request.prompt_tokens, request.prompt_array[start:end].tobytes()
    if end > prompt:
        data += array("q", request.output_token_ids[max(0, start - prompt) : end - prompt]).tobytes()
    return data
