"""Compares the kernels of `dovetail.nn` and of the sampler with their twins in plain torch:
accuracy, time, bytes per second.

    python -m bench.kernels                 # check, then time; needs a GPU
    python -m bench.kernels --only check    # also without one: TRITON_INTERPRET=1, small and slow
    python -m bench.kernels --only tune     # how the sampler's work is cut: every candidate, quickest first

Errors are ‖out - exact‖ / ‖exact‖ against float64, of kernel and twin; for the sampler, how many of
the tokens differ from the twin's. Times are medians of CUDA events, of calls in a CUDA graph whose
inputs take turns, so that together they exceed the L2. Where the twin of the sampler asks the host
or waits for it, it can't be in a graph, and its time has the launches in it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.api.attention import AttentionLayer, FusedCache, LayerCache, LayerSpec
from dovetail.api.component import NoOptions
from dovetail.api.model import BuildContext
from dovetail.api.sampler import (
    Capture,
    Lines,
    RowHistory,
    RowSampling,
    SampledRow,
    SampleInputs,
    SamplerContext,
)
from dovetail.nn.activation import silu_mul
from dovetail.nn.logprobs import top_logprobs
from dovetail.nn.norm import QKNorm, rms_norm
from dovetail.nn.parallel import SINGLE
from dovetail.nn.qkv import rope_and_store_kv
from dovetail.nn.rotary import Rope, RotaryEmbedding
from dovetail_samplers.default import DefaultSampler
from dovetail_samplers.table import draw_plain

if TYPE_CHECKING:
    from dovetail_samplers.fused import Sizes

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# the interpreter rounds bfloat16 wrongly
DTYPES = (
    [torch.bfloat16, torch.float16, torch.float32] if ON_GPU else [torch.float16, torch.float32]
)
DISPATCHERS = (
    "dovetail.nn.activation",
    "dovetail.nn.logprobs",
    "dovetail.nn.norm",
    "dovetail.nn.qkv",
    "dovetail_samplers.default",
)
DISPATCHERS += ("dovetail_samplers.table",)
# that the inputs of one case take together, at least, unless that is more than MAX_TURNS of them
ROTATED_BYTES = 256 << 20
MAX_TURNS = 64
REPEATS = 20
BLOCK_SIZE = 16

Run = Callable[[], object]
Tensors = Sequence[torch.Tensor]


@contextmanager
def dispatching(to_kernels: bool) -> Iterator[None]:
    """Context in which all functions with a kernel and a twin use the given one."""
    modules = [import_module(name) for name in DISPATCHERS]
    before = [module.use_kernels for module in modules]
    for module in modules:
        module.use_kernels = lambda *tensors: to_kernels
    try:
        yield
    finally:
        for module, function in zip(modules, before, strict=True):
            module.use_kernels = function


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


# ---- the cases of dovetail.nn


@dataclass(frozen=True)
class Draw:
    """One case's random inputs: what is timed; what is checked, once, as it may overwrite them; and
    what that should be, before."""

    run: Run
    outputs: Callable[[], Tensors]
    exact: Callable[[], Tensors]


@dataclass(frozen=True)
class Case(ABC):
    """One function at one size. Inputs are reproducible."""

    n: int  # tokens, or rows

    @abstractmethod
    def draw(self, dtype: torch.dtype) -> Draw: ...

    @property
    @abstractmethod
    def numbers(self) -> int:
        """Minimum number of values to read or write."""


@dataclass(frozen=True)
class Norm(Case):
    size: int

    def __str__(self) -> str:
        return f"norm {self.size}"

    def draw(self, dtype: torch.dtype) -> Draw:
        x, weight = randn(self.n, self.size, dtype=dtype), randn(self.size, dtype=dtype)

        def exact() -> Tensors:
            wide = x.double()
            return (wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-6) * weight.double(),)

        return Draw(lambda: rms_norm(x, weight, 1e-6), lambda: (rms_norm(x, weight, 1e-6),), exact)

    @property
    def numbers(self) -> int:
        return 2 * self.n * self.size


@dataclass(frozen=True)
class SiluMul(Case):
    size: int

    def __str__(self) -> str:
        return f"silu * up {self.size}"

    def draw(self, dtype: torch.dtype) -> Draw:
        gate_up = randn(self.n, 2 * self.size, dtype=dtype)
        gate, up = gate_up.chunk(2, dim=-1)
        exact = lambda: (gate.double() * torch.sigmoid(gate.double()) * up.double(),)  # noqa: E731
        return Draw(lambda: silu_mul(gate_up), lambda: (silu_mul(gate_up),), exact)

    @property
    def numbers(self) -> int:
        return 3 * self.n * self.size


@dataclass(frozen=True)
class TurnAndWrite(Case):
    heads: int
    kv_heads: int
    size: int
    normed: bool

    def __str__(self) -> str:
        return (
            f"{'norm + ' if self.normed else ''}rope + write {self.heads}/{self.kv_heads} x "
            f"{self.size}"
        )

    def draw(self, dtype: torch.dtype) -> Draw:
        heads = self.heads
        kv_heads = self.kv_heads
        size = self.size
        rotation = RotaryEmbedding(Rope(1e6, size), 4096, device=DEVICE)(
            torch.randint(4096, (self.n,), device=DEVICE)
        )
        slots = torch.randperm(2 * self.n + BLOCK_SIZE, device=DEVICE)[: self.n]
        layer = PagedLayer(LayerSpec(0, heads, kv_heads, size, 1.0), slots, dtype)
        norm = (
            QKNorm(
                heads,
                kv_heads,
                size,
                1e-6,
                BuildContext(
                    parallel=SINGLE, dtype=dtype, device=DEVICE, make_attention=lambda spec: layer
                ),
            )
            if self.normed
            else None
        )
        if norm is not None:
            norm.weight.data.normal_(1.0, 0.2)
        qkv = randn(self.n, heads + 2 * kv_heads, size, dtype=dtype)
        _ = rotation.cos  # spelled out now: an engine does it once a step, not in each layer

        def run() -> torch.Tensor:
            return rope_and_store_kv(qkv, norm, rotation, layer)

        def exact() -> Tensors:
            qk, v = qkv.double().tensor_split((heads + kv_heads,), dim=1)
            if norm is not None:
                qk = (
                    qk
                    / torch.sqrt((qk**2).mean(-1, keepdim=True) + 1e-6)
                    * norm.weight.view(norm.heads).double()
                )
            qk = qk * rotation.cos.double() + torch.roll(qk, size // 2, -1) * rotation.sin.double()
            return *qk.split((heads, kv_heads), dim=1), v

        return Draw(run, lambda: (run(), *layer.written), exact)

    @property
    def numbers(self) -> int:
        return 2 * self.n * (self.heads + 2 * self.kv_heads) * self.size


class PagedLayer(AttentionLayer):
    """A cache like the triton backend's, with the simplest way to write to it."""

    def __init__(self, spec: LayerSpec, slots: torch.Tensor, dtype: torch.dtype) -> None:
        self.spec = spec
        self.slots = slots
        self.dtype = dtype
        self.blocks = slots // BLOCK_SIZE
        self.offsets = slots % BLOCK_SIZE
        pages = int(slots.max()) // BLOCK_SIZE + 1
        row = spec.kv_heads * BLOCK_SIZE * spec.head_size * dtype.itemsize
        self.bind(
            LayerCache(
                tuple(
                    torch.zeros((pages, row), dtype=torch.uint8, device=DEVICE) for _ in range(2)
                ),
                BLOCK_SIZE,
            )
        )

    def bind(self, cache: LayerCache) -> None:
        shape = (-1, self.spec.kv_heads, cache.block_size, self.spec.head_size)
        self.k, self.v = (
            memory.view(self.dtype).view(shape).transpose(1, 2) for memory in cache.memory
        )

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[self.blocks, self.offsets], self.v[self.blocks, self.offsets] = k, v

    def cache_for_fused_write(self) -> FusedCache:
        return FusedCache(self.k, self.v, self.slots)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @property
    def written(self) -> Tensors:
        return self.k[self.blocks, self.offsets], self.v[self.blocks, self.offsets]


@dataclass(frozen=True)
class Logprobs(Case):
    vocab: int

    def __str__(self) -> str:
        return f"logprobs {self.vocab}"

    def draw(self, dtype: torch.dtype) -> Draw:
        logits, ids = (
            randn(self.n, self.vocab, dtype=dtype) * 4,
            torch.randint(self.vocab, (self.n,), device=DEVICE),
        )

        def outputs() -> Tensors:
            top = top_logprobs(logits, ids, 5)
            return top.logprobs, top.ranks

        def exact() -> Tensors:
            own = logits.gather(1, ids[:, None]).double()
            best = torch.cat((own, logits.double().topk(5, dim=1).values), dim=1)
            return best - logits.double().logsumexp(1, keepdim=True), 1 + (
                logits.double() > own
            ).sum(1)

        return Draw(outputs, outputs, exact)

    @property
    def numbers(self) -> int:
        return self.n * self.vocab


def nn_cases() -> list[Case]:
    """Return the cases of a small and of a medium model."""
    if not ON_GPU:
        return [
            Norm(3, 48),
            SiluMul(3, 40),
            TurnAndWrite(5, 4, 2, 8, True),
            TurnAndWrite(5, 3, 1, 24, False),
            Logprobs(3, 300),
        ]
    cases: list[Case] = []
    for n in (1, 8, 64, 256, 8192):
        for hidden, inner, heads in ((1024, 3072, 16), (4096, 12_288, 32)):
            cases += [Norm(n, hidden), SiluMul(n, inner), TurnAndWrite(n, heads, 8, 128, True)]
        cases.append(TurnAndWrite(n, 32, 8, 64, False))
    return cases + [Norm(n, 16_384) for n in (1, 2048)] + [Logprobs(n, 151_936) for n in (1, 64)]


# ---- the sampler


GREEDY = RowSampling(temperature=0.0)
PLAIN = RowSampling(temperature=0.8)
SAMPLINGS = {
    "greedy": GREEDY,
    "temperature": PLAIN,
    "top-k 20": replace(PLAIN, top_k=20),
    "top-k 20, top-p .95": replace(PLAIN, top_k=20, top_p=0.95),
    "top-k 1000": replace(PLAIN, top_k=1000),
    "top-p .95": replace(PLAIN, top_p=0.95),
    "min-p .05": replace(PLAIN, min_p=0.05),
}
VOCAB = 151_936 if ON_GPU else 700


def peaked_logits(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return logits like a trained model's: most tokens negligible, some thousand in an exponential
    tail."""
    bulk = torch.randn(rows, VOCAB, device=DEVICE) * 2.5
    tail = torch.empty(rows, VOCAB, device=DEVICE).exponential_(0.4) * (
        torch.rand(rows, VOCAB, device=DEVICE) < 0.02
    )
    return (bulk + tail).to(dtype)


def flat_logits(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return logits like those of a model with random weights."""
    return (torch.randn(rows, VOCAB, device=DEVICE) * 0.3).to(dtype)


def tied_logits(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return equal logits, so that the lowest ids are kept."""
    return torch.full((rows, VOCAB), 1.5, dtype=dtype, device=DEVICE)


LOGITS = {"peaked": peaked_logits, "flat": flat_logits, "tied": tied_logits}


def make_sampler(rows: int, samplings: Sequence[RowSampling]) -> DefaultSampler:
    """One that has taken `rows` requests, the i-th with samplings[i % …] and seed i, some tokens
    long."""
    lens = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    history = RowHistory(
        torch.zeros((rows + 1, 8), dtype=torch.int32, device=DEVICE), lens + 5, lens // 2
    )
    sampler = DefaultSampler(NoOptions(), SamplerContext(str(DEVICE), VOCAB, history))
    sampler.prepare(rows)
    added = [
        SampledRow(row=row, sampling=replace(samplings[row % len(samplings)], seed=row))
        for row in range(rows)
    ]
    sampler.update([], added)
    return sampler


def lines_of(rows: int) -> Lines:
    """A line of each row, without drafts."""
    return Lines(
        rows=torch.arange(rows, device=DEVICE),
        ahead=torch.zeros(rows, dtype=torch.int32, device=DEVICE),
    )


def check_sampler() -> None:
    """Return the number of tokens that differ from the twin's: rounding may decide between close
    winners, or the last token of top-p."""
    rows = 256 if ON_GPU else 2 * len(SAMPLINGS)
    print(f"\n{f'sampler, tokens of {rows} rows that differ':38} {'':5} {'dtype':>9}")
    for dtype, shape in itertools.product(DTYPES, LOGITS):
        torch.manual_seed(1)
        rows_that_differ = different(rows, LOGITS[shape](rows, dtype))
        listed = ", ".join(
            sorted({list(SAMPLINGS)[row % len(SAMPLINGS)] for row in rows_that_differ})
        )
        print(f"{shape:38} {'':5} {str(dtype)[6:]:>9} {len(rows_that_differ):9} {listed}")


def different(rows: int, logits: torch.Tensor) -> list[int]:
    """Return the rows with another token than the twin's, over all ways of sampling."""
    sampler = make_sampler(rows, list(SAMPLINGS.values()))
    lines = lines_of(rows)
    device_rows = sampler._device_rows
    history = sampler.context.history
    with dispatching(to_kernels=True):
        inputs = SampleInputs(logits=logits, lines=lines, capture=Capture.TOKENS)
        ours = sampler.sample(inputs).token_ids
    twins = draw_plain(
        logits, lines, device_rows.parameters(lines.rows), history, device_rows.hashes
    )
    return (ours != twins).nonzero()[:, 0].tolist()


# ---- checking and timing


def check_nn() -> None:
    print(f"{'error against float64':38} {'n':>5} {'dtype':>9} {'kernel':>9} {'twin':>9}")
    for case, dtype in itertools.product(nn_cases(), DTYPES):
        if case.n > 256 and dtype == torch.float32:
            continue
        kernel, twin = (error_of(case, dtype, to_kernels) for to_kernels in (True, False))
        limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
        print(
            f"{case!s:38} {case.n:5} {str(dtype)[6:]:>9} {kernel:9.1e} "
            f"{twin:9.1e}{'' if kernel <= limit else '  WRONG'}"
        )


def error_of(case: Case, dtype: torch.dtype, to_kernels: bool) -> float:
    torch.manual_seed(0)
    draw = case.draw(dtype)
    exact = draw.exact()
    with dispatching(to_kernels):
        return max(map(relative_error, draw.outputs(), exact))


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    error = (out.double() - exact).norm() / exact.double().norm()
    return error.item() if error.isfinite() else float("inf")


def median_seconds(run: Run) -> float:
    """Return the median time of one call on the device."""
    for _ in range(3):
        run()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(REPEATS)
    ]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1000


def seconds_in_graph(calls: Sequence[Run]) -> float:
    """Return the time of one of `calls`, which run one after the other in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_seconds(graph.replay) / len(calls)


def turns(size: int) -> int:
    """Return the number of inputs of this size to use in turn."""
    return max(3, min(MAX_TURNS, ROTATED_BYTES // size))


def time_nn() -> None:
    print(f"\n{'time':38} {'n':>5} {'twin us':>9} {'kernel us':>9} {'x':>6} {'TB/s':>6}")
    for case in nn_cases():
        size = 2 * case.numbers
        seconds = []
        for to_kernels in (False, True):
            with dispatching(to_kernels):
                seconds.append(
                    seconds_in_graph([case.draw(torch.bfloat16).run for _ in range(turns(size))])
                )
        print_times(str(case), case.n, *seconds, size)


def time_sampler() -> None:
    print(
        f"\n{'sampler, bfloat16 logits':38} {'n':>5} {'twin us':>9} {'kernel us':>9} {'x':>6} "
        f"{'TB/s':>6}"
    )
    for rows, shape in itertools.product((1, 8, 64, 256), ("peaked", "flat")):
        size = rows * VOCAB * 2
        logits = [LOGITS[shape](rows, torch.bfloat16) for _ in range(turns(size))]
        for name in SAMPLINGS:
            print_times(
                f"{shape}: {name}", rows, *sampler_seconds(rows, logits, SAMPLINGS[name]), size
            )


def sampler_seconds(
    rows: int, logits: Sequence[torch.Tensor], sampling: RowSampling
) -> tuple[float, float]:
    """Return the seconds of the twin (plain torch) and of the kernel."""
    sampler, lines, host_rows = make_sampler(rows, [sampling]), lines_of(rows), np.arange(rows)
    recorded = [SampleInputs(logits=x, lines=lines, capture=Capture.TOKENS) for x in logits]
    launched = SampleInputs(logits=logits[0], lines=lines, host_rows=host_rows)
    with dispatching(to_kernels=True):
        kernel = seconds_in_graph([partial(sampler.sample, inputs) for inputs in recorded])
    with dispatching(to_kernels=False):
        return median_seconds(lambda: sampler.sample(launched)), kernel


def print_times(name: str, n: int, twin: float, kernel: float, size: int) -> None:
    print(
        f"{name:38} {n:5} {twin * 1e6:9.1f} {kernel * 1e6:9.1f} {twin / kernel:6.1f} "
        f"{size / kernel / 1e12:6.2f}",
        flush=True,
    )


def tune() -> None:
    """The candidates of `fused.Sizes`, by the sum of the medians over the cases that they are
    for."""
    from dovetail_samplers.fused import SIZES

    surveys = [
        replace(SIZES, tile=tile, survey_warps=warps)
        for tile, warps in itertools.product((1024, 2048, 4096), (2, 4, 8))
    ]
    compare("survey", surveys, ["greedy", "temperature"])
    cuts = [(1024, 4), (1024, 8), (2048, 8), (2048, 16), (4096, 16)]
    choices = [
        replace(SIZES, group=group, chunk=chunk, choose_warps=warps)
        for group, (chunk, warps) in itertools.product((32, 64, 128), cuts)
    ]
    choices += [
        replace(SIZES, pivots=pivots, chunk=chunk, choose_warps=warps)
        for pivots, (chunk, warps) in itertools.product((2, 8), cuts)
    ]
    compare("choose", choices, ["top-k 20, top-p .95", "top-p .95"])


def compare(title: str, candidates: Sequence[Sizes], names: Sequence[str]) -> None:
    loads = [
        (rows, [peaked_logits(rows, torch.bfloat16) for _ in range(turns(rows * VOCAB * 2))], name)
        for rows in (1, 256)
        for name in names
    ]
    times = {sizes: [fused_seconds(*load, sizes) * 1e6 for load in loads] for sizes in candidates}
    print(f"\n{title}, us: {', '.join(f'{name} x {rows}' for rows, _, name in loads)}")
    for sizes in sorted(times, key=lambda sizes: sum(times[sizes])):
        print(f"  {' '.join(f'{t:7.1f}' for t in times[sizes])}  {sizes}", flush=True)


def fused_seconds(rows: int, logits: Sequence[torch.Tensor], name: str, sizes: Sizes) -> float:
    from dovetail_samplers import fused

    sampler = make_sampler(rows, [SAMPLINGS[name]])
    lines = lines_of(rows)
    device_rows = sampler._device_rows
    history = sampler.context.history
    return seconds_in_graph(
        [
            lambda x=x: fused.draw(
                x, lines, device_rows.records, history, device_rows.hashes, sizes
            )
            for x in logits
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["check", "time", "tune"])
    only = parser.parse_args().only
    if not ON_GPU:
        if os.environ.get("TRITON_INTERPRET") != "1" or only != "check":
            raise SystemExit(
                "no GPU: only `TRITON_INTERPRET=1 python -m bench.kernels --only check` works here"
            )
        from tests.attention import interpreter

        interpreter.mend()
    with torch.inference_mode():
        if only in (None, "check"):
            check_nn()
            check_sampler()
        if only in (None, "time"):
            time_nn()
            time_sampler()
        if only == "tune":
            tune()


if __name__ == "__main__":
    main()
