"""DeepSeek's routing (arXiv:2405.04434, arXiv:2412.19437): experts form groups, and a token's
experts come from its few best groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dovetail.api.model import BuildContext
from dovetail.nn.activation import Activation
from dovetail.nn.moe import Experts, Router, SharedFeedForward, SparseFeedForward
from dovetail.nn.parameter import whole


@dataclass(frozen=True, slots=True)
class Grouping:
    """How a token's experts are chosen."""

    scoring: str  # "softmax" or "sigmoid" of the logits
    groups: int  # of equal size
    kept: int  # best groups of a token
    pair: int  # a group's score is the sum of this many best scores of its experts
    scale: float  # multiplies the weights
    corrected: bool  # a learned bias of each expert counts in the choice, not in the weights
    eps: float = 1e-20  # added to the sum by which weights are divided


def group_reasons(config: Any, pair: int) -> list[str]:
    """Why a config's groups of experts can't be right."""
    count = config.n_routed_experts
    groups = config.n_group or 1
    kept = config.topk_group or 1
    if count % groups or count // groups < pair:
        return [
            f"n_group = {groups} must split n_routed_experts ({count}) into equal groups of at "
            f"least {pair}"
        ]
    if not 1 <= kept <= groups or config.num_experts_per_tok > kept * (count // groups):
        return [
            f"topk_group = {kept}: of {groups} groups of {count // groups} experts it must keep "
            f"num_experts_per_tok or more"
        ]
    return []


def sigmoid_grouping(config: Any) -> Grouping:
    """Return DeepSeek-V3's way to choose, with the config's groups."""
    return Grouping(
        "sigmoid",
        config.n_group or 1,
        config.topk_group or 1,
        2,
        config.routed_scaling_factor,
        corrected=True,
    )


class GroupedRouter(Router):
    """Router that also chooses. Its correction stays in float32, as in checkpoints."""

    def __init__(self, hidden: int, count: int, grouping: Grouping, context: BuildContext) -> None:
        super().__init__(hidden, count, context)
        self.grouping = grouping
        self.e_score_correction_bias = (
            whole((count,), replace(context, dtype=torch.float32)) if grouping.corrected else None
        )

    def choose(
        self, x: torch.Tensor, k: int, *, normalize: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> ids [tokens, k] int32 and weights [tokens, k] float32. `normalize`:
        to a sum of 1, before they are scaled."""
        scores = self(x)
        correction = self.e_score_correction_bias
        scores = scores.sigmoid() if self.grouping.scoring == "sigmoid" else scores.softmax(-1)
        ids = chosen_in_groups(
            scores if correction is None else scores + correction, self.grouping, k
        )
        weights = scores.gather(1, ids)
        if normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.grouping.eps)
        return ids.to(torch.int32), weights * self.grouping.scale


def chosen_in_groups(scores: torch.Tensor, grouping: Grouping, k: int) -> torch.Tensor:
    """Return the ids [tokens, k] int64 of the best of scores [tokens, experts] within each token's
    best groups; of equals, the lower id."""
    if grouping.kept < grouping.groups:
        # [tokens, groups, experts of a group]
        by_group = scores.view(len(scores), grouping.groups, -1)
        best = (
            by_group.topk(grouping.pair, dim=-1)
            .values.sum(-1)
            .sort(dim=-1, descending=True, stable=True)
            .indices[:, : grouping.kept]
        )
        outside = torch.ones(by_group.shape[:2], dtype=torch.bool, device=scores.device).scatter_(
            1, best, value=False
        )
        scores = by_group.masked_fill(outside[:, :, None], -torch.inf).flatten(1)
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def grouped_feed_forward(
    config: Any,
    grouping: Grouping,
    context: BuildContext,
    *,
    normalize: bool,
    shared: SharedFeedForward | None,
    activation: Activation = "silu",
) -> SparseFeedForward:
    """Return the mixture of a config with the fields of DeepSeek's."""
    hidden = config.hidden_size
    count = config.n_routed_experts
    experts = Experts(
        hidden,
        config.moe_intermediate_size,
        count,
        context,
        activation,
        per_token=config.num_experts_per_tok,
    )
    router = GroupedRouter(hidden, count, grouping, context)
    return SparseFeedForward(router, experts, normalize=normalize, shared=shared)
