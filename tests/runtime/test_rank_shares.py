"""Sums and gatherings through memory that all ranks can read, each rank in a process of its own:
with GPUs on two of them, or on the one that there is; without, in Triton's interpreter, with memory
of the host.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from datetime import timedelta
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import pytest
import torch
import torch.distributed as dist

from dovetail_executors.runtime import rank_shares
from dovetail_executors.runtime.groups import ENVIRONMENT
from tests.preloaded import Preloaded
from tests.support import FULL

LIMIT_S = 300
ON_GPUS = torch.cuda.is_available()

COMMON = """
import random, sys, threading
import torch
import torch.distributed as dist
from dovetail_executors.runtime import rank_shares

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
on_gpus = torch.cuda.is_available()
device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", size), rank=rank, world_size=size)
ROWS, WIDTH = 300, 256


def make(dtype):
    if on_gpus:
        shares = rank_shares.make_rank_shares(ROWS * WIDTH, 0, dtype, device, rank, size)
        dist.barrier()
        rank_shares.connect(shares, dist.group.WORLD)
        return shares
    part = ROWS * WIDTH * dtype.itemsize
    count = rank_shares.buffer_bytes(size, part, part)
    buffers = [torch.from_file(f"{folder}/{dtype} {of}", shared=True, size=count, dtype=torch.uint8) for of in range(size)]
    shares = rank_shares.RankShares(buffers[rank], rank, size, part, dtype, torch.zeros(1, dtype=torch.int32))
    shares.connect([buffer.data_ptr() for buffer in buffers])
    shares.mapped = buffers
    dist.barrier()
    return shares


def numbers(of, seed, rows, dtype):
    return torch.arange(rows * WIDTH, device=device).add(13 * of + seed).remainder(9).view(rows, WIDTH).to(dtype)


def total(seed, rows, dtype):
    return sum(numbers(of, seed, rows, dtype).float() for of in range(size)).to(dtype)
"""
SUMS = """
shares = make(torch.bfloat16)
begins = shares.place(1, WIDTH, torch.bfloat16).data_ptr()
weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=device)


def sums(rows_of_sums):
    x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device=device)
    for seed, rows in enumerate(rows_of_sums):
        place = shares.place(rows, WIDTH, x.dtype)
        if seed % 4 == 1:  # the ranks have met
            assert place.data_ptr() == begins
        place.copy_(numbers(rank, seed, rows, x.dtype))
        shares.add(x[:rows], (weight, 1e-6) if seed % 2 else None)
        if seed % 3 == 0:
            x.remainder_(16)
        if seed % 4 == 0:
            x[:rows] += exchanged(seed, rows)
    return x


def exchanged(seed, rows):
    mine = numbers(rank, seed, rows, torch.bfloat16)
    assert shares.all_reduce(mine)
    return mine + shares.all_gather(numbers(rank, seed, rows, torch.bfloat16)).view(rows, size, WIDTH)[:, -1]


def wanted(rows_of_sums):
    x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device=device)
    for seed, rows in enumerate(rows_of_sums):
        x[:rows] = (x[:rows].float() + total(seed, rows, torch.float32)).bfloat16()
        if seed % 3 == 0:
            x.remainder_(16)
        if seed % 4 == 0:
            x[:rows] += total(seed, rows, x.dtype) + numbers(size - 1, seed, rows, x.dtype)
    return x


chance = random.Random(0)
for round in range(4 if on_gpus else 1):
    rows = [chance.choice([1, 2, 17, 64, 265, 300] if on_gpus else [1, 2, 5]) for _ in range(20 if on_gpus else 10)]
    assert torch.equal(sums(rows), wanted(rows)), rows
    dist.barrier()
if on_gpus:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = sums(rows)
    for _ in range(5):
        dist.barrier()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x, wanted(rows))
print("sums")
"""
EXCHANGES = """
for dtype in (torch.float32, torch.float16):
    shares = make(torch.float32)
    for seed, rows in enumerate([1, 3, 20, 1, 40]):
        mine = numbers(rank, seed, rows, dtype)
        assert shares.all_reduce(mine) and torch.equal(mine, total(seed, rows, dtype))
        turned = numbers(rank, seed, rows, dtype).t()  # it need not be contiguous
        whole = torch.cat([numbers(of, seed, rows, dtype).t() for of in range(size)], dim=-1)
        assert torch.equal(shares.all_gather(turned), whole)
    assert not shares.all_reduce(torch.ones(ROWS * WIDTH + 1, device=device)), "it has no room"
    assert shares.all_gather(torch.ones(4, dtype=torch.int64, device=device)) is None, "of no dtype that it knows"
    dist.barrier()
print("exchanges")
"""
RELEASE = """
import triton.language as tl
from dovetail.nn.kernels import rank_sums

if not on_gpus:  # the interpreter would take a minute for as many attempts as a GPU makes between two polls
    rank_sums.LOOK, rank_sums.TURN = tl.constexpr(64), tl.constexpr(1)
shares = make(torch.float32)
rank_shares.check(shares, device)
dist.barrier()
if rank == 0:
    x = torch.zeros(3, WIDTH, device=device)
    threading.Timer(0.5, shares.release).start()
    for _ in range(3):
        shares.place(3, WIDTH, x.dtype).fill_(1)
        shares.add(x, (torch.ones(WIDTH, device=device), 1e-6))
        shares.all_reduce(x)
        shares.all_gather(x)
    if on_gpus:
        torch.cuda.synchronize()
print("released")
"""


def shares_of_one(rows: int, width: int) -> rank_shares.RankShares:
    part = rows * width * 4
    buffer = torch.zeros(rank_shares.buffer_bytes(2, part, part), dtype=torch.uint8)
    return rank_shares.RankShares(
        buffer, 0, 2, part, torch.float32, torch.zeros(1, dtype=torch.int32)
    )


def test_a_place_is_not_given_again_before_its_shares_are_added() -> None:
    pytest.importorskip("triton")
    shares = shares_of_one(4, 256)

    def place() -> int:
        given = shares.place(4, 256, torch.float32)
        assert given is not None
        return given.data_ptr()

    first = place()
    shares.begin_again()
    second = place()
    assert second != first
    assert place() == first
    shares.restart()
    assert place() == first, "ranks have met after a failure, and add nothing of before"


def test_ranks_whose_processes_had_other_groups_find_each_others_memory() -> None:
    """torch numbers exchanges by process: rank 0 has had other engines, and starts two at once."""
    store = dist.HashStore()
    of_process = count(5)
    stores = [[rank_shares.ExchangeKeys(store) for _ in range(2)] for _ in range(2)]
    groups = [
        [dist.PrefixStore(f"engine {engine}", each) for each in of_engine]
        for engine, of_engine in enumerate(stores)
    ]
    for number in range(4):
        for engine, group in enumerate(groups):
            keys = [f"CUDASymmetricMemory/{next(of_process)}", f"CUDASymmetricMemory/{number}"]
            for rank, each in enumerate(group):
                each.set(f"{keys[rank]}/{rank}", f"{engine} {number} {rank}")
            for rank, each in enumerate(group):
                other = f"{keys[rank]}/{1 - rank}"
                each.wait([other])
                assert each.get(other) == f"{engine} {number} {1 - rank}".encode()


def test_other_keys_of_a_group_stay_as_they_are() -> None:
    store = dist.HashStore()
    keys = rank_shares.ExchangeKeys(store)
    keys.set("symm_mem_validate/7/0", b"here")
    assert store.get("symm_mem_validate/7/0") == b"here"
    keys.wait(["symm_mem_validate/7/0"], timedelta(seconds=5))


@pytest.fixture(
    scope="module", params=[2, 3] if ON_GPUS or FULL else [3]
)  # of two ranks the order can't be wrong
def printed(request: pytest.FixtureRequest) -> list[list[str]]:
    """Run the programs above on all ranks, and return what each rank printed: the names of the
    programs that it completed, in order."""
    pytest.importorskip("triton")
    size = request.param
    environ = {**os.environ, **ENVIRONMENT, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    if not ON_GPUS:
        environ["TRITON_INTERPRET"] = "1"
    code = COMMON + SUMS + EXCHANGES + RELEASE
    with (
        TemporaryDirectory() as folder,
        ExitStack() as files,
        closing(Preloaded(["torch"])) as torch_imported,  # not triton, which asks the environment
    ):
        (Path(folder) / "store").touch()
        started = []
        for rank in range(size):
            args = ["-c", code, str(rank), str(size), folder]
            outputs = [files.enter_context(TemporaryFile("w+")) for _ in range(2)]
            pid = torch_imported.start(args, files=(None, *outputs), environ=environ)
            started.append((pid, outputs))
        told = []
        for pid, (output, errors) in started:
            ended = torch_imported.wait(pid, LIMIT_S)
            output.seek(0)
            errors.seek(0)
            assert ended.exit_code == 0, errors.read()
            told.append(output.read().split())
        return told


@pytest.mark.slow("starts ranks")
def test_every_sum_is_that_of_all_ranks_one_by_one_and_in_a_graph(printed: list[list[str]]) -> None:
    assert all("sums" in names for names in printed)


@pytest.mark.slow("starts ranks")
def test_what_is_exchanged_is_summed_or_gathered_in_the_order_of_ranks(
    printed: list[list[str]],
) -> None:
    assert all("exchanges" in names for names in printed)


@pytest.mark.slow("starts ranks")
def test_a_rank_that_waits_for_one_that_is_gone_is_released(printed: list[list[str]]) -> None:
    """Every kernel that is enqueued by then, or later, returns."""
    assert all("released" in names for names in printed)
