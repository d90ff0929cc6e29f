"""Steps in which rows ask for logits processors, with graphs that are played on the CPU: the tokens
are those without graphs, and steps in which nobody asks replay what they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dovetail.api.executor import ComponentRef, NewRow
from dovetail.api.graphs import GraphSupport
from dovetail.api.sampler import (
    Capture,
    Lines,
    RowSampling,
    SampledTokens,
    SampleInputs,
    SamplerCapabilities,
)
from dovetail.errors import PluginError
from dovetail.nn.logprobs import top_logprobs
from dovetail_executors.runtime.logits import LogitsProcessors
from dovetail_executors.runtime.profiling import peak_bytes
from dovetail_executors.runtime.recorded_steps import decode_builders
from tests.e2e import processing
from tests.runtime.fakes import VOCAB, Bench, Greedy
from tests.runtime.recorded import give_graphs

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5], [8]]
PAIR: dict[str, Any] = {"t:shun": {"amount": 5.0, "spare": []}, "t:clip": {"width": 0.5}}
ASKED = RowSampling(logits_processors=PAIR)
SLOW = RowSampling(logits_processors={"t:faulty": {"at": "nowhere"}, **PAIR})


def drawn(logits: torch.Tensor) -> torch.Tensor:
    """Return the least likely of the tokens that are left of clipped logits, otherwise the most
    likely: [n]."""
    clipped = logits.isneginf()
    return (
        logits.masked_fill(clipped, torch.inf)
        .argmin(dim=1)
        .where(clipped.any(dim=1), logits.argmax(dim=1))
    )


class Processing(Greedy):
    capabilities = SamplerCapabilities(cuda_graph=GraphSupport.ALL, processors=True)

    def capture_for(self, host_rows: NDArray[np.int64]) -> Capture | None:
        return Capture.TOKENS

    def sample(self, inputs: SampleInputs) -> SampledTokens:
        logits, process, host_rows = inputs.logits, inputs.process, inputs.host_rows
        if process is None:
            tokens = SampledTokens(logits.argmax(dim=1))
            return super().sample(inputs) if inputs.capture is None else tokens
        if host_rows is None:
            process(logits, 0)
            return SampledTokens(drawn(logits))
        processed = logits.clone()
        for start in range(0, len(logits), 2):  # in parts
            process(processed[start : start + 2], start)
        token_ids = drawn(processed)
        asked = [
            self.rows[row].logprobs
            for row in host_rows.tolist()
            if self.rows[row].logprobs is not None
        ]
        return SampledTokens(token_ids, top_logprobs(logits, token_ids, 1) if asked else None)


def bench_with(*names: str, graphs: bool = False, lines: int = 0) -> Bench:
    bench = Bench(max_lines=lines)
    bench.sampler.__class__ = Processing
    refs = [
        ComponentRef("logits_processor", f"t:{name.lower()}", f"tests.e2e.processing:{name}")
        for name in names
    ]
    if refs:
        bench.make_runner(processors=LogitsProcessors(refs, VOCAB, bench.rows, 4))
    if graphs:
        give_graphs(
            bench, decode_builders(bench.runner.parts, bench.rows.max_lines, bench.recordings)
        )
    return bench


@dataclass
class Told:
    """Calls that the rows of a bench received, and the graphs of each step."""

    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in PROMPTS])
    graphs: list[tuple[str, ...]] = field(default_factory=list)


def play(bench: Bench, samplings: Sequence[RowSampling], *, late: bool = False) -> Told:
    """Compute all prompts, then let three rows decode, then have the second leave for another that
    asks for nothing, then check drafts."""
    told = Told()

    def take(result: Any, rows: Sequence[int], counts: Sequence[int] | None = None) -> None:
        assert not result.failed
        told.graphs.append(result.graphs)
        ids = iter(result.token_ids.tolist())
        for row, count in zip(rows, counts or [1] * len(rows), strict=True):
            told.tokens[row] += [next(ids) for _ in range(count)]

    new: list[NewRow] = [
        bench.new(row, prompt, sampling)
        for row, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
    ]
    take(bench.run({row: len(prompt) for row, prompt in enumerate(PROMPTS)}, new), range(4))
    for _ in range(3):
        take(
            bench.run_late(dict.fromkeys((0, 2, 3), 1), (), {2: range(2, 20)})
            if late
            else bench.run(dict.fromkeys((0, 2, 3), 1)),
            (0, 2, 3),
        )
    take(bench.run({1: 3, 3: 1}, [bench.new(1, [7, 7, 7])], [1]), (1, 3))
    if bench.rows.max_lines > bench.max_rows:
        for drafts in ([5, 5], [0]):
            result = bench.check(dict.fromkeys(range(4), 1), {0: drafts, 3: [told.tokens[3][-1]]})
            assert result.counts is not None
            take(result, range(4), result.counts.tolist())
    take(bench.run({1: 1}), (1,))
    return told


MIXED = [
    ASKED,
    RowSampling(),
    RowSampling(logits_processors={"t:shun": {"amount": 9.0}}),
    RowSampling(),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("lines", [0, 12])
def test_tokens_in_graphs_are_those_without(late: bool, lines: int) -> None:
    plain, replayed = (
        play(bench_with("Shun", "Clip", graphs=graphs, lines=lines), MIXED, late=late)
        for graphs in (False, True)
    )
    assert replayed.tokens == plain.tokens
    assert (
        replayed.graphs[1:4]
        == [("model", "sampling_processed") if late else ("decode_processed",)] * 3
    )
    assert replayed.graphs[-1] == ("decode",), "of a row that doesn't ask"
    nobody = play(bench_with(graphs=True, lines=lines), [RowSampling()] * 4, late=late)
    assert [nobody.tokens[row][:4] for row in (1, 3)] == [
        plain.tokens[row][:4] for row in (1, 3)
    ], "which don't ask"
    assert nobody.tokens[0] != plain.tokens[0]


@pytest.mark.parametrize("late", [False, True])
def test_steps_in_which_nobody_asks_replay_what_they_do_without_processors(late: bool) -> None:
    with_them, without = (
        play(bench_with(*names, graphs=True), [RowSampling()] * 4, late=late)
        for names in (("Shun", "Clip"), ())
    )
    assert (with_them.tokens, with_them.graphs) == (without.tokens, without.graphs)


def test_a_step_in_which_a_row_asks_for_one_that_cannot_be_captured_is_sampled_outside_of_graphs() -> (
    None
):
    plain, replayed = (
        play(bench_with("Shun", "Clip", "Faulty", graphs=graphs), [SLOW, *MIXED[1:]])
        for graphs in (False, True)
    )
    assert replayed.tokens == plain.tokens
    assert replayed.graphs[1:4] == [()] * 3
    assert plain.tokens == play(bench_with("Shun", "Clip"), MIXED).tokens, (
        "the other changes nothing"
    )


def test_a_mask_holds_after_processors_and_log_probabilities_are_of_raw_logits() -> None:
    bench, plain = bench_with("Shun", "Clip", graphs=True), bench_with()
    asked = replace(ASKED, logprobs=1)
    [logprobs, raw] = [
        one.run_late({0: 5}, [one.new(0, PROMPTS[0], sampling)], {0: [11, 12]}).logprobs
        for one, sampling in ((bench, asked), (plain, replace(asked, logits_processors={})))
    ]
    assert logprobs is not None
    assert raw is not None
    assert logprobs.token_ids[0, 0] in (11, 12)
    assert (logprobs.token_ids[0, 1], logprobs.logprobs[0, 1]) == (
        raw.token_ids[0, 1],
        raw.logprobs[0, 1],
    )


def test_one_that_says_it_can_be_captured_and_cannot_is_named() -> None:
    class Liar(processing.Clip):
        def apply(self, logits: torch.Tensor, lines: Lines) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processing, "Clip", Liar)
        with pytest.raises(
            PluginError,
            match=r"logits processor t:clip declares GraphSupport.ALL, but can't be recorded: "
            r"RuntimeError: operation not",
        ):
            bench_with("Shun", "Clip", graphs=True)


class Counting(processing.Shun):
    calls: ClassVar[list[tuple[int, float]]] = []  # lines, and what the rows ask for

    def apply(self, logits: torch.Tensor, lines: Lines) -> None:
        self.calls.append((len(logits), float(self.amounts[lines.rows].sum())))


def test_the_steps_that_are_profiled_apply_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processing, "Shun", Counting)
    Counting.calls.clear()
    bench = bench_with("Shun", "Clip", lines=12)
    for name, value in {
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 500,
        "memory_reserved": 300,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8_000, 10_000))
    peak_bytes(bench.runner, 32)
    assert Counting.calls == [
        (2, 4.0),
        (2, 4.0),
        *[(2, 2.0 * count) for count in (2, 2, 2, 2, 2, 2)],
    ]
    assert not bench.sampler.rows
    bench.run({0: 1}, [bench.new(0, [3])])
    assert len(Counting.calls) == 8, "nobody asks any more"
