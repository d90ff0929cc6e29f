"""A weight format, for Dovetail."""

from collections.abc import Iterable

from dovetail.api import QuantizationSpec, hookimpl


@hookimpl
def dovetail_quantizations() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="acme",
        target="dovetail_acme.format:AcmeQuantization",
        summary="Int8, a scale per output",
        quantizes=True,
    )
