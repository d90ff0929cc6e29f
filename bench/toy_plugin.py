"""This module declares the components of `bench/toy.py`. Every process of Dovetail imports it to
find them, so it imports nothing that they need."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="executor",
            name="toy",
            target="bench.toy:ToyExecutor",
            api="1.0",
            options="bench.toy:ToyOptions",
            summary="No model: tokens are a function of seed and position",
        ),
        ComponentSpec(
            kind="sampler",
            name="toy",
            target="bench.toy:ToySampler",
            api="1.0",
            summary="Samples nothing, and needs no torch",
        ),
    ]
