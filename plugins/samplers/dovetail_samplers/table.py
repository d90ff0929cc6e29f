"""`RowTable`: sampling parameters of all rows on the host. `Needs`: what they require of a step.

They change only when rows start and end, and the host must know a step's paths (`Needs`), so the table is numpy; the values that a step's rows need
are sent with the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.sampler import RowSampling
from dovetail.runtime.transfer import to_device
from dovetail_samplers.noise import seed_state
from dovetail_samplers.rules import RowRules

TEMPERATURES = (float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max))  # outside, float32 would be 0 or infinite
NO_TOP_P = np.inf  # 1 would drop the last tokens due to rounding


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
        self.vocab_size, self.device = vocab_size, device
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
