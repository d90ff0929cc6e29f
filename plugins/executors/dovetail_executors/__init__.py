"""Built-in executors."""

from __future__ import annotations

from dovetail.api.component import CommandSpec, ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="executor",
            name="local",
            target="dovetail_executors.local:LocalExecutor",
            api="1.0",
            options="dovetail_executors.options:LocalOptions",
            summary="The model on one device, in this process",
            requires=("torch>=2.11", "transformers>=5", "safetensors>=0.5"),
        ),
        ComponentSpec(
            kind="executor",
            name="tensor",
            target="dovetail_executors.tensor:TensorExecutor",
            api="1.0",
            options="dovetail_executors.options:TensorOptions",
            summary="The model split over several GPUs, of this host or several, or over processes "
            "on CPUs",
            requires=("torch>=2.11", "transformers>=5", "safetensors>=0.5"),
        ),
    ]


@hookimpl
def dovetail_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            "ranks",
            "dovetail_executors.agent:ranks",
            "Offer this host's devices to an engine on another host",
        )
    ]
