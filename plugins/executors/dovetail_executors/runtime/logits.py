"""`LogitsProcessors`: the logits processors of a rank.

Tracks which rows ask for which, and makes the function with which a sampler applies them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.executor import ComponentRef
from dovetail.api.graphs import GraphSupport
from dovetail.api.logits_processor import (
    ArgumentContext,
    LogitsProcessor,
    LogitsProcessorContext,
    ProcessedRow,
)
from dovetail.api.sampler import Lines, Process, SampledRow
from dovetail.errors import PluginError, describe
from dovetail.nn.token_masks import mask_tokens
from dovetail.nn.transfer import all_to_device
from dovetail.request.frozen import thawed
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.sampler_rows import update_one_by_one

logger = logging.getLogger("dovetail")

Asks = NDArray[np.bool_]  # [n, processors]: which of them the row of each line asks for
WRONG = 2  # in row 1 of `Sampled.tokens`: the processors left no finite largest logit


class LogitsProcessors:
    """Processors in the order in which they are applied, with the rows that ask for them."""

    def __init__(
        self,
        refs: Sequence[ComponentRef],
        vocab_size: int,
        rows: RowState,
        max_drafts: int,
        max_tokens: int = 0,
    ) -> None:
        """Create and prepare the processors, if there are any. `max_tokens`: of a step. Raises
        `PluginError` that names the one that failed."""
        self.names = tuple(ref.name for ref in refs)
        context = LogitsProcessorContext(str(rows.device), vocab_size, rows.history, max_drafts)
        self._argument_context = ArgumentContext(encode=None, vocab_size=vocab_size)
        self._made = tuple(_made(ref, context, rows.max_rows) for ref in refs)
        self._capturable = np.array(
            [each.capabilities.cuda_graph is GraphSupport.ALL for each in self._made], np.bool_
        )
        self._asks = np.zeros((rows.max_rows + 1, len(refs)), np.bool_)
        # rows that ask for any
        self._asking = torch.zeros(rows.max_rows + 1, dtype=torch.bool, device=rows.device)
        # by line of a step: `WRONG` or 0
        most = max(rows.max_lines, max_tokens if refs else 0)
        self._wrong = torch.zeros(most, dtype=torch.int64, device=rows.device)
        # processors that couldn't forget a row, which are no longer used -> reason
        self._lost: dict[int, str] = {}
        self._all_ask = False

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> dict[int, str]:
        """Pass changed rows to the processors.

        Returns the rows of `added` that one of them rejected, and why; ignore their tokens.
        """
        changed = [*removed, *(one.row for one in added)]
        if not self._asks[changed].any() and not any(
            one.sampling.logits_processors for one in added
        ):
            return {}
        refused: dict[int, str] = {}
        for index, name in enumerate(self.names):
            asked = [row for row in dict.fromkeys(changed) if self._asks[row, index]]
            self._forget(index, asked)
            rows, wrong = self._validated(
                index, [one for one in added if name in one.sampling.logits_processors]
            )
            wrong |= self._begin(index, rows)
            self._asks[[one.row for one in rows if one.row not in wrong], index] = True
            refused |= wrong
        places = np.unique(np.array(changed, np.int64))
        self._asking.index_copy_(
            0, *all_to_device([places, np.asarray(self._asks[places].any(1))], self._asking.device)
        )
        return refused

    def asked_by(self, host_rows: NDArray[np.int64]) -> Asks | None:
        """Return which processors the rows [n] of a step's lines ask for; None if none."""
        asks = self._asks[host_rows] | self._all_ask
        return asks if asks.any() else None

    def can_capture(self, asks: Asks) -> bool:
        """Return True if a graph applies all processors that a step asks for."""
        return not self._lost and bool(self._capturable[asks.any(0)].all())

    @property
    def captured(self) -> bool:
        """True if a graph applies any of them."""
        return bool(self._capturable.any())

    def process(
        self,
        lines: Lines,
        asks: Asks,
        masked: torch.Tensor | None,
        words: torch.Tensor,
        failures: dict[int, str],
    ) -> Process:
        """Return the function that applies what a step asks for, then the masks: `masked` [n] int64
        are the lines' rows in `words`, or -1. Adds processors that raise to `failures`, index ->
        reason; the requests that ask for them end."""
        indices = np.flatnonzero(asks.any(0)).tolist()
        failures |= {index: reason for index, reason in self._lost.items() if index in indices}
        indices = [index for index in indices if index not in self._lost]
        return partial(self._process, lines, indices, masked, words, failures)

    def process_captured(
        self, lines: Lines, masked: torch.Tensor | None, words: torch.Tensor
    ) -> Process:
        """Return the function for all processors that a graph can apply.

        It raises `PluginError` for one that raises.
        """
        return partial(
            self._process, lines, np.flatnonzero(self._capturable).tolist(), masked, words, None
        )

    def add_wrong(self, tokens: torch.Tensor) -> None:
        """Add `WRONG` to row 1 of tokens [3, n] (see `sampling.append`) for lines whose largest
        logit wasn't finite."""
        tokens[1] += self._wrong[: tokens.shape[1]]

    def reason(self, asks: Asks, line: int) -> str:
        """Return why the line failed, for a client."""
        names = ", ".join(name for name, asked in zip(self.names, asks[line], strict=True) if asked)
        return (
            "the logits are NaN, infinite or all -inf after the logits processors that it asks "
            "for: "
            f"{names}"
        )

    @contextmanager
    def asked_by_all(self) -> Iterator[Mapping[str, Mapping[str, Any]]]:
        """Apply every processor in each step, to measure their memory.

        Yields what rows should ask for: the processors whose arguments have defaults.
        """
        self._all_ask = True
        try:
            yield {
                name: {}
                for name, processor in zip(self.names, self._made, strict=True)
                if self._has_defaults(processor)
            }
        finally:
            self._all_ask = False

    def _has_defaults(self, processor: LogitsProcessor) -> bool:
        try:
            processor.Arguments.model_validate({}, context=self._argument_context)
        except Exception:
            return False
        return True

    def _validated(
        self, index: int, asking: Sequence[SampledRow]
    ) -> tuple[list[ProcessedRow], dict[int, str]]:
        """Return the rows with their arguments, and the rows whose arguments are invalid here
        although they were valid on arrival."""
        rows = list[ProcessedRow]()
        wrong = dict[int, str]()
        name = self.names[index]
        model = self._made[index].Arguments
        for one in asking:
            plain = thawed(one.sampling.logits_processors[name])
            try:
                arguments = model.model_validate(plain, context=self._argument_context)
            except Exception as error:
                wrong[one.row] = (
                    f"logits processor {name} rejects arguments that it accepted on arrival: "
                    f"{describe(error)}"
                )
                logger.warning("ending a request: %s", wrong[one.row])
                continue
            rows.append(ProcessedRow(row=one.row, arguments=arguments, sampling=one.sampling))
        return rows, wrong

    def _forget(self, index: int, rows: Sequence[int]) -> None:
        """Remove rows.

        If the processor raises, never use it again: it might change the logits of a row that
        doesn't ask.
        """
        self._asks[rows, index] = False
        if not rows or index in self._lost:
            return
        try:
            self._made[index].update(rows, [])
        except Exception as error:
            self._lose(index, error)

    def _begin(self, index: int, rows: Sequence[ProcessedRow]) -> dict[int, str]:
        """Start rows. Returns those that the processor rejects, and why."""
        if index not in self._lost and rows:
            name = f"logits processor {self.names[index]}"
            update = self._made[index].update
            try:
                update([], rows)
                return {}
            except Exception:
                try:
                    return update_one_by_one(name, update, [], rows)
                except Exception as error:
                    self._lose(index, error)
        return {row.row: self._lost[index] for row in rows}

    def _lose(self, index: int, error: Exception) -> None:
        self._lost[index] = (
            f"logits processor {self.names[index]} is no longer used: it raised in update() when a "
            f"row was removed: {describe(error)}"
        )
        logger.error(self._lost[index], exc_info=error)

    def _process(
        self,
        lines: Lines,
        indices: Sequence[int],
        masked: torch.Tensor | None,
        words: torch.Tensor,
        failures: dict[int, str] | None,
        logits: torch.Tensor,
        start: int,
    ) -> None:
        part = slice(start, start + len(logits))
        own = lines.take(part)
        for index in indices:
            name = self.names[index]
            try:
                self._made[index].apply(logits, own)
            except Exception as error:
                if failures is None:
                    raise PluginError(
                        f"logits processor {name} declares GraphSupport.ALL, but can't be recorded: "
                        f"{describe(error)}"
                    ) from error
                failures[index] = f"logits processor {name} raised in apply(): {describe(error)}"
                logger.warning("ending requests: %s", failures[index], exc_info=error)
        if masked is not None:
            mask_tokens(logits, masked[part], words)
        wrong = self._asking[own.rows] & ~logits.amax(-1).isfinite()
        self._wrong[part] = wrong * WRONG
        # so that a valid id is sampled, for which the request ends
        logits.masked_fill_(wrong[:, None], 0.0)


def _made(ref: ComponentRef, context: LogitsProcessorContext, max_rows: int) -> LogitsProcessor:
    processor: LogitsProcessor = ref.make(context)
    try:
        processor.prepare(max_rows)
    except Exception as error:
        raise PluginError(
            f"logits processor {ref.name} raised in prepare(): {describe(error)}"
        ) from error
    return processor
