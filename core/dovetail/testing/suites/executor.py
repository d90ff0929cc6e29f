"""`ExecutorSuite`: checks that an executor conforms to the contract of `dovetail.api.executor`.

The model's values aren't judged here (that is the model's suite): the tokens of a request that runs
by itself are compared with those of all other ways to run it. So a simulated executor passes if it
is consistent. Executors get the bundled demo model, and load it if they need one; torch is imported
only by the executor.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

from dovetail.api.executor import Capacity, Executor
from dovetail.errors import DovetailError, describe
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.executor_adapters import ExecutorAdapters
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_blocks import ExecutorBlocks
from dovetail.testing.suites.executor_deterministic import ExecutorDeterministic
from dovetail.testing.suites.executor_draft_model import ExecutorDraftModel
from dovetail.testing.suites.executor_drafts import ExecutorDrafts
from dovetail.testing.suites.executor_late import ExecutorLate
from dovetail.testing.suites.executor_logprobs import ExecutorLogprobs
from dovetail.testing.suites.executor_pooled import ExecutorPooled
from dovetail.testing.suites.executor_processors import ExecutorProcessors
from dovetail.testing.suites.executor_results import ExecutorResults
from dovetail.testing.suites.executor_sampling import ExecutorSampling
from dovetail.testing.suites.executor_settings import ExecutorSettings
from dovetail.testing.suites.executor_subject import (
    LENGTHS,
    SEEDED,
    SETTINGS,
    require_quiet,
    require_same,
    stop,
)
from dovetail.testing.suites.executor_transfers import ExecutorTransfers
from dovetail.testing.suites.footprint import (
    Footprint,
    child_processes,
    temporary_folder,
    tensor_bytes,
)
from dovetail.testing.suites.holding import require_bounded
from dovetail.testing.suites.other_thread import InThreads

MUCH = 2**20  # bytes that no executor retains incidentally
LONG = 40  # requests before an executor's size is taken
GROWTH = 16 * LONG  # most bytes more that it may keep after the next ones
NOTICES_S = 3.0  # time limit for reporting a dead worker


class ExecutorSuite(
    ExecutorResults,
    ExecutorSampling,
    ExecutorBlocks,
    ExecutorLate,
    ExecutorDrafts,
    ExecutorPooled,
    ExecutorAdapters,
    ExecutorLogprobs,
    ExecutorProcessors,
    ExecutorDeterministic,
    ExecutorDraftModel,
    ExecutorSettings,
    ExecutorTransfers,
):
    """Suite of executors: start and stop, and the tokens of a request, which depend on nothing
    else."""

    @check("executor.capacity", since="1.0")
    def test_the_capacity_makes_sense(self) -> None:
        """`start` returned a `Capacity` that no engine can work with: it needs at least one page,
        one step in flight, two token ids; a pool that holds one sequence of `max_model_len`, which
        is at most the config's value."""
        with self._shared_bench() as bench:
            capacity = bench.capacity
            layout = bench.capacity.layout
            require(isinstance(capacity, Capacity), f"start returned {capacity!r}")
            least = {"num_pages": 1, "max_in_flight": 1, "vocab_size": 2, "max_model_len": 1}
            for name, value in least.items():
                require(
                    type(getattr(capacity, name)) is int,
                    f"Capacity.{name} is {getattr(capacity, name)!r}, expected an int",
                )
                require(
                    getattr(capacity, name) >= value,
                    f"Capacity.{name} is {getattr(capacity, name)}, expected {value} or more",
                )
            require(
                layout.block_size >= 1 and layout.groups,
                f"the layout needs blocks of at least a token, and a group of layers: {layout}",
            )
            needed = layout.most_pages(capacity.max_model_len, SETTINGS["max_num_batched_tokens"])
            told = (
                f"the pool has {capacity.num_pages} pages, and one sequence of "
                f"{capacity.max_model_len} tokens needs {needed}"
            )
            require(capacity.num_pages >= needed, told)
            asked = SETTINGS["max_model_len"]
            require(
                capacity.max_model_len <= asked,
                f"max_model_len is {capacity.max_model_len}, and the config asks for {asked} at "
                f"most",
            )
            words = all(
                isinstance(key, str) and isinstance(value, str)
                for key, value in capacity.details.items()
            )
            require(words, f"details are for people, words by words: {capacity.details!r}")

    @check("executor.stop", since="1.0")
    def test_stop_may_come_at_any_time(self) -> None:
        """`stop` raised. It may be called before `start`, twice, and while a step is in flight: the
        engine calls it after any failure."""
        executor = self._make()
        stop(executor, "before start")
        executor = self._make()
        bench = Bench(executor, executor.start())
        try:
            bench.add("a", bench.prompt(5))
            bench.submit({"a": 5})
        finally:
            stop(executor, "with a step in flight")
        stop(executor, "a second time")

    @check("executor.failed_start", since="1.0")
    def test_a_start_that_fails_says_why_in_dovetails_terms(self) -> None:
        """The model's directory doesn't exist, and `start` raised something other than
        `DovetailError` (`ModelLoadError`, `UnsupportedError`), which users would see as a crash; or
        `stop` failed after it, or left something behind. An executor that needs no model may
        start."""
        before = Footprint.now()
        executor = self._make(model_dir=Path("no", "such", "model"))
        try:
            executor.start()
        except DovetailError:
            pass
        except Exception as error:
            fail(f"start of a model that isn't there raised {describe(error)}")
        finally:
            stop(executor, "after a start that failed")
        left = before.left_behind()
        require(not left, f"after a start that failed, and stop, there is still: {', '.join(left)}")

    @check("executor.forecast", since="1.1")
    def test_a_forecast_is_that_of_start(self) -> None:
        """`forecast` returned something other than words or None; or raised for a model that
        `start` serves; or returned words for a directory that doesn't exist, though `start` raises;
        or raised something other than `DovetailError`, which lists of models would show as a
        crash."""
        made = self._make()
        kind = type(made)
        stop(made, "before start")
        told = kind.forecast(made.context)
        words = told is None or (isinstance(told, str) and told != "")
        require(words, f"forecast returned {told!r}, expected words or None")
        missing = self._make(model_dir=Path("no", "such", "model"))
        try:
            told = kind.forecast(missing.context)
            _require_start(missing, told)
        except DovetailError:
            return
        except Exception as error:
            fail(f"forecast of a model that isn't there raised {describe(error)}")
        finally:
            stop(missing, "after a start that failed")

    @check("executor.leaves_nothing", since="1.0")
    def test_nothing_is_left_behind(self) -> None:
        """After `stop` there are threads, processes, open files, temporary files or tensors of more
        than a megabyte that weren't there before `start`. (Resources that only the very first start
        creates, and later ones reuse, are excluded.)"""
        with self._shared_bench():
            pass
        before = Footprint.now()
        bytes_before = tensor_bytes()
        with temporary_folder() as folder:
            with self._bench() as bench:
                bench.alone("a", bench.prompt(5), 2)
            left = [f"temporary file {path.name}" for path in folder.iterdir()]
        if (more := tensor_bytes() - bytes_before) > MUCH:
            left.append(f"tensors of {more} bytes")
        left = before.left_behind() + left
        require(not left, f"after stop there is still: {', '.join(left)}")

    @check("executor.unstarted", since="1.1")
    def test_what_was_not_started_leaves_nothing(self) -> None:
        """An executor was made and stopped without `start`, and left threads, processes or open
        files. Open what `stop` must close in `start`, or close it without one."""
        stop(self._make(), "before start")
        before = Footprint.now()
        with temporary_folder() as folder:
            stop(self._make(), "before start")
            left = [f"temporary file {path.name}" for path in folder.iterdir()]
        left = before.left_behind() + left
        require(not left, f"without start, after stop there is still: {', '.join(left)}")

    @check("executor.any_thread", since="1.1")
    def test_any_thread_may_call(self) -> None:
        """Each call came from another thread, one at a time, and one raised, or a request generated
        other tokens. Keep nothing by thread: an engine may be started, stepped and stopped by
        different ones."""
        with self._shared_bench() as bench:
            expected = {
                name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {}))
                for name in LENGTHS
            }
        executor = self._make()
        caller: Any = InThreads(executor)
        try:
            bench = Bench(caller, caller.start())
            self._add(bench, *LENGTHS)
            bench.prefill(*LENGTHS)
            caller.check()
            bench.decode(*LENGTHS, steps=2)
            for name in LENGTHS:
                require_same(bench, name, expected[name], "called from threads in turn")
        finally:
            stop(caller, "from another thread")

    @check("executor.healthy", since="1.0")
    def test_check_is_quiet_while_all_is_well(self) -> None:
        """`check` raised although nothing is wrong. The server calls it repeatedly to see whether
        the engine is alive."""
        with self._shared_bench() as bench:
            require_quiet(bench.executor, "after start")
            bench.add("a", bench.prompt(5))
            bench.submit({"a": 5})
            require_quiet(bench.executor, "with a step in flight")
            bench.collect()
            require_quiet(bench.executor, "after a step")

    @check("executor.dead_worker", since="1.0", capability="workers")
    def test_a_dead_worker_is_reported(self) -> None:
        """One of its processes was killed, and `check` didn't report it. Watch the processes
        (`exitcode`, `poll`), raise `DovetailError` that names the dead one, and let `collect` raise
        it, too, instead of waiting forever."""
        before = set(child_processes())
        with self._bench() as bench:
            (pid, *_) = [pid for pid in child_processes() if pid not in before]
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + NOTICES_S
            while time.monotonic() < deadline:
                try:
                    bench.executor.check()
                except DovetailError:
                    return
                time.sleep(0.01)
            fail(f"process {pid} was killed, and check() found all well for {NOTICES_S:g} seconds")

    @check("executor.failure", since="1.0")
    def test_after_a_step_that_failed_it_says_so_or_goes_on_rightly(self) -> None:
        """A step was rejected (it requested more tokens of a row than are known), and afterwards
        `check` didn't raise, but the next valid step raised or gave wrong tokens, for this or
        another row. If the state can no longer be trusted, `check` must raise `DovetailError` on
        every call, and so must `submit`."""
        with self._bench() as bench:
            expected = {
                name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {}))
                for name in LENGTHS
            }
            self._add(bench, *LENGTHS)
            bench.prefill(*LENGTHS)
            try:
                bench.executor.collect(bench.executor.submit(bench.build({"c": 1, "a": 4})))
            except Exception:
                refuses = [_refuses(bench.executor.check) for _ in range(2)]
                require(
                    refuses[0] == refuses[1],
                    f"after a step that failed, check() raised: {refuses[0]}; when it was called "
                    f"again: {refuses[1]}",
                )
                if refuses[0]:
                    refused = _refuses(lambda: bench.executor.submit(bench.build({"b": 1})))
                    require(
                        refused, "check() raises after a step that failed, and submit() doesn't"
                    )
                    return
                bench.decode(*LENGTHS, steps=2)
                for name in LENGTHS:
                    require_same(bench, name, expected[name], "after a step that was refused")

    @check("executor.impossible_step", since="1.1")
    def test_a_step_that_can_not_be_computed_fails_no_single_rows(self) -> None:
        """A step requested more tokens of a row than are known, and neither `submit` nor `collect`
        raised, but `Result.failed` has rows, which the engine then ends as if the others could go
        on. `failed` is for rows whose own values are wrong. An error of the whole step is an
        exception, after which `check` says whether the executor can continue."""
        with self._bench() as bench:
            self._add(bench, *LENGTHS)
            bench.prefill(*LENGTHS)
            batch = bench.build({"c": 1, "a": 4})
            try:
                result = bench.executor.collect(bench.executor.submit(batch))
            except Exception:  # of any type: `executor.failure` looks at what follows
                return
            require(
                not result.failed,
                f"4 tokens of a row were requested, which has 1: Result.failed is {result.failed}",
            )

    @check("executor.neighbours", since="1.0")
    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        """A request generated other tokens beside others, in another row and in other blocks, than
        by itself. Look for state shared between rows, and for reads by position in the batch
        instead of by row."""
        with self._shared_bench() as bench:
            expected = {
                name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {}))
                for name in LENGTHS
            }
            bench.take_blocks(1)
            self._add(bench, *LENGTHS, rows={"a": 5, "b": 7, "c": 2})
            bench.prefill("c", "a", "b")
            bench.decode("b", "c", "a")
            bench.decode("a", "b", "c")
            for name in LENGTHS:
                require_same(
                    bench, name, expected[name], "beside others, in another row and other blocks"
                )

    @check("executor.ids_stay", since="1.0")
    def test_sampled_ids_stay_with_their_row(self) -> None:
        """A request that kept its row generated other tokens than one that was added to a row again
        with all its tokens. While a request has a row the core sends no ids: the next input is the
        token that the executor sampled."""
        with self._shared_bench() as bench:
            for name in LENGTHS:
                expected = bench.alone(name, self._prompt(bench, name), 4, **SEEDED.get(name, {}))
                for received in (1, 3):
                    tokens = [*self._prompt(bench, name), *expected[:received]]
                    bench.add(name, tokens, prompt_len=LENGTHS[name], **SEEDED.get(name, {}))
                    bench.prefill(name)
                    bench.decode(name, steps=3 - received)
                    require_same(
                        bench,
                        name,
                        expected[received:],
                        f"given a row anew after {received} tokens",
                    )
                    bench.remove(name)

    @check("executor.chunks", since="1.0")
    def test_a_prompt_in_chunks_is_the_prompt_at_once(self) -> None:
        """A prompt computed in chunks, beside decodes, gave other tokens than in one step. A chunk
        starts where the row has stopped, attends to everything before it, and samples only at the
        last known token."""
        with self._shared_bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 6) for name in "ac"}
            self._add(bench, "a", "c")
            bench.prefill("a")
            for chunk in (1, 3, 16, LENGTHS["c"] - 20):
                bench.run({"c": chunk, "a": 1})
            bench.decode("a", "c")
            for name in "ac":
                require_same(
                    bench,
                    name,
                    expected[name],
                    "the prompt of c in chunks of 1, 3, 16 and the rest, beside a",
                )

    @check("executor.idle", since="1.0")
    def test_a_row_that_sits_out_steps_is_kept(self) -> None:
        """A request without grants for some steps continued with other tokens. A row is held until
        a batch lists it in `removed`."""
        with self._shared_bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 4) for name in "ac"}
            self._add(bench, "a", "c")
            bench.prefill("a", "c")
            bench.decode("c", steps=3)
            bench.decode("a", steps=3)
            for name in "ac":
                require_same(bench, name, expected[name], "after steps in which it had no part")

    @check("executor.row_reuse", since="1.0")
    def test_a_row_given_away_begins_anew(self) -> None:
        """A row was removed and added in one batch, and the new request generated other tokens than
        by itself, or the step failed, or rows that stayed were affected. `removed` precedes
        `added`, nothing of the old request remains (tokens, blocks, sampling), and other rows don't
        move."""
        with self._shared_bench() as bench:
            expected = {
                name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {}))
                for name in LENGTHS
            }
            for name in ("c", "b", "a", "c"):
                bench.add(name, self._prompt(bench, name), row=3, **SEEDED.get(name, {}))
                bench.prefill(name)
                bench.decode(name, steps=2)
                require_same(bench, name, expected[name], "in a row that another had before")
                bench.remove(name)
            self._add(bench, *LENGTHS, rows={"b": 0, "a": 1, "c": 4})
            bench.prefill("a", "b", "c")
            bench.decode("c", "a")
            bench.tokens["b"] = []
            bench.remove("b")
            bench.decode("a", "c")
            self._add(bench, "b", rows={"b": 0})
            bench.prefill("b")
            for name in LENGTHS:
                require_same(
                    bench, name, expected[name], "while b left its row and came back to it"
                )

    @check("executor.long_use", since="1.0")
    def test_long_use(self) -> None:
        """After many requests one generated other tokens than at first, or the executor kept more
        than before. Drop what belongs to a row in the step that lists it in `removed`, and what
        belongs to a step when it is collected."""
        with self._shared_bench() as bench:
            prompt = self._prompt(bench, "c")
            expected = bench.alone("c", prompt, 2, seed=1)
            numbers = count()

            def serve(times: int) -> None:
                for number in islice(numbers, times):
                    bench.alone(f"request {number}", [number % 2, *prompt[:8]], 2, seed=number)

            require_bounded(bench.executor, serve, LONG, GROWTH, "requests that were removed")
            bench.add("c", prompt, seed=1)
            bench.prefill("c")
            bench.decode("c")
            require_same(bench, "c", expected, f"after {next(numbers)} requests")

    @check("executor.limits", since="1.0")
    def test_what_the_config_allows_can_be_used_up(self) -> None:
        """A step with the maximum number of rows or tokens, or a sequence of
        `Capacity.max_model_len`, failed or gave other tokens than small ones. Buffers must hold all
        of that, including the last row, token and position."""
        rows = SETTINGS["max_num_seqs"]
        step = SETTINGS["max_num_batched_tokens"]
        with self._shared_bench() as bench:
            longest = bench.capacity.max_model_len
            length = min(step // rows, longest - 1, bench.num_blocks // rows * bench.block_size - 1)
            prompts = {f"r{row}": bench.prompt(length, variant=row) for row in range(rows)}
            expected = {
                name: bench.alone(name, prompt, 2, room=1) for name, prompt in prompts.items()
            }
            for name, prompt in prompts.items():
                bench.add(name, prompt, room=1)
            bench.prefill(*prompts)
            bench.decode(*prompts)
            for name in prompts:
                require_same(
                    bench,
                    name,
                    expected[name],
                    f"in a step of {rows} rows and {rows * length} tokens",
                )
            bench.remove(*prompts)
            whole = bench.alone("whole", bench.prompt(longest - 1), 1, room=1, seed=1)
            bench.add("parts", bench.prompt(longest - 1), room=1, seed=1)
            bench.run({"parts": longest - 2})
            bench.prefill("parts")
            require_same(
                bench,
                "parts",
                whole,
                f"as the last of {longest} tokens, where the prompt came in two chunks",
            )


def _refuses(call: Callable[[], object]) -> bool:
    """Return True if it raises `DovetailError`; other errors pass through."""
    try:
        call()
    except DovetailError:
        return True
    return False


def _require_start(executor: Executor, told: str | None) -> None:
    """Fail if a forecast has words for what doesn't start."""
    try:
        executor.start()
    except DovetailError as error:
        require(told is None, f"forecast returned {told!r}, and start raised {describe(error)}")
