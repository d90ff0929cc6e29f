"""`local` and `tensor` with steering: their workers get the feature with their config."""

from __future__ import annotations

from dataclasses import replace

from dovetail.api.executor import ExecutorContext
from dovetail_executors.local import LocalExecutor
from dovetail_executors.tensor import TensorExecutor
from tests.features.steering.device import MakesSteeringPlan
from tests.features.steering.parts import LocalSteering, Steering, TensorSteering


def with_steering(options: Steering, context: ExecutorContext) -> ExecutorContext:
    make = MakesSteeringPlan(options.vectors, options.layer, options.slots)
    config = context.config
    return replace(context, config=replace(config, features=(*config.features, make)))


class SteeredLocal(LocalExecutor):
    options: LocalSteering

    def __init__(self, options: LocalSteering, context: ExecutorContext) -> None:
        super().__init__(options, with_steering(options, context))


class SteeredTensor(TensorExecutor):
    options: TensorSteering

    def __init__(self, options: TensorSteering, context: ExecutorContext) -> None:
        super().__init__(options, with_steering(options, context))
