"""Measures what a decode step of n lines takes on a GPU, and what a draft model takes, so that the
core knows what drafts cost (`Capacity`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np
import torch

from dovetail.api.executor import Batch, Drafts
from dovetail.nn.state.states import CheckedDrafts
from dovetail_executors.runtime.features import Proposer
from dovetail_executors.runtime.graphs import Graphs
from dovetail_executors.runtime.model_io import DECODE
from dovetail_executors.runtime.profiling import batch_of_drafts, drafting_batch, empty_batch
from dovetail_executors.runtime.recording import synchronize
from dovetail_executors.runtime.runner import Runner
from dovetail_executors.runtime.step import DeviceSpan
from dovetail_executors.runtime.step_inputs import HostLines

LINES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
DRAFTING_ROWS = (1, 4, 16, 64, 256)
TIMES = 3


@torch.inference_mode()
def line_costs(runner: Runner, graphs: Graphs) -> tuple[tuple[int, float], ...]:
    """Replay the decode graphs of some numbers of lines, of rows with few tokens, and return the
    median seconds of each. Empty if there are none, or rows are too short for that. The KV pool
    must be allocated; rows are empty before and after, and what the first page holds is
    undefined."""
    rows = runner.rows
    costs = list[tuple[int, float]]()
    for count in LINES:
        graph = graphs.find(DECODE, count)
        if graph is None or count > rows.max_lines:
            break
        batch = drafting_batch(rows, count)
        drafts = int(batch.num_lines.max())
        if (1 + TIMES) * drafts >= rows.max_len:  # each replay may accept all
            break
        with _rows_of(runner, batch):
            lines = HostLines.of(batch)
            step = graph.inputs.fill(lines, 0)
            graphs.replay(graph, step)  # meanwhile the host enqueues those that are measured
            if (
                rows.states is not None
                and (checked := CheckedDrafts.of(graph.inputs.states, lines.ahead)) is not None
            ):
                rows.states.accept(checked, rows.num_tokens)  # compiles its kernels
            spans = list[DeviceSpan]()
            for _ in range(TIMES):
                spans.append(DeviceSpan(runner.device))
                graphs.replay(graph)
                spans[-1].close()
            spans[-1].wait()
            costs.append((count, median(span.seconds for span in spans)))
    return tuple(costs)


@torch.inference_mode()
def draft_costs(
    runner: Runner, draft: Proposer, drafts: int, max_tokens: int
) -> tuple[tuple[int, float], ...]:
    """Let the draft model, or the head, propose `drafts` for each of some numbers of rows with few
    tokens, and return the seconds of each number by draft, the host's work included. Empty if rows
    are too short for that, or a step of `max_tokens` can't check as many. As with `line_costs`,
    rows are empty before and after."""
    rows = runner.rows
    costs = list[tuple[int, float]]()
    lines = min(rows.max_lines, max_tokens)
    most = min(rows.max_rows, lines // (1 + drafts)) if 2 + drafts <= rows.max_len else 0
    for count in sorted({count for count in DRAFTING_ROWS if count < most} | {most} - {0}):
        asked = Drafts(np.full(count, drafts, np.int32), np.full(count * drafts, -1, np.int32))
        seconds = list[float]()
        batch = batch_of_drafts(rows, asked, known=2)
        for _ in range(1 + (TIMES if runner.device.type == "cuda" else 1)):
            with _rows_of(runner, batch):
                started = runner.clock.now()
                draft.propose(asked, batch.rows, runner.graphs)
                if runner.device.type == "cuda":
                    synchronize(runner.device)
                seconds.append(runner.clock.now() - started)
        costs.append((count, median(seconds[1:]) / drafts))
    return tuple(costs)


@contextmanager
def _rows_of(runner: Runner, batch: Batch) -> Iterator[None]:
    """Start the rows that `batch` adds, and remove them at the end."""
    runner.apply(batch)
    yield
    # Not after an error, which ends the engine's start
    runner.apply(empty_batch(removed=batch.rows))
