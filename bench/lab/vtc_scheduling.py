"""The admission of the server that the VTC paper measured: `lightllm`, with a router that reads its
socket once a step. `vtc_arena.py` simulates with it."""

from __future__ import annotations

from collections.abc import Sequence

from bench.lab.policies import registry_with
from dovetail.api.scheduler import Step
from dovetail.registry.registry import Registry
from dovetail.request import Request
from dovetail_schedulers.lightllm import LightLLM

NAME = "s-lora"


class SLoRAScheduler(LightLLM):
    """LightLLM, which hears a step late of a request that arrives while others run: its event loop
    turns to its socket after the next step has begun. Where a request ends, the loop turns once
    more, and it hears in time."""

    # ids of those that waited when the step before was planned
    _heard_of: frozenset[str] = frozenset()
    _turned = False  # a request has ended since then

    def schedule(self, step: Step) -> None:
        super().schedule(step)
        self._heard_of = frozenset(request.id for request in step.waiting)
        self._turned = False

    def on_finished(self, request: Request) -> None:
        super().on_finished(request)
        self._turned = True

    def _admit(self, step: Step, waiting: Sequence[Request]) -> None:
        super()._admit(
            step,
            [
                request
                for request in waiting
                if request.id in self._heard_of or self._turned or not step.running
            ],
        )


def registry() -> Registry:
    """Return the installed plugins, and this policy among them."""
    return registry_with(
        NAME,
        "bench.lab.vtc_scheduling:SLoRAScheduler",
        "dovetail_schedulers.lightllm:LightLLMOptions",
    )
