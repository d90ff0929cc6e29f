"""The bank of adapters: its modules and memory, what it refuses, and the graphs of steps with
adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dovetail.api.executor import AdapterLoad, AdapterRows
from dovetail.api.model import ModelInputs, WeightRule
from dovetail.errors import DovetailError, UnsupportedError
from dovetail.nn.linear import QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from dovetail_executors.runtime.adapters import AdapterBank, Adapters
from dovetail_executors.runtime.recorded_steps import with_axes_of_features
from tests.models.oracle import context
from tests.runtime.fakes import HIDDEN, Bench, TinyModel
from tests.runtime.recorded import WatchedGraphs, give_graphs
from tests.runtime.test_decode_graphs import CapturableGreedy, decode_steps

SHIFT = "model.shift"
CPU = torch.device("cpu")


class Shifting(TinyModel):
    """Adds to its hidden states a linear layer of them, whose weight is 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shift = ReplicatedLinear(HIDDEN, HIDDEN, context())
        self.shift.weight.data.zero_()

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        hidden = super().forward(inputs)
        return hidden + self.shift(hidden)

    def weights(self) -> Iterator[WeightRule]:
        yield WeightRule(f"{SHIFT}.weight", self.shift.weight)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("tests.runtime.fakes.TinyModel", Shifting)
    monkeypatch.setattr("dovetail.nn.adapters.is_readable", lambda tensor: False)  # as on a GPU
    made = Bench(max_rows=4)
    made.make_runner(Adapters(AdapterBank(made.model, 2, 4, torch.float32, CPU), made.rows))
    return made


def saved(path: Path, a: torch.Tensor, b: torch.Tensor, name: str = SHIFT) -> str:
    save_file({f"{name}.lora_A": a, f"{name}.lora_B": b}, path)
    return str(path)


def random_file(path: Path, seed: int, rank: int = 3) -> str:
    torch.manual_seed(seed)
    return saved(path, torch.randn(rank, HIDDEN), torch.randn(HIDDEN, rank))


def generated(
    bench: Bench, slots: list[int], loads: tuple[AdapterLoad, ...], steps: int = 4
) -> list[list[int]]:
    """The tokens of a row for each slot, all with the same prompt."""
    added = [bench.new(row, [3, 1, 4]) for row in range(len(slots))]
    part = AdapterRows(loads, {row: slot for row, slot in enumerate(slots) if slot})
    batch = bench.batch(dict.fromkeys(range(len(slots)), 3), added, [], [])
    results = [bench.runner.collect(bench.runner.submit(replace(batch, parts=(part,))))]
    results += [bench.run(dict.fromkeys(range(len(slots)), 1)) for _ in range(steps)]
    return [[int(result.token_ids[row]) for result in results] for row in range(len(slots))]


def test_decodes_with_adapters_have_graphs_of_their_own(bench: Bench, tmp_path: Path) -> None:
    loads = tuple(
        AdapterLoad(slot, random_file(tmp_path / f"{slot}", slot), f"{slot}") for slot in (1, 2)
    )
    expected = generated(bench, [1, 0, 2], loads)
    assert len({*map(tuple, expected)}) == 3
    bench.run({3: 2}, [bench.new(3, [7, 5])], removed=[0, 1, 2])
    graphs = with_graphs(bench)
    assert generated(bench, [1, 0, 2], ()) == expected
    assert graphs.replayed == [("decode_adapted", 4)] * 4
    bench.run({3: 1})
    bench.run({1: 1, 3: 1})
    assert graphs.replayed[4:] == [("decode", 1), ("decode", 2)], (
        "rows without adapters replay the plain graphs"
    )


def with_graphs(bench: Bench) -> WatchedGraphs:
    bench.sampler.__class__ = CapturableGreedy
    plain = decode_steps(bench)
    return give_graphs(bench, [*plain, *with_axes_of_features(plain, bench.runner.parts)])


def test_a_slot_gets_another_adapter_and_nothing_of_the_one_before(
    bench: Bench, tmp_path: Path
) -> None:
    first, second = (
        random_file(tmp_path / "first", 1, rank=4),
        random_file(tmp_path / "second", 2, rank=1),
    )
    alone = generated(bench, [2], (AdapterLoad(2, second, "second"),))
    bench.run({3: 2}, [bench.new(3, [7, 5])], removed=[0])
    generated(bench, [1], (AdapterLoad(1, first, "first"),))
    bench.run({2: 2}, [bench.new(2, [7, 5])], removed=[0])
    assert generated(bench, [1], (AdapterLoad(1, second, "second"),)) == alone


def test_an_adapter_of_rank_zero_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    one, other = generated(
        bench, [0, 1], (AdapterLoad(1, random_file(tmp_path / "empty", 1, rank=0), "empty"),)
    )
    assert one == other


REFUSED: dict[str, tuple[str, Callable[[Path], str], int]] = {
    "no slot": ("slot 3; there are slots 1 to 2", lambda path: random_file(path, 1), 3),
    "slot 0": ("slot 0; there are", lambda path: random_file(path, 1), 0),
    "no file": ("No such file", str, 1),
    "rank": ("for r up to 4, found .5, ", lambda path: random_file(path, 1, rank=5), 1),
    "shape of A": (
        "expected A",
        lambda path: saved(path, torch.zeros(2, HIDDEN + 1), torch.zeros(HIDDEN, 2)),
        1,
    ),
    "shape of B": (
        "expected A",
        lambda path: saved(path, torch.zeros(2, HIDDEN), torch.zeros(HIDDEN, 3)),
        1,
    ),
    "module": (
        "lm_head of the model can't have adapters",
        lambda path: saved(path, torch.zeros(2, 3), torch.zeros(4, 2), "lm_head"),
        1,
    ),
    "no B": (
        "lora_B",
        lambda path: save_file({f"{SHIFT}.lora_A": torch.zeros(2, HIDDEN)}, path) or str(path),
        1,
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_with_an_adapter_is_said(what: str, bench: Bench, tmp_path: Path) -> None:
    message, make, slot = REFUSED[what]
    with pytest.raises(DovetailError, match=message):
        generated(bench, [0], (AdapterLoad(slot, make(tmp_path / "adapter"), "wrong"),))


def test_a_row_is_refused_whose_slot_is_empty_or_missing(bench: Bench) -> None:
    with pytest.raises(DovetailError, match="slot 1 holds no adapter"):
        generated(bench, [1], ())
    bench.make_runner()
    with pytest.raises(DovetailError, match="has AdapterRows, which this executor can't use"):
        generated(bench, [1], ())


class Layers(nn.Module):
    """A model of some layers with rules."""

    def __init__(
        self, layers: dict[str, Any], rules: Callable[[dict[str, Any]], list[WeightRule]]
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self._rules = rules

    def weights(self) -> list[WeightRule]:
        return self._rules(dict(self.layers.items()))


class Own(ReplicatedLinear):
    """Computes its product by itself."""

    def forward(self, x: torch.Tensor, norm: Any = None) -> torch.Tensor:
        return x @ self.weight.t()


def test_modules_are_those_of_layers_whose_products_take_adapters() -> None:
    layers = {
        "qkv": QKVParallelLinear(8, 2, 1, 4, context(), bias=True, gated=True),
        "o": RowParallelLinear(8, 6, context(), bias=False),
        "own": Own(8, 8, context()),
        "twice": ReplicatedLinear(8, 8, context()),
        "transformed": ReplicatedLinear(8, 8, context()),
    }

    def rules(made: dict[str, Any]) -> list[WeightRule]:
        parts = {
            "q0": "q_proj",
            "q1": "q_proj",
            "gate0": "q_proj",
            "gate1": "q_proj",
            "k": "k_proj",
            "v": "v_proj",
        }
        return [
            *(
                WeightRule(f"{name}.weight", made["qkv"].weight, part)
                for part, name in parts.items()
            ),
            WeightRule("o_proj.weight", made["o"].weight),
            WeightRule("own.weight", made["own"].weight),
            WeightRule("one.weight", made["twice"].weight),
            WeightRule("other.weight", made["twice"].weight),
            WeightRule("transformed.weight", made["transformed"].weight, transform=lambda w: w + 1),
        ]

    bank = AdapterBank(Layers(layers, rules), 2, 8, torch.float32, CPU)
    assert bank.capacity.modules == {
        "q_proj": (8, 16),
        "k_proj": (8, 4),
        "v_proj": (8, 4),
        "o_proj": (8, 6),
    }
    assert (bank.capacity.slots, bank.capacity.max_rank) == (2, 8)
    with pytest.raises(UnsupportedError, match="no layer that LoRA adapters can change"):
        AdapterBank(
            Layers(
                {"own": Own(8, 8, context())},
                lambda made: [WeightRule("own.weight", made["own"].weight)],
            ),
            2,
            8,
            torch.float32,
            CPU,
        )
