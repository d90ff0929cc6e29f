"""8-bit weights: float8 values (e4m3 of arXiv:2209.05433) times a scale per output, or per block of
outputs and inputs.

For few rows, kernels widen the weights to 16 bits, which is exact: only what a plain layer rounds
is rounded. For many rows, 8-bit products are faster in proportion to their width; for these the
inputs are rounded to e4m3, too, with scales computed per token (and per group of inputs, if weights
have blocks). A checkpoint's scale for all inputs of a layer ("static") is coarser, and not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, gcd
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F

from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.activation import silu_mul
from dovetail.nn.format.base import ExpertLayers, kept, stacked
from dovetail.nn.format.dense import Kernel
from dovetail.nn.format.stored import (
    StoredFormat,
    StoredWeight,
    TensorShape,
    checked_scales,
)
from dovetail.nn.kernels import stored_experts
from dovetail.nn.kernels.available import (
    has_float8_products,
    has_many_rows,
    has_one_row_float8,
    has_products_of_blocks,
    use_kernels,
)
from dovetail.nn.kernels.launch import KernelUnavailable
from dovetail.nn.norm import Norm, RMSNorm
from dovetail.nn.parameter import Part, Weight
from dovetail.nn.residual import Residual, with_fusable_norm

if TYPE_CHECKING:
    from dovetail.nn.kernels.many_rows import Tiling
    from dovetail.nn.kernels.streamed import Stored

LARGEST = 448.0  # finite value of e4m3
FEW_ROWS = 8  # above, a program runs out of registers
# rows from which 8-bit products are faster than reading the weights, and so faster than 16-bit
# products
PRODUCTS_FROM = 65
LEAST_GROUP = 32  # inputs that 8-bit products multiply at once
BLOCKS_FROM = 513  # rows from which torch's product of numbers with scales in blocks is the fastest
IN_PARTS_BELOW = 513  # rows; above, there are enough programs without splitting
# rows from which weights are widened before the product, where 8-bit products aren't available
WIDENED_FROM = 257


@dataclass(frozen=True, slots=True)
class Float8(StoredFormat):
    """`scales`: granularity in the checkpoint. "computed": the checkpoint is plain and quantized
    while loading, with a scale per output. A scale per tensor is stored once per output, so that
    the parts of a layer may differ.

    `block`: (outputs, inputs) that share one scale. `scale_name`: last component of the scale
    tensor's name. `static`: the checkpoint has a scale for inputs. `inputs`: the lowest precision
    in bits to which inputs may be rounded."""

    scales: Literal["computed", "tensor", "channel", "block"]
    block: tuple[int, int] = (1, 0)
    scale_name: str = "weight_scale"
    static: bool = False
    inputs: Literal[8, 16] = 8

    def __str__(self) -> str:
        kind = {
            "computed": "a scale per output",
            "tensor": "a scale per tensor",
            "channel": "a scale per output",
        }
        return f"fp8 ({kind.get(self.scales) or 'a scale per {} x {}'.format(*self.block)})"

    @property
    def rows_at_once(self) -> int:
        return self.block[0]

    def allocate(self, weight: Weight, device: torch.device) -> StoredWeight:
        outputs, inputs = weight.shape
        values = torch.empty((outputs, inputs), dtype=torch.float8_e4m3fn, device=device)
        if self.scales != "block":
            return StoredWeight(self, weight, values, torch.ones(outputs, device=device))
        across, along = self.block
        # outputs per scale: fewer than in the checkpoint if a part begins or ends within a block
        sharing = gcd(across, outputs)
        for part in weight.parts.values():
            if part.dim == 0:
                sharing = gcd(sharing, part.start, part.size, part.at)
            elif part.start % along or (
                part.size % along and part.start + part.size < part.source_shape[1]
            ):
                raise UnsupportedError(
                    f"a rank's share of {part.source_shape[1]} inputs is {part.size}, no multiple "
                    f"of the {along} inputs of a block: use fewer ranks"
                )
        return StoredWeight(
            self,
            weight,
            values,
            torch.ones((outputs // sharing, ceil(inputs / along)), device=device),
        )

    def dequantized(self, weight: StoredWeight) -> torch.Tensor:
        values = weight.data.float()
        scales = weight.scales
        if scales.ndim == 1:
            return values * scales[:, None]
        outputs, inputs = weight.layer_shape
        across = scales.repeat_interleave(outputs // len(scales), 0)
        along = min(self.block[1], inputs)
        return values * across.repeat_interleave(along, 1)[:, :inputs]

    # Loading

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        if self.scales == "computed":
            return {}
        outputs, inputs = part.source_shape
        tensors = {
            "weight": TensorShape(
                ((outputs, inputs),), part.dim, part.start, part.size, stride=part.stride
            )
        }
        if self.scales == "tensor":
            tensors[self.scale_name] = TensorShape(((), (1,), (1, 1)))
        elif self.scales == "channel":
            dim, start, size = (0, part.start, part.size) if part.dim == 0 else (None, 0, 0)
            tensors[self.scale_name] = TensorShape(
                ((outputs, 1), (outputs,)), dim, start, size, stride=part.stride
            )
        else:
            size = self.block[part.dim]
            first = part.start // size
            last = ceil((part.start + part.size) / size)
            tensors[self.scale_name] = TensorShape(
                ((ceil(outputs / self.block[0]), ceil(inputs / self.block[1])),),
                part.dim,
                first,
                last - first,
            )
        if self.static:
            tensors["input_scale"] = TensorShape(((), (1,), (1, 1)), optional=True)
        return tensors

    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        values = tensors["weight"]
        scales = checked_scales(tensors[self.scale_name], LARGEST, self.scale_name)
        if values.dtype != torch.float8_e4m3fn:
            raise ModelLoadError(
                f"expected float8_e4m3fn, found {str(values.dtype).removeprefix('torch.')}"
            )
        if bool((values.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise ModelLoadError("weights must not be NaN")
        for copy in range(part.copies):
            at = part.at + copy * part.size
            self._place(weight, replace(part, at=at, copies=1), values, scales)

    def _place(
        self, weight: StoredWeight, part: Part, values: torch.Tensor, scales: torch.Tensor
    ) -> None:
        part.place(weight.data).copy_(values)
        rows = part.size if part.dim == 0 else part.source_shape[0]
        if self.scales != "block":
            _rows_of(weight.scales, part, 0, rows).copy_(scales.reshape(-1).expand(rows))
            return
        sharing = weight.layer_shape[0] // len(weight.scales)
        first = part.start if part.dim == 0 else 0
        at = (
            torch.arange(first, first + rows, sharing, device=scales.device) // self.block[0]
            - first // self.block[0]
        )
        _rows_of(weight.scales, part, 0, rows // sharing, sharing).copy_(scales[at])

    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        own = slice(part.start, part.start + part.size) if part.dim == 1 else slice(None)
        into = _rows_of(weight.data, part, first, len(rows))
        if self.scales != "block":
            scales = rows.abs().amax(1).float() / LARGEST
            scales.masked_fill_(scales == 0, 1.0)
            into.copy_(rows[:, own].float() / scales[:, None])
            _rows_of(weight.scales, part, first, len(rows)).copy_(scales)
            return
        numbers, (outputs, inputs) = rows[:, own].float(), weight.layer_shape
        sharing = outputs // len(weight.scales)
        along = self.block[1]
        padded = F.pad(numbers, (0, -inputs % along))
        scales = (
            padded.abs().reshape(len(rows) // sharing, sharing, -1, along).amax((1, 3)) / LARGEST
        )
        scales.masked_fill_(scales == 0, 1.0)
        into.copy_(
            numbers / scales.repeat_interleave(sharing, 0).repeat_interleave(along, 1)[:, :inputs]
        )
        _rows_of(weight.scales, part, first // sharing, len(scales), sharing).copy_(scales)

    # Computing

    def for_kernels(self, weights: Sequence[StoredWeight]) -> stored_experts.Stored | None:
        first = weights[0]
        group = self.block[1] if first.scales.ndim > 1 else 0
        if not stored_experts.takes(stored_experts.FLOAT8, first.layer_shape[1], group):
            return None
        values = stacked(weights)
        scales = stacked([weight.scales for weight in weights])
        narrows = (
            self.inputs == 8
            and not 0 < group < LEAST_GROUP
            and first.compute_dtype == torch.bfloat16
            and has_float8_products(first.device)
        )
        return stored_experts.Stored(
            values, first.layer_shape[1], scales, None, group, stored_experts.FLOAT8, narrows
        )

    def add_experts_to(
        self,
        layers: ExpertLayers,
        residual: Residual,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None:
        if use_kernels(x, ids, weights):
            from dovetail.nn.kernels import experts

            gate_up, down = self.stored_experts(layers)
            biased = layers.gate_up_bias is not None or layers.down_bias is not None
            if (
                gate_up is not None
                and down is not None
                and not biased
                and experts.takes_few(x, gate_up, down, layers.activation, ids)
            ):
                from dovetail.nn.kernels import few_experts_float8

                with suppress(KernelUnavailable):
                    few_experts_float8.experts(
                        x, gate_up, down, ids, weights, out=residual.summed()
                    )
                    return
        StoredFormat.add_experts_to(self, layers, residual, x, ids, weights)

    def columns(
        self,
        weight: StoredWeight,
        x: torch.Tensor | Residual,
        bias: torch.Tensor | None = None,
        norm: Norm | None = None,
        *,
        gated: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        stream, norm = with_fusable_norm(x, norm)
        if not _takes_kernels(weight):
            return StoredFormat.columns(self, weight, stream, bias, norm, gated=gated, into=into)
        if norm is not None and stream.is_shared:
            stream = Residual(stream.normed(norm))
            norm = None
        with suppress(KernelUnavailable):
            if kernel := self._kernel_for_few(weight, len(stream), gated):
                around = None if norm is None else (norm.weight, norm.eps)
                return kernel(
                    stream.summed(),
                    weight,
                    bias,
                    norm=around,
                    gated=gated,
                    into=into,
                    scales=weight.scales,
                )
        tiling = self._tiling(weight, len(stream), gated=gated)
        if tiling is not None or self._narrows(len(stream), weight):
            with suppress(KernelUnavailable):
                narrow, x_scales = self._narrowed(weight, stream, norm)
                return self._product(
                    weight,
                    narrow,
                    x_scales,
                    tiling,
                    bias,
                    dtype=stream.summed().dtype,
                    gated=gated,
                    into=into,
                )
        x = stream.read(norm)
        if len(x) < WIDENED_FROM:
            with suppress(KernelUnavailable):
                return kept(self._stream(weight, x, bias, gated=gated), into)
        y = F.linear(x, self.dequantized(weight).to(x.dtype), bias)
        return kept(silu_mul(y) if gated else y, into)

    def add_to(self, weight: StoredWeight, residual: Residual, x: torch.Tensor) -> None:
        if not _takes_kernels(weight):
            StoredFormat.add_to(self, weight, residual, x)
            return
        with suppress(KernelUnavailable):
            if kernel := self._kernel_for_few(weight, len(x)):
                kernel(x, weight, out=residual.summed(), scales=weight.scales)
                return
            tiling = self._tiling(weight, len(x), in_parts=True)
            narrows = tiling is not None or self._narrows(len(x), weight)
            if narrows:
                narrow, x_scales = self._narrowed(weight, Residual(x), None)
                parts = self._product(
                    weight, narrow, x_scales, tiling, None, dtype=x.dtype, in_parts=True
                )
                residual.add_parts(parts)
                return
            if len(x) < WIDENED_FROM:
                residual.add_parts(self._stream(weight, x, in_parts=True))
                return
        residual.summed().add_(self.columns(weight, x))

    def _kernel_for_few(
        self, weight: StoredWeight, rows: int, gated: bool = False
    ) -> Kernel | None:
        """Return a kernel that loads all weights of some outputs at once, if that is faster than
        streaming them."""
        from dovetail.nn.kernels import few_rows, one_row

        if rows == 1 and has_one_row_float8(weight.device):
            from dovetail.nn.kernels import one_row_float8

            if one_row_float8.takes(weight, weight.scales, self.block[1], gated):
                return one_row_float8.linear
        if rows == 1 and one_row.takes_scales(weight, weight.scales, self.block[1], gated):
            return partial(one_row.linear, group=self.block[1])
        if rows > FEW_ROWS or weight.scales.ndim > 1:
            return None
        tiling = few_rows.tiling_for(weight, rows, gated)
        return None if tiling is None else partial(few_rows.linear, tiling=tiling)

    def _tiling(self, weight: StoredWeight, rows: int, **around: bool) -> Tiling | None:
        """Return the tiling with which `many_rows` multiplies this weight, or None if it can't or
        isn't the fastest."""
        block = weight.scales.ndim > 1
        if (
            self.inputs > 8
            or weight.compute_dtype != torch.bfloat16
            or not has_many_rows(weight.device)
            or (block and self.block[1] != 128)
        ):
            return None
        from dovetail.nn.kernels import many_rows

        return many_rows.tiling_for(
            weight.data, rows, **around, sharing=len(weight) // len(weight.scales) if block else 0
        )

    def _narrows(self, rows: int, weight: StoredWeight) -> bool:
        """True if inputs of this many rows are rounded to 8 bits, too."""
        return (
            self.inputs == 8
            and rows >= PRODUCTS_FROM
            and weight.compute_dtype == torch.bfloat16
            and has_float8_products(weight.device)
        )

    def _narrowed(
        self, weight: StoredWeight, stream: Residual, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream in float8, normed if `norm` is given, and its scales. Raises
        `KernelUnavailable`."""
        from dovetail.nn.kernels import float8_products

        group = self.block[1] if weight.scales.ndim > 1 else 0
        return (
            float8_products.narrowed(stream.summed(), group)
            if norm is None
            else stream.normed_in_float8(norm, group)
        )

    def _product(
        self,
        weight: StoredWeight,
        narrow: torch.Tensor,
        x_scales: torch.Tensor,
        tiling: Tiling | None,
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        gated: bool = False,
        in_parts: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply float8 inputs. `in_parts`: return partial sums [parts, tokens, outputs]. Raises
        `KernelUnavailable`."""
        from dovetail.nn.kernels import float8_products, many_rows

        if tiling is not None:
            return many_rows.linear(
                narrow,
                weight.data,
                bias,
                tiling=tiling,
                gated=gated,
                in_parts=in_parts,
                into=into,
                x_scales=x_scales,
                scales=weight.scales,
                dtype=dtype,
            )
        if self._multiplies_blocks(weight, len(narrow)):
            y = float8_products.linear_of_blocks(
                narrow, x_scales, weight, weight.scales, bias, dtype
            )
        elif weight.scales.ndim > 1:
            if in_parts and len(narrow) >= IN_PARTS_BELOW:
                return self._stream(weight, narrow, bias, x_scales=x_scales, dtype=dtype)[None]
            return kept(
                self._stream(
                    weight,
                    narrow,
                    bias,
                    x_scales=x_scales,
                    gated=gated,
                    in_parts=in_parts,
                    dtype=dtype,
                ),
                into,
            )
        else:
            y = float8_products.linear(narrow, x_scales, weight, weight.scales, bias, dtype)
        y = silu_mul(y) if gated else y
        return y[None] if in_parts else kept(y, into)

    def _multiplies_blocks(self, weight: StoredWeight, rows: int) -> bool:
        """True if torch's product of float8 numbers with scales in blocks is the fastest."""
        from dovetail.nn.kernels import float8_products

        fits = (
            weight.scales.ndim > 1
            and rows >= BLOCKS_FROM
            and float8_products.takes_blocks(weight, weight.scales, self.block[1])
        )
        return fits and has_products_of_blocks(weight.device)

    def _stream(
        self, weight: StoredWeight, x: torch.Tensor, bias: torch.Tensor | None = None, **around: Any
    ) -> torch.Tensor:
        from dovetail.nn.kernels import streamed

        return streamed.linear(x, self._stored(weight), bias, **around)

    def _stored(self, weight: StoredWeight) -> Stored:
        from dovetail.nn.kernels.streamed import Stored

        return Stored(weight.data, weight.scales, None, weight.layer_shape[1], self.block[1])


def _takes_kernels(weight: StoredWeight) -> bool:
    """True if kernels accept this weight: activations have 16 bits, so that matrix units don't
    round them."""
    return weight.compute_dtype in (torch.bfloat16, torch.float16) and use_kernels(weight.data)


def _rows_of(
    values: torch.Tensor, part: Part, first: int, count: int, sharing: int = 1
) -> torch.Tensor:
    """Return `count` rows of `values`, starting at the part's row `first`; each row covers
    `sharing` outputs."""
    at = (part.at // sharing if part.dim == 0 else 0) + first
    return values[at : at + count]
