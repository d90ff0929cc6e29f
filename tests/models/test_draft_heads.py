"""Draft heads compute what plain references do: transformers' own MTP layers, and EAGLE-3's
equations; and refuse what doesn't fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.api.component import NoOptions
from dovetail.api.draft_head import HeadContext, HeadInputs
from dovetail.api.state import StateLayer
from dovetail.errors import DovetailError, ModelLoadError, UnsupportedError
from dovetail.nn.parallel import SINGLE
from dovetail.nn.weights import load_weights
from dovetail_models.eagle3 import Eagle3
from dovetail_models.mtp import Mtp
from tests.e2e.reference import checkpoint
from tests.models.heads import (
    WITH_MTP,
    add_tensors,
    eagle3_fields,
    eagle3_tensors,
    glm4_moe,
    mtp_model,
    mtp_tensors,
    plain_eagle3,
    plain_eagle3_layers,
    target_config,
    write_eagle3,
)
from tests.models.hybrids import qwen3_next
from tests.models.oracle import FakeGroup, build, checkpoint_tensors, context, fill
from tests.models.test_decoders import assert_close, some_tokens

LENGTH = 13
NO_OPTIONS = NoOptions()


def of(directory: Path, target: Any, *, dummy: bool = False) -> HeadContext:
    return HeadContext(directory=directory, target=target, dummy=dummy)


@torch.no_grad()
def outputs(
    head: Any, states: torch.Tensor, tokens: torch.Tensor, stored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states and logits of the positions after the first `stored`, of which only K and V are
    stored."""
    positions = torch.arange(len(tokens))

    def part(of: slice) -> HeadInputs:
        return HeadInputs(token_ids=tokens[of], positions=positions[of], states=states[of])

    head.store(part(slice(stored)))
    out = head(part(slice(stored, None)))
    return out, head.logits(out)


@pytest.mark.parametrize("family", WITH_MTP)
def test_mtp_heads_equal_transformers(family: str) -> None:
    config = WITH_MTP[family]()
    with checkpoint(config) as (directory, model):
        theirs = mtp_model(model)
        add_tensors(directory, mtp_tensors(theirs))
        ours, arch = (
            build(config, make_state=lambda spec: StateLayer(spec, lambda: None)),
            Mtp(NO_OPTIONS, of(directory, config)),
        )
        fill(ours, checkpoint_tensors(model))
        head: Any = arch.build(context(), ours)
        load_weights(head, directory, partly=True)
    tokens = some_tokens(config, LENGTH + 1, 0)
    with torch.no_grad():
        final = model.get_decoder()(tokens[None, :-1]).last_hidden_state
        states, logits = outputs(head, head.fuse(final[0]), tokens[1:], 8)
        positions = torch.arange(1, LENGTH + 1)[None]
        expected = theirs.forward_layer(0, final, positions, None, input_ids=tokens[None, 1:])[0]
    assert_close(states, expected[8:])
    assert_close(logits, model.lm_head(expected[8:]))


@pytest.mark.parametrize(
    ("changes", "embedding"),
    [
        ({}, True),
        ({"norm_before_residual": False}, False),
        (
            {
                "layer": {"model_type": "qwen3", "num_hidden_layers": 3},
                "eagle_aux_hidden_state_layer_ids": [2],
            },
            True,
        ),
    ],
)
def test_eagle3_heads_equal_the_plain_equations(
    tmp_path: Path, changes: dict[str, Any], embedding: bool
) -> None:
    config, generator = target_config(), torch.Generator().manual_seed(3)
    fields = eagle3_fields(config, **changes)
    tensors = eagle3_tensors(fields)
    directory = write_eagle3(
        tmp_path / "head",
        fields,
        {name: one for name, one in tensors.items() if embedding or name != "embed_tokens.weight"},
    )
    target = build(config)
    target.embedding.weight.data.copy_(tensors["embed_tokens.weight"] + embedding)
    arch = Eagle3(NO_OPTIONS, of(directory, config))
    assert arch.taps == tuple(fields["eagle_aux_hidden_state_layer_ids"])
    head: Any = arch.build(context(), target)
    head.load_checkpoint(directory, 0)
    tapped = torch.randn(LENGTH, len(arch.taps) * config.hidden_size, generator=generator)
    tokens = torch.randint(config.vocab_size, (LENGTH,), generator=generator)
    kept = tapped.clone()
    states, logits = outputs(head, head.fuse(tapped), tokens, 8)
    expected, drafted = plain_eagle3(fields, tensors, tapped, tokens)
    assert_close(states, expected[8:])
    targets = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert_close(logits[:, targets], drafted[8:])
    assert (logits.isinf().sum(1) == config.vocab_size - len(targets)).all(), (
        "other ids can't be drafted"
    )
    assert torch.equal(tapped, kept)
    # its own output, as the next state
    place = torch.tensor([LENGTH])
    again = head(HeadInputs(token_ids=tokens[:1], positions=place, states=states[-1:]))
    longer = (
        torch.cat((tapped @ tensors["fc.weight"].T, expected[-1:])),
        torch.cat((tokens, tokens[:1])),
    )
    assert_close(again, plain_eagle3_layers(fields, tensors, *longer)[0][-1:])


def made(
    directory: Path, config: Any, fields: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> Any:
    """A head of a checkpoint with these files, loaded."""
    arch = Eagle3(NO_OPTIONS, of(write_eagle3(directory / "head", fields, tensors), config))
    head: Any = arch.build(context(), build(config))
    head.load_checkpoint(directory / "head", 0)
    return head


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"speculators_model_type": "eagle"},
            "speculators_model_type is 'eagle': heads in the format of `speculators` have 'eagle3'",
        ),
        ({"speculators_model_type": None}, "speculators_model_type is None"),
        ({"layer": {"hidden_size": 24}}, "made for a hidden size of 24, and the model has 32"),
        ({"target_hidden_size": 64}, "made for a hidden size of 64, and the model has 32"),
        (
            {"layer": {"vocab_size": 60}},
            "it has a vocabulary of 60 tokens, and the model one of 61",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            "reads states after 3 layers, and the model has 3",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [-1]}, "reads states after -1 layers"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "the model's 3 layers are too few"),
        ({"eagle_aux_hidden_state_layer_ids": ["1"]}, "expected numbers of layers, got"),
        ({"draft_vocab_size": 62}, "draft_vocab_size = 62 must be from 1 to vocab_size, 61"),
        ({"draft_vocab_size": "30"}, "draft_vocab_size: expected a whole number, got '30'"),
        ({"norm_before_fc": True}, "norm_before_fc = True is not implemented"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config = .* is not implemented",
        ),
        (
            {"transformer_layer_config": None},
            "transformer_layer_config: must be the config of a model",
        ),
        ({"layer": {"model_type": "gpt2"}}, "model_type 'gpt2' is not implemented"),
        (
            {"layer": {"hidden_act": "gelu"}},
            "transformer_layer_config: hidden_act = 'gelu' is not implemented",
        ),
    ],
)
def test_eagle3_heads_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    config = target_config()
    with pytest.raises(DovetailError, match=says):
        made(
            tmp_path,
            config,
            eagle3_fields(config, **changes),
            eagle3_tensors(eagle3_fields(config)),
        )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("d2t"), "lacks d2t"),
        (lambda tensors: tensors.update(d2t=tensors["d2t"][1:]), "d2t: expected 30 whole numbers"),
        (
            lambda tensors: tensors.update(d2t=tensors["d2t"].float()),
            "d2t: expected 30 whole numbers",
        ),
        (lambda tensors: tensors["d2t"].fill_(40), "different ids of the model's 61"),
        (
            lambda tensors: tensors["d2t"].copy_(-torch.arange(30)),
            "different ids of the model's 61",
        ),
        (lambda tensors: tensors["t2d"].logical_not_(), "t2d and d2t disagree"),
        (lambda tensors: tensors.pop("fc.weight"), "lacks 1 tensor .fc.weight"),
        (
            lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, 1:].clone()}),
            "fc.weight: expected shape",
        ),
        (
            lambda tensors: tensors.update({"midlayer.x": torch.zeros(1)}),
            "holds 1 tensor .midlayer.x",
        ),
    ],
)
def test_eagle3_checkpoints_that_cannot_be_right_are_refused(
    tmp_path: Path, change: Any, says: str
) -> None:
    config = target_config()
    fields = eagle3_fields(config)
    change(tensors := eagle3_tensors(fields))
    with pytest.raises(ModelLoadError, match=says):
        made(tmp_path, config, fields, tensors)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            target_config(),
            "model_type 'llama' has no multi-token-prediction head that is implemented "
            ".implemented: deepseek_v3, deepseek_v32, glm4_moe, ",
        ),
        (
            glm4_moe(),
            r"this checkpoint has no multi-token-prediction head \(tensors model.layers.2.\*\)",
        ),
        (qwen3_next(), r"this checkpoint has no multi-token-prediction head \(tensors mtp.\*\)"),
        (
            glm4_moe(num_nextn_predict_layers=0),
            "this checkpoint has no multi-token-prediction head",
        ),
    ],
)
def test_models_without_an_mtp_head_are_refused(config: Any, says: str) -> None:
    with checkpoint(config) as (directory, _), pytest.raises(UnsupportedError, match=says):
        Mtp(NO_OPTIONS, of(directory, config))


def test_more_mtp_layers_than_one_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="2 layers of multi-token prediction are not implemented"
    ):
        Mtp(NO_OPTIONS, of(Path(), glm4_moe(num_nextn_predict_layers=2), dummy=True))


@pytest.mark.parametrize("size", [2])
def test_ranks_store_their_share_of_heads(tmp_path: Path, size: int) -> None:
    config = target_config()
    directory = write_eagle3(
        tmp_path / "head", eagle3_fields(config), eagle3_tensors(eagle3_fields(config))
    )
    for arch in (
        Eagle3(NO_OPTIONS, of(directory, config)),
        Mtp(NO_OPTIONS, of(Path(), glm4_moe(), dummy=True)),
    ):
        [whole], [half] = arch.layer_specs(SINGLE), arch.layer_specs(FakeGroup(1, size))
        assert (half.heads, half.kv_heads, half.index) == (
            whole.heads // size,
            whole.kv_heads // size,
            0,
        )
