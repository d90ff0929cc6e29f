"""One step on one device: `Runner` turns a `Batch` into the flat inputs of a model, runs it, samples, and copies the results to the host.

`submit` only enqueues; waiting for the device happens in `collect`. On a CPU `submit` computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend
from dovetail.api.clock import Clock
from dovetail.api.executor import Batch, HostLogprobs, Masks, Result
from dovetail.api.sampler import Lines, RowSampling, SampledTokens, Sampler, TopLogprobs
from dovetail.errors import DovetailError
from dovetail.nn.logprobs import top_logprobs
from dovetail.nn.token_masks import mask_tokens
from dovetail.runtime.adapters import AdapterBank, load_adapters
from dovetail.runtime.decode_rows import append, last_tokens
from dovetail.runtime.draft_head import RunningHead
from dovetail.runtime.draft_model import DraftModel, are_mixed
from dovetail.runtime.graphs import Graph, Graphs, ModelOutputs, StepParts, TappedStates
from dovetail.runtime.kv_pool import KVPool
from dovetail.runtime.logits import WRONG, Asks, LogitsProcessors
from dovetail.runtime.mask_buffer import MaskBuffer, masks_of_lines
from dovetail.runtime.pooler import PooledResult, Pooler
from dovetail.runtime.row_state import RowState
from dovetail.runtime.sampled import Sampled, SampledCopy
from dovetail.runtime.sampler_rows import update_rows
from dovetail.runtime.states import CheckedDrafts, States
from dovetail.runtime.step_inputs import DeviceInputs, HostInputs, HostLines
from dovetail.runtime.transfer import HostCopy, all_to_device, to_device

LOGITS_AT_ONCE = 1 << 24  # numbers per slice in which prompt logprobs are computed
SHARING_WORTH = 4096  # tokens of K and V saved; with fewer, sharing costs more than it saves


@dataclass(slots=True)
class LogprobsCopy:
    """`TopLogprobs`, in one or more slices, being copied to the host."""

    slices: list[tuple[HostCopy, HostCopy, HostCopy]] = field(default_factory=list)

    def add(self, top: TopLogprobs) -> None:
        self.slices.append((HostCopy(top.token_ids), HostCopy(top.logprobs), HostCopy(top.ranks)))

    def value(self) -> HostLogprobs:
        token_ids, logprobs, ranks = (
            np.concatenate([part.value for part in parts])
            for parts in zip(*self.slices, strict=True)
        )
        return HostLogprobs(token_ids, logprobs, ranks)


class DeviceSpan:
    """Span of a GPU's queue, timed by the GPU, from its creation to `close`."""

    __slots__ = ("_begin", "_end", "_stream")

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(
            device
        )  # looked up once: that takes longer than recording
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._begin.record(self._stream)

    def close(self) -> None:
        self._end.record(self._stream)

    def wait(self) -> None:
        """Wait until the device has passed the end."""
        self._end.synchronize()

    @property
    def passed(self) -> bool:
        """True once the device has passed the end."""
        return bool(self._end.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        """Return the span's seconds on the GPU, once the device has passed its end."""
        return float(self._begin.elapsed_time(self._end)) / 1000


@dataclass(slots=True)
class PendingStep:
    """A submitted step: its request, and results being copied to the host."""

    batch: Batch
    request_ids: list[str]  # of all rows: by `collect` a row may have another request
    lines: HostLines  # [n]
    started: float  # when submitted, in seconds on the engine's clock
    changes: tuple[
        list[int], list[tuple[int, RowSampling]]
    ]  # rows removed from the sampler, and added to it
    refused: dict[int, str] = field(
        default_factory=dict
    )  # new rows that the sampler or a logits processor rejected, and others that one failed
    sampled: SampledCopy | None = None  # None if n is 0
    asked_logprobs: int = (
        -1
    )  # largest number of alternatives requested of a replayed sampling; -1: no logprobs
    logprobs: LogprobsCopy | None = None  # if sampling wasn't replayed
    masked: NDArray[np.int64] | None = (
        None  # [n] the lines' rows in the masks, or -1; None: no line is masked
    )
    asks: Asks | None = None  # which logits processors the lines' rows ask for; None: none
    prompt_logprobs: dict[int, LogprobsCopy] = field(default_factory=dict)
    pooled: dict[int, PooledResult] = field(default_factory=dict)  # by index in the batch
    tapped: tuple[TappedStates, int | None] | None = (
        None  # for the draft head, once the tokens are sampled: arguments of `RunningHead.follow`
    )
    unsampled: tuple[torch.Tensor, NDArray[np.int64]] | None = (
        None  # of a late batch before `sample`: hidden states, and the indices of the lines'
    )
    checked: CheckedDrafts | None = (
        None  # of a model with recurrent layers: drafts whose changes to the states are enqueued after sampling
    )
    graphs: tuple[str, ...] = ()  # kinds of the replayed ones
    ended: float | None = None  # when it had been computed, if `submit` knows
    span: DeviceSpan | None = None  # on a GPU

    @property
    def step(self) -> int:
        return self.batch.step

    @property
    def rows(self) -> NDArray[np.int32]:
        return self.batch.rows

    @property
    def passed(self) -> bool:
        """True once the device has computed the step, so that `collect` needn't wait."""
        return self.span is None or self.span.passed

    def outcome(self) -> NDArray[np.int64]:
        """Return [3, n]: see `decode_rows.append`."""
        n = len(self.lines.rows)
        return np.zeros((3, 0), np.int64) if self.sampled is None else self.sampled.tokens(n)

    def outcome_logprobs(self) -> HostLogprobs | None:
        """Return the log-probabilities of all lines, if any row requests them."""
        if self.sampled is not None and self.asked_logprobs >= 0:
            return self.sampled.logprobs(len(self.lines.rows), self.asked_logprobs)
        return self.logprobs.value() if self.logprobs else None


class Runner:
    """Model, attention, sampler and rows of one device. Its arguments are ready to run; it has no lasting allocations itself."""

    def __init__(
        self,
        model: torch.nn.Module,
        backend: AttentionBackend,
        pool: KVPool,
        sampler: Sampler,
        rows: RowState,
        clock: Clock,
        vocab_size: int,
        draft: DraftModel | RunningHead | None = None,
        pooler: Pooler | None = None,
        processors: LogitsProcessors | None = None,
    ) -> None:
        self.model: Any = model  # a CausalLM
        self.draft = draft  # None: drafts come with the batches
        self.pooler = pooler  # None: no row pools
        self.processors = processors  # None: the engine has none
        self.backend, self.pool, self.sampler, self.rows, self.clock = (
            backend,
            pool,
            sampler,
            rows,
            clock,
        )
        self.device = rows.device
        self._slice = max(1, LOGITS_AT_ONCE // vocab_size)  # positions with logits computed at once
        self._pending: deque[PendingStep] = deque()
        self._refused: dict[
            int, str
        ] = {}  # rows of collected steps in `PendingStep.refused`: their requests have ended
        self._vocab_size = vocab_size
        self.masks = MaskBuffer(rows.max_lines, vocab_size, rows.device)
        self.adapters: AdapterBank | None = None
        self.graphs: Graphs | None = None  # set once captured

    @property
    def parts(self) -> StepParts:
        """Objects from which graphs of its steps are built."""
        draft = self.draft.model if isinstance(self.draft, DraftModel) else None
        generates = self.pooler is None or self.pooler.plan.capacity.generates
        adapters = None if self.adapters is None else self.adapters.step
        return StepParts(
            self.model,
            self.backend,
            self.sampler,
            self.rows,
            self.masks,
            draft,
            self._head,
            generates,
            adapters,
            self.processors,
        )

    @property
    def _head(self) -> RunningHead | None:
        return self.draft if isinstance(self.draft, RunningHead) else None

    @torch.inference_mode()
    def submit(self, batch: Batch) -> PendingStep:
        """Enqueue a step; for a late one, only the model. Raises `DovetailError` if it doesn't match the rows' state."""
        started = self.clock.now()
        span = DeviceSpan(self.device) if self.device.type == "cuda" else None
        self._check_drafts(batch)
        changes = self._change_rows(batch)
        pending = PendingStep(
            batch, self.rows.request_ids, HostLines.of(batch), started, changes, span=span
        )
        graphs, graph = (
            self.graphs if self.graphs is not None and self._is_plain_decode(batch) else None,
            None,
        )
        proposes = self.draft is not None and batch.drafts is not None
        if graphs is not None or proposes:
            self._tell_sampler(batch, pending)
        if graphs is not None:
            shared, adapted = self._worth_sharing(batch), self._is_adapted(batch)
            graph = graphs.for_decode(
                pending.lines.rows, shared, late=batch.late, adapted=adapted, asks=pending.asks
            )
        if batch.drafts is not None and graph is None:
            self.rows.put_drafts(batch.rows, batch.drafts)
        if self.draft is not None and batch.drafts is not None:
            self.draft.propose(batch.drafts, batch.rows, self.graphs)
        if graphs is not None and graph is not None:
            self._replay(graphs, graph, batch, pending)
        else:
            hidden, last_indices = self._run_model(batch, pending)
            if graphs is None and not proposes:
                self._tell_sampler(batch, pending)  # while the device computes
            if batch.late:
                pending.unsampled = hidden, last_indices
            elif len(last_indices):
                self._sample(last_indices, hidden, pending)
            if not batch.late:
                self._follow(pending)
        if batch.drafts is None:  # otherwise `collect` does
            self.rows.advance(batch.rows, batch.num_tokens)
        if not batch.late:
            self._close(pending)
        self._pending.append(pending)
        return pending

    @torch.inference_mode()
    def sample(self, pending: PendingStep, masks: Masks) -> None:
        """Enqueue the sampling of a late step. Raises `DovetailError` if it isn't the only step in flight, or has been sampled."""
        if pending.unsampled is None or [*self._pending] != [pending]:
            raise DovetailError(
                f"step {pending.step} can't be sampled: it must be late, sampled once, and the only one in flight"
            )
        hidden, last_indices = pending.unsampled
        pending.unsampled = None
        if len(masks.lines):
            self.masks.send(masks)
            pending.masked = masks_of_lines(masks, len(pending.lines.rows))
        self._sample(last_indices, hidden, pending)
        self._follow(pending)
        self._close(pending)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Launch the step kernel by kernel."""
        graphs, self.graphs = self.graphs, None
        try:
            yield
        finally:
            self.graphs = graphs

    def _follow(self, pending: PendingStep) -> None:
        """Let the draft head follow a step whose tokens are sampled, unless it has done so in a graph."""
        if (head := self._head) is not None and pending.tapped is not None:
            head.follow(*pending.tapped)
            pending.tapped = None

    def _close(self, pending: PendingStep) -> None:
        """Finish submitting: the whole step is enqueued; on a CPU, computed. How many tokens rows with drafts get is known to `collect`."""
        if pending.batch.drafts is None:
            self.rows.known[pending.lines.rows] += 1
        if self.graphs is not None:
            pending.graphs = self.graphs.take_kinds()
        if self.rows.states is not None and pending.checked is not None:
            self.rows.states.accept(pending.checked, self.rows.num_tokens)
        if pending.span is not None:
            pending.span.close()
        else:
            pending.ended = self.clock.now()

    def collect(self, pending: PendingStep) -> Result:
        """Wait for the oldest submitted step. Raises `DovetailError` if `pending` is another one."""
        if not self._pending or self._pending[0] is not pending:
            oldest = (
                f"step {self._pending[0].step} is the oldest"
                if self._pending
                else "none is in flight"
            )
            raise DovetailError(f"step {pending.step} was collected, but {oldest}")
        if pending.unsampled is not None:
            raise DovetailError(
                f"step {pending.step} was collected, but it is late and wasn't sampled"
            )
        started, ended = self._wait(self._pending.popleft())
        self._refused |= {
            row: reason
            for row, reason in pending.refused.items()
            if self.rows.request_ids[row] == pending.request_ids[row]
        }
        batch, (sampled, broken, gained) = pending.batch, pending.outcome()
        counts, logprobs = None, pending.outcome_logprobs()
        if batch.drafts is None:
            sampling, lines = np.flatnonzero(batch.yields_token), np.arange(len(sampled))
            token_ids = np.full(len(batch.rows), -1, np.int64)
            token_ids[sampling] = sampled
        else:
            sampling = np.arange(len(batch.rows)).repeat(batch.num_lines)
            counts = np.zeros(len(batch.rows), np.int32)
            np.add.at(counts, sampling, gained.astype(np.int32))
            lines = yielded = np.flatnonzero(pending.lines.ahead < counts[sampling])
            sampling, token_ids, broken = sampling[yielded], sampled[yielded], broken[yielded]
            if logprobs is not None:
                logprobs = HostLogprobs(
                    logprobs.token_ids[yielded], logprobs.logprobs[yielded], logprobs.ranks[yielded]
                )
            self.rows.known[batch.rows] += counts
            self.rows.advance(
                batch.rows, np.where(batch.drafts.counts > 0, counts, batch.num_tokens)
            )
            if isinstance(self.draft, DraftModel):
                self.draft.collected(batch.rows)
        failed = {
            int(sampling[index]): self._why_broken(int(broken[index]), int(lines[index]), pending)
            for index in np.flatnonzero(broken)
        }
        pooled = {index: pooled_result.value() for index, pooled_result in pending.pooled.items()}
        for index in [index for index, value in pooled.items() if not np.isfinite(value).all()]:
            failed[index] = "the model's hidden states hold NaN or infinity"
            del pooled[index]
        failed |= {
            index: pending.refused[row]
            for index, row in enumerate(batch.rows.tolist())
            if row in pending.refused
        }
        return Result(
            step=pending.step,
            token_ids=token_ids,
            started=started,
            ended=ended,
            logprobs=logprobs,
            prompt_logprobs={
                index: copy.value() for index, copy in pending.prompt_logprobs.items()
            },
            failed=failed,
            pooled=pooled,
            counts=counts,
            graphs=pending.graphs,
        )

    def _why_broken(self, flags: int, line: int, pending: PendingStep) -> str:
        if flags == WRONG and self.processors is not None and pending.asks is not None:
            return self.processors.reason(pending.asks, line)
        return "the model's hidden state holds NaN"

    def _wait(self, pending: PendingStep) -> tuple[float, float]:
        """Wait until the step is computed. Returns its start and end times."""
        if pending.ended is not None or pending.span is None:
            return pending.started, pending.ended or pending.started
        pending.span.wait()
        ended = self.clock.now()
        return ended - pending.span.seconds, ended

    def _run_model(
        self, batch: Batch, pending: PendingStep
    ) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Run the model for any step. Large steps are launched kernel by kernel. Returns hidden states [any, hidden], and where in them those of the
        lines' last tokens are."""
        graphs, shared_blocks, host = (
            self.graphs,
            self._worth_sharing(batch),
            HostInputs.of(batch, self.rows),
        )
        num_lines = batch.num_lines
        asks = np.flatnonzero(self._asks_prompt_logprobs(batch))
        wanted = last_indices = host.line_ends(num_lines)
        all_states, pools = (
            len(asks) > 0,
            None if self.pooler is None else self.pooler.plan_step(batch, host),
        )
        if pools is not None:
            wanted = np.concatenate([last_indices, pools.tokens])
            all_states = all_states or pools.all_states or len(wanted) > self.rows.max_lines
        draft_model = self.draft if isinstance(self.draft, DraftModel) else None
        draft = draft_model if (batch.num_tokens > num_lines).any() else None
        adapted = self._is_adapted(batch)
        graph = (
            None
            if graphs is None
            else graphs.for_model(
                host.num_tokens, shared_blocks, all_states=all_states, adapted=adapted
            )
        )
        if graphs is not None and graph is not None:
            inputs = graph.inputs.fill(host, wanted)
            outputs = graphs.replay(
                graph,
                host.attention_batch(self.rows, inputs, shared_blocks, mixed_graph=graph.whole),
            )
            all_states, draft = graph.inputs.all_states, draft_model  # these graphs run it
        else:
            inputs = host.to_device(self.rows)
            if self.rows.states is not None:
                pending.checked = self._plan_states(self.rows.states, batch, host, inputs)
            self.backend.plan(host.attention_batch(self.rows, inputs, shared_blocks))
            all_states = all_states or len(wanted) == host.num_tokens
            types = host.types(self.rows) if getattr(self.model, "reads_types", False) else None
            draft_module = None if draft is None else draft.model
            outputs = self._launch_model(
                inputs, None if all_states else wanted, draft_module, adapted=adapted, types=types
            )
        if draft is not None:
            draft.computed(batch)
        hidden, tapped = outputs
        pending.tapped = None if tapped is None else (tapped, host.num_tokens)
        self._ask_prompt_logprobs(asks, batch, host, hidden, pending)
        if self.pooler is not None and pools is not None:
            pending.pooled = self.pooler.pool(
                pools,
                hidden,
                pools.tokens if all_states else np.arange(len(last_indices), len(wanted)),
            )
        return hidden, last_indices if all_states else np.arange(len(last_indices))

    def _plan_states(
        self, states: States, batch: Batch, host: HostInputs, inputs: DeviceInputs
    ) -> CheckedDrafts | None:
        """Plan a step for recurrent layers. Returns its drafts, if it has any."""
        checkpoint_at, most, checked = np.zeros(len(batch.rows), np.int32), batch.num_tokens, None
        if batch.drafts is not None:
            most = np.where(batch.drafts.counts > 0, 0, most)
        if batch.checkpoints:
            index = {row: index for index, row in enumerate(batch.rows.tolist())}
            at = [index[checkpoint.row] for checkpoint in batch.checkpoints]
            checkpoint_at[at] = [
                checkpoint.tokens - self.rows.computed[checkpoint.row]
                for checkpoint in batch.checkpoints
            ]
            if ((checkpoint_at[at] < 1) | (checkpoint_at[at] > most[at])).any():
                raise DovetailError(
                    f"step {batch.step} can't write a checkpoint of tokens that it doesn't compute, or of a row with drafts"
                )
            states.put(
                [states.max_rows + 1 + i for i in at],
                [checkpoint.pages for checkpoint in batch.checkpoints],
            )
        step = states.batch(
            inputs.rows, inputs.query_starts, inputs.kv_lens, batch.num_tokens, checkpoint_at
        )
        if batch.drafts is not None:
            step, checked = states.with_drafts(
                step, host.rows, host.kv_lens, batch.num_lines, batch.drafts.counts
            )
        states.steps.plan(step)
        return checked

    def _launch_model(
        self,
        inputs: DeviceInputs,
        wanted: NDArray[np.int64] | None,
        draft: Any,
        *,
        adapted: bool,
        types: NDArray[np.int64] | None,
    ) -> ModelOutputs:
        """Return hidden states of all tokens; with `wanted`, indices of tokens, only theirs: [n, hidden], n at least 1. `draft`: a model that stores
        its K and V of all tokens, or None. `adapted`: tokens have adapters. `types` [tokens]: see `CausalLM.forward`."""
        token_ids = self.rows.token_ids.view(-1).index_select(0, inputs.token_indices).long()
        if wanted is not None and not len(wanted):
            wanted = np.array(
                [len(token_ids) - 1]
            )  # no row samples or pools, but models require at least one token
        device_wanted = None if wanted is None else to_device(wanted, self.device)
        rows = inputs.token_indices // self.rows.row_width if adapted else None
        device_types = None if types is None else to_device(types, self.device)
        outputs = self.parts.run(
            token_ids, inputs.token_indices, inputs.positions, device_wanted, rows, device_types
        )
        if draft is not None:
            draft(token_ids, inputs.positions, device_wanted)
        return outputs

    def _is_plain_decode(self, batch: Batch) -> bool:
        """Return True if every row computes a token for each line, and has one, so that a graph can replay the step if it supports the rows'
        sampling."""
        one_each = bool((batch.num_tokens == batch.num_lines).all()) and not batch.checkpoints
        return one_each and not self._asks_prompt_logprobs(batch).any()

    def _replay(self, graphs: Graphs, graph: Graph, batch: Batch, pending: PendingStep) -> None:
        """Replay with the longest rows first: kernels that compute a row in one program start with these, and short ones fill the gaps at the end."""
        order = np.argsort(
            -self.rows.known[pending.lines.rows], kind="stable"
        )  # a row's lines stay neighbours
        lines = pending.lines.sorted(order)
        outputs = graphs.replay(graph, graph.inputs.fill(lines, self._worth_sharing(batch)))
        if self.rows.states is not None:
            pending.checked = CheckedDrafts.of(graph.inputs.states, lines.ahead)
        if batch.late:
            pending.unsampled = outputs.hidden, np.argsort(order)
            pending.tapped = None if outputs.tapped is None else (outputs.tapped, None)
            return
        self._fetch(outputs, pending, order)

    def _fetch(
        self, sampled: Sampled, pending: PendingStep, order: NDArray[np.int64] | None = None
    ) -> None:
        """Copy the results of the step's lines to the host, in this order."""
        if sampled.packed is not None:
            pending.asked_logprobs = int(self.rows.logprobs[pending.lines.rows].max())
        pending.sampled = SampledCopy(sampled, order, with_logprobs=pending.asked_logprobs >= 0)

    def _is_adapted(self, batch: Batch) -> bool:
        """Return True if any row of the batch has an adapter."""
        return self.adapters is not None and bool(self.rows.adapters[batch.rows].any())

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor, *, adapted: bool) -> torch.Tensor:
        """Return logits for hidden states [n, hidden] of rows [n]."""
        return self.parts.logits(hidden, rows) if adapted else self.model.logits(hidden)

    def _adapts_head(self, rows: NDArray[Any]) -> bool:
        """Return True if an adapter of any of these rows changes the output layer."""
        if self.adapters is None or not self.adapters.heads:
            return False
        return bool(np.isin(self.rows.adapters[rows], [*self.adapters.heads]).any())

    def _worth_sharing(self, batch: Batch) -> int:
        """Return the number of leading blocks that attention reads once for all rows; 0 if that would save too little, or the step has adapters."""
        if self._is_adapted(batch):
            return 0
        tokens = (
            batch.shared_prefix_blocks * self.rows.layout.groups[0].block_tokens
            if batch.shared_prefix_blocks
            else 0
        )
        return batch.shared_prefix_blocks if tokens * (len(batch.rows) - 1) >= SHARING_WORTH else 0

    def _check_drafts(self, batch: Batch) -> None:
        """Raise `DovetailError` if the batch has unknown token ids as drafts, or a step with drafts wouldn't be alone in flight."""
        if self._pending and (
            batch.drafts is not None or self._pending[-1].batch.drafts is not None
        ):
            raise DovetailError(
                f"step {batch.step} can't be submitted while step {self._pending[-1].step} is in flight: one of them has drafts"
            )
        if batch.drafts is None:
            return
        ids, lowest = batch.drafts.token_ids, 0 if self.draft is None else -1
        if ((ids < lowest) | (ids >= self._vocab_size)).any():
            there = "no" if self.draft is None else "a"
            raise DovetailError(
                f"step {batch.step} has drafts that aren't in the vocabulary of {self._vocab_size} tokens; there is {there} draft model"
            )

    def _change_rows(self, batch: Batch) -> tuple[list[int], list[tuple[int, RowSampling]]]:
        """Apply the batch's changes. Returns the rows to remove from the sampler, and those to add, with their parameters: not those that pool."""
        if batch.adapters or any(new.adapter for new in batch.added):
            load_adapters(self.adapters, batch)
        self.rows.update(batch)
        self.rows.check(batch)
        if self.draft is not None:
            self.draft.begin(batch)
            if batch.drafts is not None and are_mixed(batch.drafts):
                raise DovetailError(
                    f"step {batch.step}: of a row's drafts, some are -1 and others aren't"
                )
        if batch.copies:
            self.pool.copy(batch.copies)
        if self.pooler is not None and (len(batch.removed) or batch.added):
            return self.pooler.change(batch)
        return batch.removed.tolist(), [(new.row, new.sampling) for new in batch.added]

    def _tell_sampler(self, batch: Batch, pending: PendingStep) -> None:
        """Raise `DovetailError` if a rejected request continues: then another rank's sampler has accepted what this one rejected."""
        if len(batch.removed) or batch.added:
            removed, added = pending.changes
            for row in (*removed, *(row for row, _ in added)):
                self._refused.pop(row, None)
            pending.refused = self.change_sampling(removed, added)
        if self.processors is not None:
            pending.asks = self.processors.asked_by(pending.lines.rows)
        for row in self._refused.keys() & set(batch.rows.tolist()) if self._refused else ():
            raise DovetailError(
                f"request {self.rows.request_ids[row]!r} goes on, but not on every rank alike: here {self._refused[row]}"
            )

    def change_sampling(
        self, removed: Sequence[int], added: Sequence[tuple[int, RowSampling]]
    ) -> dict[int, str]:
        """Tell the sampler and the logits processors of rows. Returns those of `added` that one of them rejected, and why."""
        name = f"sampler {type(self.sampler).__name__}"
        refused = update_rows(
            name, self.sampler.update, removed, added, lambda row: (row, RowSampling())
        )
        return (
            refused if self.processors is None else self.processors.update(removed, added) | refused
        )

    def _sample(
        self, host_indices: NDArray[np.int64], hidden: torch.Tensor, pending: PendingStep
    ) -> None:
        """Sample for the step's lines [n], and extend their rows. `host_indices` [n]: indices in `hidden` of their last tokens' states."""
        graphs, host_lines = self.graphs, pending.lines
        adapted = self._adapts_head(host_lines.rows)
        graph = (
            None
            if graphs is None or adapted
            else graphs.for_sampling(
                host_lines.rows, masked=pending.masked is not None, asks=pending.asks
            )
        )
        if graphs is not None and graph is not None:
            graph.inputs.fill(hidden, host_indices, host_lines, pending.masked)
            self._fetch(graphs.replay(graph), pending)
            return
        rows, ahead, indices = all_to_device(
            [host_lines.rows, host_lines.ahead, host_indices], self.device
        )
        last, lines = hidden.index_select(0, indices), Lines(rows, ahead)  # [n, hidden]
        sampled = self._draw(self._logits(last, rows, adapted=adapted), lines, pending)
        tokens = append(self.rows, lines, last_tokens(self.rows, lines)[1], sampled.token_ids, last)
        if self.processors is not None and pending.asks is not None:
            self.processors.add_wrong(tokens)
        self._fetch(Sampled(tokens), pending)
        if sampled.logprobs is not None:
            pending.logprobs = LogprobsCopy()
            pending.logprobs.add(sampled.logprobs)

    def _draw(self, logits: torch.Tensor, lines: Lines, pending: PendingStep) -> SampledTokens:
        """Sample a token for each of the step's lines [n] from logits [n, vocab], restricted to its masks. Samplers don't know about masks: a
        forbidden token looks like one that the model finds impossible. Log-probabilities are those of the unmasked logits."""
        host_rows, masked, raw = pending.lines.rows, None, logits
        if pending.masked is not None:
            masked = to_device(pending.masked, self.device)
            raw = logits.clone() if (self.rows.logprobs[host_rows] >= 0).any() else logits
            mask_tokens(logits, masked, self.masks.words)
        if self.processors is None or pending.asks is None:
            sampled = self.sampler.sample(logits, lines, host_rows)
        else:
            sampled = self._draw_processed(
                self.processors, pending.asks, logits, lines, masked, pending
            )
        if masked is None or sampled.logprobs is None:
            return sampled
        return SampledTokens(
            sampled.token_ids,
            top_logprobs(raw, sampled.token_ids, sampled.logprobs.token_ids.shape[1] - 1),
        )

    def _draw_processed(
        self,
        processors: LogitsProcessors,
        asks: Asks,
        logits: torch.Tensor,
        lines: Lines,
        masked: torch.Tensor | None,
        pending: PendingStep,
    ) -> SampledTokens:
        failures: dict[int, str] = {}
        process = processors.process(lines, asks, masked, self.masks.words, failures)
        sampled = self.sampler.sample_processed(logits, lines, pending.lines.rows, process)
        for index, reason in failures.items():
            pending.refused |= dict.fromkeys(pending.lines.rows[asks[:, index]].tolist(), reason)
        return sampled

    def _asks_prompt_logprobs(self, batch: Batch) -> NDArray[np.bool_]:
        """Return [b]: True for rows that request prompt log-probabilities and have more than one known token left to compute."""
        rows = self.rows
        asks: NDArray[np.bool_] = (rows.prompt_logprobs[batch.rows] >= 0) & (
            rows.computed[batch.rows] + 1 < rows.known[batch.rows]
        )
        return asks

    def _ask_prompt_logprobs(
        self,
        asks: NDArray[np.int64],
        batch: Batch,
        host: HostInputs,
        hidden: torch.Tensor,
        pending: PendingStep,
    ) -> None:
        """Compute the log-probability of the known token after each computed one, for the rows `asks` of the batch; a row's last known token has
        none."""
        for index in asks.tolist():
            row, start = int(batch.rows[index]), int(self.rows.computed[batch.rows[index]])
            count = min(int(batch.num_tokens[index]), int(self.rows.known[row]) - start - 1)
            first = int(host.query_starts[index])
            adapted = self._adapts_head(batch.rows[[index]])
            rows = torch.full((count,), row, dtype=torch.int64, device=self.device)
            targets = self.rows.token_ids[row, start + 1 : start + 1 + count].long()
            copy = pending.prompt_logprobs[index] = LogprobsCopy()
            for part, ids in zip(
                torch.split(hidden[first : first + count], self._slice),
                torch.split(targets, self._slice),
                strict=True,
            ):
                logits = self._logits(part, rows[: len(part)], adapted=adapted)
                copy.add(top_logprobs(logits, ids, int(self.rows.prompt_logprobs[row])))
