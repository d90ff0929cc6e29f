"""`ExecutorPooled`: checks of rows that pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import Pooled, PoolingCapacity, RowPooling
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.executor_bench import IDS, Bench
from dovetail.testing.suites.executor_subject import (
    LENGTHS,
    ExecutorSubject,
    broken_model,
    require_same,
)
from dovetail.testing.suites.footprint import temporary_folder

NAN = IDS + 1  # a token that no other prompt has
METHODS = ("last", "mean", "cls")
CLOSE = 1e-3  # of the largest number of a result, in float32: sums in another order differ by less
Vector = NDArray[np.float32]


class ExecutorPooled(ExecutorSubject):
    """Rows that pool. `Capacity.pooling` tells whether an executor has any."""

    @check("executor.pooled", since="1.0", capability="pooling")
    def test_a_row_pools_once_at_the_end_of_its_prompt(self) -> None:
        """The part `Pooled` must have one array, float32, for each row in `PoolingRows.due` and no
        other: as many numbers as `Capacity.pooling.size` says, or labels, in a row for each token
        of the prompt if the task begins with "token_". Such a row has no token."""
        with self._shared_bench() as bench:
            can = _capacity(bench)
            for task in can.tasks:
                size = can.size_of(task)
                self._pools(bench, "a", "c", task=RowPooling(task))
                first = bench.run({"c": 20, "a": LENGTHS["a"]})
                second = bench.run({"c": LENGTHS["c"] - 20})
                told = [sorted(first.values(Pooled)), sorted(second.values(Pooled))]
                require(
                    told == [[1], [0]],
                    f"{task}: results of the places {told} of two steps; due were those of [[1], "
                    f"[0]]",
                )
                for result, name in (
                    (first.values(Pooled)[1], "a"),
                    (second.values(Pooled)[0], "c"),
                ):
                    shape = (LENGTHS[name], size) if task.startswith("token_") else (size,)
                    kind = isinstance(result, np.ndarray) and result.dtype == np.float32
                    require(
                        kind and result.shape == shape,
                        f"{task} of {LENGTHS[name]} tokens is {result!r}, expected float32 "
                        f"{list(shape)}",
                    )
                ids = [*first.token_ids.tolist(), *second.token_ids.tolist()]
                require(
                    ids == [-1] * 3, f"rows that pool have the tokens {ids}, expected none (-1)"
                )
                bench.remove("a", "c")

    @check("executor.pooled_beside", since="1.0", capability="pooling")
    def test_what_is_pooled_depends_on_the_prompt_alone(self) -> None:
        """A prompt in chunks, beside others, or in a row that another had before, pooled something
        else than by itself at once, by last token, mean or first token (`pooling.method`); or a
        request that generated beside such rows got other tokens. Each method needs its own part of
        all chunks."""
        for method in METHODS:
            with self._shared_bench(pooling={"method": method}) as bench:
                can = _capacity(bench)
                require(
                    can.method == method,
                    f"pooling.method is {method}, and Capacity.pooling.method {can.method}",
                )
                for task in can.tasks:
                    pooling = RowPooling(task)
                    how = f"{task} by {method}"
                    expected = {name: self._alone(bench, name, pooling) for name in LENGTHS}
                    tokens = bench.alone("g", self._prompt(bench, "a"), 6) if can.generates else []
                    self._pools(bench, *LENGTHS, task=pooling)
                    if can.generates:
                        bench.add("g", self._prompt(bench, "a"))
                    found: dict[str, Vector] = {}
                    chunks: Sequence[Mapping[str, int]] = (
                        (
                            {"g": LENGTHS["a"], "c": 7, "a": 4},
                            {"c": 29, "g": 1, "a": 7},
                            {"g": 1, "b": 2, "c": 1},
                        )
                        if not can.indivisible
                        else ({"c": LENGTHS["c"], "a": LENGTHS["a"]}, {"b": 2})
                    )
                    for counts in chunks:
                        counts = {
                            name: count for name, count in counts.items() if name in bench.requests
                        }
                        result = bench.run(counts)
                        found |= {
                            name: result.values(Pooled)[index]
                            for index, name in enumerate(counts)
                            if index in result.values(Pooled)
                        }
                    for name in LENGTHS:
                        require_close(
                            found.get(name),
                            expected[name],
                            f"{how} of {name}, in chunks and beside others",
                        )
                    bench.remove(*LENGTHS)
                    if can.generates:
                        require_same(bench, "g", tokens, f"beside rows that pool ({how})")
                        bench.remove("g")
                    self._pools(bench, "b", "a", task=pooling)
                    result = bench.prefill("a", "b")
                    for index, name in enumerate("ab"):
                        require_close(
                            result.values(Pooled).get(index),
                            expected[name],
                            f"{how} of {name}, in a row that another had before",
                        )
                    bench.remove("a", "b")

    @check("executor.pooled_again", since="1.0", capability="pooling")
    def test_a_row_that_begins_again_pools_anew(self) -> None:
        """A prompt that was stopped halfway and given a row again pooled something else than at
        once. Nothing of the first attempt remains: with mean, first token and "token_" tasks it
        starts from its first token, as the core doesn't let it use cached ones; by last token it
        may."""
        for method in reversed(METHODS):
            with self._shared_bench(pooling={"method": method}) as bench:
                can = _capacity(bench)
                for task in can.tasks if not can.indivisible else ():
                    pooling = RowPooling(task)
                    expected = self._alone(bench, "c", pooling)
                    for _ in range(2):  # the second time in a row that has pooled such a prompt
                        self._pools(bench, "c", task=pooling)
                        bench.run({"c": 20})
                        request = bench.requests["c"]
                        computed = (
                            0
                            if can.needs_all_states(task)
                            else 16 // bench.block_size * bench.block_size
                        )
                        bench.remove("c")
                        blocks = request.blocks if computed else None
                        bench.add(
                            "c",
                            request.tokens,
                            row=request.row,
                            computed=computed,
                            blocks=blocks,
                            room=0,
                            pooling=pooling,
                        )
                        bench.run({"c": 5})
                        result = bench.prefill("c")
                        require_close(
                            result.values(Pooled).get(0),
                            expected,
                            f"{task} by {method}, of a row that began again after {computed} "
                            f"tokens",
                        )
                        bench.remove("c")

    @check("executor.pooled_settings", since="1.0", capability="pooling")
    def test_rows_differ_in_what_they_want(self) -> None:
        """In one step, rows want other sizes, or the numbers before the last function. `dimensions`
        keeps the leading numbers, and `activate` then normalizes them to length 1 if the model does
        that; scores become probabilities."""
        with self._shared_bench(pooling={"normalize": True}) as bench:
            can = _capacity(bench)
            for task in can.tasks:
                raw = self._alone(bench, "a", RowPooling(task, activate=False))
                wanted = {"b": RowPooling(task), "c": RowPooling(task, activate=False)}
                if task.endswith("embed"):
                    few = max(1, can.size // 4) if can.dimensions is None else min(can.dimensions)
                    wanted |= {
                        "few": RowPooling(task, few),
                        "raw": RowPooling(task, few, activate=False),
                    }
                for name, pooling in wanted.items():
                    bench.add(name, self._prompt(bench, "a"), pooling=pooling)
                result = bench.prefill(*wanted)
                for index, pooling in enumerate(wanted.values()):
                    found = result.values(Pooled).get(index)
                    cut = raw[..., : pooling.dimensions]
                    if not task.endswith("embed") and pooling.activate:
                        require(
                            found is not None and bool(((found >= 0) & (found <= 1)).all()),
                            f"{task} gave {found}, expected probabilities",
                        )
                        continue
                    expected = (
                        cut / np.linalg.norm(cut, axis=-1, keepdims=True)
                        if pooling.activate
                        else cut
                    )
                    require_close(found, expected, f"a row with {pooling}, beside others")
                bench.remove(*wanted)

    @check("executor.pooled_failed", since="1.0", capability="pooling")
    def test_a_row_whose_states_are_nan_fails_alone(self) -> None:
        """One request's hidden states were NaN. Only its row may be in `Result.failed`, and it must
        be, without a result; others in the step have theirs. (A checkpoint in several files isn't
        damaged for this check.)"""
        with temporary_folder() as folder:
            if not broken_model(self.model, folder, NAN):
                return
            with self._bench(folder) as bench:
                for task in _capacity(bench).tasks:
                    expected = self._alone(bench, "a", RowPooling(task))
                    self._pools(bench, "a", task=RowPooling(task))
                    bench.add("nan", [*bench.prompt(3), NAN], pooling=RowPooling(task))
                    bench.submit({"nan": 4, "a": LENGTHS["a"]})
                    result = bench.collect(broken="nan")
                    told = (
                        f"{task}: failed are {dict(result.failed)}, and results of "
                        f"{sorted(result.values(Pooled))}"
                    )
                    require(
                        sorted(result.failed) == [0] and sorted(result.values(Pooled)) == [1], told
                    )
                    require_close(
                        result.values(Pooled).get(1),
                        expected,
                        f"{task} beside a row whose states are NaN",
                    )
                    bench.remove("nan", "a")

    def _pools(self, bench: Bench, *names: str, task: RowPooling) -> None:
        for name in names:
            bench.add(name, self._prompt(bench, name), room=0, pooling=task)

    def _alone(self, bench: Bench, name: str, pooling: RowPooling) -> Vector:
        self._pools(bench, name, task=pooling)
        result: Vector | None = bench.prefill(name).values(Pooled).get(0)
        bench.remove(name)
        if result is None:
            fail(f"{pooling.task} of {name}: a prompt that was computed has no result")
        return result


def _capacity(bench: Bench) -> PoolingCapacity:
    capacity = bench.capacity.pooling
    if capacity is None:
        fail("Capacity.pooling is None, and was not in another start")
    return capacity


def require_close(found: Vector | None, expected: Vector, what: str) -> None:
    """Check that a result is the expected one, up to rounding in sums."""
    require(
        found is not None and found.shape == expected.shape,
        f"{what}: {found!r}, expected {list(expected.shape)} numbers",
    )
    if found is not None:
        off = float(np.abs(found - expected).max())
        require(
            off <= CLOSE * float(np.abs(expected).max()),
            f"{what}: differs by {off:.3g} from what the prompt gives by itself at once",
        )
