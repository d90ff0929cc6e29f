"""The oracle is transformers' whole model: it changes nothing where transformers has a way to say
the same, and only the spans that a test names are images."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from tests.media.checkpoints import NAMES, checkpoint, picture, reference
from tests.media.oracle import TEXT, Prompt, rows_of, tensors_of, tensors_of_all


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_whole_model_and_of_spans_alone(name: str) -> None:
    directory = checkpoint(name)
    model = reference(directory)
    placeholder = model.config.image_token_id
    tensors = tensors_of(directory, picture(40, 30))
    rows = rows_of(directory, tensors).shape[1]
    ids = [70, 71, *[placeholder] * rows, 72]
    oracle = Prompt(directory, ids, [tensors]).logits()
    torch.testing.assert_close(oracle, whole_logits(model, ids, tensors), rtol=0, atol=1e-6)
    other = Prompt(directory, ids, [tensors_of(directory, picture(40, 30, seed=1))]).logits()
    assert (oracle - other)[2:].abs().max() > 1e-3
    torch.testing.assert_close(oracle[:2], other[:2], rtol=0, atol=1e-6)
    typed = Prompt(directory, [placeholder, *ids], [tensors], typed=1)
    assert typed.logits(placeholder).isfinite().all()


def test_several_images_of_a_prompt_are_those_of_the_whole_model() -> None:
    """LLaVA-OneVision's have no tiles then."""
    directory = checkpoint("llava_onevision")
    model = reference(directory)
    images = [picture(40, 64), picture(91, 17, seed=1)]
    each = tensors_of_all(directory, images)
    rows = [[model.config.image_token_id] * rows_of(directory, one).shape[1] for one in each]
    ids = [70, *rows[0], 71, *rows[1], 72]
    assert (
        len(rows[0]) == len(rows[1]) < rows_of(directory, tensors_of(directory, images[0])).shape[1]
    )
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    whole = whole_logits(model, ids, processor([images], return_tensors="np"))
    oracle = Prompt(directory, ids, each).logits()
    torch.testing.assert_close(oracle, whole, rtol=0, atol=1e-6)


@torch.no_grad()
def whole_logits(model: Any, ids: list[int], tensors: Any) -> torch.Tensor:
    """Return the logits [tokens, vocab] of transformers for a prompt with images."""
    token_ids = torch.tensor([ids])
    inputs = {name: torch.as_tensor(value) for name, value in tensors.items()}
    known = inspect.signature(model.forward).parameters
    for key in ("mm_token_type_ids", "token_type_ids"):
        if key in known:
            inputs[key] = (token_ids == model.config.image_token_id).long()
    logits: torch.Tensor = model(input_ids=token_ids, use_cache=False, **inputs).logits[0]
    return logits


@torch.no_grad()
def test_placeholders_that_are_typed_are_text() -> None:
    directory = checkpoint("llava")
    model = reference(directory)
    ids = [70, model.config.image_token_id, TEXT]
    expected = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    assert torch.equal(Prompt(directory, ids, typed=1).logits(), expected)
    assert Prompt(directory, ids, typed=1).greedy(1) == [int(expected[-1].argmax())]
