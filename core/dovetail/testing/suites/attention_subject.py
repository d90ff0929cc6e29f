"""`AttentionSubject`: test cases for attention backends, from their capabilities and the available
devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from dovetail.api.attention import AttentionCapabilities
from dovetail.api.graphs import GraphSupport
from dovetail.testing.checks import CheckFailed
from dovetail.testing.suite import Suite
from dovetail.testing.suites.attention_bench import Bench, Case

SOME_HEAD_SIZES = (4, 8, 20, 64, 80, 128, 256)  # tested if any is allowed
SOME_BLOCK_SIZES = (1, 3, 8, 16, 64, 256)
MOST_WHOLE = 700  # tokens of a row all of which attend to all


class AttentionSubject(Suite):
    """A backend on a device: by default on a GPU if the backend supports it and there is one,
    otherwise on the CPU.

    An undeclared device can be set, for emulation (kernels in Triton's interpreter on "cpu");
    `dtypes` then lists those that the emulation computes correctly. Both are part of the
    verdict.
    """

    kind = "attention"
    settings = Suite.settings | {"device", "dtypes", "max_len", "examples"}

    device: ClassVar[str | None] = None
    dtypes: ClassVar[tuple[str, ...] | None] = None  # None: all declared
    max_len: ClassVar[int] = 80  # tokens of random rows
    examples: ClassVar[int] = 40  # random steps

    @property
    def place(self) -> str:
        """Device that checks run on. Raises `CheckFailed` if there is none, since nothing could be
        tested."""
        if self.device is not None:
            return self.device
        for name in ("cuda", "cpu"):
            if name in self.claims.devices and (name == "cpu" or torch.cuda.is_available()):
                return name
        raise CheckFailed(
            f"this machine has none of the declared devices ({', '.join(self.claims.devices)}): "
            f"run the suite on one that has"
        )

    def declares(self, capability: str) -> bool:
        """`mixed_graph` is declared by `GraphSupport.ALL`, `cache_dtypes` by a non-empty tuple, `fused_write` by exposing a cache. What is about the
        cache applies to backends with `causal`, since others may have none."""
        if capability in ("groups", "shared_prefix") and not self.claims.causal:
            return False
        if capability == "mixed_graph":
            return self.claims.cuda_graph is GraphSupport.ALL
        if capability == "cache_dtypes":
            return bool(self.claims.cache_dtypes) and self.claims.causal
        if capability == "fused_write":
            return self.bench(self.case((0,), (1,))).layers[0].cache_for_fused_write() is not None
        return super().declares(capability)

    @property
    def claims(self) -> AttentionCapabilities:
        claims: AttentionCapabilities = self.component_class.capabilities
        return claims

    def case(self, history: Sequence[int], queries: Sequence[int], **fields: Any) -> Case:
        """Make a step on the suite's device, with supported values for what `fields` doesn't
        give."""
        defaults: dict[str, Any] = {
            "block_size": self.claims.default_block_size(),
            "head_size": self.head_sizes()[0],
            "dtype": self.tried_dtypes()[0],
            "device": self.place,
        }
        return Case(tuple(history) or (0,) * len(queries), tuple(queries), **(defaults | fields))

    def bench(self, case: Case, relabel: int | None = 0) -> Bench:
        """Make a bench. A backend without `groups` gets layers with the last one's window; one
        without `causal` gets whole rows, of at most `MOST_WHOLE` tokens."""
        if not self.claims.causal:
            case = case.whole(MOST_WHOLE)
        if not self.claims.groups:
            case = replace(case, windows=case.windows[-1:] * len(case.windows))
        return Bench(self.make, case, relabel=relabel)

    def tried_dtypes(self) -> tuple[str, ...]:
        return self.dtypes or self.claims.dtypes

    def head_sizes(self) -> tuple[int, ...]:
        return self.claims.head_sizes or SOME_HEAD_SIZES

    def block_sizes(self) -> tuple[int, ...]:
        """Return the declared block sizes, or a selection with the smallest and an odd multiple."""
        multiple = self.claims.block_size_multiple
        candidates = self.claims.block_sizes or sorted({*SOME_BLOCK_SIZES, multiple, 3 * multiple})
        return tuple(size for size in candidates if self.claims.supports_block_size(size))

    def small(self, sizes: Sequence[int], limit: int = 64) -> Sequence[int]:
        """Return the sizes that are quick to try, at least one."""
        return [size for size in sizes if size <= limit] or [min(sizes)]
