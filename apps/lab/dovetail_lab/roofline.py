"""`RooflineStepTime`: step times without a GPU, from a model's config.json and a device's data
sheet.

In a roofline (Williams, Waterman and Patterson, Roofline, CACM 52(4), 2009), an operation takes as
long as the slower of reading its bytes and computing its operations. A step is a sequence of such
operations, plus a constant time per layer, in which kernels start and end:

    layers x layer_s + matrices + experts + head + attention + states + activations + sums between devices

`bench/lab/roofline_error.py` compares it with measurements; `docs/lab/roofline.md` has the
errors.
"""

from __future__ import annotations

from functools import cached_property
from math import sqrt
from typing import Any, Literal

from pydantic import Field, model_validator

from dovetail.api.kv_cache import KVLayout
from dovetail.errors import ConfigError
from dovetail_lab.devices import DATA_SHEETS, DataSheet
from dovetail_lab.model_sizes import ModelSizes
from dovetail_lab.step_time import Described, Seconds, StepShape

ACTIVATIONS = 2  # number of times that a layer's activations are written and read


class RooflineStepTime(Described):
    """Step-time model of a 16-bit transformer, dense or mixture of experts, on one device or
    several with tensor parallelism. Of a model with sliding windows, shapes must count what its
    layers see (`StepShape.of` with `windows`). States of recurrent layers are float32."""

    kind: Literal["roofline"] = "roofline"
    model: str | dict[str, Any] = Field(description="A config.json, its folder, or its content.")
    device: str | DataSheet = Field(
        description=f"A data sheet, or the name of one: {', '.join(DATA_SHEETS)}."
    )
    gpus: int = Field(1, ge=1, description="Devices that share each layer (tensor parallelism).")
    weight_bytes: float = Field(2.0, gt=0, allow_inf_nan=False, description="Bytes per weight.")
    kv_bytes: float = Field(2.0, gt=0, allow_inf_nan=False, description="Bytes per K or V value.")
    bandwidth_share: float = Field(
        0.78, gt=0, le=1, description="Share of the data sheet's bandwidth that kernels attain."
    )
    flops_share: float = Field(
        0.73, gt=0, le=1, description="Share of the data sheet's FLOPS that matrix products attain."
    )
    attention_share: float = Field(
        0.27,
        gt=0,
        le=1,
        description="Share of the data sheet's FLOPS that attention in prefills attains.",
    )
    launched_layer_s: Seconds = Field(
        0.0, description="Host time to launch a layer without a graph; a lower bound on the step."
    )
    layer_s: Seconds = Field(
        1.7e-5, description="Minimum device time of a layer in a recorded graph."
    )
    sum_s: Seconds = Field(
        1.2e-5, description="Minimum time of an all-reduce; there are two per layer."
    )

    @model_validator(mode="after")
    def _known(self) -> RooflineStepTime:
        if isinstance(self.device, str) and self.device not in DATA_SHEETS:
            raise ConfigError(
                f"device {self.device!r}: expected a data sheet or one of {', '.join(DATA_SHEETS)}"
            )
        heads = self.sizes.heads
        if heads % self.gpus:
            raise ConfigError(
                f"gpus is {self.gpus}, but {heads} attention heads can't be split evenly over them"
            )
        return self

    @cached_property
    def sizes(self) -> ModelSizes:
        return ModelSizes.of(self.model)

    @property
    def sheet(self) -> DataSheet:
        return DATA_SHEETS[self.device] if isinstance(self.device, str) else self.device

    def seconds(self, shape: StepShape) -> float:
        sizes = self.sizes
        tokens = shape.tokens
        seconds = sizes.layers * self.layer_s
        seconds += self._products(sizes.dense_weights, sizes.dense_weights * tokens)
        seconds += self._products(sizes.head_weights, sizes.head_weights * shape.rows)
        if sizes.experts:
            chosen = sizes.experts_per_token * tokens
            seconds += self._products(
                sizes.expert_weights * sizes.experts_touched(tokens), sizes.expert_weights * chosen
            )
        seconds += (
            self._attention(shape)
            + self._states(shape)
            + self._activations(tokens)
            + self._sums(tokens)
        )
        return max(seconds, sizes.layers * self.launched_layer_s)

    def num_pages(self, layout: KVLayout, memory_share: float) -> int:
        """Return the number of pages that fit on the devices, if the engine uses `memory_share` of
        their memory, including weights. Excludes the memory of activations, a few percent. Raises
        `ConfigError` if the weights leave no space."""
        left = (
            memory_share * self.sheet.memory_bytes * self.gpus
            - self.weight_bytes * self.sizes.parameters
        )
        if left < layout.page_bytes:
            weights = 1e-9 * self.weight_bytes * self.sizes.parameters
            memory = 1e-9 * self.sheet.memory_bytes
            raise ConfigError(
                f"{weights:.0f} GB of weights leave no room for K and V in {memory_share:.0%} of "
                f"{self.gpus} x {memory:.0f} GB"
            )
        return int(left / layout.page_bytes)

    @cached_property
    def _bytes_per_s(self) -> float:
        return self.gpus * self.sheet.bytes_per_s * self.bandwidth_share

    @cached_property
    def _flops(self) -> float:
        return self.gpus * self.sheet.flops

    def _products(self, weights: float, multiplied: float) -> float:
        """Return the seconds of matrix products that read `weights` weights, with `multiplied`
        multiplications over all rows."""
        return _either(
            self.weight_bytes * weights / self._bytes_per_s,
            2.0 * multiplied / (self._flops * self.flops_share),
        )

    def _attention(self, shape: StepShape) -> float:
        """Return the seconds to read K and V once, and to compute a score and a weighted sum for
        each pair of a prefill."""
        sizes = self.sizes
        pairs = 4.0 * sizes.attention_layers * sizes.heads * sizes.head_size * shape.prefill_pairs
        reading = self.kv_bytes * sizes.kv_numbers * shape.context_tokens / self._bytes_per_s
        return _either(reading, pairs / (self._flops * self.attention_share))

    def _states(self, shape: StepShape) -> float:
        """Return the seconds to read and write the state of each row once, and to multiply it with
        each token: it decays, is corrected by the token's key and value, and is read by its query,
        8 operations per number."""
        sizes = self.sizes
        moving = 2.0 * sizes.state_bytes * shape.rows / self._bytes_per_s
        return _either(
            moving,
            8.0 * sizes.state_numbers * shape.prefill_tokens / (self._flops * self.attention_share),
        )

    def _activations(self, tokens: int) -> float:
        sizes = self.sizes
        inner = sizes.mlp + sizes.experts_per_token * sizes.expert_mlp
        numbers = 2 * sizes.hidden + (sizes.heads + sizes.kv_heads) * sizes.head_size + inner
        return 2.0 * ACTIVATIONS * sizes.layers * numbers * tokens / self._bytes_per_s

    def _sums(self, tokens: int) -> float:
        """Return the seconds of two ring all-reduces per layer."""
        if self.gpus == 1:
            return 0.0
        sent = 2.0 * (self.gpus - 1) / self.gpus * 2.0 * self.sizes.hidden * tokens
        return 2.0 * self.sizes.layers * (self.sum_s + sent / self.sheet.link_bytes_per_s)


def _either(reading_s: float, computing_s: float) -> float:
    """Return the time of work that overlaps reading and computing: the longer of the two, and up to
    1.4 times that if both are equal, since tiles start by reading and end by computing. Square
    roots are the same on every machine."""
    return sqrt(reading_s * reading_s + computing_s * computing_s)
