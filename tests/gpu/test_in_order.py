"""Products that add up in the order of the inputs: a row has the same bits with any number of
rows, so that deterministic requests can be computed in forwards of several sizes."""

from __future__ import annotations

import pytest
import torch

from dovetail.nn.fixed_shapes import fixed_shapes
from dovetail.nn.format import DENSE
from dovetail.nn.kernels.available import has_many_rows
from dovetail.nn.residual import Residual
from tests.gpu.device import on_a_gpu

pytestmark = on_a_gpu

ROWS = (32, 64, 256, 512, 2048)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul_(0.1).bfloat16()


@pytest.fixture(autouse=True)
def needs_its_kernel() -> None:
    torch.manual_seed(0)
    if not has_many_rows(torch.device("cuda", 0)):
        pytest.skip("the kernel for few rows needs Hopper's matrix units")


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(4096, 1024), (1024, 3072), (6144, 4096), (4096, 12_288)]
)
def test_a_row_has_the_same_bits_with_any_number_of_rows(outputs: int, inputs: int) -> None:
    x = random(max(ROWS), inputs)
    weight = random(outputs, inputs)
    before = random(max(ROWS), outputs)
    found = []
    with fixed_shapes():
        for rows in ROWS:
            stream = Residual(before[:rows].clone())
            DENSE.add_to(weight, stream, x[:rows].contiguous())
            plain = DENSE.columns(weight, x[:rows].contiguous())
            gated = DENSE.columns(weight, x[:rows].contiguous(), gated=True)
            found.append([each[: ROWS[0]] for each in (plain, gated, stream.summed())])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)
