"""Applies what accepted drafts change to the live states of rows, after a step that checked drafts:
see `dovetail.api.state`."""

from __future__ import annotations

from contextlib import suppress

import torch

from dovetail.api.state import Changes, StateBatch
from dovetail.nn.kernels.available import use_kernels
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.state.alike import AlikeLayers
from dovetail.nn.state.scan import changed


def accept_drafts(
    alike: AlikeLayers, batch: StateBatch, known: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Enqueue the changes of the drafts that count in a step with `StateBatch.ahead`. `known` [n]
    int64: the indices in it of the known tokens that have drafts. `num_tokens` [rows] int32:
    tokens of each row, including those that the step has yielded: accepted drafts and one more."""
    for tensor in range(len(alike.firsts)):
        _accept(alike, tensor, batch, known, num_tokens)


def _accept(
    alike: AlikeLayers,
    tensor: int,
    batch: StateBatch,
    known: torch.Tensor,
    num_tokens: torch.Tensor,
) -> None:
    if use_kernels(known, alike.units, num_tokens):
        from dovetail.nn.kernels import accept as kernels

        with suppress(KernelUnavailable):
            kernels.accept_drafts(alike, tensor, batch, known, num_tokens)
            return
    places = batch.places[known]
    yielded = num_tokens[places] - batch.kv_lens[known]
    for layer in alike.layers:
        noted = layer.changes[tensor]
        held = layer.read(tensor, places)
        for draft in range(1, int(yielded.max())):
            rows = (yielded > draft).nonzero()[:, 0]
            tokens = known[rows] + draft
            if isinstance(noted, Changes):
                held[rows] = changed(held[rows].float(), noted.take(tokens)).to(held.dtype)
            else:
                held[rows] = torch.cat([held[rows, :, 1:], noted[tokens, :, None]], dim=2)
        layer.write(tensor, places, held)
