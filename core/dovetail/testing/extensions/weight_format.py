"""`WeightFormatSuite`: checks of a way of storing the weights of linear layers
(`dovetail.nn.format`).

    class TestQuantizing(WeightFormatSuite):
        name = "tiny-bits"

    class TestStored(WeightFormatSuite):
        name = "tiny-bits"
        config = {"quant_method": "tiny-bits", "bits": 3}

        def checkpoint(self, outputs, inputs, generator):
            values = torch.randint(-3, 4, (outputs, inputs), generator=generator, dtype=torch.int8)
            return {"weight": values, "weight_scale": torch.rand(outputs, generator=generator)}

Needs torch.
"""

from __future__ import annotations

import copy
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

MODULE = "model.layers.0.mlp.down_proj"
UNKNOWN = "no_format_has_this_field"
UNKNOWN_VALUES: tuple[Any, ...] = (1, True, "x", 0, False, "", [], {})
TOKENS = (1, 3, 40)
ODD_VALUES: tuple[Any, ...] = (None, "x", -1, 1.5, [], {})
# keys by which configs leave modules out
LEAVE_OUT = ("modules_to_not_convert", "ignore")
ODD_SHAPE = (3, 5)


class WeightFormatSuite(ExtensionSuite):
    """Checks of a weight format, on a CPU, in float32."""

    # a checkpoint's `quantization_config`; None: the format quantizes plain checkpoints only
    config: ClassVar[Mapping[str, Any] | None] = None
    # a linear module that it stores
    module: ClassVar[str] = MODULE
    # [outputs, inputs] of a layer that it can store
    shape: ClassVar[tuple[int, int]] = (64, 128)
    # of the values to those of the checkpoint, relative: about 0.35 for two bits, 0.01 for eight
    largest_error: ClassVar[float] = 0.4

    @classmethod
    def offers(cls, registry: Registry) -> Sequence[ResolvedQuantization]:
        return registry.quantizations()

    def checkpoint(
        self, outputs: int, inputs: int, generator: torch.Generator
    ) -> Mapping[str, torch.Tensor]:
        """Return random tensors of a checkpoint's module of [outputs, inputs], by the last
        components of their names, as the format's `tensors` names them. Override this for a
        format that reads tensors of its own. Draw from `generator`."""
        return {}

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the values [outputs, inputs] float32 that tensors of `checkpoint` mean, or None.
        Override this with a plain formula, so that `dequantized` is compared with it."""
        return None

    def test_it_is_made_from_the_config(self) -> None:
        """The class isn't a `Quantization`, or can't be made from `config`, or changes it; or it
        declares `quantizes`, and can't be made from None."""
        from dovetail.nn.format import Quantization, WeightFormat

        loaded = self.offer.load()
        require(
            isinstance(loaded, type) and issubclass(loaded, Quantization),
            f"{self.offer.spec.target} is {loaded!r}, expected a Quantization",
        )
        given = copy.deepcopy(self.config)
        made = loaded(given)
        require(given == self.config, f"the config that it was made from became {given}")
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
        for value in UNKNOWN_VALUES:
            try:
                self.offer.load()({**self.config, UNKNOWN: value})
            except UnsupportedError as error:
                require(UNKNOWN in str(error), f"the error doesn't name the field: {error}")
            else:
                fail(f"quantization_config with {UNKNOWN} = {value!r} was accepted")

    def test_a_wrong_config_is_an_error_of_dovetail(self) -> None:
        """A config with a missing field, or a value of another type, raised an error that isn't
        Dovetail's. Raise `ModelLoadError` that names the field."""
        config = dict(self.config or {})
        fields = [name for name in config if name != "quant_method"]
        for name in fields:
            self._makes_or_refuses({key: config[key] for key in config if key != name})
            for value in ODD_VALUES:
                self._makes_or_refuses({**config, name: value})

    def test_modules_that_the_config_leaves_out_are_plain(self) -> None:
        """A module in `modules_to_not_convert`, or in `ignore`, has a format, though the config
        was accepted. Return `DENSE` for it, or refuse the field."""
        from dovetail.nn.format import DENSE

        for key in LEAVE_OUT:
            made = self._with({key: [self.module]})
            form = None if made is None else made.of_module(self.module)
            require(form in (None, DENSE), f"{key} names {self.module}, and its format is {form}")

    def test_formats_are_values(self) -> None:
        """Two formats of equal settings differ, or have different hashes, so that the layers can't
        be merged. Use a frozen dataclass."""
        made = self._made()
        first = made.of_module(self.module)
        made.of_module("lm_head")
        for second in (made.of_module(self.module), self._made().of_module(self.module)):
            require(
                first == second and hash(first) == hash(second),
                f"{first!r} and {second!r} differ, though their settings are equal",
            )

    def test_what_is_loaded_is_what_is_stored(self) -> None:
        """`dequantized` doesn't return the values of the checkpoint: they are zeros, in other
        places or of another size, or they were never stored. Set `largest_error` for a format
        that loses more."""
        import torch

        from dovetail.testing.extensions import weight_loading as loading

        form, weight = self._filled()
        found = form.dequantized(weight)
        require(
            found.dtype == torch.float32 and tuple(found.shape) == self.shape,
            f"dequantized is {found.dtype} {tuple(found.shape)}, expected float32 {self.shape}",
        )
        _, other = self._filled(seed=1)
        differs = (found != form.dequantized(other)).any(1)
        require(
            bool(differs.float().mean() > 0.5),
            "two checkpoints have the same values: they aren't stored, or `checkpoint` of the "
            "suite doesn't draw from its generator",
        )
        is_constant = (found == found[:, :1]).all(1)
        require(
            bool(is_constant.float().mean() < 0.5),
            "all values of an output are the same: values aren't stored",
        )
        expected = self._expected(weight)
        if expected is not None:
            loading.compare("dequantized", found, expected, self.largest_error)

    def test_each_part_goes_to_its_place(self) -> None:
        """Parts of a merged layer, or a rank's share of one, have other values than in a layer of
        their own. `Part` says which outputs or inputs they are (`start`, `size`, `stride`), where
        they go (`at`), and how often (`copies`). A layout that can't be stored is refused with `UnsupportedError`."""
        import torch

        from dovetail.testing.extensions import weight_loading as loading

        form = self._made().of_module(self.module)
        for layout in loading.layouts(*self.shape):
            try:
                weight = loading.allocated(form, layout)
                loading.load(weight, self.checkpoint)
                found = form.dequantized(weight)
            except UnsupportedError:
                continue
            except Exception as error:
                fail(f"{layout.what} made it raise {describe(error)}", error)
            alone = [
                self._alone(form, part, seed) for seed, part in enumerate(layout.parts.values())
            ]
            loading.compare(layout.what, found, torch.cat(alone), self.largest_error)

    def test_products_are_those_of_the_values(self) -> None:
        """`columns` isn't the product with `dequantized`, for some number of tokens, with or
        without a bias or a norm, `gated`, or into memory that is given; or `add_to` doesn't add it;
        or a result hasn't the dtype of x."""
        import torch

        form, weight = self._filled()
        values = form.dequantized(weight)
        require(bool(torch.isfinite(values).all()), "dequantized has values that aren't finite")
        generator = torch.Generator().manual_seed(1)
        bias = torch.randn(self.shape[0], generator=generator)
        for tokens in TOKENS:
            x = torch.randn(tokens, self.shape[1], generator=generator)
            for added in (None, bias):
                self._compare(form, weight, x, added)
            self._compare_norm(form, weight, x)
            self._compare_added(form, weight, x)
        narrow = form.columns(weight, x.bfloat16(), bias.bfloat16())
        require(
            narrow.dtype == torch.bfloat16,
            f"columns of x in bfloat16 are {narrow.dtype}, expected bfloat16",
        )
        require(
            torch.equal(values, form.dequantized(weight)), "the products changed the stored values"
        )

    def test_what_cannot_be_stored_is_refused(self) -> None:
        """A layer of 3 x 5 was neither stored nor refused with `UnsupportedError`."""
        from dovetail.testing.extensions import weight_loading as loading

        form = self._made().of_module(self.module)
        try:
            weight = loading.allocated(form, loading.whole(ODD_SHAPE))
            loading.load(weight, self.checkpoint)
            found = form.dequantized(weight)
        except DovetailError:
            return
        except Exception as error:
            fail(f"a layer of 3 x 5 made it raise {describe(error)}", error)
        require(
            tuple(found.shape) == ODD_SHAPE and bool(found.isfinite().all()),
            f"a layer of 3 x 5 was stored as {tuple(found.shape)}: {found}",
        )

    def _compare(
        self, form: WeightFormat, weight: Any, x: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        import torch
        import torch.nn.functional as F

        expected = F.linear(x, form.dequantized(weight), bias)
        into = torch.empty_like(expected)
        before = x.clone()
        _near(f"columns of {len(x)} tokens", form.columns(weight, x, bias), expected)
        result = form.columns(weight, x, bias, into=into)
        _near(f"columns of {len(x)} tokens with into", result, expected)
        _near(f"`into` after columns of {len(x)} tokens", into, expected)
        half = self.shape[0] // 2
        gated = F.silu(expected[:, :half]) * expected[:, half:]
        result = form.columns(weight, x, bias, gated=True)
        _near(f"columns, gated, of {len(x)} tokens", result, gated)
        require(torch.equal(x, before), "columns changed x")

    def _compare_norm(self, form: WeightFormat, weight: Any, x: torch.Tensor) -> None:
        """Compare products of a residual stream that is normed first."""
        import torch.nn.functional as F

        from dovetail.nn.residual import Residual

        def doubled(stream: torch.Tensor) -> torch.Tensor:
            return stream * 2

        norm: Any = doubled
        values = form.dequantized(weight)
        for given in (None, norm):
            expected = F.linear(x if given is None else norm(x), values)
            result = form.columns(weight, Residual(x.clone()), norm=given)
            named = "without" if given is None else "with"
            _near(f"columns of a stream of {len(x)} tokens, {named} a norm", result, expected)

    def _compare_added(self, form: WeightFormat, weight: Any, x: torch.Tensor) -> None:
        import torch.nn.functional as F

        from dovetail.nn.residual import Residual

        product = F.linear(x, form.dequantized(weight))
        stream = Residual(product / 2)
        form.add_to(weight, stream, x)
        _near(f"the stream after add_to of {len(x)} tokens", stream.summed(), product * 1.5)

    def _made(self) -> Quantization:
        made: Quantization = self.offer.load()(copy.deepcopy(self.config))
        return made

    def _with(self, fields: Mapping[str, Any]) -> Quantization | None:
        """Return what is made of the config with more fields; None if there is no config, or it
        refuses them."""
        if self.config is None:
            return None
        try:
            made: Quantization = self.offer.load()({**self.config, **fields})
        except DovetailError:
            return None
        return made

    def _makes_or_refuses(self, config: Mapping[str, Any]) -> None:
        try:
            self.offer.load()(config)
        except DovetailError:
            return
        except Exception as error:
            fail(f"the config {config} made it raise {describe(error)}", error)

    def _filled(self, seed: int = 0) -> tuple[WeightFormat, Any]:
        """Return a format and a loaded weight of it."""
        from dovetail.testing.extensions import weight_loading as loading

        form = self._made().of_module(self.module)
        weight = loading.allocated(form, loading.whole(self.shape))
        loading.load(weight, self.checkpoint, seed)
        return form, weight

    def _expected(self, weight: Any) -> torch.Tensor | None:
        """Return the values that the suite loaded, if they are known."""
        import torch

        from dovetail.testing.extensions import weight_loading as loading

        if not loading.is_stored(weight):
            return loading.plain_values(*self.shape, 0)
        generator = torch.Generator().manual_seed(0)
        return self.values(self.checkpoint(*self.shape, generator))

    def _alone(self, form: WeightFormat, part: Any, seed: int) -> torch.Tensor:
        """Return the values of this rank's share of a part, with its copies, from a layer of one
        part."""
        import torch

        from dovetail.testing.extensions import weight_loading as loading

        shape = part.source_shape
        weight = loading.allocated(form, loading.whole(shape))
        loading.load(weight, self.checkpoint, seed)
        indices = part.start + part.stride * torch.arange(part.size)
        share = form.dequantized(weight).index_select(part.dim, indices)
        return torch.cat([share] * part.copies, part.dim)


def _near(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    require(
        found.shape == expected.shape,
        f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}",
    )
    bound = 1e-3 * float(expected.abs().max()) + 1e-6
    worst = float((found - expected).abs().max())
    require(worst <= bound, f"{what} is off by {worst:.3g}")
