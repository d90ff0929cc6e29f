"""Sums over ranks in one kernel, in Triton's interpreter: one rank computes, and the others have
left their shares, and the word that they are there. `tests/runtime/test_rank_shares.py` has several
ranks compute, each in a process of its own."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

from dovetail.nn.kernels.rank_sums import MOST_PROGRAMS, Exchange, add_shares, sum_parts
from tests.kernels import INTERPRETED, ON_GPU

released = torch.zeros(1, dtype=torch.int32)


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


@pytest.mark.skipif(
    not INTERPRETED,
    reason="ranks on a GPU share memory otherwise: tests/runtime/test_rank_shares.py",
)
@pytest.mark.parametrize(
    ("ranks", "rank", "rows", "size", "normed", "dtype"),
    [
        (2, 0, 1, 64, True, torch.float32),
        (2, 1, 3, 96, False, torch.float32),
        (4, 2, 5, 128, True, torch.float32),
        (2, 0, MOST_PROGRAMS + 3, 16, True, torch.float16),
    ],
)
def test_a_rank_adds_all_shares_in_the_order_of_ranks_and_norms_the_stream(
    ranks: int, rank: int, rows: int, size: int, normed: bool, dtype: torch.dtype
) -> None:
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
    result = add_shares(
        x, addresses(shares), addresses(flags), released, rank, (weight, 1e-6) if normed else None
    )
    assert torch.equal(x, wanted)
    if result is not None:
        expected = torch.nn.functional.rms_norm(wanted.float(), (size,), weight.float(), 1e-6)
        torch.testing.assert_close(result.float(), expected, rtol=2e-3, atol=2e-3)
    assert (result is not None) == normed
    assert not flags[rank].any(), "it takes the signals"
    for other in range(ranks):
        if other != rank:
            given = torch.zeros_like(flags[other])
            given[:programs, rank] = 1
            assert torch.equal(flags[other], given), "it signals to the others"


@pytest.mark.skipif(
    ON_GPU or INTERPRETED, reason="a GPU compiles what it runs, and the interpreter nothing"
)
def test_one_thread_of_a_waiting_program_reads_the_hosts_memory() -> None:
    """The host answers one read after the other: of all threads, they take milliseconds."""
    from tests.attention.hopper import compiling_for_hopper

    none = torch.zeros(2, dtype=torch.int64)
    x = torch.zeros(5, 4096, dtype=torch.bfloat16)
    with compiling_for_hopper() as compiled:
        add_shares(x, none, none, released, 0, None)
        sum_parts(x, Exchange(none, none, none, released, 0))
    for kernel in compiled:
        assert 32 * kernel.warps <= 4096, "no number is read by two threads"
        looks = re.findall(r"^.*ld\.volatile.*$", kernel.ptx, re.MULTILINE)
        assert looks
        assert all(look.startswith("\t@%p") for look in looks), looks
