"""`quant_method: auto-round`: integer checkpoints of Intel's AutoRound (arXiv:2309.05516), in
the layouts of GPTQ or AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.errors import ModelLoadError, UnsupportedError, shown
from dovetail.nn.format.awq import AwqInt4
from dovetail.nn.format.base import Quantization, WeightFormat
from dovetail.nn.format.dense import DENSE
from dovetail.nn.format.gptq import MAKING, format_of
from dovetail.nn.format.reading import WHERE, group_size, keys_and_values, names, within

_DEFAULT = "auto_round:auto_gptq"
# layout -> whether zero points are stored minus 1
_LIKE_GPTQ = {
    "auto_round": False,
    "auto_round:gptqmodel": False,
    "auto_round:auto_gptq": True,
    "auto_round:gptq": True,
    "auto_gptq": True,
    "gptq": True,
}
_LIKE_AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_awq", "awq")
_OF_MODULES = frozenset(("bits", "group_size", "sym"))  # in `extra_config`
KEYS = FileKeys(
    "auto-round",
    {
        "quant_method": Used("the format"),
        "bits": Used("2 to 8; others are refused"),
        "group_size": Used("inputs per scale"),
        "sym": Used("whether all zero points are the middle"),
        "packing_format": Used("the layout: of GPTQ or of AWQ"),
        "backend": Used("the same in older files"),
        "extra_config": Used("settings of single modules; those of 16 bits are plain"),
        "modules_to_not_convert": Used("modules that aren't quantized"),
        "block_name_to_quantize": Used("only modules within it are quantized"),
        "to_quant_block_names": Used("the same"),
        "data_type": Refused("another type of weights", ("int",)),
        "act_bits": Refused("quantized inputs", (16, 32)),
        "super_bits": Refused("scales of few bits"),
        "super_group_size": Refused("scales of few bits"),
        "quant_lm_head": Refused("a quantized output layer", (False,)),
        "rotation_config": Refused("rotated weights", ({},)),
        "hadamard_config": Refused("rotated weights", ({},)),
        **dict.fromkeys(("act_*", "amp", "batch_size", "dataset", "iters", "lr"), MAKING),
        **dict.fromkeys(("enable_*", "gradient_accumulate_steps", "low_*", "nsamples"), MAKING),
        **dict.fromkeys(("minmax_lr", "seqlen", "not_use_best_mse", "momentum", "seed"), MAKING),
        **dict.fromkeys(("scale_dtype", "supported_types", "true_sequential"), MAKING),
        "autoround_version": NoEffect("the version that wrote the file"),
        "static_kv_dtype": Used("scales of K and V, read if `kv_cache_dtype` is fp8"),
        "static_attention_dtype": Refused("quantized attention"),
    },
)


class AutoRound(Quantization):
    """Quantizes the linear layers of the blocks, except those that the config excludes."""

    def __init__(self, config: Mapping[str, Any] | None) -> None:
        super().__init__(config)
        config = config or {}
        KEYS.check(config, WHERE)
        self.format = _format_of(config)
        self._own = _of_single_modules(config)
        self._left_out = names(config, "modules_to_not_convert")
        self._blocks = _blocks(config)

    def of_module(self, name: str) -> WeightFormat:
        if (own := self._own.get(name)) is not None:
            return own
        is_left_out = any(within(name, other) for other in self._left_out)
        return DENSE if is_left_out or not self._quantizes(name) else self.format

    def _quantizes(self, name: str) -> bool:
        if self._blocks:
            return any(within(name, block) for block in self._blocks)
        return not within(name, "lm_head")

    def __str__(self) -> str:
        return str(self.format)


def _blocks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of modules that hold the quantized ones; empty if all are."""
    for key in ("block_name_to_quantize", "to_quant_block_names"):
        value = config.get(key)
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if value is not None:
            return names(config, key)
    return ()


def _format_of(config: Mapping[str, Any]) -> WeightFormat:
    bits = config.get("bits")
    layout = config.get("packing_format") or config.get("backend") or _DEFAULT
    group = group_size(config, "group_size")
    if layout in _LIKE_AWQ and bits == 4:
        return AwqInt4(group, symmetric=False)
    if layout in _LIKE_GPTQ and type(bits) is int and 2 <= bits <= 8:
        less_one = _LIKE_GPTQ[layout]
        return format_of(bits, group, bool(config.get("sym", True)), less_one=less_one)
    raise UnsupportedError(
        f"{WHERE}: bits = {shown(bits)} in the layout {shown(layout)} are not implemented "
        f"(only 2 to 8 of {', '.join(_LIKE_GPTQ)}, and 4 of {', '.join(_LIKE_AWQ)})"
    )


def _of_single_modules(config: Mapping[str, Any]) -> dict[str, WeightFormat]:
    """Return the formats of modules with settings of their own, which 16 bits leave plain."""
    found: dict[str, WeightFormat] = {}
    settings = keys_and_values(config.get("extra_config") or {}, f"{WHERE}: extra_config")
    for name, own in settings.items():
        own = keys_and_values(own, f"{WHERE}: extra_config.{name}")
        bits = own.get("bits", config["bits"])
        if type(bits) is not int:
            raise ModelLoadError(f"{WHERE}: extra_config.{name}: bits must be a number")
        changed = {key for key in own if own[key] != config.get(key)} - _OF_MODULES
        if bits < 16 and changed:
            raise UnsupportedError(
                f"{WHERE}: extra_config.{name}: {', '.join(sorted(changed))} is not implemented "
                f"(only {', '.join(sorted(_OF_MODULES))})"
            )
        found[str(name)] = DENSE if bits >= 16 else _format_of({**config, **own})
    return found
