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
from enum import IntFlag
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.sampler import Lines, RowHistory, RowSampling
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


class Needs(IntFlag):
    """Flags of a row's needs besides the most likely token."""

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


def needs_of(sampling: RowSampling, rules: RowRules | None, vocab_size: int) -> Needs:
    needs = Needs(0)
    if sampling.temperature > 0 and sampling.top_k != 1:  # top_k=1 is greedy
        needs |= Needs.RANDOM
        if 0 < sampling.top_k < vocab_size:
            needs |= Needs.TOP_K
        if sampling.top_p < 1:
            needs |= Needs.TOP_P
        if sampling.min_p > 0:
            needs |= Needs.MIN_P
    if rules is not None:
        needs |= Needs.RULES
    if sampling.repetition_penalty != 1:
        needs |= Needs.REPETITION
    if sampling.presence_penalty != 0 or sampling.frequency_penalty != 0:
        needs |= Needs.FREQUENCY
    if sampling.logprobs is not None:
        needs |= Needs.LOGPROBS
    return needs


class RowTable:
    """Parameters by column, indexed by row; `rules`: of rows that have any."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.needs = np.zeros(max_rows, np.uint8)
        self.temperature = np.ones(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int64)
        self.top_p = np.full(max_rows, NO_TOP_P, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.repetition = np.ones(max_rows, np.float32)
        self.presence = np.zeros(max_rows, np.float32)
        self.frequency = np.zeros(max_rows, np.float32)
        self.seed_states = np.zeros(max_rows, np.int64)
        self.logprobs = np.zeros(max_rows, np.int64)
        self.rules: dict[int, RowRules] = {}

    def remove(self, row: int) -> None:
        self.rules.pop(row, None)

    def add(self, row: int, sampling: RowSampling) -> None:
        rules = RowRules.of(sampling, self.vocab_size, self.device)
        needs = needs_of(sampling, rules, self.vocab_size)
        self.needs[row] = int(needs)
        self.temperature[row] = min(max(sampling.temperature, TEMPERATURES[0]), TEMPERATURES[1])
        self.top_k[row] = sampling.top_k if Needs.TOP_K in needs else self.vocab_size
        self.top_p[row] = sampling.top_p if Needs.TOP_P in needs else NO_TOP_P
        self.min_p[row] = sampling.min_p
        self.repetition[row] = sampling.repetition_penalty
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        self.seed_states[row] = seed_state(sampling.seed)
        self.logprobs[row] = sampling.logprobs or 0
        if rules is not None:
            self.rules[row] = rules

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
        records = np.empty(len(rows), RECORD)
        records["temperature"] = np.where(
            table.needs[rows] & Needs.RANDOM, table.temperature[rows], 0
        )
        for name, column in (
            ("top_k", table.top_k),
            ("top_p", table.top_p),
            ("min_p", table.min_p),
            ("seed_state", table.seed_states),
        ):
            records[name] = column[rows]
        self.records.index_copy_(0, *all_to_device([rows, _words(records)], self.records.device))

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
