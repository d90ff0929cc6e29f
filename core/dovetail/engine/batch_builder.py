"""`BatchBuilder`: turns a planned step into the `Batch` that an executor computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq
from typing import cast

import numpy as np

from dovetail.api.executor import Batch, Drafts, NewRow, RowCheckpoint
from dovetail.api.kv_cache import Checkpoint, Pages
from dovetail.engine.books import Books
from dovetail.engine.flight import InFlightStep
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.step import PlannedStep

# Most steps change neither: making an array anew would be 1 % of a small step's time.
NONE = np.zeros(0, np.int32)
NO_PAGES = np.zeros((0, 3), np.int32)


class BatchBuilder:
    """Builds the batches of one engine; each holds only the changes since the one before."""

    def __init__(self, books: Books, *, may_share: bool) -> None:
        """`may_share`: the executor can use the number of leading blocks that all rows share."""
        self._books = books
        self._kv = books.kv
        self._rows = books.rows
        self._layout = books.layout
        first = books.layout.groups[0] if books.layout.groups else None
        self._may_share = (
            may_share and first is not None and first.window is None and not first.recurrent
        )
        # the requests of the last step, and the number of blocks that all begin with
        self._sharing: tuple[list[LiveRequest], int] = ([], 0)

    def build(
        self, step: PlannedStep, drafts: Mapping[LiveRequest, Sequence[int]], *, constrained: bool
    ) -> InFlightStep:
        """Return the record of a step, with its batch. Requests without a row get one.

        `drafts`: of its decodes. `constrained`: some unfinished requests have a grammar.
        """
        requests = list(step.granted)
        tokens = list(step.granted.values())
        if drafts:
            tokens = [
                count + len(drafts.get(request, ())) for request, count in step.granted.items()
            ]
        appended = [
            (group, r.row, page)
            for r, tables in step.appended
            if r.row >= 0
            for group, pages in enumerate(tables)
            for page in pages
        ]
        newcomers = [r for r in requests if r.row < 0]
        for request in newcomers:
            self._rows.assign(request)
        removed = self._rows.take_removed() if self._rows.removed else ()
        batch = Batch(
            step=step.index,
            removed=np.array(removed, np.int32) if removed else NONE,
            added=tuple(self._new_row(r, step.granted[r]) for r in newcomers),
            new_pages=np.array(appended, np.int32) if appended else NO_PAGES,
            copies=tuple(self._kv.take_copies()),
            checkpoints=tuple(map(_row_checkpoint, self._kv.take_checkpoints())),
            rows=np.array([r.row for r in requests], np.int32),
            num_tokens=np.array(tokens, np.int32),
            yields_token=np.array([r.yields_token for r in requests])
            if step.prefill_tokens
            else np.ones(len(requests), np.bool_),
            shared_prefix_blocks=self._shared_prefix(requests, new=bool(step.admitted)),
            late=constrained
            and any(
                r.yields_token
                and r.constraint is not None
                and r.constraint.may_mask(r.in_flight - 1)
                for r in requests
            ),
            drafts=_drafts(requests, drafts) if drafts else None,
        )
        features = self._books.concerned_features if self._books.concerned else ()
        for feature in features:
            batch = feature.fill(batch, requests, newcomers)
        return InFlightStep(
            index=step.index,
            batch=batch,
            planned=step.now,
            requests=requests,
            num_tokens=tokens,
            prefilled=step.prefilled,
            recomputed=step.recomputed,
            prefill_tokens=step.prefill_tokens,
            decode_tokens=sum(tokens) - step.prefill_tokens,
            context_tokens=sum([r.num_computed for r in requests]),
            cached_tokens=sum(step.admitted.values()),
            preempted=len(step.preempted),
            recomputed_tokens=step.recomputed_tokens,
            decisions=tuple(step.decisions or ()),
            unsampled=batch.late,
            drafts=drafts,
            features=features,
        )

    def _shared_prefix(self, requests: list[LiveRequest], new: bool) -> int:
        """Return how many leading blocks all rows share; 0 unless the executor can use it.

        Cached until a table is `new` or other requests run: tables only grow at their end.
        """
        if new:  # even if this step can't share: requests of an earlier one may run together later
            self._sharing = ([], 0)
        if not self._may_share or len(requests) < 2:
            return 0
        if requests != self._sharing[0]:
            pages = _common_pages([self._kv.tables(r)[0] for r in requests])
            self._sharing = (requests, pages // self._layout.groups[0].pages_per_block)
        return self._sharing[1]

    def _new_row(self, request: LiveRequest, granted: int) -> NewRow:
        known = request.prompt_array, request.output, request.ahead
        return NewRow(
            row=request.row,
            request_id=request.id,
            token_ids=np.concatenate(known, dtype=np.int32, casting="unsafe"),
            prompt_len=request.prompt_tokens,
            computed=request.num_computed - granted,
            pages=tuple(np.array(pages, np.int32) for pages in self._kv.tables(request)),
            sampling=request.sampling,
        )


def _common_pages(tables: list[Pages]) -> int:
    """Return how many leading pages all tables have in common."""
    common = tables[0]
    for table in tables[1:]:
        if table[: len(common)] != common:
            common = common[: sum(takewhile(bool, map(eq, common, table)))]
    return len(common)


def _drafts(requests: list[LiveRequest], drafts: Mapping[LiveRequest, Sequence[int]]) -> Drafts:
    each = [drafts.get(request, ()) for request in requests]
    return Drafts(
        np.array([len(ids) for ids in each], np.int32),
        np.array([token for ids in each for token in ids], np.int32),
    )


def _row_checkpoint(checkpoint: Checkpoint) -> RowCheckpoint:
    request = cast("LiveRequest", checkpoint.request)  # managers are only given those
    return RowCheckpoint(request.row, checkpoint.tokens, np.array(checkpoint.pages, np.int32))
