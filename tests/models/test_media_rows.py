"""Rows of images in our decoders: they replace embeddings, and are added after layers."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.model import ModelInputs
from tests.models.configs import MAX_LEN, configs
from tests.models.oracle import build
from tests.support import examples

LENGTHS = st.integers(1, MAX_LEN // 2)
SEEDS = st.integers(0, 99)


def a_model(config: Any) -> Any:
    """Return our model with random weights."""
    model = build(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    return model


def some_inputs(config: Any, length: int, levels: int, seed: int) -> ModelInputs:
    """Return random tokens, some of which are placeholders; other tokens' rows are NaN."""
    generator = torch.Generator().manual_seed(seed)
    is_row = torch.rand(length, generator=generator) < 0.5
    rows = torch.randn(levels, length, config.hidden_size, generator=generator)
    return ModelInputs(
        token_ids=torch.randint(config.vocab_size, (length,), generator=generator),
        positions=torch.arange(length),
        rows=rows.masked_fill(~is_row[:, None], torch.nan),
        is_row=is_row,
    )


@torch.no_grad()
def states(config: Any, inputs: ModelInputs, wanted: torch.Tensor | None = None) -> torch.Tensor:
    """Return the final states of a new model."""
    hidden: torch.Tensor = a_model(config)(
        ModelInputs(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            rows=inputs.rows,
            is_row=inputs.is_row,
            wanted=wanted,
        )
    )
    return hidden


@given(config=configs(), length=LENGTHS, seed=SEEDS)
@examples(quick=30, full=500)
def test_a_row_counts_as_the_embedding_of_a_token(config: Any, length: int, seed: int) -> None:
    given = some_inputs(config, length, 1, seed)
    assert given.rows is not None
    assert given.is_row is not None
    token_id = getattr(config, "pad_token_id", None) or 0  # what Gemma 4 reads at placeholders
    padding = torch.full_like(given.token_ids, token_id)
    with torch.no_grad():
        embedded = a_model(config).embed(padding)
    as_rows = torch.where(given.is_row[:, None], embedded, given.rows[0])
    found = states(
        config,
        ModelInputs(
            token_ids=given.token_ids,
            positions=given.positions,
            rows=as_rows[None],
            is_row=given.is_row,
        ),
    )
    token_ids = torch.where(given.is_row, padding, given.token_ids)
    expected = states(config, ModelInputs(token_ids=token_ids, positions=given.positions))
    assert torch.equal(found, expected)


@given(config=configs(), length=LENGTHS, levels=st.integers(1, 4), seed=SEEDS)
@examples(quick=30, full=500)
def test_rows_of_deeper_levels_are_added_after_their_layers(
    config: Any, length: int, levels: int, seed: int
) -> None:
    inputs = some_inputs(config, length, levels, seed)
    assert inputs.rows is not None
    assert inputs.is_row is not None
    place = inputs.is_row[:, None]
    for tap in range(min(levels, config.num_hidden_layers)):
        fewer = ModelInputs(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            rows=inputs.rows[: max(tap, 1)],
            is_row=inputs.is_row,
        )
        with torch.no_grad():
            found = a_model(config).forward_tapped(inputs, [tap])[1]
            before = a_model(config).forward_tapped(fewer, [tap])[1]
        row = inputs.rows[tap]
        expected = torch.where(place, row if tap == 0 else before + row, before)
        torch.testing.assert_close(found, expected)


@given(config=configs(), length=LENGTHS, levels=st.integers(1, 4), seed=SEEDS, data=st.data())
@examples(quick=30, full=500)
def test_wanted_states_are_those_of_all_tokens(
    config: Any, length: int, levels: int, seed: int, data: st.DataObject
) -> None:
    inputs = some_inputs(config, length, levels, seed)
    wanted = torch.tensor(data.draw(st.lists(st.integers(0, length - 1), min_size=1, unique=True)))
    torch.testing.assert_close(states(config, inputs, wanted), states(config, inputs)[wanted])
