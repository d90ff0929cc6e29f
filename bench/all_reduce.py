"""Sums over the GPUs of this host, recorded in CUDA graphs as a model's steps are: microseconds of each way, by the size of what is summed.

    python -m bench.all_reduce                 # two ranks
    python -m bench.all_reduce --size 4 --hidden 4096 --json out.json

A graph holds 50 sums of [rows, hidden] bfloat16, each added to a residual stream and followed by the stream's RMS norm, since that is what a layer
does; for NCCL and torch's symmetric memory these are kernels of their own. Each sum is checked against the ranks' own numbers. The median of 20
replays; the copy into symmetric memory counts where a way needs one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from dovetail.nn.norm import rms_norm
from dovetail.runtime.groups import ENVIRONMENT, TorchGroup

SUMS = 50
REPLAYS = 20
EPS = 1e-6
ROWS = (1, 4, 16, 64, 128, 256, 1024, 2048, 4096, 8192)


def separate(
    group: TorchGroup, all_reduce: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor
) -> None:
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


def nccl(group: TorchGroup, x: torch.Tensor) -> torch.Tensor:
    group._run(lambda process_group: process_group.allreduce([x], group._synchronous))
    return x


def torch_shot(group: TorchGroup, shots: str, x: torch.Tensor) -> torch.Tensor:
    assert group.symmetric is not None
    mine = group.symmetric._buffer[: x.numel()].view(x.shape)
    mine.copy_(x)
    getattr(torch.ops.symm_mem, f"{shots}_shot_all_reduce_out")(mine, "sum", group.symmetric._group_name, x)
    return x


def copied(x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor) -> None:
    """No sum at all: what the copy, the addition and the norm take."""
    x.add_(part.clone())
    rms_norm(x, weight, EPS)


def microseconds(act: Callable[[], None], device: torch.device) -> float:
    """Return the time of one sum of a graph."""
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
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(1e3 * start.elapsed_time(end) / SUMS)
    return statistics.median(times)


def right(way: Callable[..., None], group: TorchGroup, rows: int, hidden: int) -> bool:
    """True if a stream of zeros gets the sum of the ranks' numbers, which are small and whole."""
    x = torch.zeros((rows, hidden), dtype=torch.bfloat16, device=group.device)
    counting = torch.arange(rows * hidden, device=group.device).remainder(7).view(rows, hidden)
    way(x, (counting + group.rank).bfloat16(), torch.ones(hidden, dtype=torch.bfloat16, device=group.device))
    wanted = sum(counting + rank for rank in range(group.size))
    assert isinstance(wanted, torch.Tensor)
    return torch.equal(x, wanted.bfloat16())


def of_rank(rank: int, size: int, hidden: int, rows: tuple[int, ...], store: str, out: str) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    group = TorchGroup(rank, size, device, "bench", store, 60.0)
    group.reserve(max(rows) * hidden, torch.bfloat16)
    print(f"rank {rank}: {group} {group.why_not_symmetric}", flush=True)
    weight = torch.randn(hidden, dtype=torch.bfloat16, device=device)
    table = []
    for count in rows:
        ways: dict[str, Callable[..., None]] = {"no sum": copied, "nccl": partial(separate, partial(nccl, group))}
        if group.symmetric is not None and 2 * count * hidden <= group.symmetric.most_bytes:
            for shots in ("one", "two"):
                ways[f"{shots}-shot"] = partial(separate, partial(torch_shot, group, shots))
        if group.shares is not None and count * hidden <= group.shares.numbers:
            ways["fused"] = partial(fused, group)
        x, part = (torch.randn(count, hidden, device=device).bfloat16() for _ in range(2))
        row: dict[str, Any] = {"rows": count, "bytes": 2 * count * hidden}
        for name, way in ways.items():
            if name != "no sum" and not right(way, group, count, hidden):
                row[name] = "WRONG"
                continue
            row[name] = microseconds(partial(way, x.zero_(), part, weight), device)
        table.append(row)
        if rank == 0:
            cells = (f"{name} {value:7.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
            print(" | ".join(cells), flush=True)
    if rank == 0 and out:
        Path(out).write_text(json.dumps(table, indent=1))
    torch.cuda.synchronize(device)
    group.abort()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--json", metavar="FILE", default="")
    args = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        Path(store).touch()
        multiprocessing.spawn(of_rank, (args.size, args.hidden, tuple(args.rows), store, args.json), nprocs=args.size)


if __name__ == "__main__":
    main()
