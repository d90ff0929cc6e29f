"""Scales by which K and V are divided before they are stored in a cache of FP8: from the
checkpoint, or fitted to the prompts of the first step. A worker makes these for the layers of its
model.

e4m3 is a floating-point format: its error is a share of each number, 1/16 at most, whatever the
scale, between 2**-6 and 448 times the scale. So a scale needn't be exact: it has to keep the
largest numbers from being cut off, and the small ones above 2**-6. Those that are calibrated are
powers of two, which change no rounding in between: so what is stored hardly depends on which
prompts came first, or on how many ranks share the heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch

from dovetail.api.attention import AttentionLayer, FusedCache, KVScales, LayerCache, LayerSpec
from dovetail.errors import ModelLoadError, shown
from dovetail.nn.weights import tensors_named

LARGEST = 448.0  # of e4m3
# headroom over the largest number seen; values lost below the largest / 2**13 hardly matter in any
# sum
ROOM = 2.0

# As compressed-tensors and vLLM, ModelOpt, and AutoFP8 name them: one number for both, or one each.
_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?(?P<of>k|v|kv)_scale$"
)


def is_kv_scale(name: str) -> bool:
    """Return True if a checkpoint's tensor of this name scales K or V of a layer."""
    return _NAME.search(name) is not None


class CacheScales:
    """Scales of all layers of one rank: ones, until they are read or calibrated."""

    def __init__(self, device: torch.device, *, calibrate: bool = False) -> None:
        self._device = device
        self._calibrate = calibrate
        self._scales: dict[int, KVScales] = {}  # by the layer's index
        self.to_calibrate = calibrate  # and no step has yet had prompts
        self._running = False
        self.source = "calibrated on the first prompts" if calibrate else "1"

    def wrap(
        self, make_layer: Callable[[LayerSpec], AttentionLayer]
    ) -> Callable[[LayerSpec], AttentionLayer]:
        """Set the scales of each new layer; those of a layer that shares another's cache are the
        other's."""

        def make(spec: LayerSpec) -> AttentionLayer:
            layer = make_layer(spec)
            if spec.shares is not None:
                layer.kv_scales = self._scales[spec.shares]
                return layer
            k, v = (torch.ones((), dtype=torch.float32, device=self._device) for _ in range(2))
            layer.kv_scales = self._scales[spec.index] = KVScales(k, v)
            return _CalibratedLayer(layer, layer.kv_scales, self) if self._calibrate else layer

        return make

    def read(self, model_dir: str | Path) -> None:
        """Take the scales that the checkpoint holds, unless they are to be calibrated. Raises
        `ModelLoadError` naming the tensor if one is no positive number, or if some layers have
        scales and others don't."""
        found: dict[tuple[int, str], float] = {}
        for name, tensor in tensors_named(model_dir, is_kv_scale):
            match = _NAME.search(name)
            if match is None or int(match["layer"]) not in self._scales:
                continue
            if tensor.numel() != 1 or not 0 < float(tensor) < float("inf"):
                raise ModelLoadError(
                    f"{model_dir}: {name}: expected one positive number for the whole layer, got "
                    f"{shown(tensor.tolist())}"
                )
            found |= {(int(match["layer"]), of): float(tensor) for of in match["of"]}
        lacking = [
            f"{of}_scale of layer {layer}"
            for layer in self._scales
            for of in "kv"
            if (layer, of) not in found
        ]
        if not found or self._calibrate:
            return
        if lacking:
            raise ModelLoadError(
                f"{model_dir}: the checkpoint scales K and V of some layers, but lacks "
                f"{lacking[0]}; set kv_cache_scales: calibrate"
            )
        for (layer, of), value in found.items():
            getattr(self._scales[layer], of).fill_(value)
        self.source = "the checkpoint's"

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Set each layer's scales from the K and V that it writes next, which must not be replayed
        from a graph."""
        self._running = True
        try:
            yield
        finally:
            self._running = self.to_calibrate = False

    @property
    def running(self) -> bool:
        return self._running

    @property
    def name(self) -> str:
        """Name that equal scales have, in other processes, too. Scales that are calibrated have a
        new one each time, since nobody knows them before the first prompts."""
        if self._calibrate:
            return f"calibrated {uuid4().hex}"
        values = [float(part) for each in self._scales.values() for part in (each.k, each.v)]
        return sha256(np.array(values, "<f8").tobytes()).hexdigest()[:16]


class _CalibratedLayer(AttentionLayer):
    """A layer whose scales are set from the values that it writes while `calibrating`."""

    def __init__(self, layer: AttentionLayer, scales: KVScales, owner: CacheScales) -> None:
        self.spec = layer.spec
        self.kv_scales = layer.kv_scales
        self._layer = layer
        self._scales = scales
        self._owner = owner

    def bind(self, cache: LayerCache) -> None:
        self._layer.bind(cache)

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        if self._owner.running:
            for scale, values in ((self._scales.k, k), (self._scales.v, k if v is None else v)):
                # nobody waits for the device
                largest = values.float().nan_to_num(0.0, 0.0, 0.0).abs().amax()
                scale.copy_(
                    torch.where(
                        largest > 0,
                        torch.exp2(torch.ceil(torch.log2(largest * (ROOM / LARGEST)))),
                        1.0,
                    )
                )
        self._layer.write(k, v)

    def cache_for_fused_write(self) -> FusedCache | None:
        return None if self._owner.running else self._layer.cache_for_fused_write()

    def bind_sinks(self, sinks: torch.Tensor) -> None:
        self._layer.bind_sinks(sinks)

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        return self._layer.attend(q)
