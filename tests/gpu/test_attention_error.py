"""Error of attention against a float64 oracle: at most twice that of torch's own attention in the
same dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend
from dovetail_executors.runtime.attention_choice import backend_class
from tests.attention.cases import Bench, Case
from tests.gpu.device import on_a_gpu, skip_unless_usable
from tests.runtime.demo import context

pytestmark = on_a_gpu

Arrays = list[NDArray[np.float64]]


def backend_of(name: str) -> type[AttentionBackend]:
    return backend_class(
        next(target for target in context().attention if target.name == f"dovetail:{name}")
    )


def round_inputs(bench: Bench) -> None:
    """Round Q, K and V to the dtype; otherwise the oracle would get different numbers."""
    for tensors in (bench.q, bench.k, bench.v):
        tensors[:] = [
            [torch.from_numpy(row).to(bench.dtype).double().numpy() for row in layer]
            for layer in tensors
        ]


def torch_attends(bench: Bench) -> NDArray[np.float64]:
    """Compute torch's scaled dot-product attention for each row separately, without paging."""
    case, rows = bench.case, []
    for row, (q, k, v) in enumerate(zip(bench.q[0], bench.k[0], bench.v[0], strict=True)):
        queries, keys, values = (
            torch.from_numpy(x).to("cuda", bench.dtype).transpose(0, 1)[None] for x in (q, k, v)
        )
        position = torch.arange(case.history[row], case.lens[row], device="cuda")[:, None]
        mask = torch.arange(case.lens[row], device="cuda")[None] <= position
        repeat = case.heads // case.kv_heads
        keys, values = (x.repeat_interleave(repeat, dim=1) for x in (keys, values))
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=case.specs[0].scale
        )
        rows.append(out[0].transpose(0, 1).double().cpu().numpy())
    return np.concatenate(rows)


@pytest.mark.parametrize(
    ("dtype", "head_size"),
    [("float32", 128), ("float16", 128), ("bfloat16", 128), ("bfloat16", 64)],
)
@pytest.mark.parametrize("attention", ["torch", "triton", "flash_attn"])
def test_the_error_is_at_most_twice_that_of_torch(
    attention: str, dtype: str, head_size: int
) -> None:
    skip_unless_usable(attention, dtype, head_size)
    backend = backend_of(attention)
    case = Case(
        (0, 700, 1200, 37),
        (300, 100, 1, 1),
        backend.capabilities.default_block_size(),
        8,
        2,
        head_size,
        dtype=dtype,
        device="cuda",
    )
    bench = Bench(backend, case)
    round_inputs(bench)
    [ours], [exact] = bench.run(), bench.expected()
    theirs = torch_attends(bench)
    for kind, size in (
        ("root mean square", lambda e: np.sqrt(np.mean(e**2))),
        ("largest", lambda e: np.abs(e).max()),
    ):
        print(
            f"\n{attention} {dtype} {head_size}: {kind} error {size(ours - exact):.2e}, torch's "
            f"{size(theirs - exact):.2e}"
        )
        assert size(ours - exact) <= 2 * size(theirs - exact), kind
