"""`WeightFormatSuite`: checks of a way of storing the weights of linear layers
(`dovetail.nn.format`).

    class TestTinyBits(WeightFormatSuite):
        name = "tiny-bits"
        config = {"quant_method": "tiny-bits", "bits": 3}

Needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.errors import DovetailError, UnsupportedError, describe
from dovetail.registry.registry import Registry
from dovetail.registry.resolved import ResolvedQuantization
from dovetail.testing.checks import fail, require
from dovetail.testing.extensions.base import ExtensionSuite

if TYPE_CHECKING:
    import torch

    from dovetail.nn.format import Quantization, WeightFormat
    from dovetail.nn.parameter import Weight

MODULE = "model.layers.0.mlp.down_proj"
UNKNOWN = "no_format_has_this_field"
TOKENS = (1, 3, 40)


class WeightFormatSuite(ExtensionSuite):
    """Checks of a weight format, on a CPU, in float32."""

    # a checkpoint's `quantization_config`; None: the format quantizes plain checkpoints only
    config: ClassVar[Mapping[str, Any] | None] = None
    # a linear module that it stores
    module: ClassVar[str] = MODULE
    # [outputs, inputs] of a layer that it can store
    shape: ClassVar[tuple[int, int]] = (64, 128)

    @classmethod
    def offers(cls, registry: Registry) -> Sequence[ResolvedQuantization]:
        return registry.quantizations()

    def test_it_is_made_from_the_config(self) -> None:
        """The class isn't a `Quantization`, or can't be made from `config`; or it declares
        `quantizes`, and can't be made from None."""
        from dovetail.nn.format import Quantization, WeightFormat

        loaded = self.offer.load()
        require(
            isinstance(loaded, type) and issubclass(loaded, Quantization),
            f"{self.offer.spec.target} is {loaded!r}, expected a Quantization",
        )
        made = self._made()
        require(
            isinstance(made.of_module(self.module), WeightFormat),
            f"of_module returned {made.of_module(self.module)!r}, expected a WeightFormat",
        )
        require(str(made).strip(), "str() of it is empty: it is shown in logs and errors")
        if self.offer.spec.quantizes:
            loaded(None)

    def test_an_unknown_field_is_refused_by_name(self) -> None:
        """A field of the config that the format doesn't know was ignored, so that a newer
        checkpoint would be read wrongly. Raise `UnsupportedError` that names it."""
        if self.config is None:
            return
        try:
            self.offer.load()({**self.config, UNKNOWN: 1})
        except UnsupportedError as error:
            require(UNKNOWN in str(error), f"the error doesn't name the field: {error}")
        else:
            fail(f"quantization_config with the field {UNKNOWN!r} was accepted")

    def test_formats_are_values(self) -> None:
        """Two formats of equal settings differ, or have different hashes, so that the layers can't
        be merged. Use a frozen dataclass."""
        first, second = (self._made().of_module(self.module) for _ in range(2))
        require(
            first == second and hash(first) == hash(second),
            f"{first!r} and {second!r} differ, though their settings are equal",
        )

    def test_products_are_those_of_the_values(self) -> None:
        """`columns` isn't the product with `dequantized`, for some number of tokens, with or
        without a bias, `gated`, or into memory that is given."""
        import torch

        form, weight = self._filled()
        values = form.dequantized(weight)
        require(
            values.dtype == torch.float32 and tuple(values.shape) == self.shape,
            f"dequantized is {values.dtype} {tuple(values.shape)}, expected float32 {self.shape}",
        )
        require(bool(torch.isfinite(values).all()), "dequantized has values that aren't finite")
        generator = torch.Generator().manual_seed(1)
        bias = torch.randn(self.shape[0], generator=generator)
        for tokens in TOKENS:
            x = torch.randn(tokens, self.shape[1], generator=generator)
            for added in (None, bias):
                self._compare(form, weight, x, added)

    def test_what_cannot_be_stored_is_refused(self) -> None:
        """A layer of 3 x 5 was neither stored nor refused with `UnsupportedError`."""
        import torch

        form = self._made().of_module(self.module)
        try:
            form.allocate(self._plain((3, 5)), torch.device("cpu"))
        except DovetailError:
            return
        except Exception as error:
            fail(f"a layer of 3 x 5 made allocate raise {describe(error)}", error)

    def _compare(
        self, form: WeightFormat, weight: Any, x: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        import torch
        import torch.nn.functional as F

        expected = F.linear(x, form.dequantized(weight), bias)
        bound = 1e-3 * float(expected.abs().max()) + 1e-6
        into = torch.empty_like(expected)
        found = {
            "columns": form.columns(weight, x, bias),
            "columns with into": form.columns(weight, x, bias, into=into),
        }
        for what, y in found.items():
            worst = float((y - expected).abs().max())
            require(worst <= bound, f"{what} of {len(x)} tokens is off by {worst:.3g}")
        half = self.shape[0] // 2
        gated = F.silu(expected[:, :half]) * expected[:, half:]
        worst = float((form.columns(weight, x, bias, gated=True) - gated).abs().max())
        bound = 1e-3 * float(gated.abs().max()) + 1e-6
        require(worst <= bound, f"columns, gated, of {len(x)} tokens is off by {worst:.3g}")

    def _made(self) -> Quantization:
        made: Quantization = self.offer.load()(self.config)
        return made

    def _plain(self, shape: tuple[int, int]) -> Weight:
        import torch

        from dovetail.api.model import BuildContext
        from dovetail.nn.parallel import SINGLE
        from dovetail.nn.parameter import Part, Weight

        context = BuildContext(
            parallel=SINGLE,
            dtype=torch.float32,
            device=torch.device("cpu"),
            make_attention=_no_attention,
        )
        return Weight(shape, {None: Part(shape, 0, 0, shape[0])}, context, later=True)

    def _filled(self) -> tuple[WeightFormat, Any]:
        """Return a format and a weight of it, with small values."""
        import torch

        form = self._made().of_module(self.module)
        weight = form.allocate(self._plain(self.shape), torch.device("cpu"))
        self.fill(form, weight)
        return form, weight

    def fill(self, form: WeightFormat, weight: Any) -> None:
        """Fill what `allocate` returned, as loading does: from a plain tensor. Override this for a
        format that only reads tensors of its own."""
        import torch

        weight.load(torch.randn(self.shape, generator=torch.Generator().manual_seed(0)))


def _no_attention(spec: Any) -> Any:
    raise DovetailError("a linear layer has no attention")
