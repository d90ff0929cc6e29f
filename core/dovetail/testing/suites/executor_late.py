"""`ExecutorLate`: checks of late sampling, for requests with a grammar."""

import numpy as np

from dovetail.api.executor import HostLogprobs
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_sampling import HOT
from dovetail.testing.suites.executor_subject import (
    LENGTHS,
    SEEDED,
    SETTINGS,
    ExecutorSubject,
    require_same,
)


class ExecutorLate(ExecutorSubject):
    """Steps with sampling that waits for masks."""

    @check("executor.late", since="1.0", capability="masks")
    def test_a_late_step_without_masks_samples_as_any_other(self) -> None:
        """`late` steps sampled without a mask gave other tokens. `submit` of a late batch only runs
        the model, `sample` samples for the rows that yield a token."""
        with self._shared_bench() as bench:
            expected = {
                name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {}))
                for name in LENGTHS
            }
            self._add(bench, *LENGTHS)
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

    @check("executor.masks", since="1.0", capability="masks")
    def test_masked_rows_sample_what_is_allowed_and_others_what_they_would(self) -> None:
        """A row sampled a token that its mask forbids; or not the most likely of two allowed ones,
        which it had sampled before; or a row without a mask sampled another token than by itself,
        possibly after a step with a mask. `Masks.lines` are indices among lines: rows that yield no
        token have none. `Masks.words` may be in other memory than `mask_words` returned."""
        with self._shared_bench() as bench:
            expected = {
                name: bench.alone(name, self._prompt(bench, name), 3, **SEEDED.get(name, {}))
                for name in LENGTHS
            }
            last = bench.capacity.vocab_size - 1
            self._add(bench, *LENGTHS)
            bench.submit({"c": 20, "a": LENGTHS["a"], "b": LENGTHS["b"]}, late=True)
            bench.sample({"a": [last]})
            bench.collect()
            require(
                bench.tokens["a"] == [last],
                f"only token {last} was allowed, and {bench.tokens['a']} was sampled",
            )
            bench.submit({"b": 1, "c": LENGTHS["c"] - 20, "a": 1}, late=True)
            bench.sample({"a": [0], "c": sorted({expected["c"][0], last})}, own_memory=False)
            bench.collect()
            require(
                bench.tokens["a"] == [last, 0],
                f"only token 0 was allowed, and {bench.tokens['a'][1:]} was sampled",
            )
            bench.submit({"b": 1, "c": 1, "a": 1}, late=True)
            bench.sample({"a": [last]})
            bench.collect()
            require(
                bench.tokens["a"] == [last, 0, last],
                f"only token {last} was allowed, and {bench.tokens['a'][2:]} was sampled",
            )
            bench.submit({"c": 1}, late=True)
            bench.sample({})
            bench.collect()
            require_same(bench, "b", expected["b"], "beside rows with masks")
            require_same(
                bench, "c", expected["c"], "after a step with a mask, in late steps without one"
            )

    @check("executor.masked_draws", since="1.0", capability="masks")
    def test_a_masked_row_draws_among_what_is_allowed(self) -> None:
        """At a temperature at which nearly all tokens are likely, rows with two allowed ids drew
        another one, or all drew the same, or drew others when repeated with the same seeds. Apply
        the mask to the logits, then sample by the row's own parameters."""
        with self._shared_bench() as bench:
            if not self.declares("samples"):
                return
            allowed = [0, bench.capacity.vocab_size - 1]
            drawn, again = (
                [token for turn in range(2) for token in _draw(bench, allowed, turn)]
                for _ in range(2)
            )
            told = (
                f"{len(drawn)} rows with different seeds at temperature {HOT:g}, allowed "
                f"{allowed}, drew {drawn}"
            )
            require(set(drawn) == set(allowed), told)
            require(drawn == again, f"{told}, and then {again}")

    @check("executor.late_overlap", since="1.0", capability="masks")
    def test_a_late_step_may_be_submitted_while_another_is_in_flight(self) -> None:
        """With two steps in flight, a late step was submitted before the results of the previous
        one were collected, and sampled afterwards, and its tokens differ. The next step reads the
        tokens sampled by the late one."""
        with self._shared_bench() as bench:
            if bench.capacity.max_in_flight < 2:
                return
            expected = bench.alone("a", self._prompt(bench, "a"), 4)
            self._add(bench, "a")
            bench.submit({"a": LENGTHS["a"]})
            for _ in range(3):
                bench.submit({"a": 1}, late=True)
                bench.collect()
                bench.sample({"a": sorted({expected[len(bench.tokens["a"])], 0})})
            bench.collect()
            require_same(
                bench,
                "a",
                expected,
                "sampled late, each mask allowing the token that it generates by itself",
            )

    @check("executor.masked_logprobs", since="1.0", capability="logprobs")
    def test_masks_leave_log_probabilities_as_they_are(self) -> None:
        """The log-probability of a token sampled under a mask isn't that of the unmasked
        distribution, or the most likely tokens aren't."""
        with self._shared_bench() as bench:
            if not self.declares("masks"):
                return
            raw = self._first_logprobs(bench, None)
            other = int(raw.token_ids[0, 2])  # the second most likely
            masked = self._first_logprobs(bench, [other])
            require(
                int(masked.token_ids[0, 0]) == other,
                f"only token {other} was allowed, and {masked.token_ids[0, 0]} was sampled",
            )
            near = np.allclose(
                masked.logprobs[0, 1:], raw.logprobs[0, 1:], atol=1e-4
            ) and np.isclose(masked.logprobs[0, 0], raw.logprobs[0, 2], atol=1e-4)
            require(
                bool(near),
                f"log-probabilities were {raw.logprobs[0].tolist()}, and under a mask "
                f"{masked.logprobs[0].tolist()}",
            )

    def _first_logprobs(self, bench: Bench, allowed: list[int] | None) -> HostLogprobs:
        """Return the log-probabilities of the first token of a greedy request, with three
        alternatives."""
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


def _draw(bench: Bench, allowed: list[int], turn: int) -> list[int]:
    """Return the first tokens of as many rows as the config allows, in one late step."""
    names = [f"{turn}.{row}" for row in range(SETTINGS["max_num_seqs"])]
    for name in names:
        bench.add(name, bench.prompt(5), room=1, temperature=HOT)
    bench.submit(dict.fromkeys(names, 5), late=True)
    bench.sample(dict.fromkeys(names, allowed))
    bench.collect()
    bench.remove(*names)
    return [bench.tokens.pop(name)[0] for name in names]
