"""`ExecutorDeterministic`: checks of rows whose bits must not depend on their company."""

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_subject import LENGTHS, ExecutorSubject

LENGTH = LENGTHS["c"]  # of the prompt
STEPS = 5  # decodes
MARK = "mark"  # name of the request


class ExecutorDeterministic(ExecutorSubject):
    """Rows with `RowSampling.deterministic`, of executors that offer it."""

    @check("executor.deterministic", since="1.1", capability="deterministic")
    def test_deterministic_rows_have_the_same_bits(self) -> None:
        """If `Capacity.not_deterministic` is empty, the token ids and log-probabilities of a row
        with `RowSampling.deterministic` have the same bits alone, beside other rows, in chunks, after
        a prefix that another such row computed, and when it is computed again; with
        `Capacity.deterministic_window` also as drafts, after a row without the mark computed them,
        and with `Capacity.changes_rows` in the same row."""
        alone = self._bits_of([{MARK: LENGTH}, *[{MARK: 1}] * STEPS])
        beside = [{"b": LENGTHS["b"], MARK: LENGTH, "a": LENGTHS["a"]}]
        self._require_bits(
            "beside other rows", alone, [*beside, *[{"a": 1, MARK: 1, "b": 1}] * STEPS]
        )
        chunks = [{MARK: 5}, {"b": LENGTHS["b"], MARK: 30}, {MARK: LENGTH - 35, "b": 1}]
        self._require_bits("in chunks", alone, [*chunks, *[{"b": 1, MARK: 1}] * STEPS])
        with self._shared_bench() as bench:
            first = bench.add("first", _marked(bench), deterministic=True, logprobs=3)
            bench.prefill("first")
            shared = LENGTH // bench.block_size
            own = bench.take_blocks(len(first.blocks) - shared)
            computed = shared * bench.block_size
            bench.add(
                MARK,
                _marked(bench),
                computed=computed,
                blocks=[*first.blocks[:shared], *own],
                deterministic=True,
                logprobs=3,
            )
            found = _run(bench, [{MARK: LENGTH - computed}, *[{MARK: 1}] * STEPS])
        _compare("after a prefix of another row", alone, found)
        with self._shared_bench() as bench:
            known = [*_marked(bench), *[token for token, _ in alone[:3]]]
            bench.add(MARK, known, prompt_len=LENGTH, deterministic=True, logprobs=3)
            found = _run(bench, [{MARK: len(known)}, *[{MARK: 1}] * (STEPS - 3)])
        _compare("computed again", alone[3:], found)
        if bench.capacity.deterministic_window:
            self._require_windows(alone, in_place=False)
        if bench.capacity.changes_rows:
            self._require_windows(alone, in_place=True)

    @check("executor.row_changes", since="1.1", capability="changes_rows")
    def test_rows_change_how_they_sample(self) -> None:
        """With `Capacity.changes_rows`, a row in `Batch.changes` samples the tokens of a row that
        is added with the same tokens and parameters: after it forgot tokens, with other tokens in
        their place, and beside rows that don't change."""
        penalties: dict[str, Any] = {
            "repetition_penalty": 1.6,
            "frequency_penalty": 0.7,
            "min_p": 0.02,
        }
        with self._shared_bench() as bench:
            self._add(bench, "a")
            prompt = bench.prompt(LENGTH, variant=3)
            own = bench.add("change", prompt, temperature=1.1)
            bench.prefill("change", "a")
            bench.decode("a", "change", steps=4)
            kept = LENGTH + 2
            token_ids = [(token + 1) % bench.capacity.vocab_size for token in own.tokens[kept:][:2]]
            settings: dict[str, Any] = {"temperature": 0.8, "seed": own.sampling.seed, **penalties}
            bench.change("change", kept, kept - 1, token_ids, **settings)
            bench.run({"a": 1, "change": 1 + len(token_ids)})
            bench.decode("change", "a", steps=2)
            known = len(own.tokens) - 3
            bench.add("new", own.tokens[:known], prompt_len=LENGTH, **settings)
            bench.run({"new": known})
            bench.decode("new", steps=2)
            found = own.tokens[known:]
            expected = bench.tokens["new"]
        require(
            found == expected,
            f"a row that changed samples {found}; a new one with the same tokens and parameters "
            f"samples {expected}",
        )

    def _require_windows(self, alone: list[tuple[int, bytes]], *, in_place: bool) -> None:
        with self._shared_bench() as bench:
            self._add(bench, "a", "b")
            first = bench.add(MARK, _marked(bench), deterministic=True, logprobs=3)
            bench.prefill(MARK, "a", "b")
            known = [*first.tokens]

            def replace_row(**sampling: Any) -> None:
                if in_place:
                    bench.change(MARK, len(known), LENGTH, **sampling)
                    return
                bench.remove(MARK)
                bench.add(
                    MARK,
                    known,
                    prompt_len=LENGTH,
                    computed=LENGTH,
                    blocks=first.blocks,
                    **sampling,
                )

            replace_row()
            bench.decode("a", MARK, "b", steps=3)
            replace_row(deterministic=True, logprobs=3)
            right = [token for token, _ in alone[1:3]]
            wrong = (alone[3][0] + 1) % bench.capacity.vocab_size
            before = len(bench.tokens[MARK])
            result = bench.check({MARK: [*right, wrong], "a": []}, b=1)
            if result.logprobs is None:
                fail("a row asks for logprobs, and Result.logprobs is None")
            numbers = result.logprobs.logprobs
            found = [
                (token, numbers[line, :4].tobytes())
                for line, token in enumerate(bench.tokens[MARK][before:])
            ]
        what = "checked as drafts, in a row that changed" if in_place else "checked as drafts"
        _compare(what, alone[1:4], found)

    def _require_bits(
        self, what: str, alone: list[tuple[int, bytes]], steps: Sequence[Mapping[str, int]]
    ) -> None:
        _compare(what, alone, self._bits_of(steps))

    def _bits_of(self, steps: Sequence[Mapping[str, int]]) -> list[tuple[int, bytes]]:
        """Return the ids and log-probabilities of the request in these steps."""
        with self._shared_bench() as bench:
            self._add(bench, *sorted({name for step in steps for name in step} - {MARK}))
            bench.add(MARK, _marked(bench), deterministic=True, logprobs=3)
            return _run(bench, steps)


def _marked(bench: Bench) -> list[int]:
    return bench.prompt(LENGTH, variant=5)


def _compare(what: str, alone: list[tuple[int, bytes]], found: list[tuple[int, bytes]]) -> None:
    for index, (wanted, got) in enumerate(zip(alone, found, strict=True)):
        require(
            got == wanted,
            f"output token {index} of a deterministic row, {what}: it is {got[0]}, alone "
            f"{wanted[0]}, and its log-probabilities have other bits",
        )


def _run(bench: Bench, steps: Sequence[Mapping[str, int]]) -> list[tuple[int, bytes]]:
    found = []
    for step in steps:
        before = {name: len(bench.tokens[name]) for name in step}
        result = bench.run(step)
        sampled = [name for name in step if len(bench.tokens[name]) > before[name]]
        if MARK not in sampled:
            continue
        if result.logprobs is None:
            fail("a row asks for logprobs, and Result.logprobs is None")
        line = sampled.index(MARK)
        numbers = result.logprobs.logprobs[line, :4].tobytes()
        found.append((bench.tokens[MARK][-1], numbers))
    return found
