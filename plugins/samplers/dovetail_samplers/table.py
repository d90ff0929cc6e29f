"""`RowTable`: sampling parameters of all rows on the host. `Needs`: what they require of a step.

They change only when rows start and end, and the host must know a step's paths (`Needs`), so the
table is numpy; the values that a step's rows need are sent with the step.

`DeviceRows`: parameters of all rows on the device, and drawing tokens from these and the logits,
without the host. This can be recorded in a CUDA graph. On a GPU `fused` draws; `draw_plain` is the
same in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.sampler import Lines, RowHistory, RowSampling, SampledRow
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.transfer import all_to_device, to_device
from dovetail_samplers.filters import LEAST, cut_top_k, first_argmax, retained, retained_min_p
from dovetail_samplers.noise import exponentials, id_hashes, seed_state, stream_keys
from dovetail_samplers.rules import RowRules

# outside, float32 would be 0 or infinite
TEMPERATURES = (
    float(np.finfo(np.float32).tiny),
    float(np.finfo(np.float32).max),
)
GREEDY = RowSampling(temperature=0.0)
NO_TOP_P = np.inf  # 1 would drop the last tokens due to rounding
RECORD = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy
        ("top_k", np.int32),  # the vocabulary's size: none
        ("top_p", np.float32),  # infinite: none
        ("min_p", np.float32),
        ("seed_state", np.int64),
    ]
)
# of a row on the host: what the device has as well, and the rest
ROW = np.dtype(
    [
        ("record", RECORD),
        ("logprobs", np.int64),
        ("temperature", np.float32),  # also of greedy rows, to divide by
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("needs", np.uint8),
    ],
    align=True,
)

RowValues = tuple[Any, ...]


class Needs:
    """Flags of a row's needs besides the most likely token. They are plain integers, since an
    operator of `IntFlag` takes as long as ten of these."""

    RANDOM = 1  # temperature above 0, and more than one token to choose from
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    RULES = 16
    REPETITION = 32
    FREQUENCY = 64  # or presence
    LOGPROBS = 128

    FILTERS = TOP_K | TOP_P | MIN_P
    CHANGED_LOGITS = RULES | REPETITION | FREQUENCY


def needs_of(sampling: RowSampling, has_rules: bool, vocab_size: int) -> int:
    """Return a row's flags of `Needs`."""
    needs = Needs.RULES if has_rules else 0
    if sampling.temperature > 0 and sampling.top_k != 1:  # top_k=1 is greedy
        needs |= Needs.RANDOM
        if 0 < sampling.top_k < vocab_size:
            needs |= Needs.TOP_K
        if sampling.top_p < 1:
            needs |= Needs.TOP_P
        if sampling.min_p > 0:
            needs |= Needs.MIN_P
    if sampling.repetition_penalty != 1:
        needs |= Needs.REPETITION
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        needs |= Needs.FREQUENCY
    if sampling.logprobs is not None:
        needs |= Needs.LOGPROBS
    return needs


def row_of(sampling: RowSampling, has_rules: bool, vocab_size: int) -> RowValues:
    """Return a row's values of ROW."""
    needs = needs_of(sampling, has_rules, vocab_size)
    temperature = sampling.temperature
    if not TEMPERATURES[0] <= temperature <= TEMPERATURES[1]:
        temperature = min(max(temperature, TEMPERATURES[0]), TEMPERATURES[1])
    record = (
        temperature if needs & Needs.RANDOM else 0,
        sampling.top_k if needs & Needs.TOP_K else vocab_size,
        sampling.top_p if needs & Needs.TOP_P else NO_TOP_P,
        sampling.min_p,
        seed_state(sampling.seed),
    )
    return (
        record,
        sampling.logprobs or 0,
        temperature,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        needs,
    )


class RowTable:
    """Parameters by column, indexed by row; `rules`: of rows that have any."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._rows = np.array([row_of(GREEDY, False, vocab_size)], ROW).repeat(max_rows)
        self.records = self._rows["record"]
        self.top_k = self.records["top_k"]
        self.top_p = self.records["top_p"]
        self.min_p = self.records["min_p"]
        self.seed_states = self.records["seed_state"]
        self.logprobs = self._rows["logprobs"]
        self.temperature = self._rows["temperature"]
        self.repetition = self._rows["repetition"]
        self.presence = self._rows["presence"]
        self.frequency = self._rows["frequency"]
        self.needs = self._rows["needs"]
        self.sent: dict[int, RowValues] = {}  # what devices have of each row, without its rules
        self.rules: dict[int, RowRules] = {}

    def remove(self, rows: Sequence[int]) -> None:
        if self.rules:
            for row in rows:
                self.rules.pop(row, None)

    def add(self, added: Sequence[SampledRow]) -> dict[int, RowValues]:
        """Set the parameters of these rows; if it raises, none has changed. Returns the values of
        rows that must be sent, and then be noted in `sent`: deterministic requests begin a row
        again and again, most of them with the same values."""
        rules_of: dict[int, RowRules] = {}
        values_of: dict[int, RowValues] = {}
        for one in added:
            rules = RowRules.of(one.sampling, self.vocab_size, self.device)
            if rules is not None:
                rules_of[one.row] = rules
            values_of[one.row] = row_of(one.sampling, rules is not None, self.vocab_size)
        changed = {
            row: values
            for row, values in values_of.items()
            if row in rules_of or values != self.sent.get(row)
        }
        if changed:
            self._rows[list(changed)] = np.array(list(changed.values()), ROW)
            self.rules |= rules_of
            for row in changed:
                self.sent.pop(row, None)
        return changed

    def send(self, column: NDArray[np.generic], rows: NDArray[np.integer]) -> torch.Tensor:
        """The column's values for `rows` [n], on the device."""
        return to_device(column[rows], self.device)

    def rules_of(self, rows: Sequence[int]) -> list[RowRules]:
        return [self.rules[row] for row in rows]


@dataclass(frozen=True, slots=True)
class Parameters:
    """Columns of RECORD for n rows, on the device, [n] each."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed_states: torch.Tensor


class DeviceRows:
    """Records of `max_rows` rows plus one for padding. Tensors keep their addresses."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        empty = np.zeros(max_rows + 1, RECORD)
        empty["top_k"], empty["top_p"] = vocab_size, NO_TOP_P
        self.records = torch.from_numpy(_words(empty)).to(device)  # [max_rows + 1, 6] int32
        self.hashes = id_hashes(vocab_size).to(device)

    def send(self, table: RowTable, rows: NDArray[np.int64]) -> None:
        """Set these rows' parameters, without synchronizing."""
        records = _words(table.records[rows])
        self.records.index_copy_(0, *all_to_device([rows, records], self.records.device))

    def draw(self, logits: torch.Tensor, lines: Lines, history: RowHistory) -> torch.Tensor:
        """logits [n, vocab] and lines [n] -> token ids [n] int64."""
        if use_kernels(lines.rows):
            from dovetail_samplers import fused

            with suppress(KernelUnavailable):
                return fused.draw(logits, lines, self.records, history, self.hashes)
        return draw_plain(logits, lines, self.parameters(lines.rows), history, self.hashes)

    def parameters(self, rows: torch.Tensor) -> Parameters:
        words = self.records[rows]  # [n, 6]
        floats: Any = words.view(torch.float32)
        return Parameters(
            floats[:, 0],
            words[:, 1].to(torch.int64),
            floats[:, 2],
            floats[:, 3],
            words.view(torch.int64)[:, 2],
        )


def _words(records: NDArray[Any]) -> NDArray[np.int32]:
    """[n] of RECORD -> [n, 6]."""
    return records.view(np.int32).reshape(len(records), -1)


def draw_plain(
    logits: torch.Tensor, lines: Lines, of: Parameters, history: RowHistory, hashes: torch.Tensor
) -> torch.Tensor:
    """Every row takes every step; unneeded ones are no-ops: without a filter all tokens are kept,
    and a greedy row's race is ignored."""
    positions = (history.lengths(lines) - history.prompt_lens[lines.rows]).to(torch.int64)
    wide = logits.to(torch.float32)
    random = of.temperature > 0
    scores = (wide - wide.amax(-1, keepdim=True).clamp_(min=LEAST)).div_(
        of.temperature.where(random, 1.0)[:, None]
    )
    weights = scores.exp()
    weights *= retained(scores, cut_top_k(scores, of.top_k, of.top_p, scores.shape[1]))
    weights *= retained_min_p(weights, of.min_p)
    raced = first_argmax(weights.div_(exponentials(stream_keys(of.seed_states, positions), hashes)))
    return torch.where(random, raced, first_argmax(logits))
