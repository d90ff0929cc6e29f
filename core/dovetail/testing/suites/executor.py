"""`ExecutorSuite`: it checks that an executor keeps the contract of `dovetail.api.executor`.

What a model computes isn't judged here (that is the model's suite): the tokens of a request that runs alone are what all other ways to run it are
compared with. So an executor that only pretends to compute passes, if it is consistent. It is given the bundled demo model, and loads it if it
needs one; torch is imported by nobody but the executor.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dovetail.api.clock import Clock, VirtualClock, WallClock
from dovetail.api.executor import Capacity, Executor, ExecutorContext, HostLogprobs
from dovetail.api.kv_cache import BlockCopy
from dovetail.config import EngineConfig
from dovetail.errors import DovetailError, describe
from dovetail.parts import find_parts
from dovetail.registry.models import resolve_model
from dovetail.testing.binding import installed
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.footprint import Footprint, child_processes, temporary_folder

SETTINGS: Mapping[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_memory": "8MiB"}
LENGTHS = {"a": 11, "b": 2, "c": 37}  # of prompts: within a block, one step, over some blocks
SEEDED: Mapping[str, Mapping[str, Any]] = {"b": {"temperature": 1.0}}  # the others are greedy
NOTICES_S = 3.0  # within which a dead worker must be told


class ExecutorSuite(Suite):
    """The suite of executors. `model` is the one to load. Everything else of the context is as the engine makes it for a small `engine.yaml`."""

    kind = "executor"
    settings = Suite.settings | {"model"}
    model: ClassVar[str] = "demo"

    def declares(self, capability: str) -> bool:
        """Two are seen rather than declared: "workers", whether `start` starts processes, and "shared_prefix", which `Capacity` tells."""
        if capability in ("workers", "shared_prefix"):
            return capability in _seen(type(self))  # type: ignore[arg-type]  # a class is hashable
        return super().declares(capability)

    # Begin and end

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
        _stop(executor, "before start")
        executor = self._make()
        bench = Bench(executor, executor.start())
        try:
            bench.add("a", bench.prompt(5))
            bench.submit({"a": 5})
        finally:
            _stop(executor, "with a step in flight")
        _stop(executor, "a second time")

    @check("executor.failed_start", since="0.1")
    def test_a_start_that_fails_says_why_in_dovetails_terms(self) -> None:
        """The model's directory didn't exist, and `start` raised something other than `DovetailError` (`ModelLoadError`, `UnsupportedError`), which
        a user would see as a crash; or `stop` didn't work after it. An executor that needs no model may start."""
        executor = self._make(model_dir=Path("no", "such", "model"))
        try:
            executor.start()
        except DovetailError:
            pass
        except Exception as error:
            fail(f"start of a model that isn't there raised {describe(error)}")
        finally:
            _stop(executor, "after a start that failed")

    @check("executor.leaves_nothing", since="0.1")
    def test_nothing_is_left_behind(self) -> None:
        """After `stop` there were threads, processes, open files or temporary files that weren't there before `start`. (What only the very first
        start makes, and the next ones use again, is left out.)"""
        with self._bench():
            pass
        before = Footprint.now()
        with temporary_folder() as folder:
            with self._bench() as bench:
                bench.alone("a", bench.prompt(5), 2)
            left = [f"temporary file {path.name}" for path in folder.iterdir()]
        left = before.left_behind() + left
        require(not left, f"after stop there is still: {', '.join(left)}")

    @check("executor.healthy", since="0.1")
    def test_check_is_quiet_while_all_is_well(self) -> None:
        """`check` raised though nothing was wrong: the server calls it again and again to see whether the engine is alive."""
        with self._bench() as bench:
            _quiet(bench.executor, "after start")
            bench.add("a", bench.prompt(5))
            bench.submit({"a": 5})
            _quiet(bench.executor, "with a step in flight")
            bench.collect()
            _quiet(bench.executor, "after a step")

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
        gave wrong tokens. If what it holds can't be trusted any more, `check` and `submit` must raise `DovetailError`."""
        with self._bench() as bench:
            expected = bench.alone("a", bench.prompt(5), 3)
            bench.add("a", bench.prompt(5))
            bench.prefill("a")
            try:
                bench.executor.collect(bench.executor.submit(bench.build({"a": 4})))
            except Exception:
                with suppress(DovetailError):
                    bench.executor.check()
                    bench.decode("a", steps=2)
                    _same(bench, "a", expected, "after a step that was refused")

    # Results

    @check("executor.order", since="0.1")
    def test_results_come_in_the_order_of_submission(self) -> None:
        """With as many steps in flight as `max_in_flight` allows, `collect` of the oldest handle returned another step, or the tokens of another.
        Results wait in a queue; what a step samples must not be overwritten by the next."""
        with self._bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 4, **SEEDED.get(name, {})) for name in LENGTHS}
            self._seat(bench, *LENGTHS)
            steps = [dict.fromkeys(names, 1) for names in ("cba", "ab", "c", "bc", "a", "cab")]
            for counts in [{"a": LENGTHS["a"]}, {"b": LENGTHS["b"], "c": LENGTHS["c"]}, *steps]:
                while len(bench.sent) >= bench.capacity.max_in_flight:
                    bench.collect()
                bench.submit(counts)
            while bench.sent:
                bench.collect()
            for name in LENGTHS:
                _same(bench, name, expected[name], "with steps in flight, and others beside it")

    @check("executor.results", since="0.1")
    def test_each_row_of_the_batch_has_its_result(self) -> None:
        """`token_ids` must be [rows of the batch], in the order of `batch.rows`: an id of the vocabulary where `yields_token` is true, -1 elsewhere;
        `failed` must be empty when nothing has failed."""
        with self._bench() as bench:
            self._seat(bench, *LENGTHS)
            batch = bench.submit({"c": 20, "a": LENGTHS["a"], "b": 1})
            result = bench.collect()
            for token, yields_token in zip(result.token_ids.tolist(), batch.yields_token.tolist(), strict=True):
                vocabulary = bench.capacity.vocab_size
                told = f"token_ids are {result.token_ids.tolist()} where yields_token is {batch.yields_token.tolist()}"
                require((0 <= token < vocabulary) if yields_token else token == -1, f"{told}; expected ids below {vocabulary}, and -1 elsewhere")
            require(not result.failed, f"nothing failed, and Result.failed is {result.failed}")

    @check("executor.batch_untouched", since="0.1")
    def test_a_batch_is_only_read(self) -> None:
        """The executor changed an array of the batch that it was given; the core may use it again. Copy what is to be changed."""
        with self._bench() as bench:
            self._seat(bench, *LENGTHS)
            counts = {name: LENGTHS[name] for name in "cab"}
            batch, seats = bench.submit(counts), [bench.seats[name] for name in counts]
            bench.collect()
            arrays = [batch.rows, batch.num_tokens, *(new.token_ids for new in batch.added), *(new.blocks for new in batch.added)]
            prompts = [self._prompt(bench, name) for name in LENGTHS]
            original = [[seat.row for seat in seats], [*counts.values()], *prompts, *(bench.seats[name].blocks for name in LENGTHS)]
            for array, values in zip(arrays, original, strict=True):
                require(array.tolist() == values, f"an array of the batch was {values} and is now {array.tolist()}")

    @check("executor.times", since="0.1")
    def test_times_are_those_of_the_engines_clock(self) -> None:
        """`Result.started` and `ended` must lie between the submit and the collect of their step on `context.clock`, in this order, and a step must
        not end before the one before it. The step-time fit and all latencies are made of them."""
        with self._bench() as bench:
            clock, ends = bench.executor.context.clock, [-np.inf]
            bench.add("a", bench.prompt(5))
            for count in (5, 1, 1):
                submitted = clock.now()
                result = bench.run({"a": count})
                told = f"submitted at {submitted}, started {result.started}, ended {result.ended}, collected at {clock.now()}"
                slack = 0.0 if isinstance(clock, VirtualClock) else 0.05  # a device's clock isn't the host's
                require(submitted - slack <= result.started <= result.ended <= clock.now() + slack, told)
                ends.append(result.ended)
            require(all(one <= other for one, other in pairwise(ends)), f"steps ended at {ends[1:]}")

    @check("executor.virtual_clock", since="0.1", capability="virtual_clock")
    def test_a_virtual_clock_moves_only_in_collect(self) -> None:
        """The executor claims `virtual_clock`: `collect` must move `context.clock` to the end of its step, and `start`, `submit` and `check` must
        leave it alone, since the core plans the next step by it."""
        with self._bench() as bench:
            clock = bench.executor.context.clock
            require(clock.now() == 0.0, f"start moved the clock to {clock.now()}")
            bench.add("a", bench.prompt(5))
            for count in (5, 1):
                before = clock.now()
                bench.submit({"a": count})
                bench.executor.check()
                require(clock.now() == before, f"submit or check moved the clock from {before} to {clock.now()}")
                result = bench.collect()
                require(clock.now() == result.ended > before, f"a step ended at {result.ended}, and the clock went from {before} to {clock.now()}")

    # A request's tokens depend on nothing else

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
                _same(bench, name, expected[name], "beside others, in another row and other blocks")

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
                    _same(bench, name, expected[received:], f"given a row anew after {received} tokens")
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
                _same(bench, name, expected[name], "the prompt of c in chunks of 1, 3, 16 and the rest, beside a")

    # Late sampling

    @check("executor.late", since="0.3", capability="masks")
    def test_a_late_step_without_masks_samples_as_any_other(self) -> None:
        """Steps that were `late`, and sampled without a mask, gave other tokens. `submit` of a late batch runs the model alone, `sample` samples for
        the rows that yield a token."""
        with self._bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {})) for name in LENGTHS}
            self._seat(bench, *LENGTHS)
            bench.submit({"c": 20, "a": LENGTHS["a"]}, late=True)  # a chunk of c yields nothing
            bench.sample({})
            bench.collect()
            bench.submit({"b": LENGTHS["b"], "c": LENGTHS["c"] - 20, "a": 1}, late=True)
            bench.sample({})
            bench.collect()
            bench.submit({"a": 1, "c": 1, "b": 1}, late=True)
            bench.sample({})
            bench.collect()
            bench.decode("c", "b")
            for name in LENGTHS:
                _same(bench, name, expected[name], "in late steps without masks")

    @check("executor.masks", since="0.3", capability="masks")
    def test_masked_rows_sample_what_is_allowed_and_others_what_they_would(self) -> None:
        """A row sampled a token that its mask forbids; or another one than the likeliest of two that are allowed, when it had sampled that before; or
        a row without a mask sampled another token than alone. `Masks.indices` are places in the batch, which not all yield a token."""
        with self._bench() as bench:
            expected = {name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {})) for name in LENGTHS}
            last = bench.capacity.vocab_size - 1
            self._seat(bench, *LENGTHS)
            bench.submit({"c": 20, "a": LENGTHS["a"], "b": LENGTHS["b"]}, late=True)
            bench.sample({"a": [last]})
            bench.collect()
            require(bench.tokens["a"] == [last], f"only token {last} was allowed, and {bench.tokens['a']} was sampled")
            bench.submit({"b": 1, "c": LENGTHS["c"] - 20, "a": 1}, late=True)
            bench.sample({"a": [0], "c": sorted({expected["c"][0], last})}, own_memory=False)
            bench.collect()
            require(bench.tokens["a"] == [last, 0], f"only token 0 was allowed, and {bench.tokens['a'][1:]} was sampled")
            bench.decode("b", "c")
            _same(bench, "b", expected["b"], "beside rows with masks")
            _same(bench, "c", expected["c"][:2], "after a step with a mask")

    @check("executor.late_overlap", since="0.3", capability="masks")
    def test_a_late_step_may_be_submitted_while_another_is_in_flight(self) -> None:
        """With two steps in flight, a late one was submitted before the results of the step before it were collected, and sampled afterwards, and its
        tokens were others. The next step reads what the late one sampled."""
        with self._bench() as bench:
            if bench.capacity.max_in_flight < 2:
                return
            expected = bench.alone("a", self._prompt(bench, "a"), 4)
            self._seat(bench, "a")
            bench.submit({"a": LENGTHS["a"]})
            for _ in range(3):
                bench.submit({"a": 1}, late=True)
                bench.collect()
                bench.sample({"a": sorted({expected[len(bench.tokens["a"])], 0})})
            bench.collect()
            _same(bench, "a", expected, "sampled late, each mask allowing the token that it had alone")

    @check("executor.masked_logprobs", since="0.3", capability="logprobs")
    def test_masks_leave_log_probabilities_as_they_are(self) -> None:
        """The log-probability of a token that was sampled under a mask wasn't that of the raw distribution, or the likeliest tokens weren't."""
        with self._bench() as bench:
            if not self.declares("masks"):
                return
            raw = self._first_logprobs(bench, None)
            other = int(raw.token_ids[0, 2])  # the second likeliest
            masked = self._first_logprobs(bench, [other])
            require(int(masked.token_ids[0, 0]) == other, f"only token {other} was allowed, and {masked.token_ids[0, 0]} was sampled")
            near = np.allclose(masked.logprobs[0, 1:], raw.logprobs[0, 1:], atol=1e-4) and np.isclose(
                masked.logprobs[0, 0], raw.logprobs[0, 2], atol=1e-4
            )
            require(bool(near), f"log-probabilities were {raw.logprobs[0].tolist()}, and under a mask {masked.logprobs[0].tolist()}")

    def _first_logprobs(self, bench: Bench, allowed: list[int] | None) -> HostLogprobs:
        """Those of the first token of a greedy request, with three alternatives."""
        bench.add("a", self._prompt(bench, "a"), logprobs=3)
        bench.submit({"a": LENGTHS["a"]}, late=allowed is not None)
        if allowed is not None:
            bench.sample({"a": allowed})
        logprobs = bench.collect().logprobs
        bench.remove("a")
        bench.tokens.pop("a")
        if logprobs is None:
            fail("a request asked for log-probabilities, and the step returned none")
        return logprobs

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
                _same(bench, name, expected[name], "after steps in which it had no part")

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
                _same(bench, name, expected[name], "in a row that another had before")
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
                _same(bench, name, expected[name], "while b left its row and came back to it")

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
                _same(bench, name, expected[name], f"in a step of {rows} rows and {rows * length} tokens")
            bench.remove(*prompts)
            whole = bench.alone("whole", bench.prompt(longest - 1), 1, room=1)
            bench.add("parts", bench.prompt(longest - 1), room=1)
            bench.run({"parts": longest - 2})
            bench.prefill("parts")
            _same(bench, "parts", whole, f"as the last of {longest} tokens, where the prompt came in two chunks")

    # Blocks

    @check("executor.new_blocks", since="0.1")
    def test_blocks_are_appended_in_order(self) -> None:
        """Requests whose tables grew as they went generated other tokens. `new_blocks[i]` goes to the end of the table of `new_block_rows[i]`, in
        order, however the rows alternate; another that begins on these blocks, in this order, must find there what was computed."""
        with self._bench() as bench:
            size = bench.block_size
            lengths = {"a": 1, "c": size}
            expected = {name: bench.alone(name, bench.prompt(length + 2 * size), 3) for name, length in lengths.items()}
            for name, length in lengths.items():
                bench.add(name, bench.prompt(length + 2 * size), blocks=bench.take_blocks(1))
            bench.run({"a": 1, "c": size})
            bench.grow("cacaca")
            bench.prefill("c", "a")
            bench.decode("a", "c")
            for name in lengths:
                seat = bench.seats[name]
                _same(bench, name, expected[name], "its blocks appended c, a, c, a, …")
                bench.add("next", seat.tokens, prompt_len=seat.prompt_len, computed=seat.computed, blocks=seat.blocks, seed=seat.sampling.seed)
                bench.prefill("next")
                _same(bench, "next", expected[name][2:], "on the blocks of another, which were appended to its table")

    @check("executor.cached", since="0.1")
    def test_a_row_may_begin_on_blocks_that_others_wrote(self) -> None:
        """A request began with `computed` tokens in blocks that another had written, before or in this very step, and generated other tokens than
        alone. `computed` tokens need no work; the K and V of the whole batch are written before any row attends."""
        with self._bench() as bench:
            shared = 2 * bench.block_size
            prompt = bench.prompt(shared + 3)
            expected = bench.alone("a", prompt, 3)
            first = bench.add("first", bench.prompt(shared))
            for when, counts in (("in the same step", {"a": 3, "first": shared}), ("before", {"a": 3})):
                bench.add("a", prompt, computed=shared, blocks=[*first.blocks[:2], *bench.take_blocks(-(-11 // bench.block_size))])
                bench.run(counts)
                bench.decode("a", steps=2)
                _same(bench, "a", expected, f"on blocks that another wrote {when}")
                del bench.seats["a"].blocks[:2]  # they are still the other's
                bench.remove("a")

    @check("executor.shared_prefix", since="0.1", capability="shared_prefix")
    def test_a_shared_prefix_changes_no_token(self) -> None:
        """`Capacity.shared_prefix` says that it makes use of `Batch.shared_prefix_blocks`, and requests whose tables begin with the same blocks
        generated other tokens with it than alone. These blocks, and no more, may be read once for all rows of the batch."""
        with self._bench() as bench:
            shared = 2 * bench.block_size
            prompts = {name: bench.prompt(shared) + bench.prompt(3 + variant, variant) for variant, name in enumerate("abc")}
            expected = {name: bench.alone(name, prompt, 4) for name, prompt in prompts.items()}
            first = bench.add("first", bench.prompt(shared))
            bench.prefill("first")
            for name, prompt in prompts.items():
                own = bench.take_blocks(-(-(len(prompt) + 4 - shared) // bench.block_size))
                bench.add(name, prompt, computed=shared, blocks=[*first.blocks[:2], *own])
            bench.run({name: len(prompt) - shared for name, prompt in prompts.items()}, shared=2)
            for names in ("abc", "cab", "cb"):
                bench.run(dict.fromkeys(names, 1), shared=2)
            for name in prompts:
                _same(bench, name, expected[name], "with two blocks shared by all rows")

    @check("executor.copies", since="0.1")
    def test_copies_run_in_order_and_before_the_step_writes(self) -> None:
        """A request began on copies of another's blocks and generated other tokens than alone. Copies run one after the other (one may read what
        the one before it wrote), after the rows have changed and before the step writes, since a source may belong to another request by then."""
        with self._bench() as bench:
            length = bench.block_size + bench.block_size // 2 + 1
            prompt = bench.prompt(length)
            expected, other = bench.alone("a", prompt, 3), bench.alone("other", bench.prompt(length, variant=1), 1)
            source = bench.add("source", prompt, room=0)
            bench.prefill("source")
            middle, table = bench.take_blocks(len(source.blocks)), bench.take_blocks(-(-(length + 8) // bench.block_size))
            bench.remove("source")
            bench.add("other", bench.prompt(length, variant=1), blocks=source.blocks)
            bench.add("a", prompt, computed=length - 1, blocks=table)
            links = [*zip(source.blocks, middle, strict=True), *zip(middle, table, strict=False)]
            bench.run({"other": length, "a": 1}, copies=[BlockCopy(src, dst) for src, dst in links])
            _same(bench, "other", other, "in blocks that were copied before it wrote to them")
            bench.decode("a", steps=2)
            _same(bench, "a", expected, "on copies of copies of another's blocks, which a third wrote to in the same step")

    # Logprobs

    @check("executor.logprobs", since="0.1", capability="logprobs")
    def test_logprobs_are_of_the_rows_that_sample(self) -> None:
        """`Result.logprobs` must have a line for each row with `yields_token`, in order, when one of them asks: column 0 is the sampled token, then
        come the k most likely, best first; `ranks` count from 1."""
        with self._bench() as bench:
            self._seat(bench, "b")
            bench.add("a", bench.prompt(5), logprobs=3)
            bench.add("c", self._prompt(bench, "c"))
            for counts in ({"c": 9, "a": 5, "b": LENGTHS["b"]}, {"b": 1, "c": 9, "a": 1}):
                result = bench.run(counts)
                sampled = [bench.tokens[name][-1] for name in counts if name != "c"]
                if result.logprobs is None:
                    fail("a row asks for logprobs, and Result.logprobs is None")
                _check_logprobs(result.logprobs, sampled, 3, "sampled")
                greedy = [name for name in counts if name != "c"].index("a")
                require(result.logprobs.ranks[greedy] == 1, f"the rank of a greedy token is {result.logprobs.ranks[greedy]}, expected 1")

    @check("executor.prompt_logprobs", since="0.1", capability="logprobs")
    def test_prompt_logprobs_are_of_the_token_after_each_one_computed(self) -> None:
        """`Result.prompt_logprobs[i]` must have a line for each token that row i computed, of the known token after it (the last known one has none
        after it), for the rows that ask and no others; in chunks as at once."""
        for chunks in ([11], [1, 6, 4]):
            with self._bench() as bench:
                prompt = bench.prompt(11)
                self._seat(bench, "c")
                bench.add("a", prompt, prompt_logprobs=2)
                computed = 0
                for chunk in chunks:
                    result = bench.run({"c": 3, "a": chunk})
                    after = prompt[computed + 1 : computed + chunk + 1]
                    computed += chunk
                    found: Mapping[int, HostLogprobs] = result.prompt_logprobs
                    require(list(found) == [1], f"row 1 of the batch asks for prompt logprobs, and rows {list(found)} have them")
                    _check_logprobs(found[1], after, 2, f"known after those computed, in chunks of {chunks}")
                require(not bench.run({"a": 1}).prompt_logprobs, "a decode has prompt logprobs")

    # Helpers

    def _make(self, model_dir: Path | None = None) -> Executor:
        clock: Clock = VirtualClock() if self.capabilities.virtual_clock else WallClock()
        executor: Executor = self.make(_context(self.model, clock, model_dir))
        return executor

    @contextmanager
    def _bench(self) -> Iterator[Bench]:
        """Start an executor, and stop it at the end."""
        executor = self._make()
        try:
            yield Bench(executor, executor.start())
        finally:
            executor.stop()

    def _prompt(self, bench: Bench, name: str) -> list[int]:
        return bench.prompt(LENGTHS[name], variant=ord(name))

    def _seat(self, bench: Bench, *names: str, rows: Mapping[str, int] | None = None) -> None:
        for name in names:
            bench.add(name, self._prompt(bench, name), row=(rows or {}).get(name), **SEEDED.get(name, {}))


@cache
def _seen(suite: type[ExecutorSuite]) -> frozenset[str]:
    """Return the capabilities that only a started executor shows."""
    before = set(child_processes())
    with suite()._bench() as bench:
        has = {"workers": bool(set(child_processes()) - before), "shared_prefix": bench.capacity.shared_prefix}
    return frozenset(name for name, there in has.items() if there)


def _context(model: str, clock: Clock, model_dir: Path | None) -> ExecutorContext:
    """Make a context as the engine does."""
    registry = installed(tuple(sys.path))
    config = EngineConfig.load({"model": model, **SETTINGS})
    parts = find_parts(config, registry)
    return ExecutorContext(
        config=config.executor_config(model_dir or resolve_model(model, registry)),
        clock=clock,
        models=tuple(part.ref() for part in parts.models),
        attention=tuple(part.ref() for part in parts.attention),
        sampler=parts.sampler.ref(),
    )


def _stop(executor: Executor, when: str) -> None:
    try:
        executor.stop()
    except Exception as error:
        fail(f"stop() {when} raised {describe(error)}")


def _quiet(executor: Executor, when: str) -> None:
    try:
        executor.check()
    except Exception as error:
        fail(f"check() {when} raised {describe(error)}")


def _same(bench: Bench, name: str, expected: list[int], how: str) -> None:
    """Check that a request's tokens are those that it generates alone, as far as both go."""
    tokens = bench.tokens.pop(name)
    bench.tokens[name] = []
    told = f"request {name} generated {tokens} {how}; alone, its prompt computed at once, {expected}"
    require(tokens and tokens[: len(expected)] == expected[: len(tokens)], told)


def _check_logprobs(found: HostLogprobs, tokens: list[int], k: int, which: str) -> None:
    shapes = found.token_ids.shape, found.logprobs.shape, found.ranks.shape
    wanted = (len(tokens), 1 + k), (len(tokens), 1 + k), (len(tokens),)
    require(shapes == wanted, f"logprobs of {len(tokens)} tokens {which}, and of the {k} likeliest: shapes are {shapes}, expected {wanted}")
    require(found.token_ids[:, 0].tolist() == tokens, f"column 0 is {found.token_ids[:, 0].tolist()}; the tokens {which} are {tokens}")
    for ids, logprobs, rank in zip(found.token_ids.tolist(), found.logprobs.tolist(), found.ranks.tolist(), strict=True):
        told = f"token ids {ids}, logprobs {logprobs}, rank {rank}"
        require(max(logprobs) <= 1e-6 and sum(map(np.exp, logprobs[1:])) <= 1.001, f"{told}: these aren't logarithms of probabilities")
        require(all(one >= other for one, other in pairwise(logprobs[1:])), f"{told}: the likeliest must come best first")
        require(len(set(ids[1:])) == k, f"{told}: the likeliest must differ")
        require(rank >= 1 and (rank > k or ids[rank] == ids[0] or logprobs[rank] == logprobs[0]), f"{told}: the token isn't where its rank says")
