"""`EndReason`: why a request ended or was refused. `FinishReason`: what outputs tell of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

# others may be added in a later minor version
FinishReason = Literal["stop", "length", "abort", "rejected", "error"]


class EndReason(StrEnum):
    """Why a request ended, or was refused. A text beside it has the details. Members may be added
    in a later minor version."""

    STOP = "stop"  # an end-of-sequence or stop token, a stop string, a complete grammar or result
    LENGTH = "length"  # it has all the tokens that it may have
    KV_CAPACITY = "kv_capacity"  # the KV cache holds no longer sequence
    ABORT = "abort"  # its caller or the server has ended it
    REJECTED = "rejected"  # by the scheduler
    INVALID = "invalid"  # the request is wrong
    UNSUPPORTED = "unsupported"  # a valid request that needs what this engine lacks
    QUEUE_FULL = "queue_full"  # too many requests are unfinished
    GRAMMAR = "grammar"  # its structured-output spec doesn't compile
    GRAMMAR_LIMIT = "grammar_limit"  # its grammar can't be followed to the end
    ADAPTER = "adapter"  # its LoRA adapter can't be loaded
    ERROR = "error"  # a component failed
    ENGINE_DEAD = "engine_dead"  # the engine failed, or was closed

    @property
    def finish_reason(self) -> FinishReason:
        """The coarse reason that outputs and observers have, in OpenAI's words and our own."""
        return _FINISH_REASONS.get(self, "rejected")

    @property
    def is_error(self) -> bool:
        """True if a component failed, so that what was computed for the request may be wrong."""
        return self.finish_reason == "error"


_FINISH_REASONS: Mapping[EndReason, FinishReason] = {
    EndReason.STOP: "stop",
    EndReason.LENGTH: "length",
    EndReason.KV_CAPACITY: "length",
    EndReason.ABORT: "abort",
    EndReason.GRAMMAR_LIMIT: "error",
    EndReason.ERROR: "error",
    EndReason.ENGINE_DEAD: "error",
}
