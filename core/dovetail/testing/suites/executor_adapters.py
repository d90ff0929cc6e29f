"""`ExecutorAdapters`: checks of rows with LoRA adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import AdapterLoad
from dovetail.testing.checks import check, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_subject import (
    LENGTHS,
    MOST_ADAPTERS,
    ExecutorSubject,
    model_directory,
    require_same,
)
from dovetail.testing.suites.footprint import temporary_folder

COUNT = 5  # tokens that requests generate
# names in a checkpoint, where they may share a tensor
HEAD = "lm_head"
EMBEDDING = "model.embed_tokens.weight"
SIZE = 3.0  # of what an adapter adds, to change most tokens
# module -> A [rank, in] and B [out, rank]
Weights = Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]]


class ExecutorAdapters(ExecutorSubject):
    """LoRA adapters. `Capacity.adapters` tells whether an executor can use them."""

    @check("executor.adapters", since="1.0", capability="adapters")
    def test_rows_with_different_adapters_share_steps(self) -> None:
        """In steps with rows of two adapters and of none, some in chunks, a request generated other
        tokens than alone; or what an adapter changed, changed nothing; or a request without one
        generated other tokens than before any adapter was loaded."""
        with self._adapting() as (bench, files):
            plain = {name: self._generated(bench, name) for name in LENGTHS}
            slots = {"a": 1, "b": 0, "c": MOST_ADAPTERS}
            loads = {slot: self._load(bench, slot, files[slot]) for slot in slots.values() if slot}
            expected = {
                name: self._generated(bench, name, adapter=slot) for name, slot in slots.items()
            }
            require(
                loads and expected["b"] == plain["b"],
                f"without an adapter b generated {expected['b']}, and before any was loaded "
                f"{plain['b']}",
            )
            changed = [
                name for name, slot in slots.items() if slot and expected[name] == plain[name]
            ]
            require(
                not changed,
                f"requests {changed} generated the same tokens with adapters as without",
            )
            for name, slot in slots.items():
                bench.add(name, self._prompt(bench, name), adapter=slot)
            bench.run({"c": 20, "a": LENGTHS["a"]})
            bench.run({"a": 1, "b": LENGTHS["b"], "c": LENGTHS["c"] - 20})
            bench.decode("b", "c", "a", steps=COUNT - 2)
            for name in slots:
                require_same(
                    bench, name, expected[name], "beside rows with other adapters, and without"
                )

    @check("executor.adapter_merged", since="1.0", capability="adapters")
    def test_an_adapter_computes_what_merged_weights_do(self) -> None:
        """With an adapter of all modules a request generated other tokens than without it on a
        model with (B A) added to the weights; or with an adapter of rank 0 or of zeros, other
        tokens than without."""
        if not self.declares("samples"):
            return  # a simulation has no weights
        with self._adapting() as (bench, files), temporary_folder() as folder:
            found = {}
            for name in LENGTHS:
                self._load(bench, 1, files[1])
                found[name] = self._generated(bench, name, adapter=1)
                plain = self._generated(bench, name)
                for index, which in enumerate(("zeros", "rank 0")):
                    self._load(bench, 2, files[which])
                    got = self._generated(bench, name, adapter=2)
                    require(
                        got == plain,
                        f"with an adapter of {('zeros', 'rank 0')[index]} {name} generated {got}, "
                        f"and without {plain}",
                    )
            if merge(model_directory(self.model), folder, files.weights[1]):
                with self._bench(folder) as merged:
                    for name, tokens in found.items():
                        expected = self._generated(merged, name)
                        require(
                            tokens == expected,
                            f"with an adapter {name} generated {tokens}, and with merged weights "
                            f"{expected}",
                        )

    @check("executor.adapter_slots", since="1.0", capability="adapters")
    def test_a_slot_may_get_another_adapter(self) -> None:
        """After a slot got another adapter, a request in it generated other tokens than with that
        adapter in another slot, or the step in flight, which used the one before, had other tokens
        than without this change."""
        with self._adapting() as (bench, files):
            expected = {}
            for slot, which in ((1, 1), (2, 2)):
                self._load(bench, slot, files[which])
                expected[which] = self._generated(bench, "a", adapter=slot)
            request = bench.add("a", self._prompt(bench, "a"), adapter=1)
            bench.submit({"a": LENGTHS["a"]})
            overlaps = bench.capacity.max_in_flight > 1
            if not overlaps:
                bench.collect()
            bench.remove("a")
            self._load(bench, 1, files[2])
            bench.add("next", self._prompt(bench, "a"), adapter=1, seed=request.sampling.seed)
            bench.submit({"next": LENGTHS["a"]})
            if overlaps:
                bench.collect()
            bench.collect()
            bench.decode("next", steps=COUNT - 1)
            require_same(
                bench,
                "a",
                expected[1],
                "in a step during which its slot was to get another adapter",
            )
            require_same(bench, "next", expected[2], "in a slot that held another adapter before")

    # Tools

    @contextmanager
    def _adapting(self) -> Iterator[tuple[Bench, Files]]:
        """Start an executor with slots, and write adapters for it: 1 and 2 of different ranks,
        "zeros" and "rank 0"."""
        with self._shared_bench(max_adapters=MOST_ADAPTERS) as bench, temporary_folder() as folder:
            yield bench, Files(bench, folder)

    def _load(self, bench: Bench, slot: int, path: str) -> AdapterLoad:
        load = AdapterLoad(slot, path, f"digest of {Path(path).name}")
        bench.load(load)
        return load

    def _generated(self, bench: Bench, name: str, **fields: Any) -> list[int]:
        return bench.alone(name, self._prompt(bench, name), COUNT, **fields)


class Files:
    """Files of random adapters for an executor's modules."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        adapters = bench.capacity.adapters
        require(
            adapters is not None and adapters.slots >= MOST_ADAPTERS and adapters.modules,
            f"Capacity.adapters is {adapters!r}",
        )
        assert adapters is not None
        self.weights: dict[int | str, Weights] = {}
        ranks: dict[int | str, int] = {1: adapters.max_rank, 2: 1, "zeros": 2, "rank 0": 0}
        for index, (which, rank) in enumerate(ranks.items()):
            random = np.random.default_rng(index)
            self.weights[which] = {
                name: (
                    random.standard_normal((rank, inputs), np.float32) / np.float32(inputs**0.5),
                    random.standard_normal((out, rank), np.float32)
                    * np.float32(0 if which == "zeros" else SIZE / max(1, rank) ** 0.5),
                )
                for name, (inputs, out) in adapters.modules.items()
            }
        self._folder = folder

    def __getitem__(self, which: int | str) -> str:
        from safetensors.numpy import save_file

        path = self._folder / f"{which}.safetensors"
        if not path.exists():
            save_file(
                {
                    f"{name}.lora_{part}": own
                    for name, both in self.weights[which].items()
                    for part, own in zip("AB", both, strict=True)
                },
                path,
            )
        return str(path)


def merge(source: Path, folder: Path, weights: Weights) -> bool:
    """Write a copy of a checkpoint with an adapter merged into its weights, in float32. Returns
    False if it isn't a single plain file."""
    import torch
    from safetensors.torch import load_file, save_file

    if not (source / "model.safetensors").exists():
        return False
    for path in source.iterdir():
        if path.is_file() and path.name != "model.safetensors":
            shutil.copyfile(path, folder / path.name)
    tensors = load_file(source / "model.safetensors")
    if HEAD in weights and f"{HEAD}.weight" not in tensors and EMBEDDING in tensors:
        tensors[f"{HEAD}.weight"] = tensors[EMBEDDING]  # the adapter changes only the output layer
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(
            json.dumps({**config, "tie_word_embeddings": False}), encoding="utf-8"
        )
    if any(f"{name}.weight" not in tensors for name in weights):
        return False
    for name, (a, b) in weights.items():
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float() + torch.from_numpy(b @ a)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return True
