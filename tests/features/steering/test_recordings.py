"""Steps with vectors have recordings of their own, and others replay the plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from dovetail.api.attention import AttentionLayer
from dovetail.api.model import ModelInputs
from dovetail.errors import DovetailError
from dovetail.nn.residual import Residual
from dovetail_executors.runtime.recorded_steps import with_axes_of_features
from tests.features.steering.device import SteeringPlan, SteersRows
from tests.features.steering.parts import SteeringRows
from tests.runtime.fakes import HIDDEN, KV_HEADS, SIZE, Bench, TinyModel
from tests.runtime.recorded import WatchedGraphs, give_graphs
from tests.runtime.test_decode_graphs import CapturableGreedy, decode_steps

GENERATOR = torch.Generator().manual_seed(1)
VECTORS = {name: torch.randn(HIDDEN, generator=GENERATOR) for name in "ab"}


class Block:
    """A layer of `TinyModel`, on a residual stream."""

    def __init__(self, layer: AttentionLayer, *weights: torch.Tensor) -> None:
        self._layer, self._weights = layer, weights

    def add_to(self, residual: Residual, rotations: Any, wanted: torch.Tensor | None) -> None:
        x, (q, k, v) = residual.summed(), self._weights
        self._layer.write((x @ k).view(-1, KV_HEADS, SIZE), (x @ v).view(-1, KV_HEADS, SIZE))
        out = self._layer.attend((x @ q).view(len(x), -1, SIZE)).reshape(-1, HIDDEN)
        x.copy_(torch.tanh(x + out))
        if wanted is not None:
            residual.keep(wanted)


class Blocks(TinyModel):
    """`TinyModel` with layers that can be reached, the last of which keeps what is wanted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blocks = [Block(*layer) for layer in self.layers]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        residual = Residual(self.embed[inputs.token_ids] + self.places[inputs.positions])
        for block in self.blocks:
            block.add_to(residual, (), inputs.wanted if block is self.blocks[-1] else None)
        return residual.summed()


@pytest.fixture(params=[0, 1], ids=["first layer", "last layer"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("tests.runtime.fakes.TinyModel", Blocks)
    made = Bench(max_rows=4, columns=SteeringPlan.columns)
    model: Any = made.model
    made.make_runner(SteersRows(VECTORS, 2, made.rows, model.blocks[request.param]))
    return made


def with_graphs(bench: Bench) -> WatchedGraphs:
    bench.sampler.__class__ = CapturableGreedy
    plain = decode_steps(bench)
    return give_graphs(bench, [*plain, *with_axes_of_features(plain, bench.runner.parts)])


def generated(bench: Bench, vectors: Sequence[str | None], steps: int = 4) -> list[list[int]]:
    """Return the tokens of a row for each vector, after the same prompt. The last step is late."""
    rows = range(len(vectors))
    before = [row for row in rows if row in bench.blocks]
    added = [bench.new(row, [3, 1, 4]) for row in rows]
    slots = {row: (row % 2 + 1, name) for row, name in enumerate(vectors) if name is not None}
    batch = bench.batch(dict.fromkeys(rows, 3), added, before, [])
    batch = replace(batch, parts=(SteeringRows(slots),))
    results = [bench.runner.collect(bench.runner.submit(batch))]
    results += [bench.run(dict.fromkeys(rows, 1)) for _ in range(steps - 1)]
    results.append(bench.run_late(dict.fromkeys(rows, 1)))
    return [[int(result.token_ids[row]) for result in results] for row in rows]


def test_replayed_steps_answer_as_launched_ones_and_plain_rows_replay_plain_recordings(
    bench: Bench,
) -> None:
    expected = generated(bench, ["a", None, None, "b"])
    assert expected[1] == expected[2]
    assert len({*map(tuple, expected)}) == 3
    graphs = with_graphs(bench)
    assert generated(bench, ["a", None, None, "b"]) == expected
    assert graphs.replayed == [("decode_steered", 4)] * 3 + [("model_steered", 4)]
    bench.run({1: 1})
    bench.run({1: 1, 2: 1})
    bench.run({0: 1, 2: 1})
    assert graphs.replayed[4:] == [("decode", 1), ("decode", 2), ("decode_steered", 2)]


def test_a_slot_that_another_row_takes_has_nothing_of_the_vector_before(bench: Bench) -> None:
    (alone,) = generated(bench, ["b"])
    generated(bench, ["a"])
    assert generated(bench, ["b"]) == [alone]


@pytest.mark.parametrize("wrong", [(3, "a"), (0, "a"), (1, "c")], ids=str)
def test_a_batch_that_doesnt_fit_is_refused(bench: Bench, wrong: tuple[int, str]) -> None:
    batch = bench.batch({0: 2}, [bench.new(0, [3, 1])], [], [])
    with pytest.raises(DovetailError, match="slots 1 to 2, and vectors a, b"):
        bench.runner.submit(replace(batch, parts=(SteeringRows({0: wrong}),)))
