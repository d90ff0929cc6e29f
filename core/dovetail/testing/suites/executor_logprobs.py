"""`ExecutorLogprobs`: checks of log-probabilities."""

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from dovetail.api.executor import HostLogprobs, PromptLogprobs
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.executor_subject import LENGTHS, ExecutorSubject


class ExecutorLogprobs(ExecutorSubject):
    """Log-probabilities of sampled tokens and of prompts."""

    @check("executor.logprobs", since="1.0", capability="logprobs")
    def test_logprobs_are_of_the_rows_that_sample(self) -> None:
        """`Result.logprobs` must have a line for each row with `yields_token`, in order, if any row
        requests them, with 1 + k columns, where k is the largest number requested: column 0 is the
        sampled token, followed by as many of the most likely as the row requests, best first;
        `ranks` count from 1."""
        with self._shared_bench() as bench:
            self._add(bench, "b")
            bench.add("a", bench.prompt(5), logprobs=3)
            bench.add("c", self._prompt(bench, "c"))
            bench.add("less", bench.prompt(4), logprobs=1)
            for counts in (
                {"c": 9, "a": 5, "b": LENGTHS["b"], "less": 4},
                {"b": 1, "less": 1, "c": 9, "a": 1},
            ):
                result = bench.run(counts)
                sampled = [bench.tokens[name][-1] for name in counts if name != "c"]
                if result.logprobs is None:
                    fail("a row asks for logprobs, and Result.logprobs is None")
                _check_logprobs(
                    result.logprobs,
                    sampled,
                    [{"a": 3, "less": 1}.get(name) for name in counts if name != "c"],
                    "sampled",
                )
                greedy = [name for name in counts if name != "c"].index("a")
                require(
                    result.logprobs.ranks[greedy] == 1,
                    f"the rank of a greedy token is {result.logprobs.ranks[greedy]}, expected 1",
                )

    @check("executor.prompt_logprobs", since="1.0", capability="logprobs")
    def test_prompt_logprobs_are_of_the_token_after_each_one_computed(self) -> None:
        """The part `PromptLogprobs` must have, for i, a line for each token that the row at
        position i of the batch computed, about the known token after it (there is none after the
        last), for the rows that request them and no others; in chunks as at once."""
        for chunks in ([11], [1, 6, 4]):
            with self._shared_bench() as bench:
                prompt = bench.prompt(11)
                self._add(bench, "c")
                bench.add("a", prompt, row=5, prompt_logprobs=2)
                computed = 0
                for chunk in chunks:
                    result = bench.run({"c": 3, "a": chunk})
                    after = prompt[computed + 1 : computed + chunk + 1]
                    computed += chunk
                    found: Mapping[int, HostLogprobs] = result.values(PromptLogprobs)
                    told = (
                        f"row 5, at place 1 of the batch, asks for prompt logprobs, and the "
                        f"places {list(found)} have them"
                    )
                    require(list(found) == [1], told)
                    _check_logprobs(
                        found[1],
                        after,
                        [2] * len(after),
                        f"known after those computed, in chunks of {chunks}",
                    )
                require(
                    not bench.run({"a": 1}).values(PromptLogprobs), "a decode has prompt logprobs"
                )
        with self._shared_bench() as bench:
            asked = {
                "a": (bench.prompt(11), 11, 2),
                "again": (bench.prompt(9, variant=1), 6, 1),
            }  # the second has generated three tokens before
            for name, (tokens, prompt_len, k) in asked.items():
                bench.add(name, tokens, prompt_len=prompt_len, prompt_logprobs=k)
            found = bench.prefill("again", "a").values(PromptLogprobs)
            require(
                sorted(found) == [0, 1],
                f"both rows of the batch ask for prompt logprobs, and the places {sorted(found)} "
                f"have them",
            )
            for index, name in enumerate(("again", "a")):
                tokens, _, k = asked[name]
                _check_logprobs(
                    found[index],
                    tokens[1:],
                    [k] * len(tokens[1:]),
                    f"known after those computed, of the row at place {index} of two that ask",
                )


def _check_logprobs(
    found: HostLogprobs, tokens: list[int], requested: list[int | None], which: str
) -> None:
    """`requested` are the numbers of most likely tokens, by line; None: the line is undefined."""
    k = max(number for number in requested if number is not None)
    dtypes = [str(array.dtype) for array in (found.token_ids, found.logprobs, found.ranks)]
    require(
        dtypes == ["int64", "float32", "int64"],
        f"token_ids, logprobs and ranks are {', '.join(dtypes)}; expected int64, float32 and int64",
    )
    shapes = found.token_ids.shape, found.logprobs.shape, found.ranks.shape
    wanted = (len(tokens), 1 + k), (len(tokens), 1 + k), (len(tokens),)
    require(
        shapes == wanted,
        f"logprobs of {len(tokens)} tokens {which}, and of the {k} most likely: shapes are "
        f"{shapes}, expected {wanted}",
    )
    for line, (token, number) in enumerate(zip(tokens, requested, strict=True)):
        if number is None:
            continue
        ids = found.token_ids[line, : 1 + number].tolist()
        logprobs = found.logprobs[line, : 1 + number].tolist()
        rank = int(found.ranks[line])
        require(
            ids[0] == token, f"column 0 of line {line} is {ids[0]}; the tokens {which} are {tokens}"
        )
        told = f"token ids {ids}, logprobs {logprobs}, rank {rank}"
        require(
            max(logprobs) <= 1e-6 and sum(map(np.exp, logprobs[1:])) <= 1.001,
            f"{told}: these aren't logarithms of probabilities",
        )
        require(
            all(one >= other for one, other in pairwise(logprobs[1:])),
            f"{told}: the most likely must be sorted, best first",
        )
        require(len(set(ids[1:])) == number, f"{told}: the most likely must differ")
        require(
            rank >= 1 and (rank > number or ids[rank] == ids[0] or logprobs[rank] == logprobs[0]),
            f"{told}: the token isn't where its rank says",
        )
