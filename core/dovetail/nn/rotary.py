"""Rotary position embedding (arXiv:2104.09864) and its scalings for longer contexts.

Frequencies and tables are computed in float32, in the same order of operations as in transformers,
so that they are bitwise equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from dovetail.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Rope:
    """Unscaled rotary embedding: dimension pair i rotates by position * theta^(-2i / head_size). Of
    longer heads only the first `head_size` numbers rotate, of 0 none."""

    theta: float
    head_size: int
    # of models whose positions have three axes (time, height, width): for each pair, the axis whose
    # position it rotates by; empty: positions have one axis
    axis: tuple[int, ...] = field(default=(), kw_only=True)

    @property
    def attention_factor(self) -> float:
        """Multiplier of cos and sin."""
        return 1.0

    def frequencies(self) -> torch.Tensor:
        """Return the frequencies [head_size / 2] float32, in radians per position."""
        return 1.0 / self._periods()

    def _periods(self) -> torch.Tensor:
        return self.theta ** (
            torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size
        )


NO_ROPE = Rope(1.0, 0)  # of layers without positions: nothing rotates


@dataclass(frozen=True, slots=True)
class LinearRope(Rope):
    """All frequencies divided by `factor` (arXiv:2306.15595)."""

    factor: float

    def frequencies(self) -> torch.Tensor:
        return 1.0 / self._periods() / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Rope(Rope):
    """Llama 3.1: wavelengths longer than original_max_len / low_freq_factor are stretched by
    `factor`, those shorter than original_max_len / high_freq_factor are kept, and those between are
    interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    def frequencies(self) -> torch.Tensor:
        plain = 1.0 / self._periods()
        waves = 2 * math.pi / plain
        long = waves > self.original_max_len / self.low_freq_factor
        short = waves < self.original_max_len / self.high_freq_factor
        blend = (self.original_max_len / waves - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - blend) * plain / self.factor + blend * plain
        return torch.where(long, plain / self.factor, torch.where(short, plain, blended))


@dataclass(frozen=True, slots=True)
class YarnRope(Rope):
    """YaRN (arXiv:2309.00071): pairs that rotate more than `beta_fast` times within
    original_max_len are kept, those that rotate less than `beta_slow` times are stretched by
    `factor`, with a ramp between; cos and sin are multiplied by `attention_factor`."""

    factor: float
    original_max_len: int
    beta_fast: float = 32
    beta_slow: float = 1
    mscale: float | None = None
    mscale_all_dim: float | None = None
    given_attention_factor: float | None = None
    truncate: bool = True  # round the ramp's ends to integers

    @property
    def attention_factor(self) -> float:
        if self.given_attention_factor is not None:
            return self.given_attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1)

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def _pair_that_turns(self, times: float) -> float:
        """Return the (fractional) dimension pair that rotates `times` times within the original
        length."""
        return (self.head_size * math.log(self.original_max_len / (times * 2 * math.pi))) / (
            2 * math.log(self.theta)
        )

    def frequencies(self) -> torch.Tensor:
        low = self._pair_that_turns(self.beta_fast)
        high = self._pair_that_turns(self.beta_slow)
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, self.head_size - 1)
        if low == high:
            high += 0.001  # avoid an empty ramp; same value as in transformers
        stretched = (
            (torch.arange(self.head_size // 2, dtype=torch.float32) - low) / (high - low)
        ).clamp(0, 1)
        kept = 1 - stretched
        periods = self._periods()
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept


@dataclass(frozen=True, slots=True)
class ProportionalRope(Rope):
    """Gemma 4: the first `pairs` rotate as if all did, divided by `factor`; the others don't
    rotate."""

    pairs: int
    factor: float = 1.0

    def frequencies(self) -> torch.Tensor:
        frequencies = 1.0 / self._periods()
        frequencies[self.pairs :] = 0
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class _Keys:
    """Keys of transformers' `rope_parameters` for one rope type."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    # keys that transformers, the reference, ignores: they are for other engines
    passed_over: tuple[str, ...] = ()


_KEYS = {
    "default": _Keys(),
    "linear": _Keys(("factor",)),
    "llama3": _Keys(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ),
    "yarn": _Keys(
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        ("attn_factor",),
    ),
    "proportional": _Keys((), ("factor", "partial_rotary_factor")),
}


_OF_AXES = ("mrope_section", "mrope_interleaved")


def rope_reasons_against(parameters: Mapping[str, Any], *, partial: bool = False) -> list[str]:
    """Return the reasons why `rope_from_config` can't serve these `rope_parameters` of a Hugging
    Face config, each naming the key; empty if it can. `partial`: the model reads
    `partial_rotary_factor`."""
    kind = parameters.get("rope_type", "default")
    if kind not in _KEYS:
        return [
            f"rope_parameters: rope_type {kind!r} is not implemented (implemented: "
            f"{', '.join(_KEYS)})"
        ]
    required = ("rope_theta", *_KEYS[kind].required)
    optional = _KEYS[kind].optional
    reasons = []
    for key in required:
        if not _is_number(parameters.get(key)) or parameters[key] <= 0:
            reasons.append(
                f"rope_parameters: {key} = {parameters.get(key)!r}, rope_type {kind!r} needs a "
                f"number > 0"
            )
    for key, value in parameters.items():
        if key in optional and not (value is None or (_is_number(value) and value >= 0)):
            reasons.append(f"rope_parameters: {key} = {value!r} must be a number >= 0")
        if key == "partial_rotary_factor" and key not in optional and value not in (None, 1):
            if not partial:
                reasons.append(f"partial_rotary_factor = {value!r} is not implemented (only 1)")
            elif not _is_number(value) or not 0 < value <= 1:
                reasons.append(
                    f"partial_rotary_factor = {value!r} must be more than 0 and at most 1"
                )
        known = (
            *required,
            *optional,
            *_KEYS[kind].passed_over,
            "rope_type",
            "type",
            "partial_rotary_factor",
            *_OF_AXES,
        )
        if key not in known and value is not None:
            reasons.append(
                f"rope_parameters: {key} = {value!r} is not implemented for rope_type {kind!r}"
            )
    return reasons + _axes_reasons(parameters)


def _axes_reasons(parameters: Mapping[str, Any]) -> list[str]:
    """Return the reasons against the keys of positions on three axes."""
    sections = parameters.get("mrope_section")
    if sections is None:
        return []
    are_counts = isinstance(sections, list | tuple) and all(
        isinstance(count, int) and count >= 0 for count in sections
    )
    if are_counts and len(sections) == 3:
        return []
    return [f"rope_parameters: mrope_section = {sections!r} must be three whole numbers >= 0"]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def rope_from_config(
    parameters: Mapping[str, Any], head_size: int, *, partial: bool = False
) -> Rope:
    """Return the rope for `rope_parameters` of a Hugging Face config. `partial`:
    `partial_rotary_factor` gives the share of a head that rotates. Raises `UnsupportedError` with
    the reasons of `rope_reasons_against`, or if `mrope_section` doesn't fit the head."""
    if reasons := rope_reasons_against(parameters, partial=partial):
        raise UnsupportedError("; ".join(reasons))
    if partial and (share := parameters.get("partial_rotary_factor")) is not None:
        head_size = int(head_size * share)
    rope = _MAKERS[parameters.get("rope_type", "default")](
        parameters, parameters["rope_theta"], head_size
    )
    return replace(rope, axis=_axis_of_pairs(parameters, head_size // 2))


def _axis_of_pairs(parameters: Mapping[str, Any], pairs: int) -> tuple[int, ...]:
    """Return `Rope.axis`. Pairs of the three axes follow each other, or alternate until the
    sections of height and width are used up; the rest is of time."""
    sections = parameters.get("mrope_section")
    if sections is None:
        return ()
    if parameters.get("mrope_interleaved"):
        axes = (pair % 3 for pair in range(pairs))
        return tuple(axis if pair < 3 * sections[axis] else 0 for pair, axis in enumerate(axes))
    if sum(sections) != pairs:
        raise UnsupportedError(
            f"rope_parameters: mrope_section = {sections!r} must add up to the {pairs} pairs of a "
            "head that rotate"
        )
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


def _llama3(p: Mapping[str, Any], theta: float, head_size: int) -> Rope:
    return Llama3Rope(
        theta,
        head_size,
        p["factor"],
        p["low_freq_factor"],
        p["high_freq_factor"],
        p["original_max_position_embeddings"],
    )


def _yarn(p: Mapping[str, Any], theta: float, head_size: int) -> Rope:
    return YarnRope(
        theta,
        head_size,
        p["factor"],
        p["original_max_position_embeddings"],
        beta_fast=p.get("beta_fast") or 32,
        beta_slow=p.get("beta_slow") or 1,
        mscale=p.get("mscale"),
        mscale_all_dim=p.get("mscale_all_dim"),
        given_attention_factor=p.get("attention_factor"),
        truncate=p.get("truncate", True),
    )


def _proportional(p: Mapping[str, Any], theta: float, head_size: int) -> Rope:
    share = p.get("partial_rotary_factor")
    return ProportionalRope(
        theta,
        head_size,
        int((1.0 if share is None else share) * head_size // 2),
        p.get("factor") or 1.0,
    )


_MAKERS: dict[str, Callable[[Mapping[str, Any], float, int], Rope]] = {
    "default": lambda p, theta, head_size: Rope(theta, head_size),
    "linear": lambda p, theta, head_size: LinearRope(theta, head_size, p["factor"]),
    "llama3": _llama3,
    "yarn": _yarn,
    "proportional": _proportional,
}


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of one step's tokens, the same for all layers: the rows `positions` of
    `table`. Kernels read these directly; plain torch uses `cos` and `sin`, which hold the same
    rows."""

    table: torch.Tensor  # [max_len, rotated] float32: cos of each pair, then sin of each pair
    positions: torch.Tensor  # [tokens] int64

    @property
    def cos(self) -> torch.Tensor:
        """[tokens, 1, rotated] float32."""
        return self._spelled_out[0]

    @property
    def sin(self) -> torch.Tensor:
        """[tokens, 1, rotated] float32; the first half is negated."""
        return self._spelled_out[1]

    @cached_property
    def _spelled_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.table[self.positions].unsqueeze(1).chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rotary(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the first numbers of x [tokens, heads, head_size], as many as the table has: pair i is
    dimensions i and i + rotated / 2. Computed in float32, returned in x's dtype."""
    size = rotation.table.shape[1]
    if size < x.shape[-1]:
        return (
            torch.cat((apply_rotary(x[..., :size], rotation), x[..., size:]), dim=-1) if size else x
        )
    wide = x.float()
    turned = torch.roll(wide, x.shape[-1] // 2, -1)
    return torch.addcmul(wide * rotation.cos, turned, rotation.sin).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """positions [tokens] int64, each < max_len -> the step's `Rotation`. With `axes` [3, tokens]
    int64 of the same range, and a rope whose positions have three axes: the rotation by these."""

    table: torch.Tensor  # [max_len, rope.head_size] float32
    _axis: torch.Tensor | None  # [rope.head_size] int64: `Rope.axis`, for cos and for sin

    def __init__(self, rope: Rope, max_len: int, *, device: torch.device) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), rope.frequencies())
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.attention_factor)
        self.register_buffer("table", table.to(device), persistent=False)
        axis = torch.tensor(rope.axis * 2, device=device) if rope.axis else None
        self.register_buffer("_axis", axis, persistent=False)

    def forward(self, positions: torch.Tensor, axes: torch.Tensor | None = None) -> Rotation:
        if axes is None or self._axis is None:
            return Rotation(self.table, positions)
        places = axes.index_select(0, self._axis)  # [rope.head_size, tokens]
        table = self.table.gather(0, places.t())  # a row for each token, so no kernel changes
        return Rotation(table, torch.arange(len(table), device=table.device))
