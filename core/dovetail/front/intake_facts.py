"""`IntakeFacts`: the limits and capabilities of an engine, against which requests are validated."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.config.limits import Limits
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.media.facts import MediaFacts
from dovetail.front.pooling import PoolingFacts


@dataclass(frozen=True, slots=True)
class IntakeFacts:
    """The properties of an engine that `Intake` validates requests against.

    They are plain values, so that they can be sent to another process.
    """

    limits: Limits
    max_model_len: int  # tokens, prompt and output together
    vocab_size: int
    defaults: GenerationDefaults
    executor: str  # its name, as the config has it
    sampler: str
    has_logprobs: bool = True  # the executor returns log-probabilities
    samples_logprobs: bool = True  # so does the sampler
    extra_args: frozenset[str] = frozenset()  # keys that the sampler understands
    logits_processors: tuple[str, ...] = ()  # full names of the engine's
    has_masks: bool = False
    pooling: PoolingFacts | None = None  # None: it can't pool
    has_adapters: bool = False
    media: MediaFacts | None = None  # None: it takes no images
    not_deterministic: str = ""  # see `dovetail.api.executor.Capacity`
    always_deterministic: bool = False  # so are all requests
