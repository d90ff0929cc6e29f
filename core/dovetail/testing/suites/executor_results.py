"""`ExecutorResults`: checks of results and their times."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import combinations, pairwise
from typing import Any

import numpy as np

from dovetail.api.clock import VirtualClock
from dovetail.testing.checks import check, require
from dovetail.testing.suites.executor_bench import IDS
from dovetail.testing.suites.executor_subject import (
    LENGTHS,
    SEEDED,
    SETTINGS,
    ExecutorSubject,
    broken_model,
    require_same,
)
from dovetail.testing.suites.footprint import temporary_folder

LONG_STEPS = 3
LEAST_SHARE = 0.01  # minimum share of device time in a long step, even if little is computed


class ExecutorResults(ExecutorSubject):
    """Results, their order and their times."""

    @check("executor.order", since="1.0")
    def test_results_come_in_the_order_of_submission(self) -> None:
        """With the maximum number of steps in flight, `collect` of the oldest handle returned
        another step, or the tokens of another. Results are a queue; a step's samples must not be
        overwritten by the next step."""
        with self._shared_bench() as bench:
            expected = {
                name: bench.alone(name, self._prompt(bench, name), 4, **SEEDED.get(name, {}))
                for name in LENGTHS
            }
            self._add(bench, *LENGTHS)
            steps = [dict.fromkeys(names, 1) for names in ("cba", "ab", "c", "bc", "a", "cab")]
            for counts in [{"a": LENGTHS["a"]}, {"b": LENGTHS["b"], "c": LENGTHS["c"]}, *steps]:
                while len(bench.sent) >= bench.capacity.max_in_flight:
                    bench.collect()
                bench.submit(counts)
            while bench.sent:
                bench.collect()
            for name in LENGTHS:
                require_same(
                    bench, name, expected[name], "with steps in flight, and others beside it"
                )

    @check("executor.results", since="1.0")
    def test_each_row_of_the_batch_has_its_result(self) -> None:
        """`token_ids` must be [rows of the batch], in the order of `batch.rows`: an id of the
        vocabulary where `yields_token` is true, otherwise -1; `failed` must be empty if nothing
        failed. Ids are int64, times are floats."""
        with self._shared_bench() as bench:
            self._add(bench, *LENGTHS)
            batch = bench.submit({"c": 20, "a": LENGTHS["a"], "b": 1})
            result = bench.collect()
            for token, yields_token in zip(
                result.token_ids.tolist(), batch.yields_token.tolist(), strict=True
            ):
                vocabulary = bench.capacity.vocab_size
                told = (
                    f"token_ids are {result.token_ids.tolist()} where yields_token is "
                    f"{batch.yields_token.tolist()}"
                )
                require(
                    (0 <= token < vocabulary) if yields_token else token == -1,
                    f"{told}; expected ids below {vocabulary}, and -1 elsewhere",
                )
            require(
                result.token_ids.dtype == np.int64,
                f"token_ids have the dtype {result.token_ids.dtype}, expected int64",
            )
            times = [type(time) for time in (result.started, result.ended)]
            require(
                times == [float, float],
                f"started and ended are of the types {times}, expected float",
            )
            require(not result.failed, f"nothing failed, and Result.failed is {result.failed}")

    @check("executor.failed_row", since="1.0", capability="samples")
    def test_a_row_may_fail_alone(self) -> None:
        """The model's values for one row of a step were NaN, and the whole step failed, or
        `Result.failed` lists another position in the batch, or other rows generated other tokens
        than by themselves, including the next user of the row and its blocks. (Detecting NaN isn't
        required.)"""
        with temporary_folder() as folder:
            token = IDS + 1  # in no other prompt
            if not broken_model(self.model, folder, token):
                return
            with self._bench(folder) as bench:
                expected = {name: bench.alone(name, self._prompt(bench, name), 3) for name in "ac"}
                self._add(bench, "a", "c", rows={"a": 4, "c": 2})
                bench.add("bad", [*bench.prompt(4), token], row=0)
                bench.submit({"c": LENGTHS["c"], "bad": 5, "a": LENGTHS["a"]})
                bench.collect("bad")
                bench.decode("a", "c")
                for name in "ac":
                    require_same(bench, name, expected[name], "beside a row whose values were NaN")
                bench.remove("a", "bad")  # whose blocks are the next to be taken
                self._add(bench, "a", rows={"a": 0})
                bench.prefill("a")
                bench.decode("a")
                require_same(
                    bench,
                    "a",
                    expected["a"],
                    "in the row and the blocks of one whose values were NaN",
                )

    @check("executor.batch_untouched", since="1.0")
    def test_a_batch_is_only_read(self) -> None:
        """The executor modified an array of its batch, which the core may reuse. Copy before
        modifying."""
        with self._shared_bench() as bench:
            self._add(bench, *LENGTHS)
            counts = {name: LENGTHS[name] for name in "cab"}
            batch = bench.submit(counts)
            requests = [bench.requests[name] for name in counts]
            bench.collect()
            arrays = [
                batch.rows,
                batch.num_tokens,
                *(new.token_ids for new in batch.added),
                *(pages for new in batch.added for pages in new.pages),
            ]
            prompts = [self._prompt(bench, name) for name in LENGTHS]
            original = [
                [request.row for request in requests],
                [*counts.values()],
                *prompts,
                *(pages for name in LENGTHS for pages in bench.pages(bench.requests[name].blocks)),
            ]
            for array, values in zip(arrays, original, strict=True):
                require(
                    array.tolist() == values,
                    f"an array of the batch was {values} and is now {array.tolist()}",
                )

    @check("executor.ownership", since="1.0")
    def test_results_are_the_cores_and_batches_no_longer_needed(self) -> None:
        """A result changed when later steps ran: results belong to the core, which may keep them.
        Or later tokens changed when the arrays of a batch were overwritten after its results were
        collected: copy what must outlive that."""
        with self._shared_bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 4) for name in "ac"}
            self._add(bench, "a", "c")
            results = []
            for _ in range(4):
                batch = bench.submit(
                    {
                        name: bench.requests[name].known - bench.requests[name].computed
                        for name in "ca"
                    }
                )
                results.append(bench.collect().token_ids)
                for new in batch.added:
                    new.token_ids[:] = 0
                    for pages in new.pages:
                        pages[:] = 0
                for name in ("rows", "num_tokens", "yields_token", "removed", "new_pages"):
                    getattr(batch, name)[:] = 0
            told = {
                name: [int(result[index]) for result in results] for index, name in enumerate("ca")
            }
            came = {name: list(bench.tokens[name]) for name in "ca"}
            require(
                told == came,
                f"results were {came} when they were collected, and are {told} after later steps",
            )
            for name in "ac":
                require_same(
                    bench,
                    name,
                    expected[name],
                    "while the arrays of batches were overwritten once their results were "
                    "collected",
                )

    @check("executor.kept_results", since="1.1")
    def test_kept_results_stay_as_they_were(self) -> None:
        """A result, its log-probabilities or those of prompts changed when later steps ran, or
        two results share an array, a dict or a list. Each result is the core's: make it of objects
        of its own."""
        asked: dict[str, Any] = (
            {"logprobs": 2, "prompt_logprobs": 1} if self.declares("logprobs") else {}
        )
        results = []
        collected = []  # the contents of each result when it was collected
        with self._shared_bench() as bench:
            for turn in range(2):
                for name in ("a", "c"):
                    bench.add(name, bench.prompt(LENGTHS[name], turn), **asked)
                for _ in range(3):
                    results.append(bench.prefill("a", "c"))
                    collected.append(_contents(results[-1]))
                bench.remove("a", "c")
        for result, then in zip(results, collected, strict=True):
            now = _contents(result)
            require(now == then, f"step {result.step} gave {then}, and after later steps {now}")
        for one, other in combinations(results, 2):
            for value in mutables(one):
                shared = [own for own in mutables(other) if _share(value, own)]
                require(
                    not shared,
                    f"the results of steps {one.step} and {other.step} share {shared!r:.200}",
                )

    @check("executor.durations", since="1.0")
    def test_a_step_takes_the_time_that_passes(self) -> None:
        """`ended - started` was a negligible part of the time between submit and collect of the
        largest possible step. They are seconds on the device; the estimates of step times that
        policies plan by are based on their difference."""
        with self._shared_bench() as bench:
            clock = bench.executor.context.clock
            shares = []
            length = min(SETTINGS["max_num_batched_tokens"] // 2, bench.capacity.max_model_len - 1)
            for turn in range(LONG_STEPS):
                bench.add("a", bench.prompt(length, turn), room=1)
                bench.add("b", bench.prompt(length, turn + 1), room=1)
                before = clock.now()
                result = bench.prefill("a", "b")
                shares.append((result.ended - result.started) / (clock.now() - before))
                bench.remove("a", "b")
            rounded = [round(share, 3) for share in shares]
            told = (
                f"steps of {2 * length} tokens took, by `ended - started`, these shares of the "
                f"time that passed: {rounded}"
            )
            require(max(shares) >= LEAST_SHARE, f"{told}; at least one should take {LEAST_SHARE}")

    @check("executor.times", since="1.0")
    def test_times_are_those_of_the_engines_clock(self) -> None:
        """`Result.started` and `ended` must be between the submit and the collect of their step on
        `context.clock`, in this order, and a step must not end before the previous one, including
        late steps. The step-time fit and all latencies are based on them."""
        with self._shared_bench() as bench:
            clock = bench.executor.context.clock
            ends = [-np.inf]
            bench.add("a", bench.prompt(5))
            late = (True, True) if self.declares("masks") else ()
            for count, is_late in zip(
                (5, 1, 1, 1, 1, 1, 1, 1), (*[False] * 6, *late), strict=False
            ):
                submitted = clock.now()
                bench.submit({"a": count}, late=is_late)
                if is_late:
                    bench.sample({"a": [0]})
                result = bench.collect()
                how = "late, submitted" if is_late else "submitted"
                told = (
                    f"{how} at {submitted}, started {result.started}, ended {result.ended}, "
                    f"collected at {clock.now()}"
                )
                # a device's clock isn't the host's
                slack = 0.0 if isinstance(clock, VirtualClock) else 0.05
                require(
                    submitted - slack <= result.started <= result.ended <= clock.now() + slack, told
                )
                ends.append(result.ended)
            require(
                all(one <= other for one, other in pairwise(ends)), f"steps ended at {ends[1:]}"
            )

    @check("executor.virtual_clock", since="1.0", capability="virtual_clock")
    def test_a_virtual_clock_moves_only_in_collect(self) -> None:
        """The executor declares `virtual_clock`: `collect` must advance `context.clock` to the end
        of its step, and `start`, `submit` and `check` must not change it, since the core plans the
        next step by it."""
        with self._bench() as bench:
            clock = bench.executor.context.clock
            require(clock.now() == 0.0, f"start moved the clock to {clock.now()}")
            bench.add("a", bench.prompt(5))
            for count in (5, 1):
                before = clock.now()
                bench.submit({"a": count})
                bench.executor.check()
                require(
                    clock.now() == before,
                    f"submit or check moved the clock from {before} to {clock.now()}",
                )
                result = bench.collect()
                require(
                    clock.now() == result.ended > before,
                    f"a step ended at {result.ended}, and the clock went from {before} to "
                    f"{clock.now()}",
                )


def mutables(value: object) -> Iterator[object]:
    """Yield the arrays, mappings, lists and sets in a value that someone could change."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from mutables(getattr(value, field.name))
    elif isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        if isinstance(value, dict):
            yield value
        for one in value.values():
            yield from mutables(one)
    elif isinstance(value, list | tuple | set):
        if not isinstance(value, tuple):
            yield value
        for one in value:
            yield from mutables(one)


def _contents(value: object) -> list[object]:
    """Return the contents of a value's `mutables`, as they are now."""
    return [_plain(one) for one in mutables(value)]


def _plain(value: object) -> object:
    """Return a value in a form that can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return repr(value)


def _share(one: object, other: object) -> bool:
    """Return True if a change of one is a change of the other."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return np.shares_memory(one, other)
    return one is other
