"""CUDA graphs: for which steps the executor may record a component's work, to replay it later.

Attention backends, samplers and logits processors declare it, each as the field `cuda_graph` of
its capabilities.
"""

from __future__ import annotations

from enum import Enum


class GraphSupport(Enum):
    """Steps in which a component's work may be recorded as a CUDA graph.

    A replay runs the recorded kernels again, with the same tensors, for other rows. So recorded
    work consists of device operations only, doesn't wait for the host, and reads whatever differs
    between steps from buffers at fixed addresses. Steps that a component doesn't support are
    launched operation by operation, or recorded without its part.

    False in a condition is NONE, and no other. Later minor versions may add members.
    """

    NONE = "none"
    """No steps."""

    DECODE = "decode"
    """Plain decode steps: each row computes one token, and asks for nothing but its id. In such a
    step no logits processor is applied."""

    ALL = "all"
    """All steps."""

    def __bool__(self) -> bool:
        return self is not GraphSupport.NONE
