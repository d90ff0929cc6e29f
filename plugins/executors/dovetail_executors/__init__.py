"""Built-in executors."""

from __future__ import annotations

from dovetail.api.component import ComponentSpec, hookimpl


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            kind="executor",
            name="local",
            target="dovetail_executors.local:LocalExecutor",
            api="0.3",
            options="dovetail_executors.options:LocalOptions",
            summary="The model on one device, in this process",
            requires=("torch>=2.11", "transformers>=5", "safetensors>=0.5"),
        )
    ]
