"""`RooflineStepTime`: step times without a GPU, from a model's config.json and a device's data sheet.

A roofline (Williams, Waterman and Patterson, Roofline, CACM 52(4), 2009) says that work takes as long as its slower half: reading its bytes, or doing
its operations. A step is a few such works one after the other, and a constant time for each layer, in which kernels begin and end:

    layers x layer_s + matrices + experts + head + attention + activations + sums between devices

`bench/lab/roofline_error.py` compares it with what was measured; `docs/lab/roofline.md` has the errors.
"""

from __future__ import annotations

from functools import cached_property
from math import sqrt
from typing import Any, Literal

from pydantic import Field, model_validator

from dovetail.errors import ConfigError
from dovetail_lab.devices import DATA_SHEETS, DataSheet
from dovetail_lab.model_sizes import ModelSizes
from dovetail_lab.step_time import Described, Seconds, StepShape

ACTIVATIONS = 2  # times that a layer's activations are written and read


class RooflineStepTime(Described):
    """A step-time model of a dense transformer, or of a mixture of experts, in 16 bits on one device or on several that share each layer."""

    kind: Literal["roofline"] = "roofline"
    model: str | dict[str, Any] = Field(description="A config.json, the folder that it is in, or its content.")
    device: str | DataSheet = Field(description=f"Its data sheet, or the name of one: {', '.join(DATA_SHEETS)}.")
    gpus: int = Field(1, ge=1, description="Devices that share each layer (tensor parallelism).")
    weight_bytes: float = Field(2.0, gt=0, allow_inf_nan=False, description="Bytes of a weight.")
    kv_bytes: float = Field(2.0, gt=0, allow_inf_nan=False, description="Bytes of a number of K or V.")
    bandwidth_share: float = Field(0.78, gt=0, le=1, description="Of the data sheet's bandwidth: what kernels attain.")
    flops_share: float = Field(0.73, gt=0, le=1, description="Of the data sheet's operations a second: what matrix products attain.")
    attention_share: float = Field(0.27, gt=0, le=1, description="The same, of a prefill's attention.")
    launched_layer_s: Seconds = Field(0.0, description="What launching a layer takes the host where no graph was recorded: a step is never shorter.")
    layer_s: Seconds = Field(1.7e-5, description="What a layer takes the device however little it computes, in a recorded graph.")
    sum_s: Seconds = Field(1.2e-5, description="What a sum over the devices takes however little it sends; there are two in a layer.")

    @model_validator(mode="after")
    def _known(self) -> RooflineStepTime:
        if isinstance(self.device, str) and self.device not in DATA_SHEETS:
            raise ConfigError(f"device {self.device!r}: expected a data sheet, or one of {', '.join(DATA_SHEETS)}")
        heads = self.sizes.heads
        if heads % self.gpus:
            raise ConfigError(f"gpus is {self.gpus}, which {heads} attention heads can't be shared by evenly")
        return self

    @cached_property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.model)

    @property
    def sheet(self) -> DataSheet:
        return DATA_SHEETS[self.device] if isinstance(self.device, str) else self.device

    def seconds(self, shape: StepShape) -> float:
        sizes, tokens = self.sizes, shape.tokens
        seconds = sizes.layers * self.layer_s
        seconds += self._products(sizes.dense_weights, sizes.dense_weights * tokens)
        seconds += self._products(sizes.head_weights, sizes.head_weights * shape.rows)
        if sizes.experts:
            chosen = sizes.experts_per_token * tokens
            seconds += self._products(sizes.expert_weights * sizes.experts_touched(tokens), sizes.expert_weights * chosen)
        seconds += self._attention(shape) + self._activations(tokens) + self._sums(tokens)
        return max(seconds, sizes.layers * self.launched_layer_s)

    def kv_tokens(self, memory_share: float) -> int:
        """Return how many tokens' K and V the devices have room for, if the engine takes `memory_share` of their memory, weights included. What a
        step's activations take is left out: a few per cent. Raises `ConfigError` if the weights leave no room."""
        left = memory_share * self.sheet.memory_bytes * self.gpus - self.weight_bytes * self.sizes.parameters
        tokens = int(left / (self.kv_bytes * self.sizes.kv_numbers))
        if tokens < 1:
            weights, memory = 1e-9 * self.weight_bytes * self.sizes.parameters, 1e-9 * self.sheet.memory_bytes
            raise ConfigError(f"{weights:.0f} GB of weights leave no room for K and V in {memory_share:.0%} of {self.gpus} x {memory:.0f} GB")
        return tokens

    @cached_property
    def _bytes_per_s(self) -> float:
        return self.gpus * self.sheet.bytes_per_s * self.bandwidth_share

    @cached_property
    def _flops(self) -> float:
        return self.gpus * self.sheet.flops

    def _products(self, weights: float, multiplied: float) -> float:
        """Return the seconds of matrix products that read `weights` and multiply `multiplied` of them, all rows together."""
        return _either(self.weight_bytes * weights / self._bytes_per_s, 2.0 * multiplied / (self._flops * self.flops_share))

    def _attention(self, shape: StepShape) -> float:
        """Return the seconds in which K and V are read once, and a score and a sum are computed for each pair of a prefill."""
        sizes = self.sizes
        pairs = 4.0 * sizes.layers * sizes.heads * sizes.head_size * shape.prefill_pairs
        reading = self.kv_bytes * sizes.kv_numbers * shape.context_tokens / self._bytes_per_s
        return _either(reading, pairs / (self._flops * self.attention_share))

    def _activations(self, tokens: int) -> float:
        sizes = self.sizes
        inner = sizes.mlp + sizes.experts_per_token * sizes.expert_mlp
        numbers = 2 * sizes.hidden + (sizes.heads + sizes.kv_heads) * sizes.head_size + inner
        return 2.0 * ACTIVATIONS * sizes.layers * numbers * tokens / self._bytes_per_s

    def _sums(self, tokens: int) -> float:
        """Return the seconds of two sums over all devices in each layer, in rings."""
        if self.gpus == 1:
            return 0.0
        sent = 2.0 * (self.gpus - 1) / self.gpus * 2.0 * self.sizes.hidden * tokens
        return 2.0 * self.sizes.layers * (self.sum_s + sent / self.sheet.link_bytes_per_s)


def _either(reading_s: float, computing_s: float) -> float:
    """Return how long work takes that reads and computes at once: the longer one, and up to 1.4 times that where both are equally long, since tiles
    begin by reading and end by computing. Square roots are the same on every machine."""
    return sqrt(reading_s * reading_s + computing_s * computing_s)
