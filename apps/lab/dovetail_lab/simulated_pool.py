"""KV pool of the executor `simulated`: its layout and size, by the options, the profile, or a
roofline's model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from dovetail.api.executor import ExecutorConfig
from dovetail.api.kv_cache import KVLayout
from dovetail.api.kv_layout import PlannedLayout
from dovetail.api.kv_transfers import WORD
from dovetail.errors import ConfigError, UnsupportedError
from dovetail_lab.cache_layout import layout_of
from dovetail_lab.model_sizes import ModelSizes
from dovetail_lab.roofline import RooflineStepTime
from dovetail_lab.simulated_options import SimulatedOptions
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.step_time import StepTimeModel

DEFAULT_BLOCK_SIZE = 16


class SimulatedPool:
    """The pool of one engine. Its properties raise `ConfigError` if both the options and the step
    times say which layers the model has, and the errors of `ModelSizes.of`."""

    def __init__(
        self,
        options: SimulatedOptions,
        profile: StepTimeProfile,
        step_time: StepTimeModel,
        config: ExecutorConfig,
    ) -> None:
        """`step_time`: the profile's model."""
        self._options = options
        self._profile = profile
        self._roofline = step_time if isinstance(step_time, RooflineStepTime) else None
        self._config = config
        self._block_size = config.block_size or DEFAULT_BLOCK_SIZE

    @cached_property
    def planned(self) -> PlannedLayout | None:
        """The layout of the model that the options or a roofline name; None if there is none."""
        sizes = self._sizes
        if sizes is None:
            return None
        return sizes.cache_layout(
            self._block_size,
            2.0 if self._roofline is None else self._roofline.kv_bytes,
            self._config.max_model_len,
        )

    @property
    def _sizes(self) -> ModelSizes | None:
        model = self._options.model
        if model is None:
            return None if self._roofline is None else self._roofline.sizes
        if self._roofline is not None or self._profile.cache_groups:
            raise ConfigError(
                f"executor simulated: step times {self._profile.name!r} state their model's "
                f"layers: leave executor.model out"
            )
        return ModelSizes.of(model)

    @cached_property
    def layout(self) -> KVLayout:
        if self.planned is not None:
            return self.planned.layout
        return layout_of(self._profile.cache_groups, self._block_size, self._config.max_model_len)

    @property
    def num_pages(self) -> int:
        """Pages in the pool: as the options say, as measured, or by the data sheet. Raises
        `UnsupportedError` if none of them does."""
        return self._options.num_pages or self._measured_pages()

    @property
    def details(self) -> Mapping[str, Any]:
        """`Capacity.details` on a layout of several groups; none on other layouts."""
        if self.planned is None or len(self.layout.groups) == 1:
            return {}
        return {"kv_groups": self.planned.describe()}

    @property
    def page_bytes(self) -> int:
        """Bytes that a transfer copies for each page. Raises `ConfigError` if they are unknown."""
        if self._options.page_bytes is not None:
            return self._options.page_bytes
        if self.planned is None:
            raise ConfigError(
                f"executor simulated: step times {self._profile.name!r} don't state the size of a "
                f"page: set executor.page_bytes"
            )
        return -(-self.planned.layout.page_bytes // WORD) * WORD

    def _measured_pages(self) -> int:
        if self._options.model is None and (
            measured := (self._profile.kv_tokens or 0) // self._block_size
        ):
            return measured
        if self._roofline is not None:
            return self._roofline.num_pages(self.layout, self._config.gpu_memory_utilization)
        why = (
            "don't state the size of the KV pool"
            if self._options.model is None
            else "don't state the size of this model's KV pool"
        )
        raise UnsupportedError(
            f"executor simulated: step times {self._profile.name!r} {why}: set executor.num_pages"
        )
