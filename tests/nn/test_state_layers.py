"""Layers with states compute what transformers' own modules do, from their checkpoints, on one rank
and on two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GraniteMoeHybridConfig, NemotronHConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from dovetail.api.model import BuildContext
from dovetail.errors import UnsupportedError
from dovetail.nn.parallel import SINGLE
from dovetail.nn.state import DeltaShape, GatedDeltaNet, Mamba2Mixer, Mamba2Shape
from dovetail.testing.memory import bind_states
from tests.rounding import assert_rounded

TOKENS = 70
# a token: a projection, a state of 16 rows, and the norm and projection of 32 outputs
ROUNDINGS = TOKENS * (24 + 16 + 32)
DELTA = DeltaShape(k_heads=2, v_heads=4, k_size=16, v_size=8, kernel=4)
MAMBA = Mamba2Shape(heads=4, head_size=8, state_size=16, groups=2, kernel=4)


class Rank:
    """One of several, without the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def context(rank: int = 0, ranks: int = 1) -> BuildContext:
    group: Any = SINGLE if ranks == 1 else Rank(rank, ranks)
    return BuildContext(
        parallel=group,
        dtype=torch.float32,
        device=torch.device("cpu"),
        make_attention=lambda spec: pytest.fail("no attention"),
    )


def part(x: torch.Tensor, sections: list[int], rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of each section of the last dimension."""
    return torch.cat(
        [section.chunk(ranks, dim=-1)[rank] for section in x.split(sections, dim=-1)], dim=-1
    )


def randomized(module: torch.nn.Module) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return module.eval()


def loaded(layer: Any, module: Any) -> Any:
    tensors = module.state_dict()
    for rule in layer.weights("model."):
        rule.parameter.load(tensors[rule.source.removeprefix("model.")], rule.shard_id)
    return layer


def delta_nets(rank: int, ranks: int, module: Any) -> GatedDeltaNet:
    shape = replace(DELTA, k_heads=2 // ranks, v_heads=4 // ranks)
    bound = bind_states([shape.spec(0)], 1, torch.float32)
    bound.plan([0], [TOKENS], [0])
    layer: GatedDeltaNet = loaded(
        GatedDeltaNet(shape, 1e-6, bound.layers[0], context(rank, ranks)), module
    )
    return layer


@torch.no_grad()
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_gated_delta_net_is_transformers(family: str, ranks: int) -> None:
    torch.manual_seed(0)
    sizes = {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "rms_norm_eps": 1e-6,
    }
    x = torch.randn(1, TOKENS, 24)
    if family == "qwen3_next":
        module = randomized(Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=24, **sizes), 0))
        q, k, v, z, b, a = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(x), module.in_proj_ba(x)
        )
        qkv, z, b, a = (
            torch.cat([one[0].flatten(1) for one in (q, k, v)], dim=-1),
            z[0].flatten(1),
            b[0],
            a[0],
        )
    else:
        module = randomized(Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(hidden_size=24, **sizes), 0))
        qkv, z, b, a = (
            project(x)[0]
            for project in (
                module.in_proj_qkv,
                module.in_proj_z,
                module.in_proj_b,
                module.in_proj_a,
            )
        )
    parts = []
    for rank in range(ranks):
        inputs = [
            part(y, sections, rank, ranks)
            for y, sections in ((qkv, [32, 32, 32]), (z, [32]), (b, [4]), (a, [4]))
        ]
        parts.append(delta_nets(rank, ranks, module)(*inputs))
    ours = module.out_proj(torch.cat(parts, dim=-1))
    assert_rounded(ours, module(x)[0], ROUNDINGS)


def mixer(
    rank: int, ranks: int, module: Any, groups: int, limits: tuple[float, float]
) -> Mamba2Mixer:
    shape = replace(MAMBA, heads=4 // ranks, groups=groups // ranks)
    bound = bind_states([shape.spec(0)], 1, torch.float32)
    bound.plan([0], [TOKENS], [0])
    made = Mamba2Mixer(
        shape,
        1e-5,
        bound.layers[0],
        context(rank, ranks),
        conv_bias=True,
        norm_group=32 // groups,
        limits=limits,
    )
    layer: Mamba2Mixer = loaded(made, module)
    return layer


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "ranks"), [("nemotron_h", 1), ("nemotron_h", 2), ("granite", 1)]
)
def test_mamba2_mixer_is_transformers(family: str, ranks: int) -> None:
    torch.manual_seed(0)
    if family == "nemotron_h":
        groups, config = (
            2,
            NemotronHConfig(
                hidden_size=16,
                mamba_num_heads=4,
                mamba_head_dim=8,
                n_groups=2,
                ssm_state_size=16,
                layer_norm_epsilon=1e-5,
                chunk_size=32,
            ),
        )
        module = randomized(NemotronHMamba2Mixer(config, 0))
    else:
        groups, config = (
            1,
            GraniteMoeHybridConfig(
                hidden_size=16,
                mamba_n_heads=4,
                mamba_d_head=8,
                mamba_n_groups=1,
                mamba_d_state=16,
                mamba_expand=2,
                rms_norm_eps=1e-5,
                mamba_chunk_size=32,
            ),
        )
        module = randomized(GraniteMoeHybridMambaLayer(config, 0))
    x, states = torch.randn(1, TOKENS, 16), groups * 16
    z, xbc, dt = module.in_proj(x)[0].split([32, 32 + 2 * states, 4], dim=-1)
    parts = []
    for rank in range(ranks):
        inputs = [
            part(y, sections, rank, ranks)
            for y, sections in ((xbc, [32, states, states]), (z, [32]), (dt, [4]))
        ]
        parts.append(mixer(rank, ranks, module, groups, module.time_step_limit)(*inputs))
    ours = module.out_proj(torch.cat(parts, dim=-1))
    assert_rounded(ours, module(x)[0], ROUNDINGS)


def test_a_norm_over_groups_that_cross_ranks_is_refused() -> None:
    shape = replace(MAMBA, heads=2, groups=1)
    bound = bind_states([shape.spec(0)], 1, torch.float32)
    with pytest.raises(
        UnsupportedError, match=r"gated norm has groups of 32 channels, and each of 2 ranks has 16"
    ):
        Mamba2Mixer(shape, 1e-5, bound.layers[0], context(0, 2), conv_bias=True, norm_group=32)
