"""`ExecutorLate`: the checks of late sampling, for requests with a grammar."""

import numpy as np

from dovetail.api.executor import HostLogprobs
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_subject import LENGTHS, SEEDED, ExecutorSubject, require_same


class ExecutorLate(ExecutorSubject):
    """Steps whose sampling waits for masks."""

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
                require_same(bench, name, expected[name], "in late steps without masks")

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
            require_same(bench, "b", expected["b"], "beside rows with masks")
            require_same(bench, "c", expected["c"][:2], "after a step with a mask")

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
            require_same(bench, "a", expected, "sampled late, each mask allowing the token that it had alone")

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
        """Return the log-probabilities of the first token of a greedy request, with three alternatives."""
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
