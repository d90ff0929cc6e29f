"""Tests of how the model suite scales the weights of transformers' models, and of its `one_thread`
context."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from dovetail.testing.suites.model_bench import Reference  # noqa: E402
from dovetail.testing.suites.model_configs import tiny  # noqa: E402
from dovetail.testing.threads import one_thread  # noqa: E402


def test_without_the_weights_of_layers_the_stream_stays_the_embedding() -> None:
    reference = Reference(tiny("LlamaForCausalLM"))
    tokens = torch.arange(5)
    embedded = reference.streams(tokens)[0]
    head = reference.model.get_output_embeddings().weight.clone()
    reference.scale_matrices(0.0, embedding=2.0)
    *streams, _ = reference.streams(tokens)  # the last is normed
    assert len(streams) > 1
    assert all(torch.equal(stream, 2 * embedded) for stream in streams)
    assert torch.equal(reference.model.get_output_embeddings().weight, head)


def test_the_embedding_is_scaled_as_the_layers_are_unless_it_has_a_factor_of_its_own() -> None:
    reference = Reference(tiny("LlamaForCausalLM"))
    before = {name: tensor.clone() for name, tensor in reference.tensors().items()}
    reference.scale_matrices(2.0)
    for name, tensor in reference.tensors().items():
        stays = "norm" in name or name == "lm_head.weight"
        assert torch.equal(tensor, before[name] * (1 if stays else 2)), name


def test_torch_has_as_many_threads_after_one_thread_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = [3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    with one_thread():
        assert numbers[-1] == 1
    assert numbers[-1] == 3
