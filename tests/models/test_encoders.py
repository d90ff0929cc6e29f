"""Encoders in the executor: states, embeddings and scores are transformers', for single texts and
pairs; and what isn't served is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import Gemma3TextModel, Qwen2_5_VLConfig

from dovetail import LLM, LoRARequest
from dovetail.api.attention import LayerSpec
from dovetail.api.executor import Pooled, RowPooling
from dovetail.errors import UnsupportedError
from dovetail.nn.model_files import read_config, text_of
from dovetail.testing.checks import CheckFailed
from dovetail_executors.runtime.attention_choice import choose_attention
from tests.adapters import config_of, weights_of, write_adapter
from tests.models.pooling_checkpoints import ROUNDINGS, dense, save, sentence_transformer, states
from tests.models.test_pooling import PROMPTS, agree, pooled, started
from tests.rounding import assert_rounded
from tests.runtime.demo import DEMO, context

WINDOWED: dict[str, Any] = {
    "local_attention": 6,
    "num_hidden_layers": 4,
    **dict.fromkeys(("cls_token_id", "sep_token_id"), 2),
}
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
ROBERTA: dict[str, Any] = {"pad_token_id": 1, "max_position_embeddings": 66}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": ROBERTA,
    "XLMRoberta": ROBERTA,
    "ModernBert": WINDOWED,
    "DistilBert": {"dim": 48, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "MPNet": {"pad_token_id": 1, "max_position_embeddings": 66},
    "DebertaV2": {
        "relative_attention": True,
        "share_att_key": True,
        "position_biased_input": False,
        "norm_rel_ebd": "layer_norm",
        "pos_att_type": "p2c|c2p",
        "position_buckets": 8,
        "max_relative_positions": -1,
    },
    "NomicBert": {"head_dim": 12},
    "JinaEmbeddingsV3": {"pad_token_id": 1},
}
ENCODERS["EuroBert"] = {"pad_token_id": 0, "mask_token_id": 3}
CLASSIFIERS = [family for family in ENCODERS if family not in ("NomicBert", "EuroBert")]


def saved(directory: Path, family: str, head: str = "Model", **fields: Any) -> Any:
    return save(directory, f"{family}{head}", **{**SPECIAL, **ENCODERS[family], **fields})


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_embeds_by_the_mean_of_its_states(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    with started(tmp_path) as bench:
        can = bench.capacity.pooling
        assert can is not None
        assert (can.tasks, can.method, can.generates, can.indivisible) == (
            ("embed", "token_embed"),
            "mean",
            False,
            True,
        )
        assert all(can.needs_all_states(task) for task in can.tasks)
        agree(
            pooled(bench, RowPooling("embed")),
            lambda tokens: F.normalize(states(model, tokens).mean(0), dim=-1),
        )
        agree(
            pooled(bench, RowPooling("token_embed", activate=False)),
            lambda tokens: states(model, tokens),
        )
    with started(tmp_path, pooling={"method": "cls"}) as bench:
        agree(
            pooled(bench, RowPooling("embed")),
            lambda tokens: F.normalize(states(model, tokens)[0], dim=-1),
        )


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_a_classifier_scores_as_transformers_does(family: str, labels: int, tmp_path: Path) -> None:
    fields = (
        {"classifier_pooling": "mean" if labels == 1 else "cls"} if family == "ModernBert" else {}
    )
    model = saved(tmp_path, family, "ForSequenceClassification", num_labels=labels, **fields)

    @torch.no_grad()
    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return found

    activation: Callable[[torch.Tensor], torch.Tensor] = (
        torch.sigmoid if labels == 1 else lambda x: x.softmax(-1)
    )
    with started(tmp_path) as bench:
        agree(pooled(bench, RowPooling("classify", activate=False)), logits)
        agree(pooled(bench, RowPooling("classify")), lambda tokens: activation(logits(tokens)))


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_tagger_labels_tokens_as_transformers_does(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family, "ForTokenClassification", num_labels=5)

    @torch.no_grad()
    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
        return found

    with started(tmp_path) as bench:
        can = bench.capacity.pooling
        assert can is not None
        assert (can.tasks, len(can.labels)) == (("token_classify",), 5)
        agree(pooled(bench, RowPooling("token_classify", activate=False)), logits)
        agree(pooled(bench, RowPooling("token_classify")), lambda ids: logits(ids).softmax(-1))


@pytest.mark.slow("makes two engines")
@pytest.mark.parametrize(
    ("family", "head"),
    [("Bert", "Model"), ("XLMRoberta", "ForSequenceClassification"), ("ModernBert", "Model")],
)
def test_an_adapter_changes_an_encoder_as_merged_weights_do(
    family: str, head: str, tmp_path: Path
) -> None:
    model = saved(tmp_path, family, head)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "layer" in name
    }
    weights = {
        name: 0.2 * array
        for name, array in weights_of(
            {name: (one.in_features, one.out_features) for name, one in linear.items()}
        ).items()
    }
    targets = sorted({name.rpartition(".")[2] for name in linear})
    # of rank 4 and alpha 8
    folder = write_adapter(tmp_path / "adapter", config_of(target_modules=targets), weights)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with LLM(tmp_path, dtype="float32", enable_lora=True, max_model_len=60) as llm:
        adapters = [LoRARequest("x", 1, str(folder)), *[None] * (len(PROMPTS) - 1)]
        found = [
            output.outputs.data
            for output in llm.encode(prompts, use_tqdm=False, lora_request=adapters)
        ]
        base = [output.outputs.data for output in llm.encode(prompts, use_tqdm=False)]
    for name, module in linear.items():
        a, b = (
            torch.tensor(weights[f"base_model.model.{name}.lora_{side}.weight"]) for side in "AB"
        )
        module.weight.data += 2 * b @ a
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[0]])
        wanted = (
            F.normalize(states(model, PROMPTS[0]).mean(0), dim=-1)
            if head == "Model"
            else model(ids).logits[0].softmax(-1)
        )
    assert_rounded(found[0], wanted.numpy(), ROUNDINGS)
    assert np.abs(found[0] - base[0]).max() > 0.01
    for one, other in zip(found[1:], base[1:], strict=True):
        assert_rounded(one, other, ROUNDINGS)


def test_the_second_text_of_a_pair_has_another_token_type(tmp_path: Path) -> None:
    """Beside a single text in the same step, whose types are all 0."""
    model = saved(tmp_path, "Bert", "ForSequenceClassification", num_labels=1)
    seconds = (4, None, 2)
    with started(tmp_path) as bench, torch.no_grad():
        for index, (prompt, second) in enumerate(zip(PROMPTS, seconds, strict=True)):
            bench.add(
                str(index), prompt, pooling=RowPooling("classify", activate=False, second=second)
            )
        found = bench.run({str(index): len(prompt) for index, prompt in enumerate(PROMPTS)}).values(
            Pooled
        )
        for index, (prompt, second) in enumerate(zip(PROMPTS, seconds, strict=True)):
            types = torch.tensor(
                [[int(second is not None and at >= second) for at in range(len(prompt))]]
            )
            assert_rounded(
                found[index],
                model(torch.tensor([prompt]), token_type_ids=types).logits[0].numpy(),
                ROUNDINGS,
            )
        bench.remove(*(str(index) for index in range(len(PROMPTS))))
        agree(
            pooled(bench, RowPooling("classify", activate=False)),
            lambda tokens: model(torch.tensor([tokens])).logits[0],
        )


@pytest.mark.slow("starts ranks: processes that import torch")
@pytest.mark.parametrize("family", ["MPNet", "NomicBert", "DebertaV2"])
@pytest.mark.usefixtures("ranks_in_threads")
def test_ranks_share_the_heads_of_an_encoder(family: str, tmp_path: Path) -> None:
    model = saved(tmp_path, family)
    with started(tmp_path, ranks=2) as bench:
        agree(
            pooled(bench, RowPooling("token_embed", activate=False)),
            lambda tokens: states(model, tokens),
        )


def test_padding_within_a_prompt_takes_no_position(tmp_path: Path) -> None:
    model = saved(tmp_path, "XLMRoberta")
    prompts = [[5, 1, 9, 1, 1, 30], [1, 7], [4, 4, 1]]
    with started(tmp_path) as bench:
        for index, prompt in enumerate(prompts):
            bench.add(str(index), prompt, pooling=RowPooling("token_embed", activate=False))
        found = bench.run({str(index): len(prompt) for index, prompt in enumerate(prompts)}).values(
            Pooled
        )
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = model(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        assert_rounded(found[index], expected.numpy(), ROUNDINGS)


@pytest.mark.parametrize(
    "family", ["Bert", "XLMRoberta", "ModernBert", "DistilBert", "MPNet", "DebertaV2"]
)
def test_a_prompt_may_have_as_many_tokens_as_there_are_positions(
    family: str, tmp_path: Path
) -> None:
    model = saved(tmp_path, family)
    prompt = [3 + index % 90 for index in range(64)]
    with started(tmp_path, max_model_len=None) as bench:
        assert bench.capacity.max_model_len == 64
        bench.add("long", prompt, room=0, pooling=RowPooling("token_embed", activate=False))
        assert_rounded(
            bench.run({"long": 64}).values(Pooled)[0], states(model, prompt).numpy(), ROUNDINGS
        )


def test_a_request_holds_one_page_of_no_bytes_as_its_place(tmp_path: Path) -> None:
    saved(tmp_path, "ModernBert")
    with started(tmp_path, max_model_len=None) as bench:
        layout = bench.capacity.layout
        (group,) = layout.groups
        assert (
            layout.page_bytes,
            group.block_tokens,
            group.window,
            layout.pages(1),
            layout.pages(64),
        ) == (0, 64, None, 1, 1)
        assert bench.capacity.details["attention"] == "dovetail:packed"


def test_part_of_a_prompt_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "Bert")
    with started(tmp_path) as bench:
        bench.add("half", [5, 6, 7, 8], pooling=RowPooling("embed"))
        bench.run({"half": 2})  # as if that were all
        with pytest.raises(CheckFailed, match="whole rows are computed"):
            bench.run({"half": 2})


REFUSED = [
    ("Bert", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),  # jina v2
    ("Bert", {"is_decoder": True}, "is_decoder"),
    ("Bert", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
    (
        "XLMRoberta",
        {"position_embedding_type": "rotary"},
        "position_embedding_type = 'rotary'",
    ),  # jina v3
    ("XLMRoberta", {"auto_map": {"AutoModel": "modeling_lora.XLMRobertaLoRA"}}, "auto_map"),
    ("DebertaV2", {"pos_att_type": "c2p"}, "pos_att_type"),  # the first DeBERTa's
    ("DebertaV2", {"conv_kernel_size": 3}, "conv_kernel_size"),  # V2's
    ("DebertaV2", {"share_att_key": False}, "share_att_key = False"),
    ("MPNet", {"pad_token_id": 0}, "pad_token_id = 0"),
    ("XLMRoberta", {"position_embedding_type": "rotary"}, "JinaEmbeddingsV3"),
    ("NomicBert", {"rotary_emb_interleaved": True}, "rotary_emb_interleaved = True"),
    ("ModernBert", {"classifier_activation": "silu"}, "classifier_activation = 'silu'"),
]


@pytest.mark.parametrize(
    ("family", "fields", "words"), REFUSED, ids=[words for _, _, words in REFUSED]
)
def test_an_encoder_of_another_kind_is_refused_by_the_field(
    family: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    saved(tmp_path, family, **fields)
    with pytest.raises(UnsupportedError, match=words), started(tmp_path):
        pass


def test_the_text_of_a_vision_model_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    """As Jina embeddings v4, whose adapters only its own code applies."""
    own = {"AutoModel": "modeling_jina_embeddings_v4.JinaEmbeddingsV4Model"}
    config = Qwen2_5_VLConfig(architectures=["JinaEmbeddingsV4Model"], auto_map=own)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="auto_map: JinaEmbeddingsV4Model is"):
        text_of(read_config(tmp_path), tmp_path)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    assert text_of(read_config(tmp_path), tmp_path).architectures


def test_adapters_of_deberta_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "DebertaV2")
    with pytest.raises(UnsupportedError, match="LoRA"):
        LLM(tmp_path, dtype="float32", enable_lora=True, max_model_len=60)


def test_a_head_for_masked_tokens_is_refused_as_such(tmp_path: Path) -> None:
    saved(tmp_path, "Bert", "ForMaskedLM")
    with (
        pytest.raises(UnsupportedError, match="BertForMaskedLM predicts masked tokens"),
        started(tmp_path),
    ):
        pass


def test_a_backend_for_the_other_kind_of_layers_is_refused_with_the_right_one(
    tmp_path: Path,
) -> None:
    backends = {backend.name.partition(":")[2]: backend for backend in context().attention}
    saved(tmp_path, "Bert")
    with (
        pytest.raises(UnsupportedError, match=r"attention to later tokens .*\n.*there is `packed`"),
        started(tmp_path, attention=(backends["torch"],)),
    ):
        pass
    with (
        pytest.raises(UnsupportedError, match="packed: causal attention isn't supported"),
        started(DEMO, attention=(backends["packed"],)),
    ):
        pass


def test_a_model_that_mixes_both_kinds_of_layers_is_refused() -> None:
    specs = [LayerSpec(index, 4, 4, 8, 1.0, causal=bool(index)) for index in range(2)]
    with pytest.raises(UnsupportedError, match="some layers are causal and others aren't"):
        choose_attention(context().attention, specs, "cpu", "float32", None)


def test_embedding_gemma_sees_later_tokens_and_pools_through_its_layers(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_bidirectional_attention": True,
        "query_pre_attn_scalar": 12,
    }
    save(tmp_path, "Gemma3TextModel", **SPECIAL, **fields)
    model = Gemma3TextModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    sentence_transformer(
        tmp_path,
        *("Pooling", "Dense", "Dense", "Normalize"),
        pooling={"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True},
    )
    layers = [
        dense(tmp_path / "2_Dense", 48, 80, "Identity", bias=False),
        dense(tmp_path / "3_Dense", 80, 48, "Identity", bias=False),
    ]
    with started(tmp_path) as bench, torch.no_grad():
        can = bench.capacity.pooling
        assert can is not None
        assert not can.generates
        agree(
            pooled(bench, RowPooling("embed")),
            lambda tokens: F.normalize(layers[1](layers[0](states(model, tokens).mean(0))), dim=-1),
        )
    assert any(len(prompt) > model.config.sliding_window for prompt in PROMPTS)


@pytest.mark.parametrize("family", ["NomicBert"])
def test_fields_of_the_published_config_must_agree_with_those_that_are_read(
    family: str, tmp_path: Path
) -> None:
    saved(tmp_path, family)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    published = {
        "activation_function": "swiglu",
        "n_embd": 48,
        "n_layer": 2,
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "n_positions": 8192,
        "causal": False,
        "use_flash_attn": True,
    }
    path.write_text(json.dumps(content | published))
    with started(tmp_path):
        pass
    for name, value in (("n_embd", 64), ("rotary_emb_fraction", 0.5), ("rotary_emb_base", 10)):
        path.write_text(json.dumps(content | published | {name: value}))
        with pytest.raises(UnsupportedError, match=f"{name} = {value}"), started(tmp_path):
            pass
