"""Ways of storing weights are found like components: a plugin declares them, and a checkpoint that
names one is served in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dovetail import LLM, SamplingParams
from dovetail.api.component import QuantizationSpec
from dovetail.errors import DISTRIBUTION, PluginError
from dovetail.nn.format import Quantization, StoredWeight, TensorShape
from dovetail.nn.format.stored import StoredFormat
from dovetail.nn.parameter import Part, Weight
from dovetail.registry.plugin import LoadedPlugin, PluginOrigin
from dovetail.registry.registry import Registry
from tests.registry.fakes import Site

SMALL = Path(__file__).parent.parent / "models" / "quantized" / "ct-fp8-dynamic"


@dataclass(frozen=True, slots=True)
class Halved(StoredFormat):
    """A third-party format: weights are stored in half precision, doubled. It has no kernels, so
    the twin computes."""

    def allocate(self, weight: Weight, device: torch.device) -> StoredWeight:
        return StoredWeight(
            self,
            weight,
            torch.empty(weight.shape, dtype=torch.float16, device=device),
            torch.tensor(2.0),
        )

    def dequantized(self, weight: StoredWeight) -> torch.Tensor:
        return weight.data.float() * weight.scales

    def tensors(self, part: Part) -> Mapping[str, TensorShape]:
        return {"half": TensorShape((part.source_shape,), part.dim, part.start, part.size)}

    def store(self, weight: StoredWeight, part: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        part.place(weight.data).copy_(tensors["half"])

    def quantize(self, weight: StoredWeight, part: Part, first: int, rows: torch.Tensor) -> None:
        raise NotImplementedError


class Halves(Quantization):
    def of_module(self, name: str) -> Halved:
        return Halved()

    def __str__(self) -> str:
        return "halves"


def test_a_plugin_brings_a_format_and_a_model_that_knows_nothing_of_it_is_served(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    directory = tmp_path / "model"
    shutil.copytree(SMALL, directory)
    config = json.loads((directory / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "halves"}
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {}
    found = load_file(SMALL / "model.safetensors")
    for name, tensor in found.items():
        if name.endswith("proj.weight"):
            tensors[name.removesuffix("weight") + "half"] = (
                tensor.float() * found[name + "_scale"].float() / 2
            ).half()
        elif not name.endswith("_scale"):
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    spec = QuantizationSpec("halves", f"{__name__}:Halves", "Half of each weight")
    registry = Registry(
        [
            *Registry.discover().plugins,
            LoadedPlugin(PluginOrigin("dovetail-acme", "acme", "1.0"), quantizations=(spec,)),
        ]
    )
    expected = json.loads((SMALL / "expected.json").read_text())["greedy"][0]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    with LLM(str(directory), registry=registry, kv_cache_memory="1MiB", max_num_seqs=2) as llm:
        outputs = llm.generate([{"prompt_token_ids": expected["prompt"]}], params)
        assert list(outputs[0].outputs[0].token_ids) == expected["tokens"][:8]
        assert llm.engine.capacity.details["quantization"] == "halves"


def test_the_hook_is_called_and_its_specs_are_checked(site: Site) -> None:
    body = (
        "from dovetail.api import QuantizationSpec, hookimpl\n\n\n@hookimpl\ndef "
        "dovetail_quantizations():\n    return [{}]\n"
    )
    site.install(
        "dovetail-good",
        modules={"good_bits": body.format('QuantizationSpec("bits", "good_bits:Bits")')},
    )
    site.install("dovetail-odd", modules={"odd_bits": body.format('"bits"')})
    registry = Registry.discover()
    assert [
        known.qualified_name for known in registry.quantizations() if not known.origin.built_in
    ] == ["dovetail-good:bits"]
    assert any(
        "gave 'bits', expected a QuantizationSpec" in str(failure) for failure in registry.failures
    )


def test_one_distribution_offers_a_name_once() -> None:
    spec = QuantizationSpec("bits", "acme:Bits")
    twice = [
        LoadedPlugin(PluginOrigin(DISTRIBUTION, name, "1.0"), quantizations=(spec,))
        for name in ("a", "b")
    ]
    assert "quantization 'bits' is offered by" in str(Registry(twice).failures[0])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (("Bits", "a:B"), "name is 'Bits'"),
        (("bits", "a.B"), "target is 'a.B'"),
        (("bits", "a:B", "two\nlines"), "expected one line of text"),
    ],
)
def test_malformed_specs_say_what_was_expected(fields: tuple[Any, ...], why: str) -> None:
    with pytest.raises(PluginError, match=why):
        QuantizationSpec(*fields)
