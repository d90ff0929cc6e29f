"""Images in prompts. `MediaSpan`: where one is, and which, as policies and managers see it.
`MediaItem`: what an executor computes of it. Only spans make a placeholder: the same token id
elsewhere is text, which users may write and models generate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MediaKind = Literal["image"]  # later versions may add kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSpan:
    """An item's place among the tokens of a prompt. Tokens between its placeholders, such as those
    that end the lines of an image, belong to it.

    Later versions may add fields with defaults.
    """

    digest: bytes  # equal only for items whose rows are equal: picture, size, processor's settings
    start: int  # index of its first placeholder
    stop: int  # index after its last placeholder

    def key(self, start: int, stop: int) -> bytes:
        """Return what hashes of tokens `start` … `stop` - 1 cover besides the tokens: the digest,
        and where the item begins, which may be before `start`. Empty if the item has none of
        them."""
        if max(start, self.start) >= min(stop, self.stop):
            return b""
        return self.digest + (self.start - start).to_bytes(8, "little", signed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaItem:
    """An item of a prompt, with all that its rows are computed of. A row replaces the embedding of
    one placeholder.

    A tensor is an argument of transformers' `get_image_features`, for this item alone. Pixels may
    be bytes, of which "pixel_table" [channels, 256] says what they stand for. All stay until the
    request ends, since a preempted request may need them again.
    """

    kind: MediaKind
    digest: bytes  # see `MediaSpan`
    # (index of the first token, number of rows) in the prompt, ascending: the tiles of some types
    # are divided by ordinary tokens
    runs: tuple[tuple[int, int], ...]
    tensors: Mapping[str, NDArray[Any]] = field(repr=False)
    # (time, height, width) in rows, of types with positions on three axes; it is one run then
    grid: tuple[int, int, int] | None = None
    # its tokens attend to each other in both directions, so each run is computed in one step
    whole: bool = False

    @property
    def rows(self) -> int:
        """Number of rows, of all runs."""
        return sum(count for _, count in self.runs)

    @property
    def span(self) -> MediaSpan:
        start = self.runs[0][0]
        last, count = self.runs[-1]
        return MediaSpan(digest=self.digest, start=start, stop=last + count)


def keys_between(media: Sequence[MediaSpan], start: int, stop: int) -> bytes:
    """Return the `MediaSpan.key`s of tokens `start` … `stop` - 1, joined."""
    return b"".join([span.key(start, stop) for span in media])


def same_tokens(
    one: NDArray[np.int32],
    media: Sequence[MediaSpan],
    other: NDArray[np.int32],
    other_media: Sequence[MediaSpan],
) -> int:
    """Return the number of leading tokens that two prompts [tokens] share, the pictures behind
    them included."""
    most = min(len(one), len(other))
    differ = one[:most] != other[:most]
    same = int(differ.argmax()) if differ.any() else most
    for place in range(max(len(media), len(other_media))):
        mine = media[place : place + 1]
        theirs = other_media[place : place + 1]
        if mine != theirs:
            return min(same, *(span.start for span in (*mine, *theirs)))
    return same
