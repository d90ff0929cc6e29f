"""Helpers that read a checkpoint's `quantization_config`. Each format has a table of its keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.api.file_keys import Refused
from dovetail.errors import ModelLoadError, shown

WHERE = "quantization_config"
DEQUANTIZE = Refused(
    "it stores weights in 16 bits; leave the format, results are the same", (False,)
)


def names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the list of names at `key`; empty if absent. Raises `ModelLoadError` if it isn't a
    list of names."""
    values = config.get(key) or ()
    if not isinstance(values, list | tuple) or not all(isinstance(name, str) for name in values):
        raise ModelLoadError(
            f"quantization_config: {key} must be a list of names, got {shown(values)}"
        )
    return tuple(values)


def within(module: str, name: str) -> bool:
    """True if `name` consists of consecutive components of the module's name: "lm_head",
    "layers.0.mlp", "down_proj"."""
    return f".{name}." in f".{module}."


def group_size(
    config: Mapping[str, Any], key: str, where: str = "quantization_config"
) -> int | None:
    """Return the number of inputs per scale; None for all (written as -1). Raises `ModelLoadError`
    for an invalid size."""
    size = config.get(key)
    if type(size) is not int or (size < 1 and size != -1):
        raise ModelLoadError(
            f"{where}: {key} must be a number of inputs, or -1 for all, got {shown(size)}"
        )
    return None if size == -1 else size


def block_size(
    config: Mapping[str, Any], key: str, where: str = "quantization_config"
) -> tuple[int, int]:
    """Return the number of outputs and inputs per block of weights with one scale. Raises
    `ModelLoadError` for invalid sizes."""
    sizes = config.get(key)
    if (
        not isinstance(sizes, list | tuple)
        or len(sizes) != 2
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        raise ModelLoadError(
            f"{where}: {key} must be two numbers, of outputs and of inputs, got {shown(sizes)}"
        )
    return sizes[0], sizes[1]


def keys_and_values(value: Any, where: str) -> Mapping[str, Any]:
    """Return `value` if it is an object. Raises `ModelLoadError` otherwise."""
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"{where}: expected keys and values, got {shown(value)}")
    return value
