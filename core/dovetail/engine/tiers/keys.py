"""Frames: their blocks, their names, and their headers in tiers.

A frame is the K and V of one cache group for tokens [k F, (k + 1) F), or the state after (k + 1) F
tokens. Its name contains a SHA-256 of all tokens up to its end. The hashes of the prefix cache
can't be used: they are seeded per process, and needn't be collision-resistant.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dovetail.api.blocks.hash_chain import Beginning, HashChain, make_digest
from dovetail.api.kv_cache import CacheGroup, KVLayout, Pages
from dovetail.api.kv_tier import FrameKey
from dovetail.request import Request

FRAME_TOKENS = 256  # maximum tokens of a frame, unless the layout's `hit_tokens` is larger
FORMAT = b"DovKV\x00\x00\x01"  # of a frame in a tier, with its version
HEADER_BYTES = 64
_SHA256 = make_digest("sha256")
_FIELDS = struct.Struct("<8sQQQ")  # format, bytes of the pages, seed, checksum


class FrameName(NamedTuple):
    """Name of a frame in this process: its cache group, and the SHA-256 of all up to its end."""

    group: int
    chain: bytes


@dataclass(frozen=True, slots=True)
class GroupFrames:
    """Frames of one cache group, all of the same length."""

    number: int
    spec: CacheGroup
    tokens: int  # of a frame
    page_bytes: int

    def blocks(self, index: int) -> range:
        """Return the blocks that hold the tokens of frame `index`. With a window shorter than a
        frame, only those that later tokens see."""
        end = (index + 1) * self.tokens
        first = index * self.tokens // self.spec.block_tokens
        visible = self.spec.first_visible_block(end)
        return range(max(first, visible), end // self.spec.block_tokens)

    def pages(self, index: int, table: Pages) -> Pages:
        """Return the pages of frame `index` in a block table that contains them."""
        blocks = self.blocks(index)
        width = self.spec.pages_per_block
        return table[blocks.start * width : blocks.stop * width]

    def needed(self, tokens: int) -> range:
        """Return the frames of a prefix of `tokens` tokens, a multiple of the frame length, that
        later tokens read."""
        last = tokens // self.tokens
        if self.spec.recurrent:
            return range(last - 1, last)
        visible = self.spec.first_visible_block(tokens) * self.spec.block_tokens
        return range(visible // self.tokens, last)

    @property
    def bytes(self) -> int:
        """Bytes of a frame's pages."""
        blocks = 1 if self.spec.recurrent else len(self.blocks(0))
        return blocks * self.spec.pages_per_block * self.page_bytes


class FrameLayout:
    """Divides the prefixes of a layout into frames."""

    def __init__(self, layout: KVLayout, page_bytes: int) -> None:
        """`page_bytes`: size of a saved page."""
        self.tokens = layout.hit_tokens
        if not layout.recurrent:  # a state is kept wherever there is one
            self.tokens *= max(1, FRAME_TOKENS // layout.hit_tokens)
        self.after = int(layout.reads_next)
        self.groups = tuple(
            GroupFrames(number, spec, self.tokens, page_bytes)
            for number, spec in enumerate(layout.groups)
        )

    def named(self, known: int) -> int:
        """Return the number of frames whose names follow from the first `known` tokens."""
        return max(0, known - self.after) // self.tokens

    def restorable(self, known: int) -> int:
        """Return the number of frames of the longest prefix that can be restored for a request with
        `known` tokens: its last token is always computed."""
        return min(self.named(known), (known - 1) // self.tokens)

    def chain(self, request: Request, like: Beginning | None = None) -> HashChain:
        """Return the hashes by which the frames of a request are named, of all that precedes the
        end of each. `like`: another chain of this layout, whose hashes of a common beginning are
        copied."""
        return HashChain(request, self.tokens, _SHA256, like, self.after)


def _packed(parts: Iterable[bytes]) -> bytes:
    """Join `parts` injectively: different parts give different bytes."""
    each = [*parts]
    lengths = [struct.pack("<Q", len(part)) for part in each]
    return struct.pack("<Q", len(each)) + b"".join([*lengths, *each])


def namespaces(model: bytes, layout: KVLayout, transfers: str) -> tuple[bytes, ...]:
    """Return the namespace [32 bytes] of each group's frames.

    `model`: digest of all that determines K and V besides the layout and the tokens. `transfers`:
    `KVTransfers.name`.
    """
    shape = repr((layout, FORMAT)).encode()
    return tuple(
        hashlib.sha256(_packed([model, shape, transfers.encode(), str(number).encode()])).digest()
        for number in range(len(layout.groups))
    )


def header(key: FrameKey, size: int, seed: int, checksum: int) -> bytes:
    """Return the header [`HEADER_BYTES`] of a frame with `size` bytes of pages. It binds their
    checksum to the frame's name."""
    fields = _FIELDS.pack(FORMAT, size, seed, checksum)
    return fields + hashlib.sha256(fields + key.namespace + key.chain).digest()


def read_header(data: memoryview, key: FrameKey) -> tuple[int, int] | None:
    """Return the seed and the checksum of a loaded frame; None if its header is damaged or belongs
    to another frame."""
    fields = bytes(data[: _FIELDS.size])
    digest = hashlib.sha256(fields + key.namespace + key.chain).digest()
    if bytes(data[_FIELDS.size : HEADER_BYTES]) != digest:
        return None
    form, size, seed, checksum = _FIELDS.unpack(fields)
    if form != FORMAT or size != len(data) - HEADER_BYTES:
        return None
    return seed, checksum
