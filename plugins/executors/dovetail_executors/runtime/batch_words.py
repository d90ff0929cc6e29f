"""Serializes a `Batch` and its `Masks` as 32-bit words for other ranks: numbers are copied
directly, without a Python object for each.

What rows sample by, their changes, and the parts of features are pickled together: they have many
types, and most steps have none.

    step (two words), shared blocks, 1 if late, drafts (-1: none), then the number of each, and of the pages of a checkpoint
    removed | new_pages (group, row, page, …) | copies (src, dst, …) | checkpoints (row, tokens, pages …) | rows | num_tokens | yields_token
    with drafts, their number in each row | drafts
    for each of `added`: row, prompt_len, computed; number of tokens, of bytes of its id, and of groups
    for each of these the pages in each group | all tokens | all pages | all ids
    with `added`, `parts` or `changes`, sampling of each of `added`, and the others, pickled
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import Batch, Drafts, Masks, NewRow, RowCheckpoint
from dovetail.api.kv_cache import PageCopy

Words = NDArray[np.int32]

# words
_HEAD = 13
_NEW = 6


def to_words(batch: Batch) -> list[Words]:
    """Return the arrays of the message, in order."""
    saved = batch.checkpoints
    lens = (
        len(batch.removed),
        len(batch.new_pages),
        len(batch.copies),
        len(saved),
        len(saved[0].pages) if saved else 0,
        len(batch.rows),
        len(batch.added),
    )
    body = [batch.removed, batch.new_pages.reshape(-1)]
    if batch.copies:
        body.append(np.array([(copy.src, copy.dst) for copy in batch.copies], np.int32).reshape(-1))
    for checkpoint in saved:
        body += [np.array([checkpoint.row, checkpoint.tokens], np.int32), checkpoint.pages]
    body += [batch.rows, batch.num_tokens, batch.yields_token.astype(np.int32)]
    if batch.drafts is not None:
        body += [batch.drafts.counts, batch.drafts.token_ids]
    pickled = b""
    if batch.added:
        body += _added_words(batch.added)
    if batch.added or batch.parts or batch.changes is not None:
        started = [new.sampling for new in batch.added], batch.parts, batch.changes
        pickled = pickle.dumps(started, pickle.HIGHEST_PROTOCOL)
        body.append(_bytes_words(pickled))
    drafts = -1 if batch.drafts is None else len(batch.drafts.token_ids)
    head = np.array(
        [0, 0, batch.shared_prefix_blocks, batch.late, drafts, *lens, len(pickled)],
        np.int32,
    )
    # a server may run more steps than 32 bits can count
    head[:2] = np.array([batch.step], np.int64).view(np.int32)
    return [head, *body]


def from_words(words: Words) -> Batch:
    """Decode a batch. Its arrays are views of `words`."""
    step = int(words[:2].copy().view(np.int64)[0])
    shared, late, drafts, removed, new_pages, copies, saved, pages, rows, added, pickled = words[
        2:_HEAD
    ].tolist()
    reader = _Reader(words, _HEAD)
    fields: dict[str, Any] = {
        "removed": reader.take(removed),
        "new_pages": reader.take(3 * new_pages).reshape(-1, 3),
        "copies": tuple(
            PageCopy(src, dst) for src, dst in reader.take(2 * copies).reshape(-1, 2).tolist()
        ),
        "checkpoints": tuple(_checkpoint(reader, pages) for _ in range(saved)),
        "rows": reader.take(rows),
        "num_tokens": reader.take(rows),
        "yields_token": reader.take(rows).astype(np.bool_),
        "drafts": None if drafts < 0 else Drafts(reader.take(rows), reader.take(drafts)),
    }
    if added or pickled:
        fields |= _started(reader, added, pickled)
    return Batch(step=step, shared_prefix_blocks=shared, late=bool(late), **{"added": (), **fields})


def masks_to_words(masks: Masks) -> list[Words]:
    """Return arrays like `to_words`: number of masks, their lines, their words."""
    return [
        np.array([len(masks.lines)], np.int32),
        masks.lines,
        masks.words.reshape(-1).view(np.int32),
    ]


def masks_from_words(words: Words) -> Masks:
    """Decode masks. Their arrays are views of `words`."""
    count = int(words[0])
    return Masks(
        words[1 : 1 + count], words[1 + count :].view(np.uint32).reshape(count, -1 if count else 0)
    )


class _Reader:
    """Reads arrays from a message in order."""

    def __init__(self, words: Words, at: int) -> None:
        self._words = words
        self._at = at

    def take(self, count: int) -> Words:
        taken = self._words[self._at : self._at + count]
        self._at += count
        return taken

    def take_bytes(self, count: int) -> bytes:
        return self.take(-(-count // 4)).tobytes()[:count]


def _checkpoint(reader: _Reader, pages: int) -> RowCheckpoint:
    row, tokens = reader.take(2).tolist()
    return RowCheckpoint(row, tokens, reader.take(pages))


def _added_words(added: Sequence[NewRow]) -> list[Words]:
    ids = [new.request_id.encode("utf-8", "surrogatepass") for new in added]
    heads = [
        (new.row, new.prompt_len, new.computed, len(new.token_ids), len(id), len(new.pages))
        for new, id in zip(added, ids, strict=True)
    ]
    tokens = [new.token_ids for new in added]
    tables = [pages for new in added for pages in new.pages]
    counts = np.array([len(pages) for pages in tables], np.int32)
    return [
        np.array(heads, np.int32).reshape(-1),
        counts,
        *tokens,
        *tables,
        _bytes_words(b"".join(ids)),
    ]


def _started(reader: _Reader, count: int, pickled: int) -> dict[str, Any]:
    """Return `count` new rows, the parts and the changes, by field; `pickled`: bytes."""
    heads = reader.take(_NEW * count).reshape(count, _NEW).tolist()
    counts = [reader.take(head[5]).tolist() for head in heads]
    tokens = [reader.take(head[3]) for head in heads]
    tables = [tuple(map(reader.take, own)) for own in counts]
    ids = reader.take_bytes(sum(head[4] for head in heads))
    at = 0
    samplings, parts, changes = pickle.loads(reader.take_bytes(pickled))
    added = []
    for (row, prompt_len, computed, _, length, _), own, pages, sampling in zip(
        heads, tokens, tables, samplings, strict=True
    ):
        name = ids[at : at + length].decode("utf-8", "surrogatepass")
        at += length
        added.append(NewRow(row, name, own, prompt_len, computed, pages, sampling))
    return {"added": tuple(added), "parts": parts, "changes": changes}


def _bytes_words(data: bytes) -> Words:
    return np.frombuffer(data + bytes(-len(data) % 4), np.int32)
