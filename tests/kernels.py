"""Device of the tests of Triton kernels: a GPU if there is one, otherwise Triton's interpreter,
which `tests/test_interpreter.py` starts."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# the interpreter rounds bfloat16 wrongly
DTYPES = (
    [torch.float32, torch.float16, torch.bfloat16] if ON_GPU else [torch.float32, torch.float16]
)

if INTERPRETED:
    from tests.attention import interpreter

    interpreter.mend()

runs_kernels = pytest.mark.skipif(
    not INTERPRETED and not ON_GPU,
    reason="needs a GPU or Triton's interpreter: tests/test_interpreter.py starts it",
)


def take_kernels(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Have their functions choose kernels wherever these run: the interpreter's take tensors of the
    CPU."""
    if INTERPRETED:
        for module in modules:
            monkeypatch.setattr(module, "use_kernels", lambda *tensors: True)


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Within a rounding or two of `exact` (float64), relative to its largest number: they
    accumulate in float32 or better."""
    tolerance = {torch.float32: 16, torch.float16: 2, torch.bfloat16: 2}[ours.dtype] * torch.finfo(
        ours.dtype
    ).eps
    scale = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    torch.testing.assert_close(
        ours.double(), exact.double(), atol=tolerance * scale, rtol=tolerance
    )
