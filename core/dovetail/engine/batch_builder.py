"""`BatchBuilder`: turns a planned step into the `Batch` that an executor computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from dovetail.api.executor import Batch, Drafts, NewRow, RowCheckpoint
from dovetail.api.kv_cache import Checkpoint, KVCacheManager, KVLayout, Pages
from dovetail.engine.books import RowAllocator
from dovetail.engine.feature import EngineFeature
from dovetail.engine.flight import InFlightStep
from dovetail.engine.live_request import LiveRequest
from dovetail.engine.step import PlannedStep

NONE = np.zeros(0, np.int32)
NO_PAGES = np.zeros((0, 3), np.int32)
NONE.flags.writeable = NO_PAGES.flags.writeable = False


class BatchBuilder:
    """Builds the batches of one engine; each holds only the changes since the one before."""

    def __init__(
        self,
        kv: KVCacheManager,
        rows: RowAllocator,
        features: Sequence[EngineFeature],
        layout: KVLayout,
        may_share: bool,
    ) -> None:
        """`may_share`: the executor can use the number of leading blocks that all requests of a step share."""
        self._kv, self._rows, self._features = kv, rows, features
        self._may_share = (
            may_share
            and bool(layout.groups)
            and layout.groups[0].window is None
            and not layout.groups[0].recurrent
        )
        self._pages_per_block = layout.groups[0].pages_per_block if layout.groups else 1
        self._has_states = layout.recurrent
        self._sharing: tuple[list[LiveRequest], int] = (
            [],
            0,
        )  # the requests of the last step, and the number of blocks that all begin with

    def build(
        self, step: PlannedStep, drafts: Mapping[LiveRequest, Sequence[int]], *, constrained: bool
    ) -> InFlightStep:
        """Return the record of a step until the result is in, with its batch. Requests without a row get one. `drafts`: those of its decodes that have
        any. `constrained`: some unfinished requests have a grammar."""
        requests, tokens = list(step.granted), list(step.granted.values())
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
        removed = self._rows.take_removed()
        batch = Batch(
            step=step.index,
            removed=np.array(removed, np.int32) if removed else NONE,
            added=tuple(self._new_row(r, step.granted[r]) for r in newcomers),
            new_pages=np.array(appended, np.int32) if appended else NO_PAGES,
            copies=tuple(self._kv.take_copies()),
            checkpoints=tuple(
                _row_checkpoint(checkpoint) for checkpoint in self._kv.take_checkpoints()
            )
            if self._has_states
            else (),
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
        for feature in self._features:
            batch = feature.fill(batch, requests, newcomers)
        return InFlightStep(
            index=step.index,
            batch=batch,
            planned=step.now,
            requests=requests,
            num_tokens=tokens,
            yields_token=batch.yields_token.tolist() if step.prefill_tokens else None,
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
        )

    def _shared_prefix(self, requests: list[LiveRequest], new: bool) -> int:
        """Return how many leading blocks all requests of a step share; 0 unless the executor can use it. Cached until a table is `new` or
        other requests run: tables only grow at their end."""
        if new:
            self._sharing = (
                [],
                0,
            )  # even if this step can't share: the requests of an earlier one may run together again later
        if not self._may_share or len(requests) < 2:
            return 0
        if requests != self._sharing[0]:
            self._sharing = (
                requests,
                _common_pages([self._kv.tables(r)[0] for r in requests]) // self._pages_per_block,
            )
        return self._sharing[1]

    def _new_row(self, request: LiveRequest, granted: int) -> NewRow:
        known = (
            np.concatenate((request.prompt_array, request.output_token_ids))
            if request.output_token_ids
            else request.prompt_array
        )
        return NewRow(
            row=request.row,
            request_id=request.id,
            token_ids=known.astype(np.int32),
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
            common = common[
                : next(
                    (
                        index
                        for index, (one, other) in enumerate(zip(common, table, strict=False))
                        if one != other
                    ),
                    len(table),
                )
            ]
        if not common:
            break
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
