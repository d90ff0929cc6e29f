"""Gives the layers of a model the formats that a quantization says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dovetail.errors import DovetailError, UnsupportedError, describe, shown
from dovetail.nn.format import DENSE, Quantization, StoredFormat, WeightFormat
from dovetail.nn.linear import LinearLayer
from dovetail.nn.moe import Experts
from dovetail.nn.weights import some_of


def _format_of(quantization: Quantization, modules: Sequence[str]) -> WeightFormat:
    """Return a layer's format from a quantization, possibly a third party's. Raises
    `UnsupportedError` if it returns none."""
    try:
        form = quantization.format_of(modules)
    except DovetailError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{type(quantization).__name__} failed: {describe(error)}"
        ) from error
    if not isinstance(form, WeightFormat):
        raise UnsupportedError(
            f"{type(quantization).__name__}: expected a `dovetail.nn.format.WeightFormat`, got "
            f"{shown(form)}"
        )
    return form


def place_weights(module: Any, quantization: Quantization, device: torch.device) -> None:
    """Give each linear layer of `module` (a `CausalLM` built with `weights_later`) its format, by
    the names that the model's rules have for it, and memory on `device`. A weight that is always
    plain is told the format in which the checkpoint stores it. Raises `UnsupportedError` if nothing
    of the model can be stored so, or something of it can't."""
    names: dict[int, list[str]] = {}
    for rule in module.weights():
        name = rule.source.rpartition(".")[0]
        names.setdefault(id(rule.parameter), []).append(name)
        stored = getattr(quantization, "config", None) is not None and getattr(
            rule.parameter, "plain", False
        )
        if stored and (form := _format_of(quantization, [name])) != DENSE:
            if not isinstance(form, StoredFormat):
                raise UnsupportedError(
                    f"{name} must be stored in 16 bits, and the checkpoint's quantization_config "
                    f"says {form}"
                )
            rule.parameter.stored_as = form
    layers = [layer for layer in module.modules() if isinstance(layer, LinearLayer | Experts)]

    def modules_of(weights: Sequence[Any]) -> list[str]:
        return list(dict.fromkeys(name for weight in weights for name in names.get(id(weight), [])))

    for layer in layers:
        modules = modules_of(layer.placed_weights())
        try:
            stays_plain = not modules or (
                getattr(layer, "sensitive", False) and getattr(quantization, "config", None) is None
            )
            form = DENSE if stays_plain else _format_of(quantization, modules)
            if isinstance(layer, Experts) and (shared := modules_of(layer.shared_weights())):
                layer.take_format(form, device, _format_of(quantization, shared))
            else:
                layer.take_format(form, device)
        except UnsupportedError as error:
            raise UnsupportedError(f"{some_of(modules)}: {error}") from error
    if all(layer.format == DENSE for layer in layers):
        raise UnsupportedError(
            f"{type(module).__name__} has no linear layer that {quantization} says is quantized: "
            f"layers of `dovetail.nn.linear` can be"
        )
