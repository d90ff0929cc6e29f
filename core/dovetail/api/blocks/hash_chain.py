"""`HashChain`: hashes of a request's full blocks, each of all tokens up to the block's end.
`PrefixCache` finds blocks by them."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from dovetail.request import Request
from dovetail.request.media import MediaSpan, keys_between, same_tokens

TOKEN_BYTES = 4

HashName = Literal["xxh3", "sha256"]
Digest = Callable[[bytes], bytes]


def make_digest(name: HashName) -> Digest:
    """Return the hash function `name`; each xxh3 has its own secret seed."""
    if name == "sha256":
        return lambda data: hashlib.sha256(data).digest()
    seed = int.from_bytes(os.urandom(8), "little")
    return lambda data: xxh3_128_digest(data, seed)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Hashes of a chain, for reuse by a chain of another request with the same beginning. Doesn't
    keep the request."""

    root: bytes
    prompt: NDArray[np.int32]  # [tokens]
    media: tuple[MediaSpan, ...]  # of the prompt
    hashes: list[bytes]  # the chain's own list, which grows

    def same_tokens(self, request: Request) -> int:
        """Return the number of leading tokens that the request's prompt shares."""
        return same_tokens(self.prompt, self.media, request.prompt_array, request.media)


class HashChain:
    """Hashes of one request's full blocks, each computed once: `hashes[i]` covers tokens 0 … (i +
    1) * block_size - 1. With several groups, `block_size` is the greatest common divisor of their
    blocks.

    A block's hash covers its tokens, the images that they are of, and the previous hash, hence
    every token up to its end; the chain starts with a hash of the request's `cache_keys`. Two prefixes with the same hash would
    share K and V that belong to one of them. By accident this has a probability of 1 in 10^20 for a
    billion blocks with 128-bit hashes. Deliberately: no two texts with the same SHA-256 are known.
    XXH3 isn't designed to withstand attacks; its seed is drawn for each cache, so that collisions
    can't be prepared. No decision depends on the values of hashes, so runs stay reproducible.

    `after`: tokens after the block that its hash covers, too, which must be known."""

    __slots__ = ("_after", "_block_size", "_digest", "_root", "hashes", "request")

    def __init__(
        self,
        request: Request,
        block_size: int,
        digest: Digest,
        like: Beginning | None = None,
        after: int = 0,
    ) -> None:
        """Create a chain that copies the hashes of a common beginning from `like`, a chain with the
        same other arguments."""
        self.request = request
        self._block_size = block_size
        self._digest = digest
        self._after = after
        self._root = digest(repr(request.cache_keys).encode())
        self.hashes: list[bytes] = []
        if like is not None and like.root == self._root:
            self.hashes = like.hashes[: max(0, like.same_tokens(request) - after) // block_size]

    @property
    def beginning(self) -> Beginning:
        request = self.request
        return Beginning(self._root, request.prompt_array, request.media, self.hashes)

    def extend(self, num_blocks: int) -> list[bytes]:
        """Return the hashes of at least the first `num_blocks` blocks, which must be full of known
        tokens, as must be what comes after them."""
        hashes = self.hashes
        if len(hashes) >= num_blocks:
            return hashes
        first = len(hashes) * self._block_size + self._after
        data = token_bytes(self.request, first, num_blocks * self._block_size + self._after)
        width = self._block_size * TOKEN_BYTES
        digest = self._digest
        media = self.request.media
        parent = hashes[-1] if hashes else self._root + self._before_blocks()
        for start in range(0, len(data), width):
            block = data[start : start + width]
            if media:
                token = first + start // TOKEN_BYTES
                block += keys_between(media, token, token + self._block_size)
            parent = digest(parent + block)
            hashes.append(parent)
        return hashes

    def _before_blocks(self) -> bytes:
        """Return what the first hash covers besides its own block and the root."""
        tokens = token_bytes(self.request, 0, self._after)
        return tokens + keys_between(self.request.media, 0, self._after)


def token_bytes(request: Request, start: int, end: int) -> bytes:
    """Return token ids `start` … `end` - 1 of prompt and output, `TOKEN_BYTES` each."""
    prompt = request.prompt_tokens
    data = request.prompt_array[start:end].tobytes()
    if end > prompt:
        data += array(
            "i", request.output_token_ids[max(0, start - prompt) : end - prompt]
        ).tobytes()
    return data
