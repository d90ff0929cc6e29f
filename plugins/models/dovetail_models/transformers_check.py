"""Verifies that a model of transformers computes the same in ragged batches of chunks as by itself
in transformers.

A model may keep state that no attention layer sees (a convolution, a recurrence), or mask attention
by other means than the arguments of the call. In flat batches it would produce wrong tokens. So
`check` runs it both ways before it may serve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from dovetail.api.attention import AttentionLayer, LayerCache, LayerSpec
from dovetail.api.model import TrialRun
from dovetail.api.state import StateBatch, StateLayer, StateSpec
from dovetail.errors import DovetailError
from dovetail_models.transformers_attention import AttentionCall, bind
from dovetail_models.transformers_states import StateCall, bind_states, state_specs_of

TOLERANCE = 1e-4  # largest difference, in root mean squares of the reference's states
MEAN_DIFFERENCE = 0.05  # largest mean difference of log-probabilities in the model's own dtype
# sequences of the whole model's check, their tokens, those of them in the first step
TRIAL_ROWS = 4
TRIAL_TOKENS = 24
TRIAL_FIRST = 16

# (token ids [n], positions [n]) -> hidden states [n, hidden]
States = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class PlainBatch:
    """Rows of a flat batch, for the plain attention of the check."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []  # (row, tokens), in the order of the batch
        self.states: StateBatch | None = None

    def begin(self, rows: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """Begin a step of `rows`: (row, its tokens in this step, those including earlier ones)."""
        places, counts, ends = torch.tensor(rows, dtype=torch.int32).unbind(1)
        self.rows = [(row, count) for row, count, _ in rows]
        starts = nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        self.states = StateBatch(
            num_rows=len(rows),
            num_tokens=int(counts.sum()),
            places=places.long().to(device),
            query_starts=starts.to(device),
            kv_lens=ends.to(device),
            host_query_lens=counts.numpy(),
            decodes=bool((counts == 1).all()),
        )


def _plain_states(
    spec: StateSpec, batch: PlainBatch, rows: int, device: torch.device
) -> StateLayer:
    """Return a state layer with float32 memory for `rows` rows."""
    layer = StateLayer(spec, lambda: batch.states)
    memory = tuple(
        torch.zeros(rows, tensor.rows, tensor.row_size, device=device) for tensor in spec.tensors
    )
    units = torch.arange(rows, dtype=torch.int32, device=device)[:, None]
    layer.bind(memory, (units,) * len(memory))
    return layer


class PlainAttention(AttentionLayer):
    """Causal attention over each row's K and V, kept in a list of tensors: the simplest
    implementation."""

    def __init__(self, spec: LayerSpec, batch: PlainBatch) -> None:
        self.spec = spec
        self._batch = batch
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def bind(self, cache: LayerCache) -> None:
        raise DovetailError("the attention of the check keeps K and V itself")

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        if v is None:
            raise DovetailError("attention modules of transformers have a V")
        start = 0
        for row, count in self._batch.rows:
            new = k[start : start + count], v[start : start + count]
            old = self._cache.get(row)
            self._cache[row] = (
                new if old is None else (torch.cat([old[0], new[0]]), torch.cat([old[1], new[1]]))
            )
            start += count

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        outs = []
        start = 0
        for row, count in self._batch.rows:
            k, v = self._cache[row]
            outs.append(self._attend_row(q[start : start + count], k, v))
            start += count
        return torch.cat(outs)

    def _attend_row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        repeats = self.spec.heads // self.spec.kv_heads
        q = q.transpose(0, 1)
        k = k.repeat_interleave(repeats, 1).transpose(0, 1)
        v = v.repeat_interleave(repeats, 1).transpose(0, 1)
        places = torch.arange(k.shape[1], device=q.device)
        # [queries, keys]: distance from query back to key
        ages = places[-q.shape[1] :, None] - places
        seen = ages >= 0 if self.spec.window is None else (ages >= 0) & (ages < self.spec.window)
        if self.spec.softcap is not None or self.sinks is not None:
            return self._attend_by_definition(q, k, v, seen).transpose(0, 1)
        return nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=self.spec.scale
        ).transpose(0, 1)

    def _attend_by_definition(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        scores = q @ k.transpose(1, 2) * self.spec.scale
        cap = self.spec.softcap
        scores = (scores if cap is None else torch.tanh(scores / cap) * cap).masked_fill(
            ~seen, -torch.inf
        )
        if self.sinks is not None:
            scores = torch.cat(
                [scores, self.sinks.to(scores)[:, None, None].expand(*scores.shape[:2], 1)], -1
            )
        return scores.softmax(-1)[..., : k.shape[1]] @ v


def check(
    base: nn.Module,
    calls: Sequence[AttentionCall],
    specs: Sequence[LayerSpec],
    states: Sequence[StateCall],
    reference: States,
    flat: States,
    lengths: Sequence[int],
    vocab_size: int,
) -> str | None:
    """Compare `reference`, which computes one sequence by itself, with `flat`, in which rows of all
    `lengths` share batches, in chunks, in changing order. The layers of `base`, which this rank
    computes as `specs`, are bound to plain attention, and its `states` to plain memory. Returns
    None if they agree, and otherwise what differs."""
    batch = PlainBatch()
    bind(base, calls, [PlainAttention(spec, batch) for spec in specs])
    device = next(base.parameters()).device
    state_specs = state_specs_of(states, len(specs))
    bind_states(
        base, states, [_plain_states(spec, batch, len(lengths), device) for spec in state_specs]
    )
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(vocab_size, (length,), generator=generator).to(device) for length in lengths
    ]
    places = [torch.arange(len(ids), device=device) for ids in rows]
    wanted = [reference(ids, positions) for ids, positions in zip(rows, places, strict=True)]
    got: list[list[torch.Tensor]] = [[] for _ in rows]
    for step in _schedule(lengths):
        batch.begin([(row, end - begin, end) for row, begin, end in step], device)
        hidden = flat(
            torch.cat([rows[row][begin:end] for row, begin, end in step]),
            torch.cat([places[row][begin:end] for row, begin, end in step]),
        )
        for (row, _, _), part in zip(
            step, torch.split(hidden, [count for _, count in batch.rows]), strict=True
        ):
            got[row].append(part)
    for length, one, other in zip(lengths, wanted, got, strict=True):
        # [tokens]
        off = (torch.cat(other) - one).abs().max(dim=-1).values / one.square().mean().sqrt()
        if not bool((off <= TOLERANCE).all()):
            token = int((~(off <= TOLERANCE)).nonzero()[0])
            return (
                f"in a sequence of {length} tokens the states differ from the reference from "
                f"token {token} on ({float(off[token]):.1e} of their size)"
            )
    return None


def _schedule(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield steps of (row, begin, end): chunks of 1, 7 and the rest but four, then four decodes;
    rows in an order that changes with each step."""
    ends = [sorted({min(1, n), min(8, n), *range(max(n - 4, 1), n + 1)}) for n in lengths]
    for step in range(max(len(row) for row in ends)):
        parts = [
            (row, 0 if step == 0 else e[step - 1], e[step])
            for row, e in enumerate(ends)
            if step < len(e)
        ]
        yield parts[step % len(parts) :] + parts[: step % len(parts)]


def trial_tokens(vocab_size: int, max_len: int) -> torch.Tensor:
    """Return the token ids [rows, tokens] for the check of the whole model."""
    return torch.randint(
        vocab_size,
        (TRIAL_ROWS, min(TRIAL_TOKENS, max_len)),
        generator=torch.Generator().manual_seed(1),
    )


@torch.no_grad()
def whole_logprobs(model: nn.Module, token_ids: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the log-probabilities [rows, tokens, vocab] float32 that a model of transformers,
    which is on the CPU, computes by itself on `device`. Its layers are moved there one at a
    time."""
    layers = [
        layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module
    ]
    handles = []
    stay = {id(tensor) for layer in layers for tensor in (*layer.parameters(), *layer.buffers())}
    moved: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def fetch(tensors: Sequence[torch.Tensor]) -> None:
        moved.append([(tensor, tensor.data) for tensor in tensors])
        for tensor in tensors:
            tensor.data = tensor.data.to(device)

    def put_back() -> None:
        for tensor, data in moved.pop():
            tensor.data = data

    for layer in layers if device.type != "cpu" else ():
        handles.append(
            layer.register_forward_pre_hook(
                lambda layer, _: fetch([*layer.parameters(), *layer.buffers()])
            )
        )
        handles.append(layer.register_forward_hook(lambda *_: put_back()))
    fetch(
        [
            tensor
            for tensor in (*model.parameters(), *model.buffers())
            if device.type != "cpu" and id(tensor) not in stay
        ]
    )
    try:
        logits: torch.Tensor = model(input_ids=token_ids.to(device), use_cache=False).logits
        return logits.float().log_softmax(-1).cpu()
    finally:
        for handle in handles:
            handle.remove()
        while moved:
            put_back()


def check_logprobs(
    run: TrialRun, token_ids: torch.Tensor, expected: torch.Tensor | None
) -> str | None:
    """Compare the log-probabilities [rows, tokens, vocab] that are `expected` for `token_ids` with
    what `run` computes. None: those that it computes without recorded graphs. Returns None if they
    agree, and otherwise what differs."""
    first = min(TRIAL_FIRST, token_ids.shape[1])
    sequences = token_ids.tolist()
    found = run(sequences, first)
    if expected is None:
        wanted = [[logprob for _, logprob in row] for row in run(sequences, first, recorded=False)]
    else:
        wanted = [
            [float(row[first - 1 + place, token]) for place, (token, _) in enumerate(one)]
            for row, one in zip(expected, found, strict=True)
        ]
    mean = float(
        (torch.tensor([[logprob for _, logprob in row] for row in found]) - torch.tensor(wanted))
        .abs()
        .mean()
    )
    if mean <= MEAN_DIFFERENCE:  # not for NaN
        return None
    by = "without recorded graphs" if expected is None else "by transformers"
    return (
        f"the log-probabilities of its tokens, as they are served, differ from those computed {by} "
        f"by {mean:.2g} on average "
        f"(at most {MEAN_DIFFERENCE})"
    )
