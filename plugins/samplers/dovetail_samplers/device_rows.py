"""`DeviceRows`: parameters of all rows on the device, and drawing tokens from these and the logits, without the host.

This can be recorded in a CUDA graph. On a GPU `fused` draws; `draw_plain` is the same in plain torch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.sampler import RowHistory
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.runtime.transfer import all_to_device
from dovetail_samplers.filters import LEAST, cut_top_k, keep, keep_min_p
from dovetail_samplers.noise import exponentials, id_hashes, stream_keys
from dovetail_samplers.order import first_argmax
from dovetail_samplers.table import NO_TOP_P, Needs, RowTable

RECORD = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy
        ("top_k", np.int32),  # the vocabulary's size: none
        ("top_p", np.float32),  # infinite: none
        ("min_p", np.float32),
        ("seed_state", np.int64),
    ]
)


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
        records["temperature"] = np.where(table.needs[rows] & Needs.RANDOM, table.temperature[rows], 0)
        for name, column in (("top_k", table.top_k), ("top_p", table.top_p), ("min_p", table.min_p), ("seed_state", table.seed_states)):
            records[name] = column[rows]
        self.records.index_copy_(0, *all_to_device([rows, _words(records)], self.records.device))

    def draw(self, logits: torch.Tensor, rows: torch.Tensor, history: RowHistory) -> torch.Tensor:
        """logits [n, vocab] and rows [n] int64, `max_rows` for padding -> token ids [n] int64."""
        if use_kernels(rows):
            from dovetail_samplers import fused

            with suppress(KernelUnavailable):
                return fused.draw(logits, rows, self.records, history, self.hashes)
        return draw_plain(logits, rows, self.parameters(rows), history, self.hashes)

    def parameters(self, rows: torch.Tensor) -> Parameters:
        words = self.records[rows]  # [n, 6]
        floats: Any = words.view(torch.float32)
        return Parameters(floats[:, 0], words[:, 1].to(torch.int64), floats[:, 2], floats[:, 3], words.view(torch.int64)[:, 2])


def _words(records: NDArray[Any]) -> NDArray[np.int32]:
    """[n] of RECORD -> [n, 6]."""
    return records.view(np.int32).reshape(len(records), -1)


def draw_plain(logits: torch.Tensor, rows: torch.Tensor, of: Parameters, history: RowHistory, hashes: torch.Tensor) -> torch.Tensor:
    """Every row takes every step; unneeded ones are no-ops: without a filter all tokens are kept, and a greedy row's race is ignored."""
    rows = rows.clamp(max=len(history.num_tokens) - 1)
    positions = (history.num_tokens[rows] - history.prompt_lens[rows]).to(torch.int64)
    wide, random = logits.to(torch.float32), of.temperature > 0
    scores = (wide - wide.amax(-1, keepdim=True).clamp_(min=LEAST)).div_(of.temperature.where(random, 1.0)[:, None])
    weights = scores.exp()
    weights *= keep(scores, cut_top_k(scores, of.top_k, of.top_p, scores.shape[1]))
    weights *= keep_min_p(weights, of.min_p)
    raced = first_argmax(weights.div_(exponentials(stream_keys(of.seed_states, positions), hashes)))
    return torch.where(random, raced, first_argmax(logits))
