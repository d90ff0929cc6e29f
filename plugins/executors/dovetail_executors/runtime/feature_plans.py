"""The features of steps: the one list of them. A worker asks for it before it reads any weights."""

from __future__ import annotations

import torch

from dovetail.api.executor import ExecutorContext
from dovetail.api.model import ParallelGroup
from dovetail.errors import UnsupportedError
from dovetail_executors.runtime.adapters import AdapterPlan
from dovetail_executors.runtime.draft_head import HeadPlan
from dovetail_executors.runtime.draft_model import DraftPlan
from dovetail_executors.runtime.features import FeaturePlan
from dovetail_executors.runtime.loading import ModelPlan
from dovetail_executors.runtime.media import MediaPlan
from dovetail_executors.runtime.pooler import PoolerPlan
from dovetail_executors.runtime.prompt_logprobs import PromptLogprobsPlan


def feature_plans(
    context: ExecutorContext, plan: ModelPlan, group: ParallelGroup, device: torch.device
) -> list[FeaturePlan]:
    """Return the features of an engine, in the order in which they take part in a step. Raises as
    each plan does, if a model can't be served with what is asked for."""
    config = context.config
    plans = list[FeaturePlan]()
    if config.max_adapters:
        plans.append(AdapterPlan(config.max_adapters, config.max_adapter_rank))
    if config.max_drafts:
        _check_drafts(plan)
    if config.draft_head is not None:
        plans.append(HeadPlan.of(config, plan, group))
    elif config.draft_model is not None:
        models = context.models
        quantizations = context.quantizations
        plans.append(DraftPlan.of(config, plan, models, group, device, quantizations))
    if (media := MediaPlan.of(config, plan)) is not None:
        plans.append(media)
    own = [make(context, plan, group, device) for make in config.features]
    return [*plans, *own, PromptLogprobsPlan(), PoolerPlan(plan.pooling)]


def _check_drafts(plan: ModelPlan) -> None:
    """Raise `UnsupportedError` if the model can't check drafts."""
    if not plan.pooling.capacity.generates:
        raise UnsupportedError(
            "speculation: this model generates nothing: it makes embeddings or scores"
        )
    for spec in plan.states:
        if not spec.drafts:
            raise UnsupportedError(
                f"speculation: recurrent layer {spec.index} of the model can't check drafts "
                "(StateSpec.drafts): remove `speculation` from the engine's config"
            )
