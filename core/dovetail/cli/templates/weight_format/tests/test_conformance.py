"""The conformance tests: they compare products with those of the dequantized weights."""

from dovetail.testing import WeightFormatSuite


class TestQuantizing(WeightFormatSuite):
    name = "acme"


class TestStored(WeightFormatSuite):
    name = "acme"
    config = {"quant_method": "acme"}
