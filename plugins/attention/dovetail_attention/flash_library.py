"""Wrappers of FlashAttention's packages with the two calls of the backend `flash_attn`: decodes,
and ragged rows with more tokens.

The installed one is found by importing: builds have several distribution names, and some no
metadata.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from dovetail.errors import DISTRIBUTION
from dovetail.nn.kernels.available import is_hopper

INSTALL = f'pip install --no-build-isolation "{DISTRIBUTION}[flash-attn]"'
PAGE = 256  # tokens: FlashAttention 2 requires pages of this size, or a multiple
CLOSE = 1e-2
TRIED_PAGES = 6


@dataclass(frozen=True, slots=True)
class Paged:
    """A layer's cache and some rows of a step."""

    # [num_blocks, block_size, kv_heads, head_size], any strides, but the last one is 1
    k: torch.Tensor
    v: torch.Tensor  # like k
    table: torch.Tensor  # [rows, max_blocks] int32
    lens: torch.Tensor  # [rows] int32: tokens of K and V


@dataclass(frozen=True, slots=True)
class Ragged:
    """Starts and ends of a call's rows. Starts are exclusive cumulative sums."""

    query_starts: torch.Tensor  # [rows + 1] int32
    kv_starts: torch.Tensor  # [rows + 1] int32
    longest_query: int
    longest_kv: int


class FlashLibrary(ABC):
    """Kernels of one package. `window` in both calls: tokens that a query attends to, itself
    included; None: all up to itself."""

    module: str

    def __init__(self, functions: Any) -> None:
        self._functions = functions

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return True if the package has kernels for such a device."""
        return True

    @abstractmethod
    def decode(
        self, q: torch.Tensor, cache: Paged, scale: float, window: int | None
    ) -> torch.Tensor:
        """q [rows, heads, head_size] -> the same; rows without tokens are undefined. Doesn't
        synchronize: can be recorded in a CUDA graph."""

    @abstractmethod
    def prefill(
        self, q: torch.Tensor, cache: Paged, rows: Ragged, scale: float, window: int | None
    ) -> torch.Tensor:
        """q [tokens, heads, head_size] of ragged rows, each its row's last tokens -> the same."""


class FlashAttention2(FlashLibrary):
    """Tri Dao, FlashAttention-2 (arXiv:2307.08691); from 2.5 on its kernels read paged K and V."""

    module = "flash_attn"

    def decode(
        self, q: torch.Tensor, cache: Paged, scale: float, window: int | None
    ) -> torch.Tensor:
        out: torch.Tensor = self._functions.flash_attn_with_kvcache(
            q[:, None],
            cache.k,
            cache.v,
            cache_seqlens=cache.lens,
            block_table=cache.table,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window),
        )
        return out[:, 0]

    def prefill(
        self, q: torch.Tensor, cache: Paged, rows: Ragged, scale: float, window: int | None
    ) -> torch.Tensor:
        out: torch.Tensor = self._functions.flash_attn_varlen_func(
            q,
            cache.k,
            cache.v,
            rows.query_starts,
            rows.kv_starts,
            rows.longest_query,
            rows.longest_kv,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window),
            block_table=cache.table,
        )
        return out


class FlashAttention3(FlashLibrary):
    """Shah et al., FlashAttention-3 (arXiv:2407.08608), for Hopper: one call serves both."""

    module = "flash_attn_interface"

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        return device.type != "cuda" or is_hopper(device)

    def decode(
        self, q: torch.Tensor, cache: Paged, scale: float, window: int | None
    ) -> torch.Tensor:
        return self._call(q[:, None], cache, scale, window)[:, 0]

    def prefill(
        self, q: torch.Tensor, cache: Paged, rows: Ragged, scale: float, window: int | None
    ) -> torch.Tensor:
        return self._call(
            q, cache, scale, window, cu_seqlens_q=rows.query_starts, max_seqlen_q=rows.longest_query
        )

    def _call(
        self, q: torch.Tensor, cache: Paged, scale: float, window: int | None, **ragged: Any
    ) -> torch.Tensor:
        out: torch.Tensor = self._functions.flash_attn_with_kvcache(
            q,
            cache.k,
            cache.v,
            cache_seqlens=cache.lens,
            page_table=cache.table,
            softmax_scale=scale,
            causal=True,
            window_size=_window_size(window),
            **ragged,
        )
        return out


def find_library(device: torch.device) -> FlashLibrary:
    """Return the newest installed package that supports the device. Raises `ImportError` that names
    what to install, or why an installed one doesn't work."""
    failures = []
    for library in (FlashAttention3, FlashAttention2):
        try:
            functions = import_module(library.module)
            if library.runs_on(device):
                return library(functions)
            failures.append(f"{library.module} doesn't support {device}")
        except ModuleNotFoundError as error:
            if error.name != library.module:
                failures.append(f"importing {library.module} failed: {error}")
        except (ImportError, OSError) as error:  # built for another torch
            failures.append(f"importing {library.module} failed: {error}")
    why = "; ".join(failures) or "it isn't installed"
    raise ImportError(f"it needs FlashAttention, and {why}; install it with: {INSTALL}")


def reason_against(
    library: FlashLibrary, device: torch.device, dtype: torch.dtype, head_size: int
) -> str | None:
    """Return why it can't serve such heads, by a trial: a build without the kernels returns
    uninitialized memory."""
    # long enough that decodes are split
    generator = torch.Generator().manual_seed(0)
    tokens = TRIED_PAGES * PAGE
    # two queries, the row's last
    q = torch.randn((2, 1, head_size), generator=generator).to(device, dtype)
    k, v = (
        torch.randn((TRIED_PAGES, PAGE, 1, head_size), generator=generator).to(device, dtype)
        for _ in range(2)
    )
    pages = torch.arange(TRIED_PAGES, dtype=torch.int32, device=device)[None]
    last, starts, kv_starts = (
        torch.tensor(ids, dtype=torch.int32, device=device)
        for ids in ([tokens], [0, 2], [0, tokens])
    )
    cache = Paged(k, v, pages, last)
    scale = head_size**-0.5
    try:
        outs = (
            library.decode(q[1:], cache, scale, None),
            library.prefill(q, cache, Ragged(starts, kv_starts, 2, tokens), scale, None)[1:],
        )
    except RuntimeError as error:
        return f"{library.module} can't attend with heads of {head_size} in {dtype}: {error}"
    weights = torch.softmax(
        q[1:].float().view(1, -1) @ k.float().view(tokens, -1).T * scale, dim=-1
    )
    expected = (weights @ v.float().view(tokens, -1)).view(1, 1, head_size)
    if all(torch.allclose(out.float(), expected, atol=CLOSE) for out in outs):
        return None
    return (
        f"this build of {library.module} computes nonsense with heads of {head_size} in "
        f"{dtype}: its kernels were left out"
    )


def _window_size(window: int | None) -> tuple[int, int]:
    return (-1, -1) if window is None else (window - 1, 0)
