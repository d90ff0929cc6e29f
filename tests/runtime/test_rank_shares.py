"""Sums through memory that GPUs share, between two processes: on two GPUs, or on the one that there is."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

RANK = """
import random, sys
import torch
import torch.distributed as dist
from dovetail.runtime.rank_shares import make_rank_shares

rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
device = torch.device("cuda", rank % torch.cuda.device_count())
torch.cuda.set_device(device)
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
shares = make_rank_shares(300 * 256, torch.bfloat16, device, dist.group.WORLD)
weight = torch.ones(256, dtype=torch.bfloat16, device=device)


def numbers(of, seed, rows):
    return torch.arange(rows * 256, device=device).add(13 * of + seed).remainder(9).view(rows, 256).bfloat16()


def sums(rows_of_sums):
    x = torch.zeros(300, 256, dtype=torch.bfloat16, device=device)
    for seed, rows in enumerate(rows_of_sums):
        shares.place(rows, 256, x.dtype).copy_(numbers(rank, seed, rows))
        normed = shares.add(x[:rows], (weight, 1e-6) if seed % 2 else None)
        if seed % 3 == 0:
            x.remainder_(16)
    return x


def wanted(rows_of_sums):
    x = torch.zeros(300, 256, dtype=torch.bfloat16, device=device)
    for seed, rows in enumerate(rows_of_sums):
        x[:rows] = (x[:rows].float() + sum(numbers(of, seed, rows).float() for of in range(size))).bfloat16()
        if seed % 3 == 0:
            x.remainder_(16)
    return x


chance = random.Random(0)
for round in range(4):
    rows = [chance.choice([1, 2, 17, 64, 265, 300]) for _ in range(20)]
    assert torch.equal(sums(rows), wanted(rows)), rows
    dist.barrier()
graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.graph(graph):
    x = sums(rows)
for _ in range(5):
    dist.barrier()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(x, wanted(rows))
print("right")
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [2, 4])
def test_every_sum_is_that_of_all_ranks_one_by_one_and_in_a_graph(size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), str(size), store],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
            )
            for rank in range(size)
        ]
        try:
            assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["right\n"] * size
        finally:
            for rank in ranks:
                rank.kill()
