"""K and V in FP8 compared with bfloat16 on one GPU: correctness of the triton backend's kernels,
and their times.

    python -m bench.kv_fp8                  # both
    python -m bench.kv_fp8 --only exact     # or `decode`, `prefill`

Exact: steps of every kind against attention in float64 over K and V as stored, held to the bounds
of the conformance suite, and every code of FP8 that `write` makes against torch's rounding. Times:
a layer, replayed from a CUDA graph, as `bench.attention` measures them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import torch

from bench.attention import DECODES, DEVICE, FP8, PREFILLS, Bench, Load, Model, copy_bandwidth
from bench.limits import require_gpu
from dovetail.api.component import NoOptions
from dovetail.testing.suites.attention_bench import Bench as Stepped
from dovetail.testing.suites.attention_bench import Case
from dovetail_attention.triton_backend import TritonAttention

STEPS = {  # tokens before, and queries, of each row
    "decodes": ((3, 100, 2000, 9000), (1, 1, 1, 1)),
    "prefills": ((0, 0, 0), (1, 700, 2100)),
    "chunks": ((30, 1000, 5000), (40, 300, 129)),
    "mixed": ((900, 0, 77, 6000), (1, 333, 50, 1)),
}
SCALES = (0.037, 0.21)
CHECKED = "float16", "bfloat16", "float32"
MODELS = (Model(), Model(block_size=64), Model(32, 8), Model(16, 8, 64), Model(16, 8, 256))


def cases() -> Iterator[tuple[str, Case]]:
    for (name, (history, queries)), dtype, head_size in product(
        STEPS.items(), CHECKED, (64, 80, 128, 256)
    ):
        for block_size, group, window, mixed in (
            (16, 2, None, False),
            (64, 1, None, True),
            (16, 8, 100, False),
        ):
            case = Case(
                history,
                queries,
                block_size,
                2 * group,
                2,
                head_size,
                (window,),
                dtype=dtype,
                device=str(DEVICE),
                cache_dtype=FP8,
                kv_scales=SCALES,
            )
            yield (
                f"{name}, {dtype}, {2 * group}/2 heads of {head_size}, block {block_size}, window "
                f"{window}",
                replace(case, mixed_graph=mixed),
            )


def check_steps() -> None:
    """Print the step closest to the error bound, and all beyond it."""
    nearest = (0.0, "")
    beyond = 0
    count = 0
    for name, case in cases():
        bench = Stepped(lambda context: TritonAttention(NoOptions(), context), case)
        [result], [exact], [allowed] = bench.run(), bench.expected(), bench.allowed_errors()
        share = float(((result - exact).abs().nan_to_num(torch.inf).amax((1, 2)) / allowed).max())
        nearest = max(nearest, (share, name))
        count += 1
        if share > 1:
            beyond += 1
            print(f"WRONG: {share:.1f} of what is allowed: {name}", flush=True)
    print(
        f"{count} steps, {beyond} wrong; nearest to the bound, {nearest[0]:.0%} of it: {nearest[1]}"
    )


def check_codes() -> None:
    """Write numbers of all sizes, the midpoints between those of FP8 among them, and compare each
    code with torch's."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[~numbers.isnan()].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    others = torch.tensor([449.0, 464.0, 465.0, 1e30, torch.inf, -torch.inf, 2.0**-10, 1e-30, 0.0])
    x = torch.cat(
        [
            numbers,
            ties,
            ties.nextafter(torch.tensor(1e9)),
            ties.nextafter(torch.tensor(-1e9)),
            others,
        ]
    )
    # [tokens, 1, 128]
    x = torch.nn.functional.pad(x, (0, -len(x) % 128)).view(-1, 1, 128).to(DEVICE)
    case = Case(
        (0,),
        (len(x),),
        16,
        1,
        1,
        128,
        dtype="float32",
        device=str(DEVICE),
        cache_dtype=FP8,
        kv_scales=SCALES,
    )
    bench = Stepped(lambda context: TritonAttention(NoOptions(), context), case)
    bench.plan(case.history, case.lens)
    bench.layers[0].write(x, x)
    cache = bench.layers[0].cache_for_fused_write()
    assert cache is not None
    slots = cache.slots[: len(x)]
    wrong = 0
    for stored, scale in ((cache.k, bench.scales[0].k), (cache.v, bench.scales[0].v)):
        twin = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        wrong += int(
            (stored.view(torch.uint8)[slots // 16, slots % 16] != twin.view(torch.uint8)).sum()
        )
    print(f"{2 * x.numel()} codes written, {wrong} unlike torch's")


def times(loads: Sequence[Load], bandwidth: float) -> None:
    """Print microseconds of both, their ratio, and the share of the copy bandwidth at which FP8 is
    read."""
    print(
        f"{'model':46} {'load':28} {'bf16 us':>9} {'fp8 us':>9} {'faster':>7} {'bf16 of copy':>13} "
        f"{'fp8 of copy':>12}"
    )
    for model, load in product(MODELS, loads):
        wide = Bench(model, load)
        small = Bench(replace(model, cache_dtype=FP8), load)
        wide_s = wide.seconds()
        small_s = small.seconds()
        shares = [
            bench.bytes / seconds / bandwidth
            for bench, seconds in ((wide, wide_s), (small, small_s))
        ]
        row = (
            f"{wide_s * 1e6:9.1f} {small_s * 1e6:9.1f} {wide_s / small_s:6.2f}x "
            f"{shares[0]:13.0%} {shares[1]:12.0%}"
        )
        print(f"{model!s:46} {load.name:28} {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["exact", "decode", "prefill"])
    args = parser.parse_args()
    require_gpu()
    if args.only in (None, "exact"):
        check_codes()
        check_steps()
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {bandwidth / 1e12:.2f} "
        f"TB/s"
    )
    if args.only in (None, "decode"):
        times(DECODES, bandwidth)
    if args.only in (None, "prefill"):
        times(PREFILLS, bandwidth)


if __name__ == "__main__":
    main()
