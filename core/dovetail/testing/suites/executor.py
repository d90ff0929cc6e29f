"""`ExecutorSuite`: it checks that an executor keeps the contract of `dovetail.api.executor`.

What a model computes isn't judged here (that is the model's suite): the tokens of a request that runs alone are what all other ways to run it are
compared with. So an executor that only pretends to compute passes, if it is consistent. It is given the bundled demo model, and loads it if it
needs one; torch is imported by nobody but the executor.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from dovetail.api.executor import Capacity
from dovetail.errors import DovetailError, describe
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_blocks import ExecutorBlocks
from dovetail.testing.suites.executor_late import ExecutorLate
from dovetail.testing.suites.executor_logprobs import ExecutorLogprobs
from dovetail.testing.suites.executor_results import ExecutorResults
from dovetail.testing.suites.executor_sampling import ExecutorSampling
from dovetail.testing.suites.executor_subject import LENGTHS, SEEDED, SETTINGS, require_quiet, require_same, stop
from dovetail.testing.suites.footprint import Footprint, child_processes, temporary_folder, tensor_bytes

MUCH = 2**20  # bytes that no executor keeps by the way
NOTICES_S = 3.0  # within which a dead worker must be told


class ExecutorSuite(ExecutorResults, ExecutorSampling, ExecutorBlocks, ExecutorLate, ExecutorLogprobs):
    """The suite of executors: their beginning and end, and the tokens of a request, which depend on nothing else."""

    @check("executor.capacity", since="0.1")
    def test_the_capacity_makes_sense(self) -> None:
        """`start` returned a `Capacity` by which no engine can work: at least one block, one step in flight, two token ids; a pool that holds one
        sequence of `max_model_len`, which is at most what the config asks for."""
        with self._bench() as bench:
            capacity, layout = bench.capacity, bench.capacity.layout
            require(isinstance(capacity, Capacity), f"start returned {capacity!r}")
            least = {"num_blocks": 1, "max_in_flight": 1, "vocab_size": 2, "max_model_len": 1}
            for name, value in least.items():
                require(type(getattr(capacity, name)) is int, f"Capacity.{name} is {getattr(capacity, name)!r}, expected an int")
                require(getattr(capacity, name) >= value, f"Capacity.{name} is {getattr(capacity, name)}, expected {value} or more")
            require(layout.block_size >= 1 and layout.groups, f"the layout needs blocks of at least a token, and a group of layers: {layout}")
            holds = capacity.num_blocks * layout.block_size
            require(holds >= capacity.max_model_len, f"the pool holds {holds} tokens, fewer than one sequence of {capacity.max_model_len}")
            asked = SETTINGS["max_model_len"]
            require(capacity.max_model_len <= asked, f"max_model_len is {capacity.max_model_len}, and the config asks for {asked} at most")
            words = all(isinstance(key, str) and isinstance(value, str) for key, value in capacity.details.items())
            require(words, f"details are for people, words by words: {capacity.details!r}")

    @check("executor.stop", since="0.1")
    def test_stop_may_come_at_any_time(self) -> None:
        """`stop` raised: it may come before `start`, twice, and while a step is in flight. The engine calls it whatever went wrong before."""
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

    @check("executor.failed_start", since="0.1")
    def test_a_start_that_fails_says_why_in_dovetails_terms(self) -> None:
        """The model's directory didn't exist, and `start` raised something other than `DovetailError` (`ModelLoadError`, `UnsupportedError`), which
        a user would see as a crash; or `stop` didn't work after it, or left something behind. An executor that needs no model may start."""
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

    @check("executor.leaves_nothing", since="0.1")
    def test_nothing_is_left_behind(self) -> None:
        """After `stop` there were threads, processes, open files, temporary files or tensors of more than a megabyte that weren't there before
        `start`. (What only the very first start makes, and the next ones use again, is left out.)"""
        with self._bench():
            pass
        before, bytes_before = Footprint.now(), tensor_bytes()
        with temporary_folder() as folder:
            with self._bench() as bench:
                bench.alone("a", bench.prompt(5), 2)
            left = [f"temporary file {path.name}" for path in folder.iterdir()]
        if (more := tensor_bytes() - bytes_before) > MUCH:
            left.append(f"tensors of {more} bytes")
        left = before.left_behind() + left
        require(not left, f"after stop there is still: {', '.join(left)}")

    @check("executor.healthy", since="0.1")
    def test_check_is_quiet_while_all_is_well(self) -> None:
        """`check` raised though nothing was wrong: the server calls it again and again to see whether the engine is alive."""
        with self._bench() as bench:
            require_quiet(bench.executor, "after start")
            bench.add("a", bench.prompt(5))
            bench.submit({"a": 5})
            require_quiet(bench.executor, "with a step in flight")
            bench.collect()
            require_quiet(bench.executor, "after a step")

    @check("executor.dead_worker", since="0.1", capability="workers")
    def test_a_dead_worker_is_reported(self) -> None:
        """One of its processes was killed, and `check` went on to find all well. Watch the processes (`exitcode`, `poll`), raise `DovetailError`
        naming the one that is gone, and let `collect` raise it too, rather than wait for ever."""
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

    @check("executor.failure", since="0.1")
    def test_after_a_step_that_failed_it_says_so_or_goes_on_rightly(self) -> None:
        """A step was refused (it wanted more tokens of a row than are known), and afterwards `check` was content, but the next lawful step raised or
        gave wrong tokens, also to another row. If what it holds can't be trusted any more, `check` must raise `DovetailError`, however often it is
        called, and so must `submit`."""
        with self._bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {})) for name in LENGTHS}
            self._seat(bench, *LENGTHS)
            bench.prefill(*LENGTHS)
            try:
                bench.executor.collect(bench.executor.submit(bench.build({"c": 1, "a": 4})))
            except Exception:
                refuses = [_refuses(bench.executor.check) for _ in range(2)]
                require(refuses[0] == refuses[1], f"after a step that failed, check() raised: {refuses[0]}; when it was called again: {refuses[1]}")
                if refuses[0]:
                    refused = _refuses(lambda: bench.executor.submit(bench.build({"b": 1})))
                    require(refused, "check() raises after a step that failed, and submit() doesn't")
                    return
                bench.decode(*LENGTHS, steps=2)
                for name in LENGTHS:
                    require_same(bench, name, expected[name], "after a step that was refused")

    @check("executor.neighbours", since="0.1")
    def test_a_row_does_not_depend_on_its_neighbours(self) -> None:
        """A request generated other tokens beside others, in another row and in other blocks, than alone. Look for state that rows share, and for
        what is read by a place in the batch instead of by row."""
        with self._bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {})) for name in LENGTHS}
            bench.take_blocks(1)
            self._seat(bench, *LENGTHS, rows={"a": 5, "b": 7, "c": 2})
            bench.prefill("c", "a", "b")
            bench.decode("b", "c", "a")
            bench.decode("a", "b", "c")
            for name in LENGTHS:
                require_same(bench, name, expected[name], "beside others, in another row and other blocks")

    @check("executor.ids_stay", since="0.1")
    def test_sampled_ids_stay_with_their_row(self) -> None:
        """A request that kept its row generated other tokens than one that was given a row anew with all that it had. While a request has a row the
        core sends no ids: the next input is what the executor itself sampled."""
        with self._bench() as bench:
            for name in LENGTHS:
                expected = bench.alone(name, self._prompt(bench, name), 4, **SEEDED.get(name, {}))
                for received in (1, 3):
                    tokens = [*self._prompt(bench, name), *expected[:received]]
                    bench.add(name, tokens, prompt_len=LENGTHS[name], **SEEDED.get(name, {}))
                    bench.prefill(name)
                    bench.decode(name, steps=3 - received)
                    require_same(bench, name, expected[received:], f"given a row anew after {received} tokens")
                    bench.remove(name)

    @check("executor.chunks", since="0.1")
    def test_a_prompt_in_chunks_is_the_prompt_at_once(self) -> None:
        """A prompt computed in chunks, beside decodes, gave other tokens than in one step. A chunk begins where the row has come to, attends to all
        before it, and samples only with the last known token."""
        with self._bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 6) for name in "ac"}
            self._seat(bench, "a", "c")
            bench.prefill("a")
            for chunk in (1, 3, 16, LENGTHS["c"] - 20):
                bench.run({"c": chunk, "a": 1})
            bench.decode("a", "c")
            for name in "ac":
                require_same(bench, name, expected[name], "the prompt of c in chunks of 1, 3, 16 and the rest, beside a")

    @check("executor.idle", since="0.1")
    def test_a_row_that_sits_out_steps_is_kept(self) -> None:
        """A request that had no tokens granted for some steps went on with other tokens. A row is held until a batch names it in `removed`."""
        with self._bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 4) for name in "ac"}
            self._seat(bench, "a", "c")
            bench.prefill("a", "c")
            bench.decode("c", steps=3)
            bench.decode("a", steps=3)
            for name in "ac":
                require_same(bench, name, expected[name], "after steps in which it had no part")

    @check("executor.row_reuse", since="0.1")
    def test_a_row_given_away_begins_anew(self) -> None:
        """A row was removed and added in one batch, and the new request generated other tokens than alone, or the step failed; or those that kept
        their rows did. `removed` comes before `added`, of the old request nothing stays (tokens, blocks, sampling), and nobody else moves."""
        with self._bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {})) for name in LENGTHS}
            for name in ("c", "b", "a", "c"):
                bench.add(name, self._prompt(bench, name), row=3, **SEEDED.get(name, {}))
                bench.prefill(name)
                bench.decode(name, steps=2)
                require_same(bench, name, expected[name], "in a row that another had before")
                bench.remove(name)
            self._seat(bench, *LENGTHS, rows={"b": 0, "a": 1, "c": 4})
            bench.prefill("a", "b", "c")
            bench.decode("c", "a")
            bench.tokens["b"] = []
            bench.remove("b")
            bench.decode("a", "c")
            self._seat(bench, "b", rows={"b": 0})
            bench.prefill("b")
            for name in LENGTHS:
                require_same(bench, name, expected[name], "while b left its row and came back to it")

    @check("executor.limits", since="0.1")
    def test_what_the_config_allows_can_be_used_up(self) -> None:
        """A step of as many rows, or tokens, as the config allows, or a sequence of `Capacity.max_model_len`, failed or gave other tokens than small
        ones. Buffers hold all of that, and the last row, token and position are as good as the others."""
        rows, step = SETTINGS["max_num_seqs"], SETTINGS["max_num_batched_tokens"]
        with self._bench() as bench:
            longest = bench.capacity.max_model_len
            length = min(step // rows, longest - 1, bench.capacity.num_blocks // rows * bench.block_size - 1)
            prompts = {f"r{row}": bench.prompt(length, variant=row) for row in range(rows)}
            expected = {name: bench.alone(name, prompt, 2, room=1) for name, prompt in prompts.items()}
            for name, prompt in prompts.items():
                bench.add(name, prompt, room=1)
            bench.prefill(*prompts)
            bench.decode(*prompts)
            for name in prompts:
                require_same(bench, name, expected[name], f"in a step of {rows} rows and {rows * length} tokens")
            bench.remove(*prompts)
            whole = bench.alone("whole", bench.prompt(longest - 1), 1, room=1, seed=1)
            bench.add("parts", bench.prompt(longest - 1), room=1, seed=1)
            bench.run({"parts": longest - 2})
            bench.prefill("parts")
            require_same(bench, "parts", whole, f"as the last of {longest} tokens, where the prompt came in two chunks")


def _refuses(call: Callable[[], object]) -> bool:
    """Return True if it raises `DovetailError`; other errors pass through."""
    try:
        call()
    except DovetailError:
        return True
    return False
