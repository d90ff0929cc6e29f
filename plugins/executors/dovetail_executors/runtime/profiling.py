"""Measures the GPU memory of an engine besides its KV pool, by running the largest possible
step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from dovetail.api.executor import Batch, Drafts, NewRow
from dovetail.api.sampler import RowSampling
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.runner import Runner


def peak_bytes(runner: Runner, max_tokens: int) -> int:
    """Run the largest step of at most `max_tokens`, and return the peak GPU memory without the KV
    pool, in bytes.

    The pool has one page, which all rows write to. Rows are empty before and after.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(runner.device)
    plain = biggest_batch(runner.rows, max_tokens)
    biggest = [plain] if runner.parts.generates else []
    if runner.rows.max_lines > len(plain.rows):
        biggest.append(drafting_batch(runner.rows, min(runner.rows.max_lines, max_tokens)))
    of_features = (batch for feature in runner.features for batch in feature.biggest(plain))
    for batch in chain(biggest, of_features):
        with _processed(runner, batch) as asking:
            runner.collect(runner.submit(asking))
            runner.apply(empty_batch(removed=asking.rows))
    free, total = torch.cuda.mem_get_info(runner.device)
    outside_torch = total - free - torch.cuda.memory_reserved(runner.device)
    return outside_torch + torch.cuda.max_memory_allocated(runner.device)


@contextmanager
def _processed(runner: Runner, batch: Batch) -> Iterator[Batch]:
    """Apply all logits processors in a step of new rows, which ask for those whose arguments have
    defaults."""
    with runner.sampling.processors.asked_by_all() as asked:
        added = (
            new
            if new.sampling is None
            else replace(new, sampling=replace(new.sampling, logits_processors=asked))
            for new in batch.added
        )
        yield replace(batch, added=tuple(added))


def biggest_batch(rows: RowState, max_tokens: int) -> Batch:
    """Return the largest possible step: maximum rows and tokens, all new, all sampling."""
    num_rows = min(rows.max_rows, max_tokens)
    count = min(max_tokens // num_rows, rows.max_len)
    tokens = np.zeros(count, np.int32)
    pages = tuple(
        np.zeros(group.blocks(count) * group.pages_per_block, np.int32)
        for group in rows.layout.groups
    )
    added = tuple(
        NewRow(row, "profile", tokens, count, 0, pages, RowSampling()) for row in range(num_rows)
    )
    index = np.arange(num_rows, dtype=np.int32)
    counts = np.full(num_rows, count, np.int32)
    yields = np.ones(num_rows, np.bool_)
    return empty_batch(added=added, rows=index, num_tokens=counts, yields_token=yields)


def drafting_batch(rows: RowState, lines: int) -> Batch:
    """Return a step of `lines` lines, spread evenly over all rows. Each row has one known token;
    the others are drafts."""
    num_rows = min(rows.max_rows, lines)
    counts = (lines // num_rows + (np.arange(num_rows) < lines % num_rows)).astype(np.int32)
    return batch_of_drafts(rows, Drafts(counts - 1, np.zeros(lines - num_rows, np.int32)), known=1)


def batch_of_drafts(rows: RowState, drafts: Drafts, known: int) -> Batch:
    """Return a step in which new rows with `known` tokens each check these drafts."""
    num_rows = len(drafts.counts)
    counts = 1 + drafts.counts
    pages = tuple(
        np.zeros(group.blocks(known + int(counts.max())) * group.pages_per_block, np.int32)
        for group in rows.layout.groups
    )
    added = tuple(
        NewRow(row, "profile", np.zeros(known, np.int32), known, known - 1, pages, RowSampling())
        for row in range(num_rows)
    )
    index = np.arange(num_rows, dtype=np.int32)
    return empty_batch(
        added=added,
        rows=index,
        num_tokens=counts,
        yields_token=np.ones(num_rows, np.bool_),
        drafts=drafts,
    )


def empty_batch(**changes: object) -> Batch:
    """Return an empty step with `changes`, fields of `Batch`."""
    nothing = np.zeros(0, np.int32)
    fields: dict[str, object] = {
        "step": -1,
        "removed": nothing,
        "added": (),
        "new_pages": nothing.reshape(0, 3),
        "copies": (),
        "rows": nothing,
        "num_tokens": nothing,
        "yields_token": nothing.astype(np.bool_),
    }
    return Batch(**{**fields, **changes})  # type: ignore[arg-type]
