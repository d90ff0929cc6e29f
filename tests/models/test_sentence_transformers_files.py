"""The tables of sentence-transformers' files have every key that it writes, and refuse what they
say."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from dovetail.api.file_keys import FileKeys, Refused
from dovetail.api.sentence_transformers_files import (
    ALL,
    DENSE,
    LOGIT_SCORE,
    MODULES,
    NORMALIZE,
    OWN,
    POOLING,
    TRANSFORMER,
    read_checked,
)
from dovetail.errors import UnsupportedError

# by sentence-transformers 6.2.0, with the older names that it reads
WRITTEN: list[tuple[FileKeys, set[str]]] = [
    (
        OWN,
        {
            "model_type",
            "__version__",
            "prompts",
            "default_prompt_name",
            "similarity_fn_name",
            "truncate_dim",
        },
    ),
    (OWN, {"activation_fn", "keep_in_fp32_modules"}),
    (MODULES, {"idx", "name", "path", "type", "kwargs"}),
    (
        TRANSFORMER,
        {
            "transformer_task",
            "modality_config",
            "module_output_name",
            "processing_kwargs",
            "unpad_inputs",
        },
    ),
    (
        TRANSFORMER,
        {"query_length", "document_length", "query_expansion", "max_seq_length", "do_lower_case"},
    ),
    (
        TRANSFORMER,
        {
            "tokenizer_name_or_path",
            "model_args",
            "model_kwargs",
            "tokenizer_args",
            "processor_kwargs",
            "config_args",
            "config_kwargs",
        },
    ),
    (
        POOLING,
        {"embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt"},
    ),
    (
        POOLING,
        {
            f"pooling_mode_{mode}"
            for mode in (
                "cls_token",
                "max_tokens",
                "mean_tokens",
                "mean_sqrt_len_tokens",
                "weightedmean_tokens",
                "lasttoken",
            )
        },
    ),
    (
        DENSE,
        {
            "in_features",
            "out_features",
            "bias",
            "activation_function",
            "module_input_name",
            "module_output_name",
            "use_residual",
        },
    ),
    (NORMALIZE, {"module_input_name", "module_output_name"}),
    (LOGIT_SCORE, {"true_token_id", "false_token_id", "module_input_name"}),
]
CLASSES = {
    "base.modules.transformer.Transformer": TRANSFORMER,
    "sentence_transformer.modules.pooling.Pooling": POOLING,
    "base.modules.dense.Dense": DENSE,
    "base.modules.normalize.Normalize": NORMALIZE,
    "cross_encoder.modules.logit_score.LogitScore": LOGIT_SCORE,
}
REFUSED = [
    (table, key, rule)
    for table in ALL
    for key, rule in table.keys.items()
    if isinstance(rule, Refused)
]


@pytest.mark.parametrize(("table", "keys"), WRITTEN)
def test_each_key_that_is_written_is_in_a_table(table: FileKeys, keys: set[str]) -> None:
    assert not [key for key in keys if table.rule(key) is None]


@pytest.mark.parametrize("name", CLASSES)
def test_the_installed_version_writes_no_other_key(name: str) -> None:
    pytest.importorskip("sentence_transformers")
    module, _, kind = name.rpartition(".")
    keys = getattr(import_module(f"sentence_transformers.{module}"), kind).config_keys
    assert not [key for key in keys if CLASSES[name].rule(key) is None]


@pytest.mark.parametrize(
    ("table", "key", "rule"), REFUSED, ids=[f"{table.file}: {key}" for table, key, _ in REFUSED]
)
def test_a_refused_key_is_refused_by_name_but_for_values_without_effect(
    table: FileKeys, key: str, rule: Refused, tmp_path: Path
) -> None:
    path = tmp_path / "file.json"
    for value in (None, *rule.unless):
        path.write_text(json.dumps({key: value}))
        assert read_checked(path, table) == {key: value}
    for other in ("something", [1], 7):
        path.write_text(json.dumps({key: other}))
        with pytest.raises(UnsupportedError, match=rf"file.json: {key} = .* is not implemented"):
            read_checked(path, table)


@pytest.mark.parametrize(
    "table", [table for table in ALL if table.unknown == "refused"], ids=lambda table: table.file
)
def test_an_unknown_key_is_refused_unless_it_is_off(table: FileKeys, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"new": False, "newer": None}))
    assert read_checked(path, table) == {"new": False, "newer": None}
    path.write_text(json.dumps({"new": 2}))
    with pytest.raises(
        UnsupportedError, match=r"file.json: 'new' = 2 is unknown and may change the numbers"
    ):
        read_checked(path, table)
