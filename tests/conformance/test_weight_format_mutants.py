"""The suite of weight formats: right ones pass, and each mistake is found by a check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dovetail.cli.plugins_new import write_package
from dovetail.testing import WeightFormatSuite
from dovetail.testing.checks import CheckFailed
from tests.registry.fakes import Site, modules_forgotten
from tests.registry.site import site  # noqa: F401

pytestmark = pytest.mark.slow("imports torch and the layers")


class Quantizing(WeightFormatSuite):
    name = "mine"


class Stored(WeightFormatSuite):
    name = "mine"
    config: ClassVar[Mapping[str, Any]] = {"quant_method": "mine"}

    def checkpoint(self, outputs: int, inputs: int, generator: Any) -> Mapping[str, Any]:
        import torch

        shape = (outputs, inputs)
        values = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        return {"weight": values, "weight_scale": torch.rand(outputs, generator=generator)}

    def values(self, tensors: Mapping[str, Any]) -> Any:
        return tensors["weight"].float() * tensors["weight_scale"][:, None]


class StoredUnknown(Stored):
    """The author has written no formula."""

    def values(self, tensors: Mapping[str, Any]) -> Any:
        return None


def overriding(signature: str, body: str) -> tuple[str, str]:
    """A method more for the format."""
    before = "    def tensors(self"
    return before, f"    def {signature}:\n        {body}\n\n{before}"


COLUMNS = "columns(self, weight, x, bias=None, norm=None, *, gated=False, into=None)"
PRODUCT = "StoredFormat.columns(self, weight, x, bias, norm, gated=gated, into=into)"
ROWS = "weight.data[at + first : at + first + len(values)] = values"
COLUMN_SHARE = "values = values[:, part.start : part.start + part.size]"
LEFT_OUT = 'name == "lm_head" or any(part in name for part in self.left_out)'
MISTAKES: list[tuple[str, tuple[str, str], type[WeightFormatSuite], str]] = [
    (
        "an unknown field is ignored",
        ("raise UnsupportedError(", "print("),
        Stored,
        "unknown_field",
    ),
    (
        "an unknown field without a value is ignored",
        ("if name not in (", "if config[name] and name not in ("),
        Stored,
        "unknown_field",
    ),
    ("copies are left out", ("range(part.copies)", "range(1)"), Quantizing, "its_place"),
    ("copies are left out of it", ("range(part.copies)", "range(1)"), Stored, "its_place"),
    (
        "alternating outputs are read one after the other",
        ("stride=part.stride", "stride=1"),
        Stored,
        "its_place",
    ),
    (
        "formats aren't values",
        ("@dataclass(frozen=True, slots=True)", "@dataclass(eq=False)"),
        Stored,
        "are_values",
    ),
    ("products are off", overriding(COLUMNS, f"return {PRODUCT} * 1.01"), Stored, "products"),
    ("values are NaN", ("values: torch.Tensor = ", "values = torch.nan * "), Stored, "products"),
    ("zeros", ("values: torch.Tensor = ", "values = 0 * "), Quantizing, "is_stored"),
    ("zeros of a checkpoint", ("values: torch.Tensor = ", "values = 0 * "), Stored, "is_stored"),
    ("nothing is stored", (ROWS, "pass"), Quantizing, "is_stored"),
    ("nothing of a checkpoint is stored", (ROWS, "pass"), StoredUnknown, "is_stored"),
    (
        "the first row only",
        (ROWS, "weight.data[at + first] = values[0]"),
        Quantizing,
        "is_stored",
    ),
    (
        "scales are halved",
        ("weight.scales[:, None]", "weight.scales[:, None] * 0.5"),
        Quantizing,
        "is_stored",
    ),
    (
        "the sign is lost",
        ("rows.float() / scales", "rows.float().abs() / scales"),
        Quantizing,
        "is_stored",
    ),
    (
        "a tenth too large",
        ("weight.scales[:, None]", "weight.scales[:, None] * 1.1"),
        Stored,
        "is_stored",
    ),
    ("`at` is ignored", ("at = part.at + copy", "at = copy"), Quantizing, "its_place"),
    (
        "`at` of a checkpoint is ignored",
        ("at = part.at + copy", "at = copy"),
        StoredUnknown,
        "its_place",
    ),
    ("the first inputs", (COLUMN_SHARE, "values = values[:, : part.size]"), Quantizing, "its_"),
    ("`start` is ignored", ("part.dim, part.start,", "part.dim, 0,"), StoredUnknown, "its_place"),
    (
        "scales of all outputs",
        ("of_outputs if part.dim == 0 else TensorShape", "TensorShape"),
        Stored,
        "its_place",
    ),
    (
        "the scales of the last part",
        (
            "weight.scales[at + first : at + first + len(values)] = scales",
            "weight.scales[:] = scales[0]",
        ),
        Quantizing,
        "its_place",
    ),
    (
        "bias is left out",
        overriding(COLUMNS, f"return {PRODUCT.replace('bias', 'None')}"),
        Stored,
        "products",
    ),
    (
        "a norm is left out",
        overriding(COLUMNS, f"return {PRODUCT.replace('norm', 'None')}"),
        Stored,
        "products",
    ),
    (
        "`into` isn't filled",
        overriding(COLUMNS, f"return {PRODUCT.replace('into=into', 'into=None')}"),
        Stored,
        "products",
    ),
    (
        "results in float32",
        overriding(COLUMNS, f"return {PRODUCT}.float()"),
        Quantizing,
        "products",
    ),
    (
        "one token only",
        overriding(COLUMNS, f"y = {PRODUCT}; y[32:] = 0; return y"),
        Quantizing,
        "products",
    ),
    (
        "a stream is replaced",
        overriding(
            "add_to(self, weight, stream, x)", "stream.summed().copy_(self.columns(weight, x))"
        ),
        Stored,
        "products",
    ),
    (
        "x is changed",
        overriding(
            COLUMNS, f"y = {PRODUCT}; x.mul_(2) if norm is None and len(x) else 0; return y"
        ),
        Stored,
        "products",
    ),
    (
        "a copy is returned, the weight is changed",
        overriding(COLUMNS, f"y = {PRODUCT}; weight.scales.mul_(1.001); return y"),
        Stored,
        "products",
    ),
    ("modules aren't left out", (LEFT_OUT, 'name == "lm_head"'), Stored, "leaves_out"),
    (
        "the config is changed",
        (
            "super().__init__(config)",
            "super().__init__(config); config and config.pop('quant_method')",
        ),
        Stored,
        "from_the_config",
    ),
    (
        "a wrong value is no error of Dovetail",
        (
            "self.left_out =",
            "self.bits = int((config or {}).get('bits', 8))\n        self.left_out =",
        ),
        type("OfBits", (Stored,), {"config": {"quant_method": "mine", "bits": 8}}),
        "wrong_config",
    ),
    (
        "only small layers are stored",
        (
            "outputs, inputs = weight.shape\n        values",
            "outputs, inputs = (weight.shape[0] // 8 * 8, weight.shape[1])\n        values",
        ),
        Quantizing,
        "cannot_be_stored",
    ),
    (
        "formats differ by their number",
        (
            "return AcmeFormat(".replace("Acme", "Mine"),
            "COUNT.append(1)\n        return MineFormat(",
        ),
        Stored,
        "are_values",
    ),
]
EXTRA = {
    "a wrong value is no error of Dovetail": (
        '("quant_method", "modules_to_not_convert")',
        '("quant_method", "modules_to_not_convert", "bits")',
    ),
    "formats differ by their number": (
        "is_stored=self.config is not None)",
        "is_stored=len(COUNT))",
    ),
}


def checks_of(suite: type[WeightFormatSuite]) -> dict[str, Callable[[Any], None]]:
    """The checks but that of the doctor, which starts a process."""
    return {
        name: getattr(suite, name)
        for name in dir(suite)
        if name.startswith("test_") and "doctor" not in name
    }


@contextmanager
def installed(folder: Path, *changes: tuple[str, str]) -> Iterator[None]:
    """The generated format, with changes to its text."""
    project = write_package("weight_format", "mine", folder)
    source = project / "src/dovetail_mine/format.py"
    text = source.read_text()
    for right, wrong in changes:
        assert text.count(right) == 1, right
        text = text.replace(right, wrong)
    source.write_text(text.replace("LARGEST = 127", "LARGEST = 127\nCOUNT = []"))
    Site(project / "src").install(
        "dovetail-mine", modules={}, entry_points={"main": "dovetail_mine"}
    )
    sys.path.insert(0, str(project / "src"))
    try:
        with modules_forgotten(project):
            yield
    finally:
        sys.path.remove(str(project / "src"))


@pytest.mark.parametrize("suite", [Quantizing, Stored, StoredUnknown])
@pytest.mark.usefixtures("site")
def test_the_generated_format_passes(suite: type[WeightFormatSuite], tmp_path: Path) -> None:
    with installed(tmp_path):
        for check in checks_of(suite).values():
            check(suite())


@pytest.mark.parametrize(
    ("what", "change", "suite", "found_by"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES]
)
@pytest.mark.usefixtures("site")
def test_a_mistake_in_a_weight_format_is_found(
    what: str,
    change: tuple[str, str],
    suite: type[WeightFormatSuite],
    found_by: str,
    tmp_path: Path,
) -> None:
    further = [EXTRA[what]] if what in EXTRA else []
    with installed(tmp_path, change, *further):
        (check,) = [check for name, check in checks_of(suite).items() if found_by in name]
        with pytest.raises(CheckFailed):
            check(suite())


def test_a_checkpoint_s_tensors_must_be_given(site: Site, tmp_path: Path) -> None:  # noqa: F811
    class Without(Stored):
        def checkpoint(self, outputs: int, inputs: int, generator: Any) -> Mapping[str, Any]:
            return {}

    with installed(tmp_path), pytest.raises(CheckFailed, match="weight_scale"):
        Without().test_what_is_loaded_is_what_is_stored()
