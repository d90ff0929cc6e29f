"""Quantization of a model: selects it from the checkpoint and `engine.yaml`, and allocates the
weights of linear layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.api.executor import QuantizationRef
from dovetail.errors import (
    ConfigError,
    DovetailError,
    ModelLoadError,
    UnsupportedError,
    describe,
    shown,
)
from dovetail.nn.format import Quantization
from dovetail_executors.runtime.architecture import built_ins_first

METHOD = "quant_method"
_WHY_NOT = {  # published ways of storing weights that no format reads
    "bitnet": "its weights are ternary, and its inputs are rounded to 8 bits as a part of the model",
    "eetq": "its bytes are in the order of one kernel",
    "fp_quant": "its inputs are rotated by Hadamard matrices",
    "higgs": "its weights are rotated by Hadamard matrices",
    "hqq": "each module has its own shape, packing and dtypes, as tensors",
    "marlin": "its weights are in the order of one kernel",
    "quanto": "its tensors are Python objects",
    "sinq": "its weights have scales along both dimensions",
    "spqr": "it has sparse outliers beside its weights",
    "torchao": "its tensors are Python objects",
    "vptq": "its vectors are permuted, with outliers beside them",
}


def choose_quantization(
    asked: str | None,
    said: Mapping[str, Any] | None,
    installed: Sequence[QuantizationRef],
    model_dir: str | Path,
) -> Quantization | None:
    """Return what reads a checkpoint whose `quantization_config` is `said`, if that is what is
    `asked` for; None if its weights are plain and stay so.

    Raises `UnsupportedError` for an unknown `quant_method` or an unsupported option of one, and
    `ConfigError` if `asked` contradicts the checkpoint."""
    if not said:
        return None if asked is None else _quantizing(asked, installed)
    path = Path(model_dir) / "config.json"
    method = said.get(METHOD)
    if not isinstance(method, str):
        raise ModelLoadError(
            f"{path}: quantization_config: expected {METHOD}, the name of a way of storing "
            f"weights, got {shown(method)}"
        )
    full = [ref for ref in installed if ref.method == method and ref.name == asked]
    ref = _named(
        method,
        full or installed,
        UnsupportedError,
        f"{path}: quantization_config: {METHOD} {shown(method)}",
    )
    if asked not in (None, ref.method, ref.name):
        raise ConfigError(
            f"quantization: {shown(asked)} is asked for, and the checkpoint is {ref.method} "
            f"already: leave the key out"
        )
    try:
        return _made(ref, said)
    except DovetailError as error:
        raise type(error)(f"{path}: {error}") from error


def _quantizing(asked: str, installed: Sequence[QuantizationRef]) -> Quantization:
    ref = _named(asked, installed, ConfigError, f"quantization: {shown(asked)}")
    if not ref.quantizes:
        able = ", ".join(other.method for other in installed if other.quantizes)
        raise ConfigError(
            f"quantization: {shown(asked)}: the checkpoint's weights are plain; they can be "
            f"quantized while they load to {able}"
        )
    return _made(ref, None)


def _made(ref: QuantizationRef, said: Mapping[str, Any] | None) -> Quantization:
    """Import and construct a quantization, possibly a third party's."""
    try:
        made = ref.load()(said)
    except DovetailError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if said is None:
            raise UnsupportedError(f"quantization {ref.name} failed: {describe(error)}") from error
        raise ModelLoadError(
            f"quantization_config: a value in it can't be used by {ref.name}: {describe(error)}"
        ) from error
    except Exception as error:
        raise UnsupportedError(f"quantization {ref.name} failed: {describe(error)}") from error
    if not isinstance(made, Quantization):
        raise UnsupportedError(
            f"quantization {ref.name}: expected a class of `dovetail.nn.format.Quantization`, its "
            f"target makes {shown(made)}"
        )
    return made


def _named(
    name: str, installed: Sequence[QuantizationRef], error: type[DovetailError], what: str
) -> QuantizationRef:
    fitting = built_ins_first([ref for ref in installed if name in (ref.method, ref.name)])
    known = ", ".join(ref.method for ref in installed) or "none"
    if not fitting and name in _WHY_NOT:
        raise error(f"{what} isn't served: {_WHY_NOT[name]}; served are {known}")
    if not fitting:
        raise error(f"{what} is unknown; known are {known}")
    if len(fitting) > 1:
        raise error(
            f"{what} is known to {' and '.join(ref.name for ref in fitting)}: write one of these "
            f"names as `quantization` in engine.yaml"
        )
    return fitting[0]
