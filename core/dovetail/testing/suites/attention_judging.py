"""Assertions on a backend's values: against exact ones, or with values that reveal which positions
were read."""

from __future__ import annotations

import gc
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.testing.checks import require
from dovetail.testing.suites.attention_bench import Bench


def assert_as_defined(bench: Bench, what: str = "") -> None:
    assert_close(bench, bench.run(), what)


def assert_close(bench: Bench, results: list[torch.Tensor], what: str = "") -> None:
    """Check that each layer's values are the exact ones, within rounding errors."""
    for spec, result, exact, allowed in zip(
        bench.case.specs, results, bench.expected(), bench.allowed_errors(), strict=True
    ):
        errors = (result - exact).abs().nan_to_num(torch.inf).amax((1, 2))  # of each token
        token = int((errors / allowed).argmax())
        require(
            errors[token] <= allowed[token],
            f"{what}token {token} of the step is off by {errors[token]:.3g}, allowed are "
            f"{allowed[token]:.3g} "
            f"({int((errors > allowed).sum())} of {len(errors)} tokens are off; layer {spec}; "
            f"{bench.case})",
        )


def assert_sees(bench: Bench) -> None:
    """Check that each query's mean position seen is that of the positions that it should see."""
    sizes = [bench.groups[place.group].block_size for place in bench.case.placed]
    for layer, (spec, size) in enumerate(zip(bench.case.specs, sizes, strict=True)):
        for q, v in zip(bench.q[layer], bench.v[layer], strict=True):
            q.zero_()
            v[:] = torch.arange(len(v))[:, None, None]
        bench.compute()
        seen = bench.attend()[layer].mean((1, 2))
        at = np.concatenate(
            [
                np.arange(start, end)
                for start, end in zip(bench.case.history, bench.case.lens, strict=True)
            ]
        )
        reach = spec.window or len(at) + max(at)
        first = np.maximum(0, at - reach + 1)
        last = (
            at
            if spec.causal
            else np.minimum(at + reach, np.repeat(bench.case.lens, bench.case.queries)) - 1
        )
        for position, begin, end, mean in zip(
            at.tolist(), first.tolist(), last.tolist(), seen.tolist(), strict=True
        ):
            expected = (begin + end) / 2
            require(
                abs(mean - expected) < 0.25,
                f"the query at position {position} sees positions whose mean is {mean:.2f}; it "
                f"should see {begin} to {end}, mean {expected} "
                f"(window {spec.window}, block size {size})",
            )


def share_prefix(bench: Bench, blocks: int, onto: NDArray[np.int32]) -> None:
    """Let all rows begin with these blocks, and there with the first row's tokens, whose K and V
    change signs each time."""
    tokens = blocks * bench.case.block_size
    for values in (*bench.k, *bench.v):
        values[0][:tokens] *= -1
        for row in values[1:]:
            row[:tokens] = values[0][:tokens]
    bench.table[:, :blocks] = onto


def tensor_bytes(*roots: Any) -> int:
    """Return the bytes of the tensors that can be reached from these objects."""
    seen: set[int] = set()
    storages: dict[int, int] = {}
    queue = list(roots)
    while queue:
        thing = queue.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType):
            continue
        seen.add(id(thing))
        if not isinstance(thing, torch.Tensor):
            queue.extend(gc.get_referents(thing))
        elif thing.layout is torch.strided:  # others have no storage
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())
