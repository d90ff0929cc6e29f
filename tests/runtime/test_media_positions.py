"""Tokens after images have the positions that transformers gives them, in launched steps, in
recorded ones and in drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.draft_head import HeadInputs
from dovetail.api.media import MediaPlace, MediaRows
from dovetail.api.model import ModelInputs
from dovetail_executors.runtime.features import StepFeature, Wanted
from dovetail_executors.runtime.media import NO_ROWS, NO_TOKENS
from dovetail_executors.runtime.media_positions import (
    POSITION_OFFSET,
    AxesOfRows,
    model_positions,
    offsets_of,
    positions_of,
)
from dovetail_executors.runtime.recorded_steps import decode_builders, mixed_builders
from dovetail_executors.runtime.recording import LayerSplitter
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.step_inputs import HostInputs
from tests.runtime.fakes import HIDDEN, Bench, TinyHead, TinyModel
from tests.runtime.recorded import give_graphs
from tests.runtime.test_decode_graphs import CapturableGreedy, decode_steps
from tests.support import examples

MODELS = {  # of transformers, by type
    "glm46v": "Glm46VModel",
    "glm4v": "Glm4vModel",
    "glm4v_moe": "Glm4vMoeModel",
    "glm_ocr": "GlmOcrModel",
    "qwen2_5_vl": "Qwen2_5_VLModel",
    "qwen2_vl": "Qwen2VLModel",
    "qwen3_5": "Qwen3_5Model",
    "qwen3_5_moe": "Qwen3_5MoeModel",
    "qwen3_vl": "Qwen3VLModel",
    "qwen3_vl_moe": "Qwen3VLMoeModel",
}


@dataclass(frozen=True)
class Prompt:
    """Token ids, and where images are among them."""

    tokens: tuple[int, ...]
    places: tuple[MediaPlace, ...] = ()


IMAGE = Prompt((5, 1, 2, 3, 4, 5, 6, 7, 8, 2), (MediaPlace(1, (1, 2, 4)),))  # offset -4


@st.composite
def prompts(draw: st.DrawFn, most_images: int = 3) -> Prompt:
    """Images of odd sizes before, between and after text."""
    grids = st.tuples(st.just(1), st.integers(1, 5), st.integers(1, 5))
    places = []
    length = draw(st.integers(0, 3))
    for grid in draw(st.lists(grids, max_size=most_images)):
        places.append(MediaPlace(length, grid))
        length += grid[1] * grid[2] + draw(st.integers(1, 3))
    end = places[-1].stop if places else 1
    length = max(end, length - draw(st.integers(0, 1)))
    tokens = draw(st.lists(st.integers(0, 29), min_size=length, max_size=length))
    return Prompt(tuple(tokens), tuple(places))


@cache
def transformers_model(model_type: str) -> Any:
    module = import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    model = object.__new__(getattr(module, MODELS[model_type]))
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    object.__setattr__(model, "config", SimpleNamespace(vision_config=vision))
    return model


@given(model_type=st.sampled_from([*MODELS]), prompt=prompts(8))
@examples(quick=60, full=3000)
def test_positions_are_those_of_transformers(model_type: str, prompt: Prompt) -> None:
    is_image = torch.zeros(len(prompt.tokens), dtype=torch.int64)
    for place in prompt.places:
        is_image[place.start : place.stop] = 1
    grids = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in (one.grid for one in prompt.places)])
    axes, offset = transformers_model(model_type).get_rope_index(
        torch.tensor([prompt.tokens]), is_image[None], image_grid_thw=grids
    )
    ours, own_offset = positions_of(len(prompt.tokens), prompt.places)
    assert ours.tolist() == axes[:, 0].tolist()
    assert own_offset == offset.item()
    assert own_offset <= 0


class ReadsAxes(TinyModel):
    """`TinyModel` whose tokens have positions on three axes."""

    def forward_tapped(
        self, inputs: ModelInputs, taps: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        axes = inputs.positions.expand(3, -1) if inputs.axes is None else inputs.axes
        places = self.places
        weights = torch.tensor([1.0, 2.0, 3.0])
        self.places = torch.einsum("a,ath->th", weights, places[axes])
        everyone = torch.arange(len(inputs.token_ids))
        try:
            return super().forward_tapped(replace(inputs, positions=everyone), taps)
        finally:
            self.places = places


class OfOneRow(ReadsAxes):
    """The oracle: knows the positions of the only row, and reads the index of each token."""

    truth: torch.Tensor  # [3, max_len]

    def forward_tapped(
        self, inputs: ModelInputs, taps: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert inputs.axes is None
        return super().forward_tapped(replace(inputs, axes=self.truth[:, inputs.positions]), taps)


class GivesAxes(StepFeature[MediaRows]):
    """Gives the model the positions of rows with images, as the feature of images does."""

    part = MediaRows
    reads_states = True

    def __init__(self, rows: RowState) -> None:
        self._rows = rows
        self._axes = AxesOfRows(rows.max_rows)
        self.asking = self._axes.rows

    def begin(self, step: Step) -> MediaRows | None:
        self._axes.update(step.batch)
        rows = step.batch.rows
        is_needed = self._axes.are_needed(rows, self._rows.computed[rows])
        return NO_ROWS if is_needed else None

    def wants(self, step: Step, note: MediaRows, host: HostInputs) -> Wanted:
        return Wanted(NO_TOKENS, inputs={"axes": torch.from_numpy(self._axes.of_step(host))})


def generated_alone(prompt: Prompt, count: int) -> list[int]:
    tokens = list(prompt.tokens)
    truth = torch.from_numpy(positions_of(64, prompt.places)[0])
    for _ in range(count):
        bench = Bench(max_rows=1, block_size=64, num_blocks=1)
        bench.model.__class__ = OfOneRow
        bench.model.truth = truth
        result = bench.run({0: len(tokens)}, [bench.new(0, tokens)])
        tokens.append(int(result.token_ids[0]))
    return tokens[len(prompt.tokens) :]


def a_bench(**of_bench: Any) -> Bench:
    """Return a bench whose model has positions on three axes. A draft model hasn't."""
    bench = Bench(columns={POSITION_OFFSET: offsets_of}, **of_bench)
    bench.model.__class__ = ReadsAxes
    bench.make_runner(GivesAxes(bench.rows))
    return bench


def begin(bench: Bench, prompts: Sequence[Prompt], work: dict[int, int]) -> Any:
    """Add the prompts as rows, and compute `work`."""
    places = {row: prompt.places for row, prompt in enumerate(prompts) if prompt.places}
    batch = bench.batch(
        work, [bench.new(row, prompt.tokens) for row, prompt in enumerate(prompts)], [], []
    )
    return bench.runner.collect(
        bench.runner.submit(replace(batch, parts=(replace(NO_ROWS, added=places),)))
    )


def generated(bench: Bench, prompts: Sequence[Prompt], chunk: int, count: int) -> list[list[int]]:
    """Return `count` tokens of each row. Prompts come in chunks, beside rows that decode."""
    tokens: list[list[int]] = [[] for _ in prompts]
    left = {row: len(prompt.tokens) for row, prompt in enumerate(prompts)}
    is_first = True
    while any(len(own) < count for own in tokens):
        work = {row: max(1, min(chunk, left[row])) for row in left if len(tokens[row]) < count}
        result = begin(bench, prompts, work) if is_first else bench.run(work)
        is_first = False
        for place, row in enumerate(work):
            left[row] -= work[row]
            if left[row] <= 0:
                tokens[row].append(int(result.token_ids[place]))
    return tokens


@given(asked=st.lists(prompts(2), min_size=1, max_size=4), chunk=st.integers(1, 40))
@examples(quick=40, full=300)
def test_tokens_are_those_of_each_row_alone(asked: list[Prompt], chunk: int) -> None:
    asked = [prompt for prompt in asked if len(prompt.tokens) < 58] or [Prompt((1, 2))]
    expected = [generated_alone(prompt, 3) for prompt in asked]
    assert generated(a_bench(), asked, chunk, 3) == expected


def test_replayed_steps_give_the_tokens_of_each_row_alone() -> None:
    text = Prompt(tuple(range(18)))  # longer than the others: its last chunks are beside decodes
    asked = [IMAGE, text, Prompt(IMAGE.tokens[::-1], (MediaPlace(0, (1, 3, 3)),))]
    bench = a_bench()
    bench.sampler.__class__ = CapturableGreedy
    mixed = mixed_builders(bench.runner.parts, LayerSplitter(), 16)
    graphs = give_graphs(bench, [*decode_steps(bench), *mixed])
    expected = [generated_alone(prompt, 5) for prompt in asked]
    assert generated(bench, asked, 4, 5) == expected
    assert {"decode", "mixed"} <= {key for key, _ in graphs.replayed}


def test_engines_of_other_models_compute_no_positions() -> None:
    bench = Bench()
    given = []
    forward = bench.model.forward

    def watched(inputs: ModelInputs) -> torch.Tensor:
        given.append(inputs)
        return forward(inputs)

    bench.model.forward = watched  # type: ignore[method-assign]
    bench.run({0: 3}, [bench.new(0, [3, 1, 4])])
    assert POSITION_OFFSET not in bench.rows.columns
    assert given[0].axes is None


PLACES = torch.randn(3, 64, HIDDEN, generator=torch.Generator().manual_seed(3))


class ReadsAxesToo(TinyHead):
    """`TinyHead` whose tokens have positions on three axes."""

    def store(self, inputs: HeadInputs) -> torch.Tensor:
        assert inputs.axes is not None
        rotated = sum(PLACES[axis][inputs.axes[axis]] for axis in range(3))
        return super().store(replace(inputs, states=inputs.states + rotated))


def drafts_after(bench: Bench, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return two drafts of each row after its prompt and one more token."""
    rows = range(len(prompts))
    begin(bench, prompts, {row: len(prompt.tokens) for row, prompt in enumerate(prompts)})
    bench.run(dict.fromkeys(rows, 1))
    propose = bench.proposer.propose
    drafts = []

    def watched(*arguments: Any) -> None:
        propose(*arguments)
        known = bench.rows.known
        drafts.extend(
            bench.rows.token_ids[row, known[row] : known[row] + 2].tolist() for row in rows
        )

    bench.proposer.propose = watched
    bench.check(dict.fromkeys(rows, 1), dict.fromkeys(rows, (-1, -1)))
    return drafts


def a_bench_with_a_head() -> Bench:
    bench = a_bench(head=True, max_lines=12)
    bench.proposer.model.__class__ = ReadsAxesToo
    return bench


def test_draft_heads_get_the_positions_of_their_tokens() -> None:
    bench = a_bench_with_a_head()
    truth = torch.from_numpy(positions_of(64, IMAGE.places)[0])
    seen = []
    store = bench.proposer.model.store

    def watched(inputs: HeadInputs) -> torch.Tensor:
        seen.extend(inputs.positions.tolist())
        assert inputs.axes is not None
        assert torch.equal(inputs.axes, truth[:, inputs.positions])
        x: torch.Tensor = store(inputs)
        return x

    bench.proposer.model.store = watched
    drafts_after(bench, [IMAGE])
    assert {0, 1, 8, 9, 10, 11} <= {*seen}  # before, in and after the image


def test_recorded_drafts_are_those_of_launched_steps() -> None:
    asked = [IMAGE, Prompt((3, 1, 4)), IMAGE]
    launched = drafts_after(a_bench_with_a_head(), asked)
    bench = a_bench_with_a_head()
    bench.sampler.__class__ = CapturableGreedy
    parts = bench.runner.parts
    own = decode_builders(parts, bench.rows.max_lines, bench.recordings)
    graphs = give_graphs(bench, [*own, *mixed_builders(parts, LayerSplitter(), 16)])
    assert drafts_after(bench, asked) == launched
    assert ("draft", 4) in graphs.replayed
    assert launched[0] == launched[2]


def test_to_a_draft_model_an_image_is_text() -> None:
    bench = a_bench(draft_error=0.5, max_lines=12)
    given: list[ModelInputs] = []
    forward = bench.proposer.model.forward

    def watched(inputs: ModelInputs) -> torch.Tensor:
        given.append(inputs)
        states: torch.Tensor = forward(inputs)
        return states

    bench.proposer.model.forward = watched
    drafts_after(bench, [IMAGE])
    assert all(inputs.axes is None and inputs.rows is None for inputs in given)
    assert sorted({place for inputs in given for place in inputs.positions.tolist()}) == [
        *range(13)
    ]


def test_padding_has_a_position_of_the_table() -> None:
    """In recorded steps it is the first token of row 0, whose offset may be less than 0."""
    offsets = torch.tensor([-4, 0], dtype=torch.int32)
    rows = torch.tensor([0, 0, 1])
    assert model_positions(torch.tensor([0, 9, 9]), offsets, rows).tolist() == [0, 5, 9]
