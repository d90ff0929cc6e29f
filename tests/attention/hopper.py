"""Compiling kernels for a Hopper that isn't there: the GPU that they were measured on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest
from bench import compiling
from bench.compiling import GPUS, Compiled, compiling_for

SHARED_MEMORY_BYTES = GPUS[90].shared_bytes  # that one program may have


def compiling_for_hopper(only: str | None = None) -> AbstractContextManager[list[Compiled]]:
    """Call `compiling_for` with the architecture of an H200."""
    return compiling_for(90, only)


def compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find launches as usual, but compile them to nothing: for tests of which launches there
    are."""
    nothing = SimpleNamespace(
        asm={"cubin": b"", "ptx": ""}, metadata=SimpleNamespace(shared=0, num_warps=4)
    )
    monkeypatch.setattr(compiling, "compile", lambda *source, **options: nothing)
    monkeypatch.setattr(compiling, "_resources", lambda cubin: (0, 0))
