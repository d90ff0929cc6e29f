"""Models with recurrent layers compute what transformers computes, however their tokens come; what
they load, and what they refuse."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dovetail.api.model import ParallelGroup
from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.format.fp8 import Fp8
from dovetail.nn.linear import LinearLayer
from dovetail.nn.moe import Experts
from dovetail.nn.parallel import SINGLE
from dovetail.nn.weights import dummy_weights, load_weights
from dovetail.testing import ModelSuite
from dovetail.testing.suites.model_bench import Bench, Chunk, Reference, on_ranks
from dovetail_models.granite import GraniteMoeHybrid
from tests.models import hybrids
from tests.models.configs import hybrid_configs
from tests.models.hybrids import FAMILIES
from tests.models.oracle import arch_of
from tests.models.test_decoders import assert_close, some_tokens
from tests.rounding import assert_rounded
from tests.support import examples

Tensors = dict[str, torch.Tensor]


@cache
def reference(name: str) -> tuple[Any, Reference]:
    config = FAMILIES[name]()
    return config, Reference(config)


def bench(name: str, parallel: ParallelGroup = SINGLE) -> Bench:
    config, theirs = reference(name)
    return Bench(arch_of(config), config, theirs.tensors(), parallel=parallel, before=torch.nan)


class TestLogitsAreThoseOfTransformers:
    @pytest.mark.parametrize("chunks", [(), (1, 7, 64, 1, 64, 13)], ids=str)
    @pytest.mark.parametrize("name", FAMILIES)
    def test_of_a_prompt_in_chunks(self, name: str, chunks: tuple[int, ...]) -> None:
        config, theirs = reference(name)
        tokens = some_tokens(config, 150, 0)
        assert_close(bench(name).run(tokens, chunks), theirs.run(tokens)[1])

    @pytest.mark.parametrize("name", FAMILIES)
    def test_of_three_prompts_in_steps_that_share_their_order_never(self, name: str) -> None:
        config, theirs = reference(name)
        ours, prompts = (
            bench(name),
            {
                key: some_tokens(config, length, length)
                for key, length in (("a", 90), ("b", 71), ("c", 8))
            },
        )
        got: dict[str, list[torch.Tensor]] = {key: [] for key in prompts}
        for order, lengths in (
            ("abc", (70, 1, 7)),
            ("cab", (1, 7, 64)),
            ("ba", (5, 12)),
            ("ab", (1, 1)),
        ):
            parts = []
            for key, length in zip(order, lengths, strict=True):
                start = sum(map(len, got[key]))
                parts.append(Chunk(key, prompts[key][start : start + length], start))
            hidden = ours.logits(ours.step(*parts))
            for key, logits in zip(order, torch.split(hidden, list(lengths)), strict=True):
                got[key].append(logits)
        for key, prompt in prompts.items():
            assert_close(torch.cat(got[key]), theirs.run(prompt)[1][: sum(map(len, got[key]))])

    @pytest.mark.parametrize("name", FAMILIES)
    def test_after_a_hit_on_a_checkpoint(self, name: str) -> None:
        config, theirs = reference(name)
        ours, tokens, others = bench(name), some_tokens(config, 100, 0), some_tokens(config, 40, 1)
        ours.run(torch.cat((tokens[:80], others)), sequence="first", checkpoint=80)
        ours.fork("first", "hit", 80)
        assert_close(ours.run(tokens[80:], sequence="hit", start=80), theirs.run(tokens)[1][80:])

    @pytest.mark.parametrize("name", [name for name in FAMILIES if name != "granite"])
    def test_on_two_ranks(self, name: str) -> None:
        config, theirs = reference(name)
        tokens = some_tokens(config, 80, 0)
        for logits in on_ranks(2, lambda group: bench(name, group).run(tokens, (64, 1, 15))):
            assert_close(logits, theirs.run(tokens)[1])


@given(
    config=hybrid_configs(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@examples(quick=10, full=150)
def test_all_sizes_compute_what_transformers_does(
    config: Any, lengths: list[int], seed: int
) -> None:
    assert arch_of(config).reasons_against(config) == []
    theirs, tokens = Reference(config, seed), some_tokens(config, sum(lengths), seed)
    ours = Bench(arch_of(config), config, theirs.tensors(), before=torch.nan)
    assert_close(ours.run(tokens, lengths), theirs.run(tokens)[1])


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (hybrids.granite(), "Mamba groups"),  # one group, whose norm is over all heads
        (hybrids.qwen3_next(linear_num_key_heads=1), "linear_num_key_heads"),
        (hybrids.qwen3_5(linear_num_key_heads=3, linear_num_value_heads=3), "linear_num_key_heads"),
        (hybrids.nemotron_h(mamba_num_heads=9, n_groups=3), "Mamba heads"),
        (hybrids.lfm2(hidden_size=33, num_attention_heads=3, num_key_value_heads=3), "hidden_size"),
    ],
)
def test_heads_that_ranks_cannot_split_are_named(config: Any, said: str) -> None:
    def specs(group: ParallelGroup) -> Any:
        return arch_of(config).state_specs(config, group)

    with pytest.raises(UnsupportedError, match=said):
        on_ranks(2, specs)


def test_the_suite_finds_the_states_of_any_steps_equal() -> None:
    class Suite(ModelSuite):
        component = GraniteMoeHybrid

    Suite().test_states()


def saved(
    name: str, directory: Path, change: Callable[[Tensors], Any] = lambda tensors: None
) -> Any:
    """A checkpoint as transformers writes it, but for a change; its config."""
    config, theirs = reference(name)
    theirs.model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return config


def loaded(config: Any, directory: Path) -> Bench:
    ours = Bench(arch_of(config), config, None, before=torch.nan)
    load_weights(ours.model, directory)
    return ours


class TestLoading:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_every_tensor_is_used_and_further_layers_are_skipped(
        self, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        has_more = "lfm2" not in name and name != "bamba"
        more = {"mtp.layers.0.fc.weight": torch.zeros(2, 2)} if has_more else {}
        config = saved(name, tmp_path, lambda tensors: tensors.update(more))
        tokens = some_tokens(config, 20, 0)
        with caplog.at_level(logging.INFO, "dovetail"):
            assert_close(loaded(config, tmp_path).run(tokens), reference(name)[1].run(tokens)[1])
        assert ("mtp." in caplog.text) == has_more

    @pytest.mark.parametrize("name", FAMILIES)
    def test_tensors_that_are_missing_or_unknown_are_named(self, name: str, tmp_path: Path) -> None:
        gone: list[str] = []

        def change(tensors: Tensors) -> None:
            of_state = ("conv.conv.weight",) if "lfm2" in name else ("conv1d.weight", "dt_bias")
            gone[:] = [
                next(key for key in tensors if key.endswith(end))
                for end in (*of_state, "out_proj.weight")
            ]
            for key in gone:
                del tensors[key]
            tensors["model.layers.0.mixer.beta"] = torch.zeros(1)

        config = saved(name, tmp_path, change)
        with pytest.raises(ModelLoadError) as raised:
            loaded(config, tmp_path)
        assert all(key in str(raised.value) for key in (*gone, "model.layers.0.mixer.beta"))

    def test_experts_may_be_one_tensor_or_many(self, tmp_path: Path) -> None:
        """Checkpoints of Qwen3.5 as published have the former, transformers writes the latter."""

        def stack(tensors: Tensors, missing: str = "") -> None:
            for layer in range(4):
                at = f"model.layers.{layer}.mlp.experts."
                one = [
                    {
                        kind: tensors.pop(f"{at}{index}.{kind}_proj.weight")
                        for kind in ("gate", "up", "down")
                    }
                    for index in range(5)
                ]
                tensors[f"{at}gate_up_proj"] = torch.stack(
                    [torch.cat((each["gate"], each["up"])) for each in one]
                )
                tensors[f"{at}down_proj"] = torch.stack([each["down"] for each in one])
            tensors.pop(missing, None)

        config = saved("qwen3_5_moe", tmp_path, stack)
        tokens = some_tokens(config, 20, 0)
        assert_close(
            loaded(config, tmp_path).run(tokens), reference("qwen3_5_moe")[1].run(tokens)[1]
        )
        saved(
            "qwen3_5_moe", tmp_path, partial(stack, missing="model.layers.2.mlp.experts.down_proj")
        )
        with pytest.raises(ModelLoadError, match=r"model\.layers\.2\.mlp\.experts\..*down_proj"):
            loaded(config, tmp_path)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_random_weights_compute_numbers(self, name: str) -> None:
        config = FAMILIES[name]()
        ours = Bench(arch_of(config), config, None, before=torch.nan)
        dummy_weights(ours.model, seed=0)
        assert ours.run(some_tokens(config, 20, 0)).isfinite().all()


class TestFormats:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_plain_weights_are_quantized_as_they_load(self, name: str) -> None:
        """In their places: parts of one tensor go to several."""
        config, theirs = reference(name)
        ours = Bench(arch_of(config), config, theirs.tensors(), quantization=Fp8(None))
        plain = products(bench(name))
        for key, weight in products(ours).items():
            if "ba_proj" in key:
                assert torch.equal(
                    weight, plain[key.replace("ba_proj", "in_proj")][-len(weight) :]
                ), key
            elif key in plain:
                assert weight.dtype == torch.float8_e4m3fn, key
                expected = plain[key][: len(weight)]
                assert (
                    weight.format.dequantized(weight) - expected
                ).abs().max() <= expected.abs().max() / 16, key
        assert ours.run(some_tokens(config, 20, 0)).isfinite().all()

    @pytest.mark.parametrize(
        ("block", "left_out"),
        [(8, []), (6, []), (8, [f"model.layers.{index}.mlp.shared_expert" for index in range(4)])],
    )
    def test_a_checkpoint_in_blocks_of_float8_is_taken_apart(
        self, block: int, left_out: list[str], tmp_path: Path
    ) -> None:
        """Blocks of 6 outputs begin and end within heads; and a shared expert may be stored
        otherwise than the experts that it is computed with."""
        config, theirs = reference("qwen3_next")
        tensors, exact = theirs.tensors(), dict[str, torch.Tensor]()
        for key, tensor in theirs.tensors().items():
            if (key.endswith("_proj.weight") or "in_proj" in key) and not (
                left_out and "shared_expert" in key
            ):
                rows, columns = (-(-size // block) for size in tensor.shape)
                scales = torch.rand(rows, columns) + 0.5
                spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[
                    : tensor.shape[0], : tensor.shape[1]
                ]
                tensors[key] = (tensor / spread).to(torch.float8_e4m3fn)
                tensors[f"{key}_scale_inv"] = scales
                exact[key] = tensors[key].float() * spread
        save_file(tensors, tmp_path / "model.safetensors")
        said = {
            "quant_method": "fp8",
            "weight_block_size": [block, block],
            "modules_to_not_convert": left_out,
        }
        ours = Bench(arch_of(config), config, None, quantization=Fp8(said))
        load_weights(ours.model, tmp_path)
        plain = Bench(arch_of(config), config, {**theirs.tensors(), **exact})
        expected = products(plain)
        for key, stored in products(ours).items():
            if key in expected:
                numbers = stored.format.dequantized(stored) if hasattr(stored, "format") else stored
                assert_rounded(numbers, expected[key][: len(stored)], 2)
        tokens = some_tokens(config, 20, 0)
        torch.testing.assert_close(ours.run(tokens), plain.run(tokens), atol=1e-3, rtol=1e-3)


def products(ours: Bench) -> dict[str, Any]:
    """The weights of linear layers and experts, by name."""
    layers = [
        (name, layer)
        for name, layer in ours.model.named_modules()
        if isinstance(layer, LinearLayer | Experts)
    ]
    return {
        f"{name}.{own}": weight
        for name, layer in layers
        for own, weight in layer.named_parameters()
        if "bias" not in own
    }


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (
        hybrids.qwen3_next,
        {"layer_types": ["linear_attention"] * 4},
        "layer_types: a model without attention layers",
    ),
    (
        hybrids.qwen3_next,
        {"layer_types": ["full_attention", "linear_attention"]},
        "layer_types has 2 entries, num_hidden_layers is 4",
    ),
    (
        hybrids.qwen3_next,
        {"layer_types": ["sliding_attention", *["full_attention"] * 3]},
        "layer_types: 'sliding_attention' is not implemented",
    ),
    (hybrids.qwen3_next, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    (hybrids.qwen3_next, {"linear_key_head_dim": 12}, "linear_key_head_dim = 12"),
    (hybrids.qwen3_next, {"linear_num_value_heads": 5}, "linear_num_value_heads = 5"),
    (hybrids.qwen3_next, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1"),
    (
        hybrids.qwen3_next,
        {"num_experts_per_tok": 6},
        "num_experts_per_tok (6) is more than num_experts (5)",
    ),
    (
        hybrids.qwen3_next,
        {"shared_expert_intermediate_size": 0},
        "shared_expert_intermediate_size = 0",
    ),
    (hybrids.qwen3_next, {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    (
        hybrids.qwen3_next,
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.2,
            }
        },
        "partial_rotary_factor",
    ),
    (
        hybrids.qwen3_next,
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [1, 1],
            }
        },
        "mrope_section",
    ),
    (hybrids.qwen3_5, {"attn_output_gate": False}, "attn_output_gate = False"),
    (hybrids.qwen3_5, {"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
    (hybrids.qwen3_5_moe, {"norm_topk_prob": False}, "norm_topk_prob = False"),
    (hybrids.qwen3_5_moe, {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    (hybrids.nemotron_h, {"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu'"),
    (hybrids.nemotron_h, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu'"),
    (hybrids.nemotron_h, {"moe_latent_size": 16}, "moe_latent_size = 16"),
    (hybrids.nemotron_h, {"n_shared_experts": 2}, "n_shared_experts = 2"),
    (hybrids.nemotron_h, {"attention_bias": True}, "attention_bias = True"),
    (hybrids.nemotron_h, {"time_step_limit": (0.1, 1.0)}, "time_step_limit"),
    (hybrids.nemotron_h, {"tie_word_embeddings": True}, "tie_word_embeddings = True"),
    (hybrids.nemotron_h, {"n_group": 4}, "n_group = 4"),
    (hybrids.granite, {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
    (
        hybrids.granite,
        {"residual_multiplier": 0.0},
        "residual_multiplier = 0.0 must be more than 0",
    ),
    (hybrids.granite, {"mamba_d_state": 24}, "mamba_d_state = 24"),
    (
        hybrids.granite,
        {"num_experts_per_tok": 5},
        "num_experts_per_tok (5) is more than num_local_experts (4)",
    ),
    (
        hybrids.granite_dense,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope_type 'dynamic'",
    ),
]


@pytest.mark.parametrize(
    ("make", "fields", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_is_not_computed_is_refused_by_name(
    make: Callable[..., Any], fields: dict[str, Any], said: str
) -> None:
    config = make()
    for name, value in fields.items():
        setattr(config, name, value)
    assert any(said in reason for reason in arch_of(config).reasons_against(config)), arch_of(
        config
    ).reasons_against(config)


# fields of published checkpoints that transformers' classes don't have
PUBLISHED: dict[str, Any] = {
    "qwen3_5": {
        "full_attention_interval": 4,
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
    },
    "qwen3_5_moe": {
        "full_attention_interval": 4,
        "output_gate_type": "swish",
        "mlp_only_layers": [],
        "mtp_use_dedicated_embeddings": False,
    },
    "qwen3_next": {"full_attention_interval": 4},
    "granite": {"position_embedding_type": "nope"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_of_published_checkpoints_are_known(name: str) -> None:
    config = FAMILIES[name](**PUBLISHED[name])
    if name.startswith("qwen3_5"):
        config.rope_parameters |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    assert arch_of(config).reasons_against(config) == []
