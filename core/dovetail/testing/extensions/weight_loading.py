"""Layers for `WeightFormatSuite`: their parts, the checkpoint's tensors, and how far values may be
from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.api.model import BuildContext
from dovetail.errors import DovetailError
from dovetail.nn.format import StoredWeight, WeightFormat
from dovetail.nn.parallel import SINGLE
from dovetail.nn.parameter import Part, Weight
from dovetail.testing.checks import fail, require

# returns a checkpoint's tensors of a module of [outputs, inputs]
Checkpoint = Callable[[int, int, torch.Generator], Mapping[str, torch.Tensor]]
SLACK = 0.02  # of the factor between values and what a format makes of them


@dataclass(frozen=True, slots=True)
class Layout:
    """A layer of this rank. `parts`: its parts, by shard id."""

    what: str
    shape: tuple[int, int]
    parts: Mapping[str | None, Part]


def whole(shape: tuple[int, int]) -> Layout:
    """Return the layout of a layer with one part, on one rank."""
    return Layout("a layer", shape, {None: Part(shape, 0, 0, shape[0])})


def layouts(outputs: int, inputs: int) -> Iterator[Layout]:
    """Yield layers whose parts are as large as one of [outputs, inputs]: merged ones, and shares of
    a rank."""
    shape = (outputs, inputs)
    merged: dict[str | None, Part] = {
        name: Part(shape, 0, 0, outputs, at=index * outputs)
        for index, name in enumerate(("q", "k", "v"))
    }
    yield Layout("three merged modules", (3 * outputs, inputs), merged)
    tall = (2 * outputs, inputs)
    yield Layout("the second half of the outputs", shape, {None: Part(tall, 0, outputs, outputs)})
    wide = (outputs, 2 * inputs)
    yield Layout("the second half of the inputs", shape, {None: Part(wide, 1, inputs, inputs)})
    shares: dict[str | None, Part] = {
        name: Part(tall, 0, outputs, outputs, at=index * outputs)
        for index, name in enumerate(("gate", "up"))
    }
    yield Layout("a rank's share of two merged modules", tall, shares)
    twice = Part(shape, 0, 0, outputs, copies=2)
    yield Layout("a module that is there twice", tall, {None: twice})
    half = Part(tall, 0, outputs, outputs // 2, at=outputs, copies=2)
    both: dict[str | None, Part] = {"q": Part(shape, 0, 0, outputs), "k": half}
    yield Layout("a module, and twice a share of another", tall, both)
    alternating: dict[str | None, Part] = {
        name: Part(tall, 0, index, outputs, at=index * outputs, stride=2)
        for index, name in enumerate(("gate", "up"))
    }
    yield Layout("outputs that alternate in the checkpoint", tall, alternating)
    turned = Part(shape, 0, 0, outputs, transposed=True)
    yield Layout("a plain checkpoint of [inputs, outputs]", shape, {None: turned})


def allocated(form: WeightFormat, layout: Layout) -> Any:
    """Return a weight of a format. Memory that the format leaves uninitialized is filled with NaN,
    and with large integers, so that what isn't written there is noticed."""
    with _filled_memory():
        return form.allocate(_plain(layout), torch.device("cpu"))


def load(weight: Any, checkpoint: Checkpoint, seed: int = 0) -> None:
    """Load all parts of a weight, as a model's weights are loaded. Parts differ."""
    for number, shard_id in enumerate(weight.parts):
        _load_part(weight, shard_id, checkpoint, seed + number)


def is_stored(weight: Any, shard_id: str | None = None) -> bool:
    """Return True if a weight reads tensors of its own format."""
    return isinstance(weight, StoredWeight) and bool(dict(weight.tensors(shard_id)))


def plain_values(outputs: int, inputs: int, seed: int) -> torch.Tensor:
    """Return what a plain checkpoint has for a module."""
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) / 8


def compare(what: str, found: torch.Tensor, expected: torch.Tensor, largest_error: float) -> None:
    """Fail if values aren't those expected, but for what a format loses. A format with few bits may
    make values smaller on the whole, by as much as its error says, but no others."""
    require(bool(torch.isfinite(found).all()), f"{what}: values that aren't finite")
    product = float((found * expected).sum())
    factor = product / float(expected.square().sum())
    error = _relative(found, expected)
    require(error <= largest_error, f"{what}: values are off by {error:.2g} of their size")
    lost = 1 - product**2 / float(found.square().sum() * expected.square().sum())
    require(
        abs(1 - factor) <= lost + SLACK,
        f"{what}: values are {factor:.3g} times what the checkpoint has",
    )
    for row in range(len(found)):
        error = _relative(found[row], expected[row])
        require(error <= 2 * largest_error, f"{what}: row {row} is off by {error:.2g} of its size")


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _load_part(weight: Any, shard_id: str | None, checkpoint: Checkpoint, seed: int) -> None:
    outputs, inputs = weight.parts[shard_id].source_shape
    if not is_stored(weight, shard_id):
        weight.load(weight.parts[shard_id].whole(plain_values(outputs, inputs, seed)), shard_id)
        return
    pieces = dict(weight.tensors(shard_id))
    tensors = checkpoint(outputs, inputs, torch.Generator().manual_seed(seed))
    lacks = [name for name, piece in pieces.items() if not piece.optional and name not in tensors]
    if lacks:
        fail(f"`checkpoint` of the suite returned no {', '.join(lacks)}, which `tensors` names")
    found = {name: piece for name, piece in pieces.items() if name in tensors}
    for piece in found.values():
        piece.expected.add(shard_id)
    for name, piece in found.items():
        piece.load(tensors[name], shard_id, None)


def _plain(layout: Layout) -> Weight:
    context = BuildContext(
        parallel=SINGLE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        make_attention=_no_attention,
    )
    return Weight(layout.shape, layout.parts, context, later=True)


def _no_attention(spec: Any) -> Any:
    raise DovetailError("a linear layer has no attention")


@contextmanager
def _filled_memory() -> Iterator[None]:
    # `torch.use_deterministic_algorithms` imports torch's compiler, which takes seconds
    before = torch.get_deterministic_debug_mode()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
