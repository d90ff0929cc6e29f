"""`ExecutorSampling`: checks that a request's sampling parameters are applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dovetail.testing.checks import check, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_subject import ExecutorSubject

HOT = 50.0  # a temperature at which nearly any token may come
SEEDS = 6
SEED = 0x5DEECE66D1234567
BITS = 8  # of a seed that are changed in one step
RETURNS = (1, 4)  # tokens after which a request is preempted
COUNT = 6  # tokens that it generates
LISTS = (1, 5, 100)  # entries of parameters that are lists
LEADING = ("logit_bias", "allowed_token_ids")  # those that lead to a token


class ExecutorSampling(ExecutorSubject):
    """Checks that the sampler is used; it has its own suite."""

    @check("executor.sampling", since="1.0", capability="samples")
    def test_each_row_is_sampled_by_its_own_parameters(self) -> None:
        """A row's `NewRow.sampling` was ignored, in whole or in part: rows were greedy that
        shouldn't be, or the other way round, or a rule had no effect. Pass each added row's
        parameters to the sampler (`Sampler.update`) before it samples for it. An executor with
        `virtual_clock` computes nothing, and may sample arbitrarily."""
        with self._shared_bench() as bench:
            prompt = bench.prompt(9)
            (greedy,) = _first(bench, prompt, {})
            other = (greedy + 1) % bench.capacity.vocab_size
            hot = [{"temperature": HOT, "seed": seed} for seed in range(SEEDS)]
            tokens = _first(bench, prompt, *hot)
            again = _first(bench, prompt, *hot)
            require(
                len(set(tokens)) > 1,
                f"at temperature {HOT:g}, {SEEDS} seeds gave the tokens {tokens}",
            )
            require(
                again == tokens,
                f"at temperature {HOT:g}, {SEEDS} seeds gave the tokens {tokens}, and then {again}",
            )
            filters: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}]
            for fields, token in zip(
                filters,
                _first(bench, prompt, *({**hot[-1], **one} for one in filters)),
                strict=True,
            ):
                require(
                    token == greedy,
                    f"with {fields} at temperature {HOT:g} token {token} was sampled, not the most "
                    f"likely one, {greedy}",
                )
            leading: list[dict[str, Any]] = [
                {"logit_bias": ((other, 1e4),)},
                {"allowed_token_ids": (other,)},
            ]
            for fields, token in zip(leading, _first(bench, prompt, *leading), strict=True):
                require(token == other, f"with {fields} token {token} was sampled")
            against: list[dict[str, Any]] = [
                {"bad_words": ((greedy,),)},
                {"min_tokens": 2, "stop_token_ids": (greedy,)},
                {"logit_bias": ((greedy, -1e4),)},
            ]
            for fields, token in zip(against, _first(bench, prompt, *against), strict=True):
                require(token != greedy, f"with {fields} token {token} was sampled anyway")
            penalties: list[dict[str, Any]] = [
                {},
                {"presence_penalty": 100.0},
                {"frequency_penalty": 100.0},
                {"repetition_penalty": 100.0},
            ]
            likely = {
                "logit_bias": ((other, 50.0),),
                "prompt_len": len(prompt) - 2,
            }  # to generate again what was generated
            came = _first(
                bench, [*prompt[:-2], other, 0], *({**likely, **penalty} for penalty in penalties)
            )
            require(came[0] == other, f"with a bias of 50 on token {other}, {came[0]} was sampled")
            for fields, token in zip(penalties[1:], came[1:], strict=True):
                require(
                    token != other,
                    f"with {fields}, token {token} was sampled again after it had been generated",
                )

    @check("executor.sampling_lists", since="1.1", capability="samples")
    def test_all_entries_of_a_list_count(self) -> None:
        """A row has 1, 5 or 100 `bad_words`, `stop_token_ids` before `min_tokens`,
        `allowed_token_ids` or tokens in `logit_bias`, and one of them had no effect, the first or
        the last; or not for a row that returned with tokens of its own."""
        with self._shared_bench() as bench:
            prompt = bench.prompt(9)
            (greedy,) = _first(bench, prompt, {})
            other, *fillers = (
                token for token in range(bench.capacity.vocab_size) if token != greedy
            )
            for count in LISTS:
                rows = [
                    fields
                    for at in (0, count - 1)
                    for fields in _lists(greedy, other, fillers[: count - 1], at)
                ]
                for prompt_len in (len(prompt), len(prompt) - 2):
                    told = {"prompt_len": prompt_len}
                    tokens = _first(bench, prompt, *({**told, **fields} for fields in rows))
                    for fields, token in zip(rows, tokens, strict=True):
                        (name, *_) = fields
                        right = token == other if name in LEADING else token != greedy
                        which = f"{name} with {count} entries, after {len(prompt) - prompt_len}"
                        require(right, f"{which} tokens of its own: token {token} was sampled")

    @check("executor.seed", since="1.0", capability="samples")
    def test_all_bits_of_a_seed_count(self) -> None:
        """Rows whose seeds differ in some of their 64 bits got the same tokens. Pass
        `RowSampling.seed` on as it is: a seed of 32 bits repeats the answers of others."""
        with self._shared_bench() as bench:
            prompt = bench.prompt(9)
            (token,) = _first(bench, prompt, {"temperature": HOT, "seed": SEED})
            for low in range(0, 64, BITS):
                seeds = [SEED ^ 1 << bit for bit in range(low, low + BITS)]
                hot = [{"temperature": HOT, "seed": seed} for seed in seeds]
                require(
                    set(_first(bench, prompt, *hot)) != {token},
                    f"seeds that differ in one of the bits {low} to {low + BITS - 1} gave the same "
                    f"token, {token}",
                )

    @check("executor.returned_rows", since="1.0", capability="samples")
    def test_a_request_that_returns_is_sampled_as_before(self) -> None:
        """A request with a temperature, penalties, rules or `min_tokens` was preempted, got a row
        again with all its tokens, and generated others than without. All of `NewRow.sampling`
        counts again, and `prompt_len` says where its output began."""
        with self._shared_bench() as bench:
            prompt = self._prompt(bench, "a")
            ways = sampling_ways(bench.alone("a", prompt, 1)[0])
            for name, fields in ways.items():
                bench.add(name, prompt, room=COUNT, **fields)
            bench.prefill(*ways)
            bench.decode(*ways, steps=COUNT - 1)
            expected = {name: bench.tokens.pop(name) for name in ways}
            bench.remove(*ways)
            for received in RETURNS:
                for name, fields in [*ways.items()][::-1]:
                    known = [*prompt, *expected[name][:received]]
                    bench.add(name, known, prompt_len=len(prompt), **fields)
                bench.prefill(*ways)
                bench.decode(*ways, steps=COUNT - 1 - received)
                for name in ways:
                    told = f"{expected[name][received:]} came without a preemption"
                    tokens = bench.tokens.pop(name)
                    require(
                        tokens == expected[name][received:],
                        f"a request {name!r} generated {tokens} after it returned with {received} "
                        f"tokens; {told}",
                    )
                bench.remove(*ways)


def sampling_ways(likely: int) -> Mapping[str, dict[str, Any]]:
    """Return parameters of several kinds, by name. `likely`: a token, which comes again and
    again."""
    few = {"allowed_token_ids": (likely, 0, 1)}
    return {
        "hot": {"temperature": HOT},
        "penalised": {"frequency_penalty": 1.5, "presence_penalty": 0.5, **few},
        "repeated": {"repetition_penalty": 1.5, "temperature": 0.8, **few},
        "banned": {"bad_words": ((likely, likely), (0, 0), (1, 1), (0, 1, likely)), **few},
        "stopped": {"min_tokens": 6, "stop_token_ids": (likely,), **few},
    }


def _lists(greedy: int, other: int, fillers: Sequence[int], at: int) -> list[dict[str, Any]]:
    """Return parameters, each with a list in which one entry matters, at index `at`: it bans the
    greedy token, or allows the other one or makes it the most likely."""

    def with_one(one: Any, others: Iterable[Any]) -> tuple[Any, ...]:
        entries = list(others)
        entries.insert(at, one)
        return tuple(entries)

    return [
        {"bad_words": with_one((greedy,), ((token,) for token in fillers))},
        {"stop_token_ids": with_one(greedy, fillers), "min_tokens": 50},
        {"logit_bias": with_one((other, 1e4), ((token, -1.0) for token in fillers))},
        {"allowed_token_ids": with_one(other, fillers), "logit_bias": ((other, 1e4),)},
    ]


def _first(bench: Bench, tokens: list[int], *rows: dict[str, Any]) -> list[int]:
    """Return the token that comes after `tokens` in each of these rows, which share a step."""
    names = [f"row {index}" for index in range(len(rows))]
    for name, fields in zip(names, rows, strict=True):
        bench.add(name, tokens, room=1, **fields)
    bench.prefill(*names)
    bench.remove(*names)
    return [bench.tokens.pop(name)[0] for name in names]
