"""The conformance tests: they compare what is stored with what is loaded, and products with those of the values."""

from collections.abc import Mapping

import torch
from dovetail.testing import WeightFormatSuite


class TestQuantizing(WeightFormatSuite):
    name = "acme"


class TestStored(WeightFormatSuite):
    name = "acme"
    config = {"quant_method": "acme"}

    def checkpoint(self, outputs: int, inputs: int, generator: torch.Generator) -> Mapping[str, torch.Tensor]:
        values = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        return {"weight": values, "weight_scale": torch.rand(outputs, generator=generator)}

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].float() * tensors["weight_scale"][:, None]
