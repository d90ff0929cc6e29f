"""Step times from a config.json and a data sheet: what they are made of, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.lab.roofline_error import PROFILES, of_profiles
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail_lab.model_sizes import ModelSizes
from dovetail_lab.roofline import RooflineStepTime
from dovetail_lab.step_profile import StepTimeProfile
from dovetail_lab.step_time import StepShape, share_touched
from tests.lab.runs import engine, request, run
from tests.support import examples

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 128_256,
}
MIXTURE = {**LLAMA, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1024}
SHEET = {"memory_bytes": 80e9, "bytes_per_s": 1e12, "flops": 1e14, "link_bytes_per_s": 1e11}
PERFECT = {
    "bandwidth_share": 1.0,
    "flops_share": 1.0,
    "attention_share": 1.0,
    "layer_s": 0.0,
    "sum_s": 0.0,
}


def model(config: dict[str, Any] | None = None, **options: Any) -> RooflineStepTime:
    return RooflineStepTime(model=config or LLAMA, device=options.pop("device", SHEET), **options)


def shape(*rows: tuple[int, int]) -> StepShape:
    new, had = np.array(rows, np.int64).T
    return StepShape.of(new, had)


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (LLAMA, 8.03),
        (
            {
                "model_type": "opt",
                "num_hidden_layers": 40,
                "hidden_size": 5120,
                "num_attention_heads": 40,
                "ffn_dim": 20_480,
                "vocab_size": 50_272,
            },
            13.1,
        ),
        (
            {
                "model_type": "bloom",
                "n_layer": 70,
                "n_embed": 14_336,
                "n_head": 112,
                "vocab_size": 250_880,
            },
            179.8,
        ),
        ({**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32_000}, 46.7),
    ],
    ids=["Llama-3.1-8B", "OPT-13B", "BLOOM", "Mixtral-8x7B"],
)
def test_parameters_are_as_many_as_the_model_has(config: dict[str, Any], billions: float) -> None:
    assert ModelSizes.of(config).parameters == pytest.approx(billions * 1e9, rel=0.005)


def test_a_decode_alone_takes_as_long_as_reading_the_weights() -> None:
    sizes = ModelSizes.of(LLAMA)
    read = 2 * (sizes.dense_weights + sizes.head_weights)
    assert model(**PERFECT).seconds(shape((1, 0))) == pytest.approx(read / 1e12, rel=0.002)


def test_a_long_prompt_takes_as_long_as_computing_it() -> None:
    sizes, tokens = ModelSizes.of(LLAMA), 8192
    computed = 2 * sizes.dense_weights * tokens + 4 * 32 * 4096 * tokens * (tokens + 1) / 2
    assert model(**PERFECT).seconds(shape((tokens, 0))) == pytest.approx(computed / 1e14, rel=0.03)


def test_context_is_read() -> None:
    both = [model(**PERFECT).seconds(shape((1, had))) for had in (0, 100_000)]
    assert both[1] - both[0] == pytest.approx(100_000 * 2 * 2 * 32 * 8 * 128 / 1e12)


def test_devices_share_the_work_and_pay_for_sums() -> None:
    one, four, free = (
        model(**{**PERFECT, "gpus": gpus, "sum_s": sum_s}).seconds(shape((1, 0)))
        for gpus, sum_s in ((1, 0.0), (4, 1e-5), (4, 0.0))
    )
    assert free == pytest.approx(one / 4, rel=0.01)
    assert four - free == pytest.approx(2 * 32 * 1e-5)


def test_a_step_is_never_shorter_than_its_launching() -> None:
    assert model(launched_layer_s=0.01).seconds(shape((1, 0))) == pytest.approx(0.32)


@given(st.floats(0, 1), st.integers(0, 60))
@examples(quick=50, full=1000)
def test_the_share_of_experts_touched_is_what_is_left_of_all(share: float, tokens: int) -> None:
    untouched = 1.0
    for _ in range(tokens):
        untouched *= 1.0 - share
    assert share_touched(share, tokens) == pytest.approx(1.0 - untouched, abs=1e-12)


def test_a_mixture_reads_few_experts_for_few_tokens_and_all_for_many() -> None:
    sizes, read = ModelSizes.of(MIXTURE), model(MIXTURE, **{**PERFECT, "flops_share": 1.0})
    alone = read.seconds(shape((1, 0)))
    both = [read.seconds(shape(*[(1, 0)] * rows)) - alone for rows in (2, 4096)]
    experts = 2 * sizes.expert_weights / 1e12
    assert both[0] == pytest.approx((sizes.experts_touched(2) - 4) * experts, rel=0.05)
    assert sizes.experts_touched(1) == pytest.approx(4)
    assert 63.9 < sizes.experts_touched(200) <= 64


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000)), min_size=1, max_size=8),
    st.integers(0, 7),
)
@examples(quick=50, full=1000)
def test_more_work_never_takes_less(rows: list[tuple[int, int]], at: int) -> None:
    at %= len(rows)
    more = [(new + (index == at), had) for index, (new, had) in enumerate(rows)]
    for config in (LLAMA, MIXTURE):
        assert model(config, device="h200").seconds(shape(*more)) >= model(
            config, device="h200"
        ).seconds(shape(*rows))


def test_a_config_is_read_from_its_file_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert (
        ModelSizes.of(str(tmp_path))
        == ModelSizes.of(str(tmp_path / "config.json"))
        == ModelSizes.of(LLAMA)
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"hidden_size": None},
            "expected hidden_size or n_embed or n_embd as a positive integer, got None",
        ),
        ({"num_attention_heads": -3}, "num_attention_heads.*-3"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"sliding_window": "long"}, "sliding_window"),
        ({"num_experts": 64}, "num_experts_per_tok"),
        ({"mlp_only_layers": [0]}, "dense layers among"),
    ],
)
def test_what_sizes_cannot_express_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelSizes.of({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "h1000"}, "h1000.*a10g"),
        ({"device": "h200", "gpus": 3}, "32 attention heads"),
        ({"device": "h200", "model": "nowhere.json"}, "nowhere.json"),
        ({"device": "h200", "bandwidth": 3}, "unknown key"),
    ],
)
def test_a_wrong_roofline_says_what_is_wrong(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        StepTimeProfile.load({"kind": "roofline", "model": LLAMA, **options}).make()


def test_it_simulates_with_the_pool_that_the_device_has_room_for() -> None:
    step_time = {"kind": "roofline", "model": LLAMA, "device": "h100-80gb"}
    result = run([request(0)], executor={"step_time": step_time, "num_pages": None})
    room = (0.9 * 80e9 - 2 * ModelSizes.of(LLAMA).parameters) / (2 * 2 * 32 * 8 * 128)
    assert result.settings["num_pages"] == int(room) // engine()["block_size"]
    with pytest.raises(ConfigError, match="no room for K and V"):
        run(
            [request(0)],
            executor={
                "step_time": {**step_time, "device": {**SHEET, "memory_bytes": 16e9}},
                "num_pages": None,
            },
        )


@pytest.mark.parametrize("name", PROFILES)
def test_its_error_on_shipped_profiles_is_as_documented(name: str) -> None:
    documented = {
        "h200-qwen3-0.6b": (0.06, 0.25),
        "h200-qwen3-8b": (0.07, 0.08),
        "h200-llama-3.2-1b": (0.09, 0.16),
        "h200-llama-3.1-8b": (0.05, 0.08),
        "rtxpro6000-llama-3.1-8b": (0.16, 0.10),
    }
    decodes, prompts = next(source for source in of_profiles() if source.name == name).errors()
    within = documented.get(name, (0.30, 0.28))
    assert np.abs(decodes).mean() < within[0]
    assert np.abs(prompts).mean() < within[1]
