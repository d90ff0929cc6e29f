"""All-reduces over the GPUs of this host, recorded in CUDA graphs like a model's steps:
microseconds of each implementation, by size.

    python -m bench.all_reduce                 # two ranks
    python -m bench.all_reduce --size 4 --hidden 4096 --json out.json
    python -m bench.all_reduce --device cpu    # gloo between processes, timed on the host's clock

A graph holds 50 sums of [rows, hidden] bfloat16, each added to a residual stream and followed by
the stream's RMS norm, since that is what a layer does; in all ways but `fused` these are kernels of
their own. `one-shot` and `two-shot` are torch's kernels for symmetric memory, which the engine
doesn't use; `exchange` is the engine's. Each sum is checked against the ranks' own numbers. The
median of 20 replays; the copy into symmetric memory counts where a way needs one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from dovetail.nn.norm import rms_norm
from dovetail_executors.runtime.groups import ENVIRONMENT, TorchGroup

SUMS = 50
REPLAYS = 20
EPS = 1e-6
ROWS = (1, 4, 16, 64, 128, 256, 1024, 2048, 4096, 8192)
MOST_OF_TORCH = 8 << 20  # bytes of a sum through torch's kernels

Sum = Callable[[torch.Tensor], torch.Tensor]
# of the stream, this rank's part and the norm's weight
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def separate(all_reduce: Sum, x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor) -> None:
    """A sum, then the addition and the norm."""
    x.add_(all_reduce(part.clone()))
    rms_norm(x, weight, EPS)


def fused(group: TorchGroup, x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor) -> None:
    """All of it in one kernel; a product would have written its result to the place."""
    assert group.shares is not None
    place = group.shares.place(len(x), x.shape[1], x.dtype)
    assert place is not None
    place.copy_(part)
    group.shares.add(x, (weight, EPS))


def exchange(group: TorchGroup, x: torch.Tensor) -> torch.Tensor:
    assert group.shares is not None
    assert group.shares.all_reduce(x)
    return x


def torch_shot(shots: str, buffer: torch.Tensor, name: str, x: torch.Tensor) -> torch.Tensor:
    mine = buffer[: x.numel()].view(x.shape)
    mine.copy_(x)
    getattr(torch.ops.symm_mem, f"{shots}_shot_all_reduce_out")(mine, "sum", name, x)
    return x


def no_sum(x: torch.Tensor) -> torch.Tensor:
    """Time of the copy, the addition and the norm only."""
    return x


def torchs_buffer(group: TorchGroup, name: str) -> torch.Tensor | None:
    """Return symmetric memory for torch's own kernels, or None if unsupported."""
    if group.shares is None:
        return None
    import torch.distributed._symmetric_memory as symmetric

    buffer = symmetric.empty(MOST_OF_TORCH // 2, dtype=torch.bfloat16, device=group.device)
    symmetric.rendezvous(buffer, name)
    return buffer


def microseconds(act: Callable[[], None], device: torch.device) -> float:
    """Return the time of one sum, of a graph where there is a GPU."""
    if device.type == "cpu":
        return statistics.median(_host_times(act))
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        act()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SUMS):
            act()
    times = []
    for _ in range(REPLAYS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(1e3 * start.elapsed_time(end) / SUMS)
    return statistics.median(times)


def _host_times(act: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(REPLAYS):
        begun = time.perf_counter()
        act()
        times.append(1e6 * (time.perf_counter() - begun))
    return times


def right(way: Way, group: TorchGroup, rows: int, hidden: int) -> bool:
    """Return True if a stream of zeros gets the sum of the ranks' numbers, which are small
    integers."""
    x = torch.zeros((rows, hidden), dtype=torch.bfloat16, device=group.device)
    counting = torch.arange(rows * hidden, device=group.device).remainder(7).view(rows, hidden)
    way(
        x,
        (counting + group.rank).bfloat16(),
        torch.ones(hidden, dtype=torch.bfloat16, device=group.device),
    )
    wanted = sum(counting + rank for rank in range(group.size))
    assert isinstance(wanted, torch.Tensor)
    return torch.equal(x, wanted.bfloat16())


def of_rank(
    rank: int, size: int, kind: str, hidden: int, rows: tuple[int, ...], folder: str, out: str
) -> None:
    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    group, plain = (
        TorchGroup(rank, size, device, f"bench-{name}", f"{folder}/{name}", 60.0)
        for name in ("shared", "plain")
    )
    # The plain group reserves no shared memory: it sends all data by its transport.
    group.reserve(max(rows) * hidden, 0, torch.bfloat16)
    group.join()
    buffer = torchs_buffer(group, "bench-shared")
    print(f"rank {rank}: {group} {group.why_not_symmetric}", flush=True)
    weight = torch.randn(hidden, device=device).bfloat16()
    table = []
    for count in rows:
        numbers = count * hidden
        ways: dict[str, Way] = {
            "no sum": partial(separate, no_sum),
            plain.transport: partial(separate, plain.all_reduce),
        }
        if buffer is not None and numbers <= buffer.numel():
            ways |= {
                f"{shots}-shot": partial(
                    separate, partial(torch_shot, shots, buffer, "bench-shared")
                )
                for shots in ("one", "two")
            }
        if group.shares is not None and 2 * numbers <= group.shares.most_exchanged:
            ways["exchange"] = partial(separate, partial(exchange, group))
        if group.shares is not None and numbers <= group.shares.numbers:
            ways["fused"] = partial(fused, group)
        x, part = (torch.randn(count, hidden, device=device).bfloat16() for _ in range(2))
        row: dict[str, Any] = {"rows": count, "bytes": 2 * numbers}
        for name, way in ways.items():
            if name != "no sum" and not right(way, group, count, hidden):
                row[name] = "WRONG"
                continue
            row[name] = microseconds(partial(way, x.zero_(), part, weight), device)
        table.append(row)
        if rank == 0:
            cells = (
                f"{name} {value:7.1f}" if isinstance(value, float) else f"{name} {value}"
                for name, value in row.items()
            )
            print(" | ".join(cells), flush=True)
    if rank == 0 and out:
        Path(out).write_text(json.dumps(table, indent=1))
    for each in (group, plain):
        each.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--json", metavar="FILE", default="")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.size:
        raise SystemExit(
            f"--size {args.size} needs as many GPUs, and torch {torch.__version__} sees "
            f"{torch.cuda.device_count()}"
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("shared", "plain"):
            (Path(folder) / name).touch()
        multiprocessing.spawn(
            of_rank,
            (args.size, args.device, args.hidden, tuple(args.rows), folder, args.json),
            nprocs=args.size,
        )


if __name__ == "__main__":
    main()
