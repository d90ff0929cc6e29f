"""Measures how close an attention backend gets to the GPU's limits: TB/s of K and V read in decode,
TFLOP/s in prefill, per layer.

    python -m bench.attention                        # the triton backend, beside the device's copy bandwidth and, if importable, flash-attn
    python -m bench.attention --only decode --tune   # every candidate of the tuning table, quickest first
    python -m bench.attention --kinds latent sinks softcap   # layers of DeepSeek's, gpt-oss' and Gemma 2's kind instead
    python -m bench.attention --fp8                  # either with K and V in FP8; `bench.kv_fp8` has both beside each other

Random data, blocks in random order, medians of CUDA events. The layers' caches take turns, so that
together they exceed the L2 many times. All is replayed from a CUDA graph, as an engine does, but
for flash-attn's prefill, which is launched.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bench.limits import require_gpu
from dovetail.api.attention import AttentionBatch, AttentionContext, KVScales, LayerSpec
from dovetail.api.component import NoOptions
from dovetail.testing.memory import bind_layers
from dovetail_attention.triton_backend import TritonAttention
from dovetail_attention.triton_tuning import DecodeTiling, PrefillTiling, Tilings

DEVICE = torch.device("cuda")
FP8 = "float8_e4m3fn"
ROTATED_BYTES = 1 << 30  # of K and V that the layers hold together, at least
MAX_LEN = 32_768  # of the block table
REPEATS = 20
WARM_UP_S = 0.1


@dataclass(frozen=True)
class Model:
    """Sizes of the attention layers of a model."""

    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"
    block_size: int = 16
    window: int | None = None
    cache_dtype: str | None = None  # of K and V, if another
    sinks: bool = False
    softcap: float | None = None
    v_in_k: int | None = None  # numbers of K that are V, in a latent layer

    def __str__(self) -> str:
        window = f" window {self.window}" if self.window else ""
        cache = f" over {self.cache_dtype}" if self.cache_dtype else ""
        kind = (
            (" sinks" if self.sinks else "")
            + (" softcap" if self.softcap else "")
            + (" latent" if self.v_in_k else "")
        )
        return (
            f"{self.heads}/{self.kv_heads} heads of {self.head_size}, {self.dtype}{cache}, "
            f"block {self.block_size}{window}{kind}"
        )

    def spec(self, index: int) -> LayerSpec:
        latent = self.v_in_k is not None
        return LayerSpec(
            index,
            self.heads,
            self.kv_heads,
            self.head_size,
            self.head_size**-0.5,
            self.window,
            self.sinks,
            self.softcap,
            latent,
            self.v_in_k,
        )

    @property
    def bytes_per_token(self) -> int:
        dtype: torch.dtype = getattr(torch, self.cache_dtype or self.dtype)
        return (1 if self.v_in_k else 2) * self.kv_heads * self.head_size * dtype.itemsize


@dataclass(frozen=True)
class Load:
    """A step: tokens of each row, and the number of queries among them."""

    name: str
    lens: tuple[int, ...]
    queries: tuple[int, ...]
    shared: int = 0  # leading tokens that all rows share

    @classmethod
    def decode(cls, name: str, rows: int, shortest: int, longest: int, shared: int = 0) -> Load:
        lens = np.random.default_rng(0).integers(shortest, longest + 1, rows).tolist()
        return cls(name, tuple(n + shared for n in lens), (1,) * rows, shared)

    def seen(self, window: int | None) -> int:
        """Number of (query, key) pairs."""
        last = (
            np.concatenate(
                [np.arange(n - q, n) for n, q in zip(self.lens, self.queries, strict=True)]
            )
            + 1
        )
        return int(np.minimum(last, window or last.max()).sum())

    def tokens(self, window: int | None) -> int:
        """Number of tokens whose K and V must be read at least once."""
        kept = [
            min(n, window + q - 1) if window else n
            for n, q in zip(self.lens, self.queries, strict=True)
        ]
        return sum(kept) - self.shared * (len(self.lens) - 1)


DECODES = (
    Load.decode("256 x 100-2,000", 256, 100, 2000),
    Load.decode("64 x 100-2,000", 64, 100, 2000),
    Load.decode("8 x 8k", 8, 7800, 8400),
    Load.decode("1 x 32k", 1, 32_000, 32_000),
    Load.decode("8 x 1k", 8, 900, 1100),
    Load.decode("1 x 600", 1, 600, 600),
    Load.decode("64 x (4k shared + 100-500)", 64, 100, 500, shared=4096),
)
PREFILLS = (
    Load("16 x 8,192", (8192,) * 16, (8192,) * 16),
    Load("64 x 1,024", (1024,) * 64, (1024,) * 64),
    Load("4 chunks of 2,048 after 14k", (16_384,) * 4, (2048,) * 4),
    Load("1 chunk of 512 after 3.5k", (4096,), (512,)),
    Load("1 chunk of 64 after 16k", (16_448,), (64,)),
)
DECODE_MODELS = (
    Model(),
    Model(block_size=64),
    Model(block_size=256),
    Model(32, 8),
    Model(8, 8),
    Model(16, 8, 64),
    Model(16, 8, 80),
    Model(16, 8, 256),
    Model(dtype="float32"),
    Model(window=512),
)
KINDS = {  # decode and prefill
    "latent": (
        Model(20, 1, 576, v_in_k=512),
        Model(16, 1, 576, v_in_k=512),
        Model(128, 1, 576, v_in_k=512),
    ),
    "sinks": (
        Model(64, 8, 64),
        Model(64, 8, 64, sinks=True),
        Model(64, 8, 64, sinks=True, window=128),
    ),
    "softcap": (
        Model(16, 8, 256),
        Model(16, 8, 256, softcap=50.0),
        Model(32, 16, 128, softcap=50.0, window=4096),
    ),
}
PREFILL_MODELS = (
    Model(32, 8),
    Model(32, 8, block_size=256),
    Model(32, 8, 64),
    Model(32, 8, 256),
    Model(16, 16),
    Model(32, 8, window=1024),
)


def median_seconds(run: Callable[[], object]) -> float:
    """Return the median time of one call on the device, after warming up until its clocks are at
    full speed."""
    started = time.perf_counter()
    while time.perf_counter() - started < WARM_UP_S:
        run()
        torch.cuda.synchronize()
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


def replayed_seconds(run: Callable[[], object]) -> float:
    """Return the median time of the kernels of `run`, replayed from a CUDA graph."""
    run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    return median_seconds(captured.replay)


def copy_bandwidth() -> float:
    """Return the bytes read and written per second by a copy within the device."""
    source, target = (torch.empty(1 << 32, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    source.random_()
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source))


class Bench:
    """A backend with layers full of random K and V, for one model and load."""

    def __init__(self, model: Model, load: Load) -> None:
        self.model = model
        self.load = load
        blocks_of_row = [-(-n // model.block_size) for n in load.lens]
        num_blocks = sum(blocks_of_row)
        num_layers = max(1, -(-ROTATED_BYTES // (sum(load.lens) * model.bytes_per_token)))
        self.backend = TritonAttention(
            NoOptions(), AttentionContext("cuda", model.dtype, model.block_size, model.cache_dtype)
        )
        self.tilings = self.backend.tilings  # what an engine uses on this GPU
        self.layers = [self.backend.make_layer(model.spec(i)) for i in range(num_layers)]
        for layer in self.layers:
            if model.sinks:
                layer.bind_sinks(
                    torch.zeros(model.heads, dtype=getattr(torch, model.dtype), device=DEVICE)
                )
            layer.kv_scales = (
                KVScales(*(torch.tensor(0.05, device=DEVICE) for _ in range(2)))
                if model.cache_dtype
                else None
            )
        bind_layers(self.backend, self.layers, num_blocks)
        self.waste_slot = num_blocks * model.block_size
        self.labels = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)
        self.table = np.zeros((len(load.lens), max(blocks_of_row)), np.int32)
        for row, (count, end) in enumerate(
            zip(blocks_of_row, np.cumsum(blocks_of_row), strict=True)
        ):
            self.table[row, :count] = self.labels[end - count : end]
        self.table[:, : load.shared // model.block_size] = self.table[
            0, : load.shared // model.block_size
        ]
        dtype = getattr(torch, model.dtype)
        self.q = torch.randn(
            sum(load.queries), model.heads, model.head_size, dtype=dtype, device=DEVICE
        )
        self._fill(num_blocks * model.block_size, dtype)
        self.use(self.tilings)

    def _fill(self, num_slots: int, dtype: torch.dtype) -> None:
        """Write every slot, row by row, in pieces."""
        piece = 1 << 16
        self.backend.prepare(1, piece, self.model.block_size)
        for start in range(0, num_slots, piece):
            slots = torch.arange(start, min(start + piece, num_slots), device=DEVICE)
            self.backend.plan(
                self._batch(np.zeros((1, 1), np.int32), [len(slots)], [len(slots)], slots, 0)
            )
            k, v = (
                torch.randn(
                    len(slots),
                    self.model.kv_heads,
                    self.model.head_size,
                    dtype=dtype,
                    device=DEVICE,
                )
                for _ in range(2)
            )
            for layer in self.layers:
                layer.write(k, None if self.model.v_in_k else v)

    def use(self, tilings: Tilings) -> None:
        """Plan the load with such tilings."""
        self.backend.tilings = tilings
        self.backend.prepare(len(self.load.lens), sum(self.load.queries), MAX_LEN)
        slots = torch.full(
            (sum(self.load.queries),), self.waste_slot, dtype=torch.int64, device=DEVICE
        )
        self.batch = self._batch(
            self.table,
            list(self.load.lens),
            list(self.load.queries),
            slots,
            self.load.shared // self.model.block_size,
        )
        self.backend.plan(self.batch)

    @staticmethod
    def _batch(
        table: np.ndarray, lens: list[int], queries: list[int], slots: torch.Tensor, shared: int
    ) -> AttentionBatch:
        starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=DEVICE)
        host_queries = np.array(queries, np.int32)
        host_lens = np.array(lens, np.int32)
        device_lens = torch.from_numpy(host_lens).to(DEVICE)
        device_table = torch.from_numpy(table).to(DEVICE)
        return AttentionBatch(
            len(lens),
            sum(queries),
            starts,
            device_lens,
            (device_table[None],),
            (slots[None],),
            host_queries,
            host_lens,
            shared,
        )

    def attend(self) -> None:
        for layer in self.layers:
            layer.attend(self.q)

    def seconds(self) -> float:
        """Return the time of `attend` for one layer, replayed from a CUDA graph."""
        return replayed_seconds(self.attend) / len(self.layers)

    def plan_seconds(self) -> float:
        """Return the host time of `plan`."""
        times = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.backend.plan(self.batch)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    @property
    def bytes(self) -> int:
        return self.load.tokens(self.model.window) * self.model.bytes_per_token

    @property
    def operations(self) -> int:
        numbers = self.model.head_size + (self.model.v_in_k or self.model.head_size)
        return 2 * self.model.heads * numbers * self.load.seen(self.model.window)


def flash_decode_seconds(model: Model, load: Load) -> float | None:
    """Return flash-attn over pages of 256, or None if unsupported."""
    if load.shared or model.window or model.cache_dtype or not flash_can(model):
        return None
    from flash_attn import flash_attn_with_kvcache

    blocks = [-(-n // 256) for n in load.lens]
    dtype = getattr(torch, model.dtype)
    copies = max(1, -(-ROTATED_BYTES // (sum(load.lens) * model.bytes_per_token)))
    shape = (sum(blocks), 256, model.kv_heads, model.head_size)
    caches = [
        tuple(torch.randn(shape, dtype=dtype, device=DEVICE) for _ in range(2))
        for _ in range(copies)
    ]
    table = torch.zeros((len(blocks), max(blocks)), dtype=torch.int32, device=DEVICE)
    order = torch.randperm(sum(blocks), dtype=torch.int32, device=DEVICE)
    for row, (count, end) in enumerate(zip(blocks, itertools.accumulate(blocks), strict=True)):
        table[row, :count] = order[end - count : end]
    lens = torch.tensor(load.lens, dtype=torch.int32, device=DEVICE)
    q = torch.randn(len(blocks), 1, model.heads, model.head_size, dtype=dtype, device=DEVICE)

    def run() -> None:
        for k, v in caches:
            flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, block_table=table, causal=True)

    return replayed_seconds(run) / copies


def flash_prefill_seconds(model: Model, load: Load) -> float | None:
    """Return flash-attn over contiguous K and V, or None if unsupported."""
    if not flash_can(model):
        return None
    from flash_attn import flash_attn_varlen_func

    dtype = getattr(torch, model.dtype)
    q = torch.randn(sum(load.queries), model.heads, model.head_size, dtype=dtype, device=DEVICE)
    k, v = (
        torch.randn(sum(load.lens), model.kv_heads, model.head_size, dtype=dtype, device=DEVICE)
        for _ in range(2)
    )
    q_starts, k_starts = (
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=DEVICE)
        for n in (load.queries, load.lens)
    )
    window = (model.window - 1, 0) if model.window else (-1, -1)

    def run() -> None:
        flash_attn_varlen_func(
            q,
            k,
            v,
            q_starts,
            k_starts,
            max(load.queries),
            max(load.lens),
            causal=True,
            window_size=window,
        )

    return median_seconds(run)


@functools.cache
def flash_can(model: Model) -> bool:
    """Return True if flash-attn is installed and computes such a model correctly: builds without a
    kernel return wrong numbers."""
    if model.sinks or model.softcap or model.v_in_k:
        return False
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return False
    dtype = getattr(torch, model.dtype)
    q, k, v = (
        torch.randn(1, 64, heads, model.head_size, dtype=dtype, device=DEVICE)
        for heads in (model.heads, model.kv_heads, model.kv_heads)
    )
    try:
        out = flash_attn_func(q, k, v, causal=True).transpose(1, 2)
    except RuntimeError:
        return False
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    return bool((out - expected).abs().max() < 0.1)


def decode_table(bandwidth: float, cache_dtype: str | None, models: Sequence[Model]) -> None:
    print(f"\ndecode: K and V read, TB/s (device copy: {bandwidth / 1e12:.2f})")
    print(
        f"{'model':52} {'load':28} {'us':>8} {'TB/s':>6} {'of copy':>8} {'plan us':>8} "
        f"{'flash-attn':>11}"
    )
    for model in models:
        for load in DECODES if model == Model() else DECODES[:3]:
            bench = Bench(replace(model, cache_dtype=cache_dtype), load)
            seconds = bench.seconds()
            plan = bench.plan_seconds()
            rate = bench.bytes / seconds
            other = flash_decode_seconds(model, load)
            beside = f"{bench.bytes / other / 1e12:11.2f}" if other else f"{'-':>11}"
            row = (
                f"{seconds * 1e6:8.1f} {rate / 1e12:6.2f} {rate / bandwidth:8.0%} "
                f"{plan * 1e6:8.0f} {beside}"
            )
            print(f"{model!s:52} {load.name:28} {row}", flush=True)


def prefill_table(cache_dtype: str | None, models: Sequence[Model]) -> None:
    print("\nprefill: TFLOP/s of the scores that are seen")
    print(f"{'model':52} {'load':28} {'ms':>8} {'TFLOP/s':>8} {'plan us':>8} {'flash-attn':>11}")
    for model in models:
        for load in PREFILLS:
            bench = Bench(replace(model, cache_dtype=cache_dtype), load)
            seconds = bench.seconds()
            plan = bench.plan_seconds()
            other = flash_prefill_seconds(model, load)
            beside = f"{bench.operations / other / 1e12:11.0f}" if other else f"{'-':>11}"
            row = (
                f"{seconds * 1e3:8.3f} {bench.operations / seconds / 1e12:8.0f} "
                f"{plan * 1e6:8.0f} {beside}"
            )
            print(f"{model!s:52} {load.name:28} {row}", flush=True)


def decode_candidates() -> Iterator[DecodeTiling]:
    for keys, warps, stages, all_warps in itertools.product(
        (16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4), (4, 8, 12, 16)
    ):
        if all_warps % warps == 0:
            yield DecodeTiling(keys, warps, stages, all_warps // warps)


def prefill_candidates() -> Iterator[PrefillTiling]:
    for queries, keys, warps, stages in itertools.product(
        (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
    ):
        yield PrefillTiling(queries, keys, warps, stages)
    for keys, stages in itertools.product((64, 128), (2, 3, 4)):
        yield PrefillTiling(128, keys, 4, stages, loads_apart=True)


def tune(
    model: Model, load: Load, candidates: Iterator[DecodeTiling] | Iterator[PrefillTiling]
) -> list[tuple[float, DecodeTiling | PrefillTiling]]:
    """Return every candidate that fits the device with its seconds, fastest first."""
    bench = Bench(model, load)
    [usual] = bench.backend.planned.schedules.values()
    loads_apart = usual.prefill_tiling.loads_apart
    results: list[tuple[float, DecodeTiling | PrefillTiling]] = []
    for tiling in candidates:
        if isinstance(tiling, PrefillTiling) and tiling.loads_apart and not loads_apart:
            continue  # such a model isn't served so, or not here
        try:
            bench.use(fixed(tiling, bench.tilings))
            results.append((bench.seconds(), tiling))
        except Exception as error:  # too much shared memory, or registers
            if "out of resource" not in str(error):
                raise
    return sorted(results, key=lambda result: result[0])


def fixed(tiling: DecodeTiling | PrefillTiling, usual: Tilings) -> Tilings:
    """Return the default choices except for this one."""
    if isinstance(tiling, DecodeTiling):
        return replace(usual, decode=lambda shape: tiling)
    return replace(usual, prefill=lambda shape: tiling)


def tuning_table(decode: bool, cache_dtype: str | None, models: Sequence[Model]) -> None:
    for model in models:
        for load in DECODES[:3] if decode else PREFILLS:
            print(f"\n{model}, {load.name}")
            for seconds, tiling in tune(
                replace(model, cache_dtype=cache_dtype),
                load,
                decode_candidates() if decode else prefill_candidates(),
            )[:10]:
                print(f"  {seconds * 1e6:9.1f} us  {tiling}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["decode", "prefill"])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument(
        "--fp8", dest="cache_dtype", action="store_const", const=FP8, help="K and V in FP8"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, help="layers of these kinds instead of plain ones"
    )
    args = parser.parse_args()
    of_kinds = [model for kind in args.kinds or () for model in KINDS[kind]]
    require_gpu()
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {bandwidth / 1e12:.2f} "
        f"TB/s"
    )
    for what in ("decode", "prefill") if args.only is None else (args.only,):
        models = of_kinds or (DECODE_MODELS if what == "decode" else PREFILL_MODELS)
        if args.tune:
            tuning_table(what == "decode", args.cache_dtype, models)
        elif what == "decode":
            decode_table(bandwidth, args.cache_dtype, models)
        else:
            prefill_table(args.cache_dtype, models)


if __name__ == "__main__":
    main()
