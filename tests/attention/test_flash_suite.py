"""The conformance suite of the `flash_attn` backend, with stand-ins for the packages;
`tests/gpu/test_flash_attn.py` has the real ones."""

from __future__ import annotations

from functools import cache

import pytest

from dovetail.testing import AttentionSuite, hygiene
from dovetail.testing.processes import run_python
from dovetail_attention import flash
from dovetail_attention.flash import FlashAttention
from dovetail_attention.flash_library import find_library, reason_against
from tests.attention.test_flash_backend import CPU, PACKAGES, install


@pytest.fixture(autouse=True)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"TestFlashAttention2": "flash_attn", "TestFlashAttention3": "flash_attn_interface"}[
        request.cls.__name__
    ]
    install(monkeypatch, PACKAGES[name]())
    # Asked about a GPU, the backend tries one: here what stands in for it.
    monkeypatch.setattr(flash, "find_library", lambda device: find_library(CPU))
    monkeypatch.setattr(
        flash,
        "reason_against",
        lambda library, device, dtype, head_size: reason_against(library, CPU, dtype, head_size),
    )


@pytest.fixture(autouse=True)
def one_process_starts_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both classes test one component."""
    monkeypatch.setattr(hygiene, "run_python", run_once)


run_once = cache(run_python)


class TestFlashAttention2(AttentionSuite):
    component = FlashAttention  # a name would have to have its package installed
    device = "cpu"
    examples = 10


class TestFlashAttention3(AttentionSuite):
    component = FlashAttention
    device = "cpu"
    examples = 10
