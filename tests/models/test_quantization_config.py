"""Formats chosen by a checkpoint's `quantization_config` and `quantization` in engine.yaml, and
errors in them."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config
from transformers.utils import quantization_config

from dovetail import LLM, SamplingParams
from dovetail.api.executor import QuantizationRef
from dovetail.api.file_keys import FileKeys, NoEffect, Refused
from dovetail.errors import (
    ConfigError,
    DovetailError,
    ModelLoadError,
    PluginError,
    UnsupportedError,
)
from dovetail.nn.format import (
    DENSE,
    Quantization,
    WeightFormat,
    awq,
    compressed_tensors,
    fp8,
    gptq,
    mxfp4,
)
from dovetail.nn.format.int4 import Unpacked
from dovetail.nn.model_files import stored_as
from dovetail.nn.placed_weights import place_weights
from dovetail_executors.runtime.architecture import find_architecture
from dovetail_executors.runtime.quantization import choose_quantization
from tests.models.oracle import CPU, MODELS, context
from tests.models.test_quantized_checkpoints import QUANTIZATIONS, loaded

SMALL = Path(__file__).parent / "quantized"

QWEN3_8B_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": [
        "lm_head",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
    ],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
DEEPSEEK_V3 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
GPTQ = {
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.1,
    "dataset": None,
    "desc_act": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "max_input_length": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "quant_method": "gptq",
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
    "use_exllama": True,
}


def of_group(**group: Any) -> dict[str, Any]:
    """compressed-tensors with one group."""
    return {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                **group,
            }
        },
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


FLOAT8 = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
    "observer": "minmax",
}
INT4 = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "actorder": None,
}


NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "symmetric": True,
}
BITS_AND_BYTES = {
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "quant_method": "bitsandbytes",
}
AUTO_ROUND = {
    "autoround_version": "0.5.1",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "extra_config": {"model.layers.1.mlp.down_proj": {"act_bits": 16, "bits": 16}},
    "group_size": 128,
    "iters": 1000,
    "low_gpu_mem_usage": True,
    "nsamples": 512,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "seqlen": 2048,
    "sym": True,
}


def choose(
    said: Any, asked: str | None = None, installed: tuple[QuantizationRef, ...] = QUANTIZATIONS
) -> Any:
    return choose_quantization(asked, said, installed, "somewhere")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (QWEN3_8B_FP8, "fp8 (a scale per 128 x 128)"),
        (DEEPSEEK_V3, "fp8 (a scale per 128 x 128)"),
        (AUTO_FP8, "fp8 (a scale per tensor)"),
        (
            of_group(
                weights=FLOAT8, input_activations={**FLOAT8, "strategy": "token", "dynamic": True}
            ),
            "fp8 (a scale per output)",
        ),
        (
            of_group(weights={**FLOAT8, "strategy": "block", "block_structure": [128, 128]}),
            "fp8 (a scale per 128 x 128)",
        ),
        (of_group(weights=INT4, format="pack-quantized"), "int4 (groups of 128, symmetric)"),
        (GPTQ, "int4 (groups of 128, symmetric)"),
        (GPTQ | {"group_size": -1, "sym": False}, "int4 (one scale per output, asymmetric)"),
        (AWQ, "int4 (groups of 128, asymmetric)"),
        (GPTQ | {"bits": 8}, "int8 (groups of 128)"),
        (AUTO_ROUND, "int4 (groups of 128, symmetric)"),
        (
            AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "sym": False},
            "int4 (groups of 128, asymmetric)",
        ),
        (BITS_AND_BYTES, "nf4"),
        (
            BITS_AND_BYTES | {"load_in_4bit": False, "_load_in_4bit": False, "load_in_8bit": True},
            "int8 (a scale per output)",
        ),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8 (a scale per output)"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "kv_cache_quant_algo": "FP8",
                "group_size": 16,
                "exclude_modules": ["lm_head", "model.layers.1.mlp*"],
            },
            "nvfp4",
        ),
        (
            of_group(
                weights=FLOAT8 | {"type": "int"},
                format="int-quantized",
                input_activations={**FLOAT8, "type": "int", "strategy": "token", "dynamic": True},
            ),
            "int8 (a scale per output)",
        ),
        (
            of_group(weights=NVFP4, format="nvfp4-pack-quantized", input_activations=NVFP4),
            "nvfp4",
        ),
        (
            of_group(weights=INT4, format="pack-quantized", input_activations=FLOAT8),
            "int4 (groups of 128, symmetric)",
        ),
    ],
)
def test_published_configs_are_read(said: dict[str, Any], told: str) -> None:
    quantization = choose(said)
    assert str(quantization) == told
    assert str(quantization.of_module("model.layers.3.mlp.down_proj")) == told


def test_what_is_left_out_stays_plain() -> None:
    left_out = choose({**QWEN3_8B_FP8, "modules_to_not_convert": ["model.layers.0.mlp", "o_proj"]})
    for name, plain in (
        ("layers.0.mlp.up_proj", True),
        ("layers.10.mlp.up_proj", False),
        ("layers.3.self_attn.o_proj", True),
    ):
        assert (left_out.of_module(f"model.{name}") == DENSE) == plain
    ignored = choose(
        of_group(weights=FLOAT8)
        | {
            "ignore": [
                "lm_head",
                r"re:.*\.\d+\.self_attn.*(?:q|k)_proj$",
                "model.layers.0.mlp.up_proj",
            ]
        }
    )
    for name, plain in (
        ("layers.1.self_attn.q_proj", True),
        ("layers.0.mlp.up_proj", True),
        ("layers.0.mlp.down_proj", False),
    ):
        assert (ignored.of_module(f"model.{name}") == DENSE) == plain
    named = choose(of_group(weights=FLOAT8, targets=["re:.*mlp.*"]))
    assert [
        named.of_module(f"model.layers.0.{name}") == DENSE
        for name in ("mlp.up_proj", "self_attn.q_proj")
    ] == [False, True]
    listed = choose(
        GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.down_proj"]]}
    )
    assert [
        listed.of_module(f"model.layers.0.{name}") == DENSE
        for name in ("mlp.up_proj", "mlp.down_proj")
    ] == [True, False]
    for said in (
        AUTO_ROUND,
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "exclude_modules": ["lm_head", "model.layers.1.mlp*"],
        },
        BITS_AND_BYTES | {"llm_int8_skip_modules": ["lm_head", "model.layers.1.mlp.down_proj"]},
    ):
        made = choose(said)
        modules = ("layers.0.mlp.down_proj", "layers.1.mlp.down_proj")
        assert [made.of_module(f"model.{name}") == DENSE for name in modules] == [False, True]
        assert made.of_module("lm_head") == DENSE
    assert (
        choose(AWQ | {"modules_to_not_convert": ["visual"]}).of_module("visual.blocks.0.attn.proj")
        == DENSE
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (
            {"quant_method": "a-new-one"},
            r"quant_method 'a-new-one' is unknown; known are fp8, compressed-tensors, modelopt",
        ),
        (
            {"quant_method": "eetq"},
            r"quant_method 'eetq' isn't served: its bytes are in the order of one kernel; served",
        ),
        (DEEPSEEK_V3 | {"fmt": "e5m2"}, "fmt = 'e5m2' is not implemented"),
        (
            DEEPSEEK_V3 | {"activation_scheme": "token"},
            "activation_scheme = 'token' is not implemented",
        ),
        (DEEPSEEK_V3 | {"dequantize": True}, "dequantize = True is not implemented"),
        ({"quant_method": "mxfp4", "dequantize": True}, "dequantize = True is not implemented"),
        (DEEPSEEK_V3 | {"hadamard": 64}, "'hadamard' = 64 is unknown and may change the numbers"),
        (
            DEEPSEEK_V3 | {"is_checkpoint_fp8_serialized": False},
            "remove it and set quantization: fp8",
        ),
        (GPTQ | {"bits": 9}, r"bits = 9 is not implemented \(only 2 to 8\)"),
        (GPTQ | {"bits": "4"}, r"bits = '4' is not implemented \(only 2 to 8\)"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not implemented"),
        (GPTQ | {"format": "marlin"}, "checkpoint_format = 'marlin' is not implemented"),
        (GPTQ | {"dynamic": {".*down.*": {"rank": 2}}}, r"dynamic..\*down..: rank is unknown"),
        (AWQ | {"format": "gemv", "version": None}, "version = 'gemv' is not implemented"),
        (DEEPSEEK_V3 | {"expert_dtype": "fp4"}, "expert_dtype = 'fp4' is not implemented"),
        (
            of_group(weights={**FLOAT8, "symmetric": False}),
            "weights: symmetric = False is not implemented for this type",
        ),
        (
            of_group(weights=FLOAT8) | {"quantization_status": "calibration"},
            "quantization_status = 'calibration' is not implemented",
        ),
        (
            of_group(weights=FLOAT8, output_activations=FLOAT8),
            "output_activations = .* quantized outputs",
        ),
        (AWQ | {"version": "gemv"}, "version = 'gemv' is not implemented"),
        (AWQ | {"zero_point": False}, "zero_point = False is not implemented"),
        (
            of_group(weights={**INT4, "num_bits": 2}, format="pack-quantized"),
            "of type 'int' and 2 bits, 'pack-quantized', are not implemented",
        ),
        (
            of_group(weights=NVFP4 | {"group_size": 32}, format="nvfp4-pack-quantized"),
            "group_size = 32 are not implemented for 4-bit floats .only tensor_group and 16",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            "quant_algo = 'W4A16_AWQ' is not",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "group_size = 32 is not implemented",
        ),
        (
            BITS_AND_BYTES | {"bnb_4bit_quant_type": "int4"},
            "bnb_4bit_quant_type = 'int4' is not implemented",
        ),
        (
            BITS_AND_BYTES | {"bnb_4bit_quant_storage": "int8"},
            "bnb_4bit_quant_storage = 'int8' is not implemented",
        ),
        (AUTO_ROUND | {"bits": 1}, "bits = 1 in the layout 'auto_round:auto_gptq' are not"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type = 'mx_fp' is not implemented"),
        (
            AUTO_ROUND | {"extra_config": {"model.layers.0.mlp.down_proj": {"act_bits": 8}}},
            "extra_config.model.layers.0.mlp.down_proj: act_bits is not implemented",
        ),
        (
            of_group(weights={**INT4, "actorder": "dynamic"}, format="pack-quantized"),
            "actorder = 'dynamic' is not implemented",
        ),
        (
            of_group(weights={**FLOAT8, "strategy": "group"}),
            "strategy = 'group' is not implemented for 8 bits",
        ),
        (
            of_group(weights=FLOAT8) | {"transform_config": {"R1": {}}},
            "transform_config = .* is not implemented",
        ),
    ],
)
def test_what_is_not_implemented_is_rejected_by_name(said: dict[str, Any], why: str) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"^somewhere/config.json: quantization_config: (.|\n)*{why}"
    ):
        choose(said)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"bits": 4}, "expected quant_method, the name of a way of storing weights, got None"),
        (
            DEEPSEEK_V3 | {"weight_block_size": [128]},
            r"weight_block_size must be two numbers, of outputs and of inputs, got \[128\]",
        ),
        (
            DEEPSEEK_V3 | {"weight_block_size": [0, 128]},
            r"weight_block_size must be two numbers, of outputs and of inputs, got \[0, 128\]",
        ),
        (
            GPTQ | {"modules_in_block_to_quantize": 5},
            "a value in it can't be used by dovetail:gptq: TypeError",
        ),
        (
            of_group(weights={**INT4, "group_size": 0}, format="pack-quantized"),
            r"config_groups.group_0.weights: group_size must be .* got 0",
        ),
        (
            of_group(weights={**FLOAT8, "strategy": "block"}),
            "config_groups.group_0.weights: block_structure must be two numbers, .* got None",
        ),
        (
            of_group(weights=[1]),
            r"config_groups.group_0.weights: expected keys and values, got \[1\]",
        ),
        (
            of_group(weights=FLOAT8) | {"config_groups": {"a": None}},
            "config_groups.a: expected keys and values, got None",
        ),
        (
            of_group(weights=FLOAT8) | {"ignore": ["re:("]},
            r"^somewhere/config.json: quantization_config: 're:\(' is not a valid regular "
            r"expression",
        ),
        (
            AWQ | {"group_size": "many"},
            "group_size must be a number of inputs, or -1 for all, got 'many'",
        ),
        (of_group(weights=FLOAT8) | {"ignore": "lm_head"}, "ignore must be a list of names"),
        *(
            (of_group(weights=FLOAT8) | {"ignore": [f"re:{expression}"]}, why)
            for expression, why in (
                ("(a+)+$", "takes too long to match"),
                ("(a|a)" * 30 + "x", "takes too long to match"),
                (".*" * 6 + "x", "takes too long to match"),
                ("(?=.*x)" * 20, "takes too long to match"),
                ("(" * 1_000, "has 1003 characters"),
            )
        ),
        (
            of_group(weights=FLOAT8, targets=[f"re:.*{n}.*x.*y.*z" for n in range(9)]),
            "takes too long to match",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_that_cannot_be_used_are_named(said: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        choose(said)


def test_what_is_asked_for_must_be_what_the_checkpoint_has() -> None:
    assert choose(None) is None
    assert str(choose(None, "fp8")) == "fp8 (a scale per output)"
    assert str(choose(AWQ, "awq")) == str(choose(AWQ, "dovetail:awq")) == str(choose(AWQ))
    with pytest.raises(ConfigError, match="'fp8' is asked for, and the checkpoint is awq already"):
        choose(AWQ, "fp8")
    with pytest.raises(
        ConfigError,
        match="the checkpoint's weights are plain; they can be quantized while they load to fp8",
    ):
        choose(None, "gptq")
    with pytest.raises(ConfigError, match="quantization: 'fp9' is unknown; known are fp8"):
        choose(None, "fp9")


def test_a_method_that_several_plugins_know_is_the_built_ins_unless_another_is_named() -> None:
    theirs, others = (
        QuantizationRef(f"{name}:awq", "awq", "tests.models.test_quantization_config:Theirs", False)
        for name in ("acme", "other")
    )
    assert type(choose(AWQ, installed=(theirs, *QUANTIZATIONS))) is type(choose(AWQ))
    assert type(choose(AWQ, "acme:awq", installed=(*QUANTIZATIONS, theirs))) is Theirs
    with pytest.raises(
        UnsupportedError,
        match=r"known to acme:awq and other:awq: write one of these names as `quantization` in "
        r"engine.yaml",
    ):
        choose(AWQ, installed=(theirs, others))


TABLES: dict[str, FileKeys] = {
    "GPTQConfig": gptq.KEYS,
    "AwqConfig": awq.KEYS,
    "FineGrainedFP8Config": fp8.KEYS,
    "Mxfp4Config": mxfp4.KEYS,
    "CompressedTensorsConfig": compressed_tensors.KEYS,
}
SETTINGS = {
    "gptq": GPTQ,
    "awq": AWQ,
    "fp8": DEEPSEEK_V3,
    "mxfp4": {"quant_method": "mxfp4"},
    "compressed-tensors": of_group(weights=FLOAT8),
}


@pytest.mark.parametrize("name", TABLES)
def test_each_key_of_transformers_config_is_in_a_table(name: str) -> None:
    names = inspect.signature(getattr(quantization_config, name)).parameters.keys() - {"kwargs"}
    assert not [key for key in names if TABLES[name].rule(key) is None]


def test_each_key_of_compressed_tensors_is_in_a_table() -> None:
    """As version 0.20.1 writes them."""
    of_config = (
        "config_groups quant_method kv_cache_scheme format quantization_status "
        "global_compression_ratio ignore moe_sparsity_config version"
    )
    of_group = "targets weights input_activations output_activations format"
    of_numbers = (
        "num_bits type symmetric group_size strategy block_structure dynamic actorder "
        "scale_dtype zp_dtype observer observer_kwargs"
    )
    tables = (
        (compressed_tensors.KEYS, of_config),
        (compressed_tensors.GROUP_KEYS, of_group),
        (compressed_tensors.NUMBER_KEYS, of_numbers),
    )
    assert not [key for table, keys in tables for key in keys.split() if table.rule(key) is None]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_a_refused_key_is_refused_by_name_and_one_without_effect_is_not(table: FileKeys) -> None:
    plain = SETTINGS[table.file]
    for key, rule in table.keys.items():
        if isinstance(rule, Refused):
            for value in (None, *rule.unless):
                choose(plain | {key: value})
            with pytest.raises(
                UnsupportedError,
                match=rf"somewhere/config.json: quantization_config: {key} = 'other' is not "
                rf"implemented",
            ):
                choose(plain | {key: "other"})
        elif isinstance(rule, NoEffect):
            for value in (True, "other", 3, [1], {"a": 1}):
                assert str(choose(plain | {key: value})) == str(choose(plain))


@pytest.mark.parametrize("less_one", [True, False])
def test_symmetric_zero_points_of_gptq_are_read_whatever_version_the_file_names(
    less_one: bool,
) -> None:
    form = gptq.GptqInt4(32, symmetric=True, less_one=less_one)
    tensors = {"qweight": torch.zeros(4, 8, dtype=torch.int32), "scales": torch.ones(1, 8)}

    def unpacked(each: int) -> Unpacked:
        word = torch.tensor([int(f"{each:x}" * 8, 16)]).to(torch.int32)
        return form.unpack({**tensors, "qzeros": word[None]})

    assert unpacked(7).zeros is None
    assert unpacked(8).zeros is None
    with pytest.raises(ModelLoadError, match="a zero point isn't 8, although the config says sym"):
        unpacked(9)


class Theirs(Quantization):
    """A third-party reader of AWQ."""

    def __init__(self, config: Mapping[str, Any] | None) -> None: ...

    def of_module(self, name: str) -> WeightFormat:
        return DENSE


class Faulty(Quantization):
    """A third-party format that is broken as `fault` says."""

    fault = ""

    def __init__(self, config: Any) -> None:
        if self.fault == "init":
            raise RuntimeError("boom")
        super().__init__(config)

    def of_module(self, name: str) -> Any:
        if self.fault == "of_module":
            raise RuntimeError("boom")
        return None


def made_nonsense(config: Any) -> int:
    return 5


@pytest.mark.parametrize(
    ("target", "fault", "why"),
    [
        (f"{__name__}:Faulty", "init", "quantization acme:bits failed: RuntimeError: boom"),
        (
            f"{__name__}:made_nonsense",
            "",
            "quantization acme:bits: expected a class of .*Quantization`, its target makes 5",
        ),
        (
            "nowhere.at_all:Bits",
            "",
            "quantization acme:bits: importing nowhere.at_all failed: ModuleNotFoundError",
        ),
        (f"{__name__}:Faulty", "of_module", "q_proj, .*: Faulty failed: RuntimeError: boom"),
        (f"{__name__}:Faulty", "", "q_proj, .*: Faulty: expected a .*WeightFormat`, got None"),
    ],
)
@pytest.mark.parametrize("asked", [None, "bits"])
def test_an_error_in_a_third_party_quantization_names_it(
    monkeypatch: pytest.MonkeyPatch, target: str, fault: str, why: str, asked: str | None
) -> None:
    monkeypatch.setattr(Faulty, "fault", fault)
    arch, config, _ = find_architecture(SMALL / "qwen3-fp8", MODELS)
    module = arch.build(config, context(weights_later=True))
    said, installed = (
        {"quant_method": "bits"} if asked is None else None,
        (QuantizationRef("acme:bits", "bits", target, True),),
    )
    with pytest.raises((UnsupportedError, PluginError), match=why):
        place_weights(module, choose(said, asked, installed), CPU)


def test_a_config_that_is_no_object_is_named(tmp_path: Path) -> None:
    directory = copied("qwen3-fp8", tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": []}))
    with pytest.raises(
        ModelLoadError,
        match=r"config.json: quantization_config: expected keys and values, got \[\]",
    ):
        find_architecture(directory, MODELS)


def test_an_architecture_sees_nothing_of_how_weights_are_stored(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                **Qwen3Config(architectures=["Qwen3ForCausalLM"]).to_dict(),
                "quantization_config": AWQ,
            }
        )
    )
    found = find_architecture(tmp_path, MODELS)
    assert stored_as(tmp_path) == AWQ
    assert not hasattr(found.config, "quantization_config")
    assert found.arch.reasons_against(
        Qwen3Config(quantization_config=AWQ)
    )  # one that is asked all the same
    assert not context().weights_later


def copied(name: str, to: Path, **change: Any) -> Path:
    """A small checkpoint whose config differs."""
    directory = to / name
    shutil.copytree(SMALL / name, directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= change
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("name", "change", "error", "why"),
    [
        (
            "qwen3-fp8",
            {"weight_block_size": [64, 64]},
            ModelLoadError,
            r"weight_scale_inv: expected shape \[\d, 2\], found \[\d, 1\]",
        ),
        (
            "qwen3-fp8",
            {"modules_to_not_convert": ["k_proj"]},
            UnsupportedError,
            "must have the same format .*q_proj: fp8 .*k_proj: plain",
        ),
        (
            "qwen3-fp8",
            {"modules_to_not_convert": ["model"]},
            UnsupportedError,
            "has no linear layer that fp8 .* says is quantized",
        ),
        (
            "gptq",
            {"group_size": 96},
            UnsupportedError,
            "groups of 96 inputs, of 128, are not implemented",
        ),
        ("awq", {"group_size": 64}, ModelLoadError, r"expected shape \[\d, 16\], found"),
    ],
)
def test_a_checkpoint_that_is_not_as_its_config_says_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any], error: type[DovetailError], why: str
) -> None:
    with pytest.raises(error, match=why):
        loaded(copied(name, tmp_path, **change))


@pytest.mark.parametrize(
    ("name", "word", "why"),
    [
        ("ct-w4a16", "weight_scale", "scales must be finite"),
        ("qwen3-fp8", "weight_scale_inv", "scales must be finite"),
    ],
)
def test_a_wrong_tensor_is_reported_with_those_that_are_stored_with_it(
    tmp_path: Path, name: str, word: str, why: str
) -> None:
    directory = copied(name, tmp_path)
    [path] = directory.glob("*.safetensors")
    tensors = load_file(path)
    next(tensor for key, tensor in tensors.items() if key.endswith(f".{word}")).fill_(float("inf"))
    save_file(tensors, path)
    with pytest.raises(
        ModelLoadError,
        match=rf"tensor model\.layers\.\d+\.\S+: (with \S*{word}\b.* of the same module: )?.*{why}",
    ) as caught:
        loaded(directory)
    assert word in str(caught.value)


@pytest.mark.slow("starts ranks: processes that import torch")
@pytest.mark.usefixtures("ranks_in_threads")
def test_two_ranks_write_what_a_quantized_checkpoint_writes_and_tell_its_format() -> None:
    directory = SMALL / "ct-fp8-dynamic"
    expected = json.loads((directory / "expected.json").read_text())["greedy"]
    prompts = [{"prompt_token_ids": each["prompt"]} for each in expected]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    with LLM(
        str(directory),
        executor={"name": "tensor", "size": 2, "device": "cpu"},
        kv_cache_memory="1MiB",
        max_num_seqs=2,
    ) as llm:
        assert [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)] == [
            each["tokens"] for each in expected
        ]
        assert llm.engine.capacity.details["quantization"] == "fp8 (a scale per output)"
