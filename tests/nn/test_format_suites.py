"""Formats of checkpoints against their definitions: what a module's tensors mean, alone, merged and
as a rank's share, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from dovetail.errors import UnsupportedError
from dovetail.testing import WeightFormatSuite
from tests.models.checkpoint_formats import FORMATS, Format

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1(packed: torch.Tensor) -> torch.Tensor:
    """The numbers of bytes, even ones in the low half."""
    table = torch.tensor(E2M1 + [-value for value in E2M1])
    return table[torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()]


def some_bytes(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def in_int32(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Pack bytes along a dimension, four in an int32, the first one lowest."""
    turned = values.t().contiguous() if dim == 0 else values.contiguous()
    packed = turned.view(torch.int32)
    return packed.t().contiguous() if dim == 0 else packed


def scales(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator) * 0.01 + 0.001


class OfCheckpoints(WeightFormatSuite):
    """Formats with a table of keys take unknown ones that are off, as for all files of a model."""

    # the package is Dovetail's own, which tests/cli/test_plugins_doctor.py examines once
    test_the_doctor_finds_nothing_wrong_with_its_package = None

    def test_an_unknown_field_is_refused_by_name(self) -> None:
        with pytest.raises(UnsupportedError, match="no_format_has_this_field"):
            self.offer.load()({**(self.config or {}), "no_format_has_this_field": 1})


class TestModelOptNvfp4(OfCheckpoints):
    name = "modelopt"
    config: ClassVar[Any] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
    }

    def checkpoint(self, outputs: int, inputs: int, generator: torch.Generator) -> Any:
        small = torch.rand((outputs, inputs // 16), generator=generator) * 100 + 1
        return {
            "weight": some_bytes(generator, outputs, inputs // 2),
            "weight_scale": small.to(torch.float8_e4m3fn),
            "weight_scale_2": scales(generator, 1)[0],
            "input_scale": torch.tensor(0.1),
        }

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        spread = tensors["weight_scale"].float().repeat_interleave(16, 1)
        return e2m1(tensors["weight"]) * spread * tensors["weight_scale_2"]


class TestModelOptFp8(OfCheckpoints):
    name = "modelopt"
    config: ClassVar[Any] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }

    def checkpoint(self, outputs: int, inputs: int, generator: torch.Generator) -> Any:
        numbers = torch.randn((outputs, inputs), generator=generator) * 50
        return {
            "weight": numbers.to(torch.float8_e4m3fn),
            "weight_scale": torch.tensor(0.01),
            "input_scale": torch.tensor(0.1),
        }

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].float() * tensors["weight_scale"]


class TestFbgemm(OfCheckpoints):
    name = "fbgemm_fp8"
    config: ClassVar[Any] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}

    def checkpoint(self, outputs: int, inputs: int, generator: torch.Generator) -> Any:
        numbers = torch.randn((outputs, inputs), generator=generator) * 50
        return {
            "weight": numbers.to(torch.float8_e4m3fn),
            "weight_scale": scales(generator, outputs, 1),
        }

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].float() * tensors["weight_scale"]


class TestGptqOfEightBits(OfCheckpoints):
    name = "gptq"
    config: ClassVar[Any] = {
        "quant_method": "gptq",
        "bits": 8,
        "group_size": 32,
        "sym": False,
        "desc_act": False,
    }

    def checkpoint(self, outputs: int, inputs: int, generator: torch.Generator) -> Any:
        groups = inputs // 32
        return {
            "qweight": in_int32(some_bytes(generator, inputs, outputs), 0),
            "qzeros": in_int32(some_bytes(generator, groups, outputs), 1),
            "scales": scales(generator, groups, outputs),
            "g_idx": torch.arange(inputs) // 32,
        }

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        turned = tensors["qweight"].t().contiguous().view(torch.uint8).float()
        zeros = tensors["qzeros"].view(torch.uint8).float() + 1
        spread = [one.repeat_interleave(32, 0).t() for one in (zeros, tensors["scales"])]
        return (turned - spread[0]) * spread[1]


class TestAutoRound(OfCheckpoints):
    name = "auto-round"
    config: ClassVar[Any] = {
        "quant_method": "auto-round",
        "bits": 8,
        "group_size": 32,
        "sym": False,
        "packing_format": "auto_round",
        "data_type": "int",
        "iters": 200,
    }

    def checkpoint(self, outputs: int, inputs: int, generator: torch.Generator) -> Any:
        return TestGptqOfEightBits.checkpoint(self, outputs, inputs, generator)  # type: ignore[arg-type]

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        shifted = {**tensors, "qzeros": tensors["qzeros"]}
        more = TestGptqOfEightBits.values(self, shifted)  # type: ignore[arg-type]
        return more + tensors["scales"].repeat_interleave(32, 0).t()  # zero points as they are


class TestBitsAndBytesInt8(OfCheckpoints):
    name = "bitsandbytes"
    config: ClassVar[Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}

    def checkpoint(self, outputs: int, inputs: int, generator: torch.Generator) -> Any:
        return {
            "weight": some_bytes(generator, outputs, inputs).view(torch.int8),
            "SCB": scales(generator, outputs) * 100,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tensors["weight"].float() * tensors["SCB"][:, None] / 127


class TestBitsAndBytesFp4(OfCheckpoints):
    name = "bitsandbytes"
    config: ClassVar[Any] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": False,
    }
    table = torch.tensor([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])

    def checkpoint(self, outputs: int, inputs: int, generator: torch.Generator) -> Any:
        numbers = outputs * inputs
        state = {"quant_type": "fp4", "blocksize": 64, "shape": [outputs, inputs]}
        return {
            "weight": some_bytes(generator, numbers // 2, 1),
            "weight.absmax": scales(generator, numbers // 64),
            "weight.quant_map": torch.cat((self.table, -self.table)),
            "weight.quant_state.bitsandbytes__fp4": torch.tensor(
                list(json.dumps(state).encode())
            ).to(torch.uint8),
        }

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        packed = tensors["weight"].flatten()
        codes = torch.stack((packed >> 4, packed & 15), 1).flatten().long()
        spread = tensors["weight.absmax"].repeat_interleave(64)
        state = bytes(tensors["weight.quant_state.bitsandbytes__fp4"].tolist())
        numbers = tensors["weight.quant_map"][codes] * spread
        return numbers.view(json.loads(state)["shape"])


class OfTheTable(OfCheckpoints):
    """Formats that are dequantized while they load, as the table of published ones defines them."""

    form: ClassVar[Format]

    def checkpoint(self, outputs: int, inputs: int, generator: torch.Generator) -> Any:
        return self.form.pack(outputs, inputs, generator)

    def values(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.form.values(dict(tensors)).float()


def of_the_table(name: str) -> type[OfTheTable]:
    form = next(form for form in FORMATS if form.name == name)
    said = {"name": form.config["quant_method"], "config": dict(form.config), "form": form}
    return type("TestOfTheTable", (OfTheTable,), said)


TestGptqOfThreeBits = of_the_table("GPTQ INT3")
TestGptqInAnyOrder = of_the_table("GPTQ INT4, inputs in any order")
TestPackedInAnyOrder = of_the_table("compressed-tensors W4A16, inputs in any order")
TestModelOptMxfp8 = of_the_table("ModelOpt MXFP8")
TestModelOptBlocks = of_the_table("ModelOpt FP8, blocks")
TestQuarkFp8 = of_the_table("Quark FP8")
TestQuarkMxfp4 = of_the_table("Quark MXFP4")
TestAqlm = of_the_table("AQLM, two codebooks")
