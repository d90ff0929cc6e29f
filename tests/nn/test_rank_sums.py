"""Sums over ranks in one kernel, in Triton's interpreter: one rank computes, and the others have left their shares, and the word that they are there.
`tests/runtime/test_rank_shares.py` has several ranks compute, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

pytest.importorskip("triton")

PROGRAM = """
    import torch
    from dovetail.nn.kernels.rank_sums import MOST_PROGRAMS, add_shares

    released = torch.zeros(1, dtype=torch.int32)
    addresses = lambda tensors: torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)

    def sums(ranks, rank, rows, size, normed, dtype):
        torch.manual_seed(ranks * 1000 + rows)
        shares = [torch.randn(rows, size).to(dtype) for _ in range(ranks)]
        flags = [torch.zeros(MOST_PROGRAMS, ranks, dtype=torch.int32) for _ in range(ranks)]
        programs = min(rows, MOST_PROGRAMS)
        flags[rank][:programs] = 1
        flags[rank][:, rank] = 0
        x, weight = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
        wanted = x.float()
        for share in shares:
            wanted = wanted + share.float()
        wanted = wanted.to(dtype)
        normed = add_shares(x, addresses(shares), addresses(flags), released, rank, (weight, 1e-6) if normed else None)
        torch.testing.assert_close(x, wanted, rtol=0, atol=0)
        if normed is not None:
            expected = torch.nn.functional.rms_norm(wanted.float(), (size,), weight.float(), 1e-6)
            torch.testing.assert_close(normed.float(), expected, rtol=2e-3, atol=2e-3)
        assert not flags[rank].any(), "it takes the signals"
        for other in range(ranks):
            if other != rank:
                given = torch.zeros_like(flags[other])
                given[:programs, rank] = 1
                assert torch.equal(flags[other], given), "it signals to the others"

    for ranks, rank in ((2, 0), (2, 1), (4, 2)):
        for rows, size, normed in ((1, 64, True), (3, 96, False), (5, 128, True)):
            sums(ranks, rank, rows, size, normed, torch.float32)
    sums(2, 0, MOST_PROGRAMS + 3, 16, True, torch.float16)
    print("right")
"""


def test_a_rank_adds_all_shares_in_the_order_of_ranks_and_norms_the_stream() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout == "right\n", done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ, reason="a GPU compiles what it runs, and the interpreter nothing")
def test_one_thread_of_a_waiting_program_reads_the_hosts_memory() -> None:
    """The host answers one read after the other: of all threads, they take milliseconds."""
    from dovetail.nn.kernels.rank_sums import Exchange, add_shares, sum_parts
    from tests.attention.hopper import compiling_for_hopper

    addresses, released = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    x = torch.zeros(5, 4096, dtype=torch.bfloat16)
    with compiling_for_hopper() as compiled:
        add_shares(x, addresses, addresses, released, 0, None)
        sum_parts(x, Exchange(addresses, addresses, addresses, released, 0))
    for kernel in compiled:
        assert 32 * kernel.warps <= 4096, "no number is read by two threads"
        looks = re.findall(r"^.*ld\.volatile.*$", kernel.ptx, re.MULTILINE)
        assert looks
        assert all(look.startswith("\t@%p") for look in looks), looks
