"""Right components in styles that a suite might take for wrong. They conform."""

from __future__ import annotations

import contextlib
from collections import UserDict, deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from dovetail.api.component import KINDS
from dovetail.api.drafter import Drafter, DrafterContext
from dovetail.api.kv_cache import Allocation, KVCacheManager, KVContext, Pages
from dovetail.api.logits_processor import LogitsProcessor
from dovetail.api.model import BuildContext, ModelInputs
from dovetail.api.observer import (
    EngineStopped,
    Observer,
    ObserverContext,
    RequestArrived,
    RequestFinished,
    StepFinished,
)
from dovetail.api.parser import Parser
from dovetail.api.prefix_cache import PrefixCache
from dovetail.api.sampler import Sampler
from dovetail.api.scheduler import Scheduler
from dovetail.api.tokenizer import Tokenizer
from dovetail.errors import UnsupportedError
from dovetail.request import Request
from dovetail.testing import elsewhere
from dovetail.testing.checks import Absent, CheckFailed, checks_of
from dovetail.testing.hanging import ended_after
from dovetail.testing.suite import Suite
from dovetail.testing.suites import suite_for
from dovetail.testing.suites.attention import AttentionSuite
from dovetail.testing.suites.drafter import DrafterSuite
from dovetail.testing.suites.executor import ExecutorSuite
from dovetail.testing.suites.grammar import GrammarSuite
from dovetail.testing.suites.kv_cache import KVCacheSuite
from dovetail.testing.suites.kv_tier import KVTierSuite
from dovetail.testing.suites.logits_processor import LogitsProcessorSuite
from dovetail.testing.suites.model import ModelSuite
from dovetail.testing.suites.observer import ObserverSuite
from dovetail.testing.suites.parser import ParserSuite
from dovetail.testing.suites.sampler import SamplerSuite
from dovetail.testing.suites.scheduler import SchedulerSuite
from dovetail.testing.suites.tokenizer import TokenizerSuite
from dovetail_models.qwen3 import Qwen3
from tests.conformance.fewer import use_fewer
from tests.conformance.kept_processes import KeptProcesses
from tests.conformance.odd_backends import (
    AtFirstUse,
    LazyLists,
    NumbersAsHandles,
    PicksAtTheEnd,
    Transposed,
)
from tests.conformance.odd_drafters import InAThread, Ranges
from tests.conformance.odd_parsers import CharByChar, Thoughts, WholeCalls
from tests.conformance.odd_samplers import InClosures, OneBuffer, OnTheHost, Slotted
from tests.conformance.odd_schedulers import FromItsHeap, InAGenerator
from tests.conformance.odd_tiers import OnALoop
from tests.conformance.odd_tokenizers import BytesAsIds, Reluctant
from tests.frozen import freeze_what_lasts
from tests.support import FULL

CHECK_S = 300.0  # of a check; the suite's own limit is that of pytest's plugin
OF_ALL_KINDS = "hygiene."  # in processes of their own; `test_builtins.py` runs them
# What takes most of a suite's time, and is about numbers or a new process, whatever a component's
# style is: `test_builtins.py` runs them in the slow profile, and this file in the full one.
DEAR = {
    "drafter.client",
    "drafter.first_use",
    "executor.adapter_merged",
    "executor.adapter_slots",
    "executor.adapters",
    "executor.capacity",
    "executor.deterministic",
    "executor.draft_model",
    "executor.drafts",
    "executor.drafts_beside",
    "executor.drafts_limits",
    "executor.drafts_masks",
    "executor.drafts_sampling",
    "executor.limits",
    "executor.long_use",
    "executor.pooled_again",
    "executor.pooled_beside",
    "executor.pooled_failed",
    "executor.pooled_settings",
    "executor.processors",
    "executor.settings",
    "executor.settings_used",
    "grammar.accept",
    "grammar.keywords",
    "grammar.regexes",
    "grammar.same_text",
    "logits_processor.first_use",
    "logits_processor.large_ids",
    "observer.first_use",
    "sampler.filter_order",
    "sampler.first_use",
    "sampler.draft_rules",
    "sampler.large_ids",
    "sampler.large_vocabulary",
    "sampler.many_calls",
    "sampler.min_p",
    "sampler.rules_before_filters",
    "sampler.rules_before_temperature",
    "sampler.temperature",
    "sampler.top_k",
    "sampler.top_p",
    "scheduler.finishes",
    "scheduler.no_starvation",
    "scheduler.replay",
    "tokenizer.exact_long",
}
# of a style that makes long texts dear; its base class passes them in the slow profile
DEAR_OF_ALL_EVENTS = {
    "parser.events",
    "parser.held",
    "parser.linear",
    "parser.long",
    "parser.verbatim",
}


class OfOneTokenizer(Drafter):
    """Completes a phrase by a table of ids, and rejects a tokenizer that has others."""

    def __init__(self, options: BaseModel, context: DrafterContext) -> None:
        super().__init__(options, context)
        self.phrase = context.encode("ok")
        if self.phrase != [7, 8]:
            raise UnsupportedError(f"the ids of 'ok' are {self.phrase}, expected [7, 8]")

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        first, second = self.phrase
        return [
            [second] if (one.output_token_ids or one.prompt_token_ids)[-1] == first else []
            for one in requests
        ]


class ById(PrefixCache):
    """Keeps the request that came first with an id until `free`, and reads no other with this id,
    as one does that keeps hashes of its tokens."""

    def __init__(self, options: BaseModel, context: KVContext) -> None:
        super().__init__(options, context)
        self.known: dict[str, Request] = {}

    def first(self, request: Request) -> Request:
        return self.known.setdefault(request.id, request)

    def lookup(self, request: Request) -> int:
        return super().lookup(self.first(request))

    def pages_needed(
        self, request: Request, num_tokens: int, without: Sequence[Request] = ()
    ) -> int:
        others = [self.first(other) for other in without]
        return super().pages_needed(self.first(request), num_tokens, others)

    def allocate(self, request: Request, num_tokens: int) -> Allocation | None:
        return super().allocate(self.first(request), num_tokens)

    def tables(self, request: Request) -> tuple[Pages, ...]:
        return super().tables(self.first(request))

    def commit(self, request: Request, upto: int) -> None:
        super().commit(self.first(request), upto)

    def uncommit(self, request: Request, upto: int) -> None:
        super().uncommit(self.first(request), upto)

    def fork(self, parent: Request, child: Request, num_tokens: int) -> Allocation | None:
        return super().fork(self.first(parent), self.first(child), num_tokens)

    def trim(self, request: Request, computed: int) -> None:
        super().trim(self.first(request), computed)

    def free(self, request: Request) -> None:
        super().free(self.known.pop(request.id, request))


class ByIdWithARing(Observer):
    """Keeps when requests arrived, by id, until they end, and the times of the last steps, of which
    a test never sees as many as there is room for."""

    __slots__ = ("arrived", "lines", "times")

    def __init__(self, options: BaseModel, context: ObserverContext) -> None:
        super().__init__(options, context)
        self.arrived = UserDict[str, float]()
        self.times = deque[float](maxlen=1_000)
        self.lines = self.summary()

    def summary(self) -> Iterator[str]:
        while True:
            yield f"{len(self.arrived)} requests, the last steps took {sum(self.times)} s"

    def on_arrived(self, event: RequestArrived) -> None:
        self.arrived[event.request.id] = event.time

    def on_step(self, event: StepFinished) -> None:
        self.times.append(event.ended - event.started)

    def on_finished(self, event: RequestFinished) -> None:
        del self.arrived[event.request.id]

    def on_stopped(self, event: EngineStopped) -> None:
        next(self.lines)


class PlacesRowsByIndex(Qwen3):
    """Copies the embeddings, writes rows by index, and keeps its inputs for no longer than a
    call."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward = model.forward_tapped

        def by_index(inputs: ModelInputs, taps: Sequence[int]) -> Any:
            if inputs.rows is None or inputs.is_row is None:
                return forward(inputs, taps)
            places = inputs.is_row.nonzero()[:, 0]
            x = model.embed(inputs.token_ids)
            rows = x.new_zeros(len(inputs.rows), *x.shape)
            rows[0] = x
            rows[:, places] = inputs.rows[:, places]
            everyone = torch.ones_like(inputs.is_row)
            return forward(replace(inputs, rows=rows, is_row=everyone), taps)

        model.forward_tapped = by_index
        return model  # type: ignore[no-any-return]


ITS_TOKENIZER = DrafterContext(
    max_drafts=8, vocab_size=32_000, max_model_len=4096, encode=lambda text: [7, 8]
)


@pytest.fixture(scope="module")
def kept_processes() -> Iterator[KeptProcesses]:
    kinds = [f"dovetail.testing.suites.{kind}" for kind in ("drafter", "parser", "tokenizer")]
    with closing(KeptProcesses((), kinds)) as processes:
        yield processes


@pytest.fixture(autouse=True)
def fewer_examples(kept_processes: KeptProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the checks with few examples: the mutants show what checks find, with all examples. One
    process answers for all components."""
    if not FULL:
        use_fewer(monkeypatch.setattr)
        monkeypatch.setattr(elsewhere, "run_python", kept_processes.run_python)


def run_checks(suite: type[Suite], **settings: Any) -> None:
    """Run the checks of a suite that apply, but those of all kinds, and the dear ones in the full
    profile only."""
    made = type("Made", (suite,), settings)()
    dear = DEAR | (DEAR_OF_ALL_EVENTS if settings["component"] is CharByChar else set())
    for id, check in checks_of(suite).items():
        if not id.startswith(OF_ALL_KINDS) and (FULL or id not in dear):
            freeze_what_lasts()  # the first executor imports transformers, and each collects garbage
            with contextlib.suppress(Absent), ended_after(CHECK_S):
                getattr(made, check.attribute)()


@pytest.mark.slow("runs a suite")
def test_a_drafter_of_one_tokenizer_conforms_with_it() -> None:
    run_checks(DrafterSuite, component=OfOneTokenizer, context=ITS_TOKENIZER)


def test_dear_checks_exist() -> None:
    assert {id for kind in KINDS for id in checks_of(suite_for(kind))} >= DEAR | DEAR_OF_ALL_EVENTS


def test_a_drafter_that_rejects_the_suites_tokenizer_is_told_what_to_set() -> None:
    with pytest.raises(CheckFailed, match=r"expected \[7, 8\]. .* set `context` of its suite"):
        run_checks(DrafterSuite, component=OfOneTokenizer)


@pytest.mark.slow("tries many texts, one by one")
@pytest.mark.parametrize("parser", [WholeCalls, CharByChar, Thoughts])
def test_a_parser_in_an_odd_style_conforms(parser: type[Parser]) -> None:
    run_checks(ParserSuite, component=parser)


@pytest.mark.slow("tries many texts, in several processes")
@pytest.mark.parametrize("tokenizer", [BytesAsIds, Reluctant])
def test_a_tokenizer_in_an_odd_style_conforms(tokenizer: type[Tokenizer]) -> None:
    run_checks(TokenizerSuite, component=tokenizer)


@pytest.mark.slow("replays the scripts of the kind")
@pytest.mark.parametrize("manager", [ById, LazyLists])
def test_a_manager_in_an_odd_style_conforms(manager: type[KVCacheManager]) -> None:
    run_checks(KVCacheSuite, component=manager)


@pytest.mark.slow("plays many scenarios")
@pytest.mark.parametrize("policy", [FromItsHeap, InAGenerator])
def test_a_policy_in_an_odd_style_conforms(policy: type[Scheduler]) -> None:
    run_checks(SchedulerSuite, component=policy)


@pytest.mark.slow("draws many tokens")
@pytest.mark.parametrize("sampler", [OneBuffer, InClosures])
def test_a_sampler_in_an_odd_style_conforms(sampler: type[Sampler]) -> None:
    run_checks(SamplerSuite, component=sampler)


@pytest.mark.slow("changes many logits, number by number")
@pytest.mark.parametrize("processor", [Slotted, OnTheHost])
def test_a_logits_processor_in_an_odd_style_conforms(processor: type[LogitsProcessor]) -> None:
    run_checks(LogitsProcessorSuite, component=processor)


@pytest.mark.slow("tries many texts, in several processes")
@pytest.mark.parametrize("drafter", [InAThread, Ranges])
def test_a_drafter_in_an_odd_style_conforms(drafter: type[Drafter]) -> None:
    run_checks(DrafterSuite, component=drafter)


@pytest.mark.slow("serves thousands of requests")
def test_an_observer_that_keeps_values_by_id_and_has_a_ring_conforms() -> None:
    run_checks(ObserverSuite, component=ByIdWithARing)


@pytest.mark.slow("does thousands of jobs, in other processes, too")
def test_a_tier_on_an_asyncio_loop_conforms() -> None:
    run_checks(KVTierSuite, component=OnALoop)


@pytest.mark.slow("compares with transformers' models")
@pytest.mark.parametrize("check", ["media_rows", "media_levels", "media_axes", "taps", "wanted"])
def test_a_model_that_places_rows_by_index_conforms(check: str) -> None:
    suite = type("Made", (ModelSuite,), {"component": PlacesRowsByIndex})()
    getattr(suite, f"test_{check}")()


@pytest.mark.slow("compiles each grammar twice")
def test_a_grammar_backend_that_compiles_at_the_first_use_conforms() -> None:
    run_checks(GrammarSuite, component=AtFirstUse)


@pytest.mark.slow("compares values with an oracle's")
def test_an_attention_backend_that_keeps_k_transposed_conforms() -> None:
    run_checks(AttentionSuite, component=Transposed)


@pytest.mark.slow("starts many executors")
def test_an_executor_whose_handles_are_numbers_conforms() -> None:
    run_checks(ExecutorSuite, component=NumbersAsHandles)


@pytest.mark.slow("compares with transformers' models")
@pytest.mark.parametrize("check", ["wanted", "inputs_and_results_are_the_callers", "taps"])
def test_a_model_that_picks_states_at_the_end_conforms(check: str) -> None:
    suite = type("Made", (ModelSuite,), {"component": PicksAtTheEnd})()
    getattr(suite, f"test_{check}")()
