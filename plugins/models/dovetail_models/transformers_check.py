"""Proves that a model of transformers computes the same in ragged batches of chunks as transformers computes by itself.

A model may keep state that no attention layer sees (a convolution, a recurrence), or mask attention by other means than the arguments of the call. In
flat batches it would produce wrong tokens. So `check` runs it both ways before it may serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from dovetail.api.attention import AttentionLayer, LayerSpec
from dovetail.errors import DovetailError
from dovetail_models.transformers_attention import AttentionCall, bind, specs_of

TOLERANCE = 1e-4  # largest difference, in root mean squares of the reference's states

States = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (token ids [n], positions [n]) -> hidden states [n, hidden]


class PlainBatch:
    """Rows of a flat batch: which tokens belong to which row. The oracle's share of what a backend's `plan` does."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []  # (row, tokens), in the order of the batch


class PlainAttention(AttentionLayer):
    """Causal attention over each row's K and V, kept in a list of tensors: nothing paged, nothing clever."""

    def __init__(self, spec: LayerSpec, batch: PlainBatch) -> None:
        self.spec, self._batch = spec, batch
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        if v is None:
            raise DovetailError("attention modules of transformers have a V")
        start = 0
        for row, count in self._batch.rows:
            new = k[start : start + count], v[start : start + count]
            old = self._cache.get(row)
            self._cache[row] = new if old is None else (torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]]))
            start += count

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        outs, start = [], 0
        for row, count in self._batch.rows:
            k, v = self._cache[row]
            outs.append(self._attend_row(q[start : start + count], k, v))
            start += count
        return torch.cat(outs)

    def _attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        repeats = self.spec.heads // self.spec.kv_heads
        q, k, v = q.transpose(0, 1), k.repeat_interleave(repeats, 1).transpose(0, 1), v.repeat_interleave(repeats, 1).transpose(0, 1)
        places = torch.arange(k.shape[1], device=q.device)
        ages = places[-q.shape[1] :, None] - places  # [queries, keys]: how long before the query the key is
        seen = ages >= 0 if self.spec.window is None else (ages >= 0) & (ages < self.spec.window)
        if self.spec.softcap is not None or self.sinks is not None:
            return self._attend_by_definition(q, k, v, seen).transpose(0, 1)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.spec.scale).transpose(0, 1)

    def _attend_by_definition(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        scores, cap = q @ k.transpose(1, 2) * self.spec.scale, self.spec.softcap
        scores = (scores if cap is None else torch.tanh(scores / cap) * cap).masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.to(scores)[:, None, None].expand(*scores.shape[:2], 1)], -1)
        return scores.softmax(-1)[..., : k.shape[1]] @ v


def check(base: nn.Module, calls: Sequence[AttentionCall], reference: States, flat: States, lengths: Sequence[int], vocab_size: int) -> str | None:
    """Compare `reference`, which computes one sequence by itself, with `flat`, in which rows of all `lengths` share batches, in chunks, in changing
    order. The layers of `base` are bound to plain attention. Returns None if they agree, and otherwise what differs."""
    batch = PlainBatch()
    bind(base, calls, [PlainAttention(spec, batch) for spec in specs_of(calls)])
    device = next(base.parameters()).device
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(vocab_size, (length,), generator=generator).to(device) for length in lengths]
    places = [torch.arange(len(ids), device=device) for ids in rows]
    wanted = [reference(ids, positions) for ids, positions in zip(rows, places, strict=True)]
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    for step in _schedule(lengths):
        batch.rows = [(row, end - begin) for row, begin, end in step]
        states = flat(torch.cat([rows[row][begin:end] for row, begin, end in step]), torch.cat([places[row][begin:end] for row, begin, end in step]))
        for (row, _, _), part in zip(step, torch.split(states, [count for _, count in batch.rows]), strict=True):
            got[row].append(part)
    for length, one, other in zip(lengths, wanted, got, strict=True):
        off = (torch.cat(other) - one).abs().max(dim=-1).values / one.square().mean().sqrt()  # [tokens]
        if not bool((off <= TOLERANCE).all()):
            token = int((~(off <= TOLERANCE)).nonzero()[0])
            return (
                f"in a sequence of {length} tokens the states differ from the reference from token {token} on ({float(off[token]):.1e} of their size)"
            )
    return None


def _schedule(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield steps of (row, begin, end): chunks of 1, 7 and the rest but four, then four decodes; rows in an order that changes with each step."""
    ends = [sorted({min(1, n), min(8, n), *range(max(n - 4, 1), n + 1)}) for n in lengths]
    for step in range(max(len(row) for row in ends)):
        parts = [(row, 0 if step == 0 else e[step - 1], e[step]) for row, e in enumerate(ends) if step < len(e)]
        yield parts[step % len(parts) :] + parts[: step % len(parts)]
