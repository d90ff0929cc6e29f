"""What checkpoints pool is what transformers computes of them, and what isn't served is refused by
name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dovetail.api.executor import Executor, Pooled, RowPooling
from dovetail.errors import ConfigError, DovetailError, ModelLoadError, UnsupportedError
from dovetail.testing.suites.executor_bench import Bench
from dovetail_executors.local import LocalExecutor
from dovetail_executors.options import LocalOptions, TensorOptions
from dovetail_executors.tensor import TensorExecutor
from tests.models.pooling_checkpoints import ROUNDINGS, dense, save, sentence_transformer, states
from tests.rounding import assert_rounded
from tests.runtime.demo import DEMO, context

PROMPTS = [[5, 17, 20, 31, 8, 90, 12, 44, 7, 7, 30], [9], [40, 3, 77, 3, 2, 61, 60]]
TASKS = ("embed", "token_embed")


@contextmanager
def started(directory: Path | str, ranks: int = 1, **changes: Any) -> Iterator[Bench]:
    own = context(model=str(directory), **changes)
    options: dict[str, Any] = {"device": "cpu", "num_pages": 30}
    executor: Executor = (
        LocalExecutor(LocalOptions(**options), own)
        if ranks == 1
        else TensorExecutor(TensorOptions(size=ranks, **options), own)
    )
    try:
        yield Bench(executor, executor.start())
    finally:
        executor.stop()


def pooled(
    bench: Bench, pooling: RowPooling, chunk: int | None = None
) -> list[NDArray[np.float32]]:
    """The results of all prompts in one batch, or in chunks."""
    found: dict[str, NDArray[np.float32]] = {}
    for index, prompt in enumerate(PROMPTS):
        bench.add(str(index), prompt, pooling=pooling)
    left = {str(index): len(prompt) for index, prompt in enumerate(PROMPTS)}
    while left:
        counts = {name: min(count, chunk or count) for name, count in left.items()}
        result = bench.run(counts)
        found |= {
            name: result.values(Pooled)[index]
            for index, name in enumerate(counts)
            if index in result.values(Pooled)
        }
        left = {name: count - counts[name] for name, count in left.items() if count > counts[name]}
    bench.remove(*found)
    return [found[str(index)] for index in range(len(PROMPTS))]


def agree(found: list[NDArray[np.float32]], expected: Callable[[list[int]], torch.Tensor]) -> None:
    for prompt, result in zip(PROMPTS, found, strict=True):
        assert result.dtype == np.float32
        wanted = expected(prompt).numpy()
        assert_rounded(result, wanted, ROUNDINGS)


@pytest.mark.parametrize(
    "kind",
    [
        "Qwen3Model",
        "LlamaModel",
        "MistralModel",
        "Gemma2Model",
        "Gemma3TextModel",
        "Qwen3ForCausalLM",
        "Olmo2Model",
    ],
)
def test_a_decoder_embeds_by_its_last_token(kind: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
        if kind.startswith("Gemma")
        else {}
    )
    model = save(tmp_path, kind, **fields)
    with started(tmp_path) as bench:
        can = bench.capacity.pooling
        assert can is not None
        assert (can.tasks, can.method, can.size, can.generates) == (
            TASKS,
            "last",
            48,
            kind.endswith("LM"),
        )
        for chunk in (
            None,
            3,
            3,
        ):  # the second time in rows that others had before, in chunks as well
            agree(
                pooled(bench, RowPooling("embed"), chunk),
                lambda tokens: F.normalize(states(model, tokens)[-1], dim=-1),
            )
            agree(
                pooled(bench, RowPooling("token_embed", activate=False), chunk),
                lambda tokens: states(model, tokens),
            )
        agree(
            pooled(bench, RowPooling("embed", dimensions=7)),
            lambda tokens: F.normalize(states(model, tokens)[-1, :7], dim=-1),
        )
        if not can.generates:
            bench.add("g", [1, 2, 3])
            with pytest.raises(DovetailError, match="generates nothing"):
                bench.executor.submit(bench.build({"g": 3}))


METHODS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda x: x[-1],
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "weighted": lambda x: (
        (x * torch.arange(1, len(x) + 1)[:, None]).sum(0) / (len(x) * (len(x) + 1) / 2)
    ),
    "cls": lambda x: x[0],
}
MODES = {
    "last": "lasttoken",
    "mean": "mean_tokens",
    "cls": "cls_token",
    "max": "max_tokens",
    "weighted": "weightedmean_tokens",
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow("makes several engines or many tokens")
def test_a_sentence_transformer_pools_as_its_files_say(method: str, tmp_path: Path) -> None:
    """By each method, with two layers behind, without normalization; and chunks change nothing."""
    model = save(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=False)
    config = {
        "word_embedding_dimension": 48,
        **{f"pooling_mode_{name}": key == method for key, name in MODES.items()},
        "include_prompt": True,
    }
    bert = {"max_seq_length": 40, "do_lower_case": False}
    sentence_transformer(
        tmp_path, "Pooling", "Dense", "Dense", pooling=config, sentence_bert_config=bert
    )
    layers = (
        dense(tmp_path / "2_Dense", 48, 30, "GELU"),
        dense(tmp_path / "3_Dense", 30, 20, bias=False),
    )

    @torch.no_grad()
    def expected(tokens: list[int]) -> torch.Tensor:
        return torch.tanh(layers[1](F.gelu(layers[0](METHODS[method](states(model, tokens))))))

    with started(tmp_path, max_model_len=None) as bench:
        can = bench.capacity.pooling
        assert can is not None
        assert (can.method, can.size, can.generates, bench.capacity.max_model_len) == (
            method,
            20,
            False,
            40,
        )
        for chunk in (None, 2, 2):
            agree(pooled(bench, RowPooling("embed"), chunk), expected)
    with started(tmp_path, pooling={"normalize": True}) as bench:
        agree(
            pooled(bench, RowPooling("embed")), lambda tokens: F.normalize(expected(tokens), dim=-1)
        )
    with started(tmp_path, load_format="dummy") as bench:
        assert [len(result) for result in pooled(bench, RowPooling("embed"))] == [20] * 3


@pytest.mark.parametrize(
    ("kind", "fields", "activation"),
    [
        ("Qwen3ForSequenceClassification", {"num_labels": 1}, torch.sigmoid),
        ("LlamaForSequenceClassification", {"num_labels": 3}, lambda x: x.softmax(-1)),
        (
            "MistralForSequenceClassification",
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            torch.sigmoid,
        ),
        (
            "LlamaForSequenceClassification",
            {"num_labels": 1, "problem_type": "regression"},
            lambda x: x,
        ),
        (
            "Qwen3ForSequenceClassification",
            {
                "num_labels": 1,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
            },
            lambda x: x,
        ),
        ("Olmo2ForSequenceClassification", {"num_labels": 2}, lambda x: x.softmax(-1)),
    ],
)
def test_a_classifier_scores_by_its_head(
    kind: str, fields: dict[str, Any], activation: Any, tmp_path: Path
) -> None:
    model = save(tmp_path, kind, **fields)

    @torch.no_grad()
    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
        return found

    with started(tmp_path) as bench:
        can = bench.capacity.pooling
        assert can is not None
        assert can.labels == tuple(f"LABEL_{index}" for index in range(fields["num_labels"]))
        assert (can.tasks, can.generates) == (("classify", "token_classify"), False)
        agree(pooled(bench, RowPooling("classify", activate=False)), logits)
        agree(pooled(bench, RowPooling("classify"), 4), lambda tokens: activation(logits(tokens)))
        agree(
            pooled(bench, RowPooling("token_classify", activate=False)),
            lambda tokens: F.linear(states(model, tokens), model.score.weight.data),
        )


@pytest.mark.parametrize("by", ["setting", "files"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_generator_scores_by_two_tokens(by: str, tied: bool, tmp_path: Path) -> None:
    """As Qwen3-Reranker does, and it still generates and embeds."""
    model = save(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=tied)
    setting: Mapping[str, Any] = {"score_tokens": (11, 5)}
    if by == "files":
        setting = {}
        sentence_transformer(
            tmp_path, "LogitScore", sentence_bert_config={"transformer_task": "text-generation"}
        )
        (tmp_path / "1_LogitScore").mkdir()
        (tmp_path / "1_LogitScore" / "config.json").write_text(
            json.dumps({"true_token_id": 11, "false_token_id": 5})
        )

    @torch.no_grad()
    def expected(tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        return logits[11:12] - logits[5:6]

    with started(tmp_path, pooling=setting) as bench:
        can = bench.capacity.pooling
        assert can is not None
        assert (can.tasks, can.labels, can.generates) == (("classify", *TASKS), ("11",), True)
        agree(pooled(bench, RowPooling("classify", activate=False)), expected)
        agree(pooled(bench, RowPooling("classify"), 5), lambda tokens: expected(tokens).sigmoid())
        agree(
            pooled(bench, RowPooling("embed")),
            lambda tokens: F.normalize(states(model, tokens)[-1], dim=-1),
        )
        assert len(bench.alone("a", PROMPTS[0], 2)) == 2


@pytest.mark.slow("starts ranks: processes that import torch")
@pytest.mark.usefixtures("ranks_in_threads")
def test_ranks_pool_together(tmp_path: Path) -> None:
    model = save(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=False)
    with started(tmp_path, ranks=2, pooling={"method": "mean", "score_tokens": (11, 5)}) as bench:
        agree(
            pooled(bench, RowPooling("embed"), 4),
            lambda tokens: F.normalize(states(model, tokens).mean(0), dim=-1),
        )
        weight = model.lm_head.weight.data
        agree(
            pooled(bench, RowPooling("classify", activate=False)),
            lambda tokens: F.linear(states(model, tokens).mean(0), weight[11:12] - weight[5:6]),
        )


def test_tokens_of_scores_are_given_as_texts(tmp_path: Path) -> None:
    with started(DEMO, pooling={"score_tokens": ["a", "b"]}) as bench:
        assert bench.capacity.pooling is not None
        assert bench.capacity.pooling.labels == ("a",)
    with (
        pytest.raises(ConfigError, match=r"score_tokens: 'a b c d' is \d+ tokens"),
        started(DEMO, pooling={"score_tokens": ["a b c d", "b"]}),
    ):
        pass


@pytest.mark.parametrize("marks", [{}, {"sentence_transformers": {"version": "4.1.0"}}])
def test_one_label_of_a_regression_is_a_sigmoid_to_sentence_transformers(
    marks: dict[str, Any], tmp_path: Path
) -> None:
    """As its `CrossEncoder` scores pairs, whoever saved the checkpoint; transformers' pipeline
    leaves the logit as it is."""
    model = save(
        tmp_path, "BertForSequenceClassification", num_labels=1, problem_type="regression", **marks
    )

    @torch.no_grad()
    def logits(tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
        return found

    with started(tmp_path) as bench:
        agree(
            pooled(bench, RowPooling("classify", of_pair=True)),
            lambda tokens: logits(tokens).sigmoid(),
        )
        agree(
            pooled(bench, RowPooling("classify")),
            lambda tokens: logits(tokens).sigmoid() if marks else logits(tokens),
        )


def test_a_stored_activation_is_that_of_pairs_and_of_labels(tmp_path: Path) -> None:
    model = save(tmp_path, "BertForSequenceClassification", num_labels=1)
    path = tmp_path / "config_sentence_transformers.json"
    path.write_text(
        json.dumps(
            {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Tanh"}
        )
    )

    @torch.no_grad()
    def expected(tokens: list[int]) -> torch.Tensor:
        return torch.tanh(model(input_ids=torch.tensor([tokens])).logits[0])

    with started(tmp_path) as bench:
        for of_pair in (True, False):
            agree(pooled(bench, RowPooling("classify", of_pair=of_pair)), expected)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_stored_size_cuts_embeddings_after_normalization(
    normalized: bool, tmp_path: Path
) -> None:
    model = save(tmp_path, "Qwen3Model", matryoshka_dimensions=[8, 32])
    modules = ("Pooling", "Normalize") if normalized else ("Pooling",)
    sentence_transformer(tmp_path, *modules, config_sentence_transformers={"truncate_dim": 16})

    def vector(tokens: list[int]) -> torch.Tensor:
        return states(model, tokens)[-1]

    def cut(tokens: list[int]) -> torch.Tensor:
        return (F.normalize(vector(tokens), dim=-1) if normalized else vector(tokens))[:16]

    def asked(tokens: list[int]) -> torch.Tensor:
        return F.normalize(vector(tokens)[:8], dim=-1) if normalized else vector(tokens)[:8]

    with started(tmp_path) as bench:
        assert bench.capacity.pooling is not None
        assert (bench.capacity.pooling.size, bench.capacity.pooling.dimensions) == (16, (8,))
        agree(pooled(bench, RowPooling("embed")), cut)
        agree(pooled(bench, RowPooling("embed", dimensions=8)), asked)


@pytest.mark.parametrize(
    ("files", "length"),
    [
        ({"tokenizer_config": {"model_max_length": 40}}, 40),
        (
            {
                "tokenizer_config": {"model_max_length": 40},
                "sentence_bert_config": {"max_seq_length": 50},
            },
            50,
        ),
        (
            {
                "tokenizer_config": {"model_max_length": 40},
                "sentence_bert_config": {"max_seq_length": None},
            },
            40,
        ),
        ({"tokenizer_config": {"model_max_length": 1000}}, 64),
        ({"tokenizer_config": {"model_max_length": 1e30}}, 64),
        ({}, 64),
    ],
    ids=str,
)
def test_the_longest_text_is_sentence_transformers(
    files: dict[str, Any], length: int, tmp_path: Path
) -> None:
    save(tmp_path, "Qwen3Model")
    sentence_transformer(tmp_path, "Pooling", **files)
    with started(tmp_path, max_model_len=None) as bench:
        assert bench.capacity.max_model_len == length


def test_sizes_that_a_model_was_trained_for_are_told(tmp_path: Path) -> None:
    save(tmp_path, "Qwen3Model", matryoshka_dimensions=[16, 32, 48])
    with started(tmp_path) as bench:
        assert bench.capacity.pooling is not None
        assert bench.capacity.pooling.dimensions == (16, 32, 48)


def with_pooling(directory: Path, **config: Any) -> None:
    sentence_transformer(directory, "Pooling", pooling={"word_embedding_dimension": 48, **config})


def with_dense(directory: Path, **config: Any) -> None:
    sentence_transformer(directory, "Pooling", "Dense")
    dense(directory / "2_Dense", 48, 8, **config)


WRONG: list[tuple[Callable[[Path], Any], str]] = [
    (
        lambda path: with_pooling(path, pooling_mode_mean_sqrt_len_tokens=True),
        r"1_Pooling/config.json: pooling by \['mean_sqrt_len_tokens'\]",
    ),
    (
        lambda path: with_pooling(path, pooling_mode=["cls", "mean"]),
        r"pooling by \['cls', 'mean'\]",
    ),
    (lambda path: with_pooling(path, include_prompt=False), "include_prompt = False"),
    (
        lambda path: with_pooling(path, pooling_mode_new=True),
        "1_Pooling/config.json: pooling_mode_new: not implemented",
    ),
    (lambda path: with_dense(path, use_residual=True), "2_Dense/config.json: use_residual = True"),
    (
        lambda path: with_dense(path, module_input_name="token_embeddings"),
        "module_input_name = 'token_embeddings'",
    ),
    (lambda path: with_dense(path, activation="Softplus"), "Softplus' isn't served"),
    (lambda path: with_dense(path, out_features=9), r"expected numbers of shape \[9"),
    (
        lambda path: sentence_transformer(path, "Pooling", "LSTM"),
        "module sentence_transformers.models.LSTM isn't served",
    ),
    (
        lambda path: sentence_transformer(path, "Normalize", "Pooling"),
        "served are modules in the order",
    ),
    (
        lambda path: sentence_transformer(
            path, "Pooling", sentence_bert_config={"do_lower_case": 1}
        ),
        "do_lower_case must be true or false",
    ),
    (
        lambda path: sentence_transformer(
            path, "Pooling", sentence_bert_config={"modality_config": {"message": {}}}
        ),
        "texts in a chat template",
    ),
    (
        lambda path: sentence_transformer(
            path, "Pooling", sentence_bert_config={"processing_kwargs": {"text": {"padding": 8}}}
        ),
        "processing_kwargs = .* is not implemented",
    ),
    (
        lambda path: sentence_transformer(
            path,
            "Pooling",
            sentence_bert_config={"modality_config": {"text": {"method": "get_text_features"}}},
        ),
        "modality_config: text = .*get_text_features",
    ),
    (
        lambda path: sentence_transformer(
            path, "Pooling", sentence_roberta_config={"query_length": 8}
        ),
        "sentence_roberta_config.json: query_length",
    ),
    (
        lambda path: sentence_transformer(
            path, "Pooling", config_sentence_transformers={"similarity_fn_name": "maxsim"}
        ),
        "'maxsim' isn't served",
    ),
    (
        lambda path: sentence_transformer(
            path, "Pooling", config_sentence_transformers={"truncate_dim": 0}
        ),
        "truncate_dim: expected a size, got 0",
    ),
    (
        lambda path: sentence_transformer(
            path, "Pooling", tokenizer_config={"model_max_length": 0.5}
        ),
        "model_max_length: expected a number",
    ),
    (
        lambda path: sentence_transformer(
            path, "Pooling", config_sentence_transformers={"model_type": "SparseEncoder"}
        ),
        "SparseEncoder isn't served",
    ),
    (
        lambda path: (path / "modules.json").write_text('[{"type": "own.Pooling", "path": ""}]'),
        "module own.Pooling isn't served",
    ),
    (
        lambda path: (path / "modules.json").write_text(
            '[{"type": "sentence_transformers.models.Dense", "path": "../x"}]'
        ),
        "expected modules",
    ),
    (lambda path: (path / "modules.json").write_text("{}"), "modules.json: expected a list"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG, ids=[words for _, words in WRONG])
def test_what_is_not_served_is_refused_by_name(
    wrong: Callable[[Path], Any], words: str, tmp_path: Path
) -> None:
    save(tmp_path, "Qwen3Model")
    wrong(tmp_path)
    with pytest.raises((UnsupportedError, ModelLoadError), match=words), started(tmp_path):
        pass


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"method": "sum"}, "pooling.method: expected last, mean, cls, max, weighted, got 'sum'"),
        ({"score_tokens": ["yes"]}, "expected two tokens"),
        ({"score_tokens": [1, 2]}, "has no head for tokens"),
        ({"pooler": 1}, "the executor knows no pooler"),
    ],
)
def test_wrong_settings_are_refused(setting: dict[str, Any], words: str, tmp_path: Path) -> None:
    save(tmp_path, "Qwen3Model")
    with pytest.raises(ConfigError, match=words), started(tmp_path, pooling=setting):
        pass


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("LlamaModel", {"is_causal": False}, "is_causal = False"),
        ("AlbertModel", {}, "AlbertModel"),
        ("LlamaForTokenClassification", {}, "LlamaForTokenClassification"),
    ],
)
def test_a_checkpoint_whose_numbers_would_differ_is_refused(
    kind: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save(tmp_path, kind, **fields)
    with pytest.raises(UnsupportedError, match=words), started(tmp_path):
        pass
