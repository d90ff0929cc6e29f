"""Settings of the runtime that builds a model from layers of `dovetail.nn`, beside those of
`BuildContext`. Authors of models pass their context on, and needn't read them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dovetail.api.model import BuildContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeContext(BuildContext):
    """`BuildContext` of a runtime that gives layers weights in other formats, or adapters, after
    `build`."""

    # weights of linear layers are allocated after `build`, in the checkpoint's format
    weights_later: bool = False
    # and the checkpoint has that format already: it isn't quantized while it loads
    weights_stored: bool = False
    # LoRA adapters may be added to linear layers after `build`
    adapters: bool = False
    # names what else changes the numbers: device, attention backend, dtype of the KV cache,
    # quantization, graphs
    environment: str = ""


def of_runtime(context: BuildContext) -> RuntimeContext:
    """Return `context` with the runtime's settings. Those of a plain `BuildContext` are the
    defaults: nothing happens after `build`."""
    if isinstance(context, RuntimeContext):
        return context
    return RuntimeContext(**{field.name: getattr(context, field.name) for field in fields(context)})
