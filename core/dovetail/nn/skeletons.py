"""Models that transformers builds, without memory for their parameters.

transformers sets torch's default dtype while it builds or loads a model, and replaces functions of
torch and of its own classes: state of the whole process. Two threads that do so at once, as engines
that start together, would leave some of these replaced. So one thread at a time does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

Model = TypeVar("Model", bound=nn.Module)

ONE_AT_A_TIME = threading.RLock()  # held while transformers builds or loads a model


def skeleton(build: Callable[[], Model], *, least_dims: int = 0) -> Model:
    """Call `build`, with `ONE_AT_A_TIME` held. Parameters of `least_dims` or more dimensions go to
    the meta device as soon as they are made, while buffers and other parameters have the values
    that the model gives them. Modules that other threads make meanwhile stay as they are."""
    thread = threading.get_ident()

    def without_memory(
        _: nn.Module, __: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        if parameter.ndim < least_dims:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    with ONE_AT_A_TIME:
        handle = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type] # torch's annotation lacks the result
        try:
            return build()
        finally:
            handle.remove()
