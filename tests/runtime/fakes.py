"""A tiny model, a greedy sampler and a `Bench` that plays the core: enough to run steps by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from dovetail.api.attention import AttentionBackend, AttentionContext, AttentionLayer, LayerSpec
from dovetail.api.clock import WallClock
from dovetail.api.component import NoOptions
from dovetail.api.draft_head import HeadArch, HeadInputs
from dovetail.api.executor import Batch, Drafts, Masks, NewRow, Result
from dovetail.api.kv_cache import CacheGroup, KVLayout, PageCopy
from dovetail.api.model import BuildContext, ModelInputs, ParallelGroup, Tapped
from dovetail.api.sampler import (
    RowSampling,
    SampledRow,
    SampledTokens,
    SampleInputs,
    Sampler,
    SamplerContext,
)
from dovetail.nn.logprobs import top_logprobs
from dovetail_executors.runtime.adapters import AdapterPlan
from dovetail_executors.runtime.draft_head import RunningHead
from dovetail_executors.runtime.draft_model import DraftModel
from dovetail_executors.runtime.features import Proposer, StepFeature
from dovetail_executors.runtime.kv_pool import KVPool, kv_layout
from dovetail_executors.runtime.logits import LogitsProcessors
from dovetail_executors.runtime.prompt_logprobs import RowsWithPromptLogprobs
from dovetail_executors.runtime.row_state import Column, RowState
from dovetail_executors.runtime.runner import Runner
from dovetail_executors.runtime.sampling import Sampling
from dovetail_executors.runtime.step import Step
from tests.runtime.recordable_attention import RecordableAttention

VOCAB, HIDDEN, HEADS, KV_HEADS, SIZE = 31, 16, 4, 2, 4
TAPS = (0, 2)  # of `TinyHead`
# on the way to a log-probability: two layers, attention over 64 tokens
ROUNDINGS = 2 * (2 * HIDDEN + HEADS * SIZE + 64) + HIDDEN + VOCAB
NAN_TOKEN = VOCAB - 1  # its embedding is NaN; never sampled


def spec_of(index: int, window: int | None = None) -> LayerSpec:
    return LayerSpec(index, HEADS, KV_HEADS, SIZE, 0.5, window)


class TinyModel(nn.Module):
    """Layers of attention with these windows, and positions in the embedding."""

    def __init__(
        self,
        make_layer: Callable[[LayerSpec], AttentionLayer],
        windows: Sequence[int | None] = (None, None),
        first_layer: int = 0,
        error: float = 0.0,
    ) -> None:
        """`error`: standard deviation of noise on the last weights, in units of theirs."""
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / 2

        self.embed = weights(VOCAB, HIDDEN)
        self.embed[NAN_TOKEN] = torch.nan
        self.places = weights(256, HIDDEN)
        self.head = weights(HIDDEN, VOCAB)
        self.head += (
            error / 2 * torch.randn(HIDDEN, VOCAB, generator=torch.Generator().manual_seed(1))
        )
        self.head[:, NAN_TOKEN] = 0
        self.layers: list[tuple[AttentionLayer, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for index, window in enumerate(windows):
            layer = make_layer(spec_of(first_layer + index, window))
            kv_width = KV_HEADS * SIZE
            self.layers.append(
                (
                    layer,
                    weights(HIDDEN, HEADS * SIZE),
                    weights(HIDDEN, kv_width),
                    weights(HIDDEN, kv_width),
                )
            )

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        return self.forward_tapped(inputs, (0,))[0]

    def forward_tapped(
        self, inputs: ModelInputs, taps: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states = [self.embed[inputs.token_ids] + self.places[inputs.positions]]
        for layer, q, k, v in self.layers:
            x = states[-1]
            layer.write((x @ k).view(-1, KV_HEADS, SIZE), (x @ v).view(-1, KV_HEADS, SIZE))
            states.append(
                torch.tanh(x + layer.attend((x @ q).view(-1, HEADS, SIZE)).reshape(-1, HIDDEN))
            )
        hidden = states[-1]
        if inputs.wanted is not None:
            hidden = hidden.index_select(0, inputs.wanted)
        return hidden, torch.cat([states[tap] for tap in taps], dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 4 * hidden @ self.head


class TinyHead(nn.Module):
    """A draft head of one layer of attention, which reads the states at `TAPS`."""

    def __init__(self, layer: AttentionLayer) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) / 2

        self.layer, kv_width = layer, KV_HEADS * SIZE
        self.embed, self.head, self.fused = (
            weights(VOCAB, HIDDEN),
            weights(HIDDEN, VOCAB),
            weights(len(TAPS) * HIDDEN, HIDDEN) / 2,
        )
        self.q, self.k, self.v = (
            weights(2 * HIDDEN, HEADS * SIZE),
            weights(2 * HIDDEN, kv_width),
            weights(2 * HIDDEN, kv_width),
        )
        self.head[:, NAN_TOKEN] = 0

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        return tapped @ self.fused

    def store(self, inputs: HeadInputs) -> torch.Tensor:
        x = torch.cat((self.embed[inputs.token_ids], inputs.states), dim=1)
        self.layer.write(
            (x @ self.k).view(-1, KV_HEADS, SIZE), (x @ self.v).view(-1, KV_HEADS, SIZE)
        )
        return x

    def forward(self, inputs: HeadInputs) -> torch.Tensor:
        x = self.store(inputs)
        out = self.layer.attend((x @ self.q).view(-1, HEADS, SIZE)).reshape(-1, HIDDEN)
        return torch.tanh(inputs.states + out)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return 4 * states @ self.head


class TinyHeadArch(HeadArch):
    taps, hidden_size = TAPS, HIDDEN

    def __init__(self) -> None:
        pass

    def layer_specs(self, parallel: ParallelGroup) -> list[LayerSpec]:
        return [spec_of(0)]

    def build(self, context: BuildContext, target: Tapped) -> nn.Module:
        return TinyHead(context.make_attention(spec_of(0)))


class Greedy(Sampler):
    """Samples the most likely token, and records what it was told."""

    def prepare(self, max_rows: int) -> None:
        self.rows: dict[int, RowSampling] = {}
        self.last_logits = torch.empty(0)

    def update(self, removed: Sequence[int], added: Sequence[SampledRow]) -> None:
        for row in removed:
            del self.rows[row]
        self.rows.update({one.row: one.sampling for one in added})

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        logits, host_rows = inputs.logits, inputs.host_rows
        assert inputs.process is None, "it declares no processors"
        assert inputs.capture is None, "it declares no cuda_graph"
        assert host_rows is not None
        assert inputs.lines.rows.tolist() == host_rows.tolist()
        self.last_logits = logits.clone()
        token_ids = logits.argmax(dim=1)
        asked = [self.rows[row].logprobs for row in host_rows.tolist()]
        if all(k is None for k in asked):
            return SampledTokens(token_ids)
        return SampledTokens(
            token_ids, top_logprobs(logits, token_ids, max(k for k in asked if k is not None))
        )


def no_processors(rows: RowState) -> LogitsProcessors:
    return LogitsProcessors((), VOCAB, rows, 0)


def layout(*groups: tuple[int, int | None, int] | int) -> KVLayout:
    """Groups of (block_tokens, window, pages_per_block); a number: block_tokens of a full group."""
    settings = [(group, None, 1) if isinstance(group, int) else group for group in groups]
    return KVLayout(
        tuple(CacheGroup((index,), *setting) for index, setting in enumerate(settings)), 1, "none"
    )


@dataclass
class Bench:
    """A runner with a tiny model, and the books that the core would keep: which row and blocks each
    request has."""

    max_rows: int = 4
    max_len: int = 64
    block_size: int = 4
    num_blocks: int = 40
    windows: tuple[int | None, ...] = (None, None)  # of the layers
    max_lines: int = 0
    max_tokens: int = 256
    error: float = 0.0  # of the model: see `TinyModel`
    draft_error: float | None = None  # of the draft model; None: there is none
    draft_windows: tuple[int | None, ...] = (None, None)
    head: bool = False  # a `TinyHead` drafts
    attention: type[AttentionBackend] = RecordableAttention
    columns: Mapping[str, Column] = field(default_factory=dict)  # of features, beside adapters
    step: int = 0
    free_blocks: list[int] = field(default_factory=list)
    blocks: dict[int, list[int]] = field(default_factory=dict)  # row -> blocks

    def __post_init__(self) -> None:
        device = torch.device("cpu")
        self.backend: Any = self.attention(
            NoOptions(), AttentionContext("cpu", "float32", self.block_size)
        )
        specs = [spec_of(index, window) for index, window in enumerate(self.windows)]
        drafting = (
            []
            if self.draft_error is None
            else [
                spec_of(len(specs) + index, window)
                for index, window in enumerate(self.draft_windows)
            ]
        )
        drafting += [spec_of(len(specs))] if self.head else []
        planned = kv_layout(self.backend, [*specs, *drafting], "float32")
        self.pool, self.layout = KVPool(planned, device), planned.layout
        make_layer = self.pool.wrap(self.backend.make_layer)
        self.model = TinyModel(make_layer, self.windows, error=self.error)
        drafter = (
            None
            if self.draft_error is None
            else TinyModel(make_layer, self.draft_windows, len(specs), self.draft_error)
        )
        head = TinyHead(make_layer(spec_of(len(specs)))) if self.head else None
        num_pages = self.num_blocks * self.layout.pages(self.block_size)
        self.pool.allocate(num_pages)
        self.rows = RowState(
            self.max_rows,
            self.max_len,
            self.layout,
            device,
            max_lines=self.max_lines,
            columns={**AdapterPlan.columns, **self.columns},
        )
        self.backend.prepare(self.rows.max_lines, self.max_tokens, self.max_len)
        self.rows.pool_allocated(num_pages)
        self.sampler: Greedy = Greedy(NoOptions(), SamplerContext("cpu", VOCAB, self.rows.history))
        self.sampler.prepare(self.max_rows)
        self.features: list[StepFeature[Any]] = []
        self.sampling = Sampling(self.sampler, self.rows, VOCAB, no_processors(self.rows))
        if drafter is not None:
            self.features.append(
                DraftModel(drafter, drafting, self.backend, self.sampling, self.max_tokens)
            )
        if head is not None:
            self.features.append(
                RunningHead(head, TinyHeadArch(), torch.float32, self.backend, self.sampling)
            )
        self.make_runner()
        self.free_blocks = np.random.default_rng(1).permutation(self.num_blocks).tolist()

    def make_runner(
        self,
        *features: StepFeature[Any],
        sampler: Sampler | None = None,
        processors: LogitsProcessors | None = None,
        model: Any = None,
    ) -> None:
        """Take a new runner, with more features, or another of these."""
        if sampler is not None or processors is not None:
            self.sampler = self.sampler if sampler is None else sampler  # type: ignore[assignment]
            processors = no_processors(self.rows) if processors is None else processors
            self.sampling = Sampling(self.sampler, self.rows, VOCAB, processors)
        self.model = self.model if model is None else model
        own = [*features, *self.features, RowsWithPromptLogprobs(self.rows, VOCAB)]
        self.runner = Runner(self.model, self.backend, self.pool, self.sampling, WallClock(), own)

    @property
    def recordings(self) -> list[Any]:
        """The features' own recordings, as an argument of `decode_builders`."""
        return [feature.recordings for feature in self.runner.features]

    @property
    def proposer(self) -> Any:
        """The draft model, or the head."""
        (found,) = (each for each in self.features if isinstance(each, Proposer))
        return found

    def new(
        self,
        row: int,
        tokens: Sequence[int],
        sampling: RowSampling | None = None,
        prompt_len: int | None = None,
        computed: int = 0,
    ) -> NewRow:
        """A request that begins in `row`, without blocks yet."""
        self.blocks[row] = self.blocks.get(row, []) if computed else []
        return NewRow(
            row,
            f"request-{row}",
            np.array(tokens, np.int32),
            len(tokens) if prompt_len is None else prompt_len,
            computed,
            tuple(np.array(pages, np.int32) for pages in self.pages(self.blocks[row])),
            sampling or RowSampling(),
        )

    def pages(self, blocks: Sequence[int]) -> tuple[list[int], ...]:
        """Return the pages of these blocks, by group: those of a block follow each other."""
        counts = [group.pages_per_block for group in self.layout.groups]
        starts = [sum(counts[:index]) for index in range(len(counts))]
        return tuple(
            [block * sum(counts) + start + page for block in blocks for page in range(count)]
            for start, count in zip(starts, counts, strict=True)
        )

    def batch(
        self,
        work: dict[int, int],
        added: Sequence[NewRow],
        removed: Sequence[int],
        copies: Sequence[PageCopy],
        drafts: Mapping[int, Sequence[int]] | None = None,
    ) -> Batch:
        """`work`: row -> tokens to compute, without its `drafts`. Blocks are handed out as needed.
        A row samples when its last known token is computed."""
        computed, known = self.rows.computed.copy(), self.rows.known.copy()
        for row in removed:
            self.free_blocks += (
                self.blocks.pop(row) if row not in [new.row for new in added] else []
            )
        for new in added:
            computed[new.row], known[new.row] = new.computed, len(new.token_ids)
        own = [list((drafts or {}).get(row, ())) for row in work]
        ends = {
            row: int(computed[row]) + count + len(drafted)
            for (row, count), drafted in zip(work.items(), own, strict=True)
        }
        appended = []
        for row, end in ends.items():
            while len(self.blocks[row]) * self.block_size < end:
                self.blocks[row].append(self.free_blocks.pop())
                appended.append((row, self.blocks[row][-1]))
        self.step += 1
        return Batch(
            step=self.step,
            removed=np.array(removed, np.int32),
            added=tuple(added),
            new_pages=np.array(
                [
                    (group, row, page)
                    for row, block in appended
                    for group, pages in enumerate(self.pages([block]))
                    for page in pages
                ],
                np.int32,
            ).reshape(-1, 3),
            copies=tuple(copies),
            rows=np.array(list(work), np.int32),
            num_tokens=np.array(
                [count + len(drafted) for count, drafted in zip(work.values(), own, strict=True)],
                np.int32,
            ),
            yields_token=np.array(
                [
                    ends[row] == known[row] + len(drafted)
                    for row, drafted in zip(work, own, strict=True)
                ],
                np.bool_,
            ),
            drafts=None
            if drafts is None
            else Drafts(
                np.array([*map(len, own)], np.int32),
                np.array([id for ids in own for id in ids], np.int32),
            ),
        )

    def submit(
        self,
        work: dict[int, int],
        added: Sequence[NewRow] = (),
        removed: Sequence[int] = (),
        copies: Sequence[PageCopy] = (),
    ) -> Step:
        return self.runner.submit(self.batch(work, added, removed, copies))

    def run(
        self,
        work: dict[int, int],
        added: Sequence[NewRow] = (),
        removed: Sequence[int] = (),
        copies: Sequence[PageCopy] = (),
    ) -> Result:
        return self.runner.collect(self.submit(work, added, removed, copies))

    def check(
        self,
        work: dict[int, int],
        drafts: Mapping[int, Sequence[int]],
        added: Sequence[NewRow] = (),
    ) -> Result:
        """As `run`, of a step with these drafts."""
        return self.runner.collect(self.runner.submit(self.batch(work, added, (), (), drafts)))

    def run_late(
        self,
        work: dict[int, int],
        added: Sequence[NewRow] = (),
        allowed: Mapping[int, Sequence[int]] | None = None,
    ) -> Result:
        """As `run`, sampled late. `allowed`: row -> the ids that its mask allows."""
        batch = replace(self.batch(work, added, (), ()), late=True)
        pending = self.runner.submit(batch)
        rows = [row for row in work if row in (allowed or {})]
        words = self.sampling.masks.to_fill(len(rows))
        words[:] = 0
        for line, row in enumerate(rows):
            for token in (allowed or {})[row]:
                words[line, token // 32] |= np.uint32(1 << token % 32)
        self.runner.sample(
            pending, Masks(np.array([list(work).index(row) for row in rows], np.int32), words)
        )
        return self.runner.collect(pending)


def generate(
    prompt: Sequence[int],
    count: int,
    windows: tuple[int | None, ...] = (None, None),
    error: float = 0.0,
) -> list[int]:
    """Return the tokens of a tiny model after a prompt, each computed from scratch and without
    other requests: the oracle of the runner's tests."""
    tokens = list(prompt)
    for _ in range(count):
        bench = Bench(max_rows=1, block_size=64, num_blocks=1, windows=windows, error=error)
        result = bench.run({0: len(tokens)}, [bench.new(0, tokens)])
        tokens.append(int(result.token_ids[0]))
    return tokens[len(prompt) :]
