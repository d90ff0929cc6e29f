"""`Graphs`: what recording launches was compiled before, many kernels at once; where that isn't
possible, recording compiles it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.api.graphs import GraphSupport

pytest.importorskip("triton")

from bench.compiling import GPUS
from bench.shapes import SHAPES, write_checkpoint

from dovetail.api.attention import AttentionContext
from dovetail.api.clock import WallClock
from dovetail.api.component import NoOptions
from dovetail.api.executor import ComponentRef
from dovetail.api.sampler import SamplerCapabilities, SamplerContext
from dovetail.config.engine import EngineConfig
from dovetail.config.parts import find_parts
from dovetail.errors import UnsupportedError
from dovetail.nn.adapters import StepAdapters
from dovetail.nn.kernels import available, gpu, launch
from dovetail.nn.parallel import SINGLE
from dovetail.nn.rehearsal import Rehearsal
from dovetail.registry.registry import Registry
from dovetail_attention import triton_backend
from dovetail_attention.triton_backend import TritonAttention
from dovetail_attention.triton_tuning import HOPPER
from dovetail_executors.runtime import graphs as graphs_module
from dovetail_executors.runtime.adapters import COLUMN, AdapterWork
from dovetail_executors.runtime.features import StepFeature
from dovetail_executors.runtime.graphs import Graphs
from dovetail_executors.runtime.kv_pool import KVPool, kv_layout
from dovetail_executors.runtime.loading import ModelPlan, load_model
from dovetail_executors.runtime.logits import LogitsProcessors
from dovetail_executors.runtime.model_io import DECODE, MODEL, GraphKey
from dovetail_executors.runtime.recorded_steps import Builder, decode_builders, mixed_builders
from dovetail_executors.runtime.recording import LayerSplitter
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.runner import Runner
from dovetail_executors.runtime.sampling import Sampling
from dovetail_executors.runtime.step import Step
from tests.kernels import INTERPRETED
from tests.runtime.fakes import VOCAB, Bench
from tests.runtime.recorded import GraphOnCpu, give_graphs, play_graphs_on_the_cpu
from tests.runtime.test_decode_graphs import CapturableGreedy
from tests.support import FULL

noted = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(),
    reason="what a GPU would be given is noted, and nothing is launched",
)

MAX_ROWS, MAX_TOKENS = (64, 1024) if FULL else (16, 256)
BLOCK_SIZE = 16


class Noting(launch.Compiler):
    """Compilation pool that compiles nothing and notes the launched kernels by name."""

    def __init__(self) -> None:
        super().__init__(self, torch.device("cpu"))  # type: ignore[arg-type]
        self.names: dict[tuple[Any, ...], str] = {}

    def submit(self, *job: Any) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def add(self, kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
        super().add(kernel, grid, *args, **options)
        self.names[list(self._jobs)[-1]] = kernel.fn.__name__

    @contextmanager
    def instead(self) -> Iterator[None]:
        token = launch._compiler.set(self)
        yield
        launch._compiler.reset(token)


def not_computed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Stand in for torch's product, which launches none of our kernels: nobody reads its values,
    and in bfloat16 a CPU takes half a second for each."""
    return x.new_zeros(*x.shape[:-1], len(weight))


@pytest.fixture
def graphs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> Graphs:
    """Return the graphs of a small model whose layers have the sizes of a large one, as if on a
    Hopper."""
    monkeypatch.setattr(gpu, "_gpu_of", lambda device: GPUS[90])
    monkeypatch.setattr(triton_backend, "_loads_apart_well", lambda shape, limits: True)
    shape, _, layers = request.param.partition(" of ")
    number = int(layers or 1)
    write_checkpoint(
        replace(SHAPES[shape], layers=number, vocab=4096, intermediate=1024, max_len=2048),
        tmp_path,
    )
    config = EngineConfig.load(
        {"model": str(tmp_path), "load_format": "dummy", "dtype": "bfloat16"}
    )
    parts, backend = (
        find_parts(config, Registry.discover()),
        TritonAttention(NoOptions(), AttentionContext("cpu", "bfloat16", BLOCK_SIZE)),
    )
    assert (backend.tilings, backend.processors) == (HOPPER, 132)
    splitter, device = LayerSplitter(), torch.device("cpu")
    targets = tuple(model.ref() for model in parts.models)
    asked = config.executor_config(tmp_path)
    plan = ModelPlan.of(asked, targets, SINGLE, device)
    pool = KVPool(kv_layout(backend, plan.specs, "bfloat16"), device)
    model = load_model(plan, asked, splitter.wrap(pool.wrap(backend.make_layer)), SINGLE, device)
    rows = RowState(MAX_ROWS, plan.max_model_len, pool.planned.layout, device)
    sampler = parts.sampler.ref().make(SamplerContext("cpu", plan.vocab_size, rows.history))
    processors = LogitsProcessors((), plan.vocab_size, rows, 0)
    sampling = Sampling(sampler, rows, plan.vocab_size, processors)
    runner = Runner(model, backend, pool, sampling, WallClock())
    for module in list(
        sys.modules.values()
    ):  # but not where they come from: what is imported meanwhile would keep them
        for name in ("use_kernels", "has_many_rows"):
            if (
                module.__name__.startswith("dovetail")
                and module is not available
                and name in vars(module)
            ):
                monkeypatch.setattr(module, name, lambda *asked: True)
    sampler.prepare(MAX_ROWS)
    play_graphs_on_the_cpu(monkeypatch)
    monkeypatch.setattr(torch.nn.functional, "linear", not_computed)
    pool.allocate(1)
    rows.pool_allocated(1)
    backend.prepare(MAX_ROWS, MAX_TOKENS, 2048)
    return Graphs.of(runner.parts, splitter, MAX_TOKENS, 600_000_000)


@noted
@pytest.mark.parametrize(
    "graphs", ["qwen3-0.6b", pytest.param("llama-3.2-1b", marks=pytest.mark.full)], indirect=True
)
def test_what_recording_launches_was_compiled_before(graphs: Graphs) -> None:
    ahead, recording = Noting(), Noting()
    with ahead.instead():
        graphs.rehearse()
    with recording.instead():
        graphs.capture()
    assert {
        "_linear",
        "prefill_hopper",
        "decode_shares",
        "_choose",
        "_change",
        "_append",
        "_embed",
    } <= set(recording.names.values())
    assert {kind: name for kind, name in recording.names.items() if kind not in ahead.names} == {}


@noted
@pytest.mark.slow("computes many steps of several layers")
@pytest.mark.parametrize("graphs", ["qwen3-0.6b of 7", "gemma-3-4b of 8"], indirect=True)
def test_so_was_what_blocks_launch_that_were_not_rehearsed(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, recording = Noting(), Noting()
    rehearsed: list[list[int]] = []
    indices = Rehearsal.indices

    def noted_indices(rehearsal: Rehearsal, taps: Collection[int]) -> Iterator[int]:
        rehearsed.append([])
        for index in indices(rehearsal, taps):
            rehearsed[-1].append(index)
            yield index

    monkeypatch.setattr(Rehearsal, "indices", noted_indices)
    with ahead.instead():
        graphs.rehearse()
    every = rehearsed[0]
    if len(every) == 7:  # all alike, but that the first one adds nothing before its norm
        assert rehearsed[-1] == [0, 1, 2, 5, 6]
    monkeypatch.setattr(Rehearsal, "indices", lambda rehearsal, taps: iter(every))  # as steps do
    with recording.instead():
        graphs.capture()
    assert {kind: name for kind, name in recording.names.items() if kind not in ahead.names} == {}


@noted
@pytest.mark.parametrize("graphs", ["qwen3-0.6b"], indirect=True)
def test_what_fails_ahead_is_told_and_left_to_the_recording(
    graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dovetail")

    def fails() -> None:
        raise MemoryError("no room")

    told: list[tuple[str, int, int]] = []
    graphs.compile_ahead(fails, lambda *progress: told.append(progress))
    assert not told
    assert "one by one: MemoryError: no room" in caplog.text
    assert not launch.is_compiling_ahead()


@noted
@pytest.mark.parametrize("graphs", ["qwen3-0.6b"], indirect=True)
def test_without_triton_nothing_is_done_ahead(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_module, "has_triton", lambda: False)
    monkeypatch.setattr(graphs, "rehearse", lambda: pytest.fail("nothing to rehearse"))
    graphs.compile_ahead(lambda: pytest.fail("nothing to prepare for"))


# ---- the table


class FullyCapturable(CapturableGreedy):
    capabilities = SamplerCapabilities(cuda_graph=GraphSupport.ALL, processors=True)


class Axis(StepFeature[None]):
    """A feature whose device work is that of adapters."""

    axis = AdapterWork.axis

    def __init__(self, step: StepAdapters, slots: torch.Tensor) -> None:
        self.work = AdapterWork(step, slots)

    def begin(self, step: Step) -> None:
        return None


TWICE = GraphKey("model", axes=frozenset({"twice"}))  # that the engine doesn't have


class Twice(Builder):
    """Doubles the tokens of `size` rows."""

    def inputs(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64)

    def run(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * inputs


def test_a_kind_is_added_by_its_inputs_and_its_work() -> None:
    bench = Bench()
    graphs = give_graphs(bench, [Twice(TWICE, (2, 4), bench.runner.parts)])
    for tokens, size in (([3], 2), ([5, 6], 2), ([7, 8, 9], 4)):
        graph = graphs.find(TWICE, len(tokens))
        assert graph is not None
        with torch.inference_mode():
            graph.inputs[: len(tokens)] = torch.tensor(tokens)
            assert graphs.replay(graph)[: len(tokens)].tolist() == [2 * token for token in tokens]
        assert graph.size == size
    assert graphs.find(TWICE, 5) is None
    assert graphs.find(DECODE, 1) is None
    assert graphs.replayed == [("model_twice", size) for size in (2, 2, 4)]


def test_larger_sizes_are_recorded_first_and_kinds_in_their_order() -> None:
    """So that smaller recordings find room in the memory of larger ones, and sampling is recorded
    after what it reads."""
    told: list[tuple[str, int, int]] = []
    inputs: list[tuple[GraphKey, int]] = []

    class Noted(Twice):
        def inputs(self, size: int) -> torch.Tensor:
            inputs.append((self.key, size))
            return super().inputs(size)

    bench = Bench()
    graphs = Graphs(
        [Noted(key, (1, 3), bench.runner.parts) for key in (MODEL, DECODE)],
        bench.runner.parts,
    )
    with pytest.MonkeyPatch.context() as patch:
        play_graphs_on_the_cpu(patch)
        graphs.capture(lambda *progress: told.append(progress))
    assert inputs == [(key, size) for key in (MODEL, DECODE) for size in (3, 1)]
    assert told == [("capturing CUDA graphs", done, 4) for done in (1, 2, 3, 4)]


def test_all_is_recorded_on_one_stream_and_warmed_up_on_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory isn't reused across streams; and replays are slower where warm-ups ran on the stream
    that is recorded."""
    current: list[object] = []  # streams, the inner ones last
    warmed_up: list[object] = []
    recorded: list[object] = []

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Noted(Twice):
        def run(self, inputs: torch.Tensor) -> torch.Tensor:
            (recorded if GraphOnCpu.active else warmed_up).append(current[-1])
            return super().run(inputs)

    play_graphs_on_the_cpu(monkeypatch)
    monkeypatch.setattr(
        torch.cuda,
        "Stream",
        lambda device: SimpleNamespace(device=device, wait_stream=lambda other: None),
    )
    monkeypatch.setattr(torch.cuda, "stream", on)
    bench = Bench()
    Graphs(
        [Noted(key, (1, 3), bench.runner.parts) for key in (MODEL, DECODE)],
        bench.runner.parts,
    ).capture()
    assert len(warmed_up) == len(recorded) == 4
    assert all(stream is recorded[0] for stream in recorded)
    assert all(stream is not recorded[0] for stream in warmed_up)


@pytest.mark.parametrize("optional", [True, False])
def test_the_device_may_lack_what_an_optional_kind_needs(optional: bool) -> None:
    class Lacking(Twice):
        def run(self, inputs: torch.Tensor) -> torch.Tensor:
            if len(inputs) == 1:
                raise UnsupportedError("no kernel for one row")
            return super().run(inputs)

    bench = Bench()
    lacking, other = (
        Lacking(TWICE, (1, 2), bench.runner.parts),
        Twice(MODEL, (1,), bench.runner.parts),
    )
    lacking.optional = optional
    if not optional:
        with pytest.raises(UnsupportedError, match="no kernel for one row"):
            give_graphs(bench, [lacking, other])
        return
    graphs = give_graphs(bench, [lacking, other])
    assert graphs.find(TWICE, 2) is None, "all of its sizes, or none"
    assert graphs.find(MODEL, 1) is not None


def test_recordings_whose_states_are_sampled_later_have_memory_of_their_own() -> None:
    """These must outlive the replay that samples from them, whichever was recorded first."""
    bench = Bench()
    bench.sampler.__class__ = CapturableGreedy
    builders = [
        *mixed_builders(bench.runner.parts, LayerSplitter(), 64),
        *decode_builders(bench.runner.parts, 4, bench.recordings),
    ]
    pools = {str(builder.key): builder.pool for builder in builders}
    of_states = {pools.pop("mixed"), pools.pop("model")}
    assert set(pools) == {"decode", "sampling"}
    assert len(set(pools.values())) == len(of_states) == 1
    assert of_states.isdisjoint(pools.values())


def test_all_recordings_are_in_one_list_each_with_its_sizes() -> None:
    """Recordings cost start-up time and memory, so none is added unseen."""
    bench = Bench(max_rows=4, max_lines=12, draft_error=0.0)
    bench.sampler.__class__ = FullyCapturable
    refs = [ComponentRef("logits_processor", "t:clip", "tests.e2e.processing:Clip")]
    processors = LogitsProcessors(refs, VOCAB, bench.rows, 4)
    step_adapters = StepAdapters()
    bench.make_runner(Axis(step_adapters, bench.rows.columns[COLUMN]), processors=processors)
    graphs = Graphs.of(bench.runner.parts, LayerSplitter(), 64, 600_000_000, bench.recordings)
    mixed, lines, drafting = (32, 64), (1, 2, 3, 4, 5, 6, 8, 12), (1, 2, 4)
    few = (1, 2, 3, 4, 5, 6, 8, 12)
    assert [(str(key), sizes) for key, sizes in graphs.keys] == [
        ("mixed", mixed),
        ("decode", lines),
        ("model", few),
        ("decode_full", few),
        ("decode_processed", few),
        ("sampling", lines),
        ("sampling_full", few),
        ("sampling_processed", few),
        ("draft_first", drafting),
        ("draft", drafting),
        ("draft_full_first", drafting),
        ("draft_full", drafting),
        ("mixed_adapted", mixed),
        ("decode_adapted", lines),
        ("model_adapted", few),
        ("decode_full_adapted", few),
        ("decode_adapted_processed", few),
    ]
