"""Tables of what the keys of sentence-transformers' files do here.

`dovetail_executors.runtime.pooling` reads how a checkpoint pools by them, `dovetail.front.pooling`
its prompts. Both call `read_checked`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dovetail.api.file_keys import FileKeys, NoEffect, Refused, Used
from dovetail.api.json_files import read_json_object
from dovetail.errors import ModelLoadError, UnsupportedError, shown

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
OWN_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_WHOLE = "only layers of whole embeddings are served"
_MULTI_VECTOR = "late interaction"
_SIZE = NoEffect("the tensors and what comes before say it")

OWN = FileKeys(
    OWN_FILE,
    {
        "prompts": Used("texts to put before prompts, by name"),
        "default_prompt_name": Used("the prompt of texts that name none"),
        "similarity_fn_name": Used(
            "what `score` computes of two embeddings: cosine, dot, euclidean or manhattan"
        ),
        "truncate_dim": Used(
            "the size to which embeddings are cut after normalization, if a request sets no "
            "`dimensions`"
        ),
        "activation_fn": Used("the activation of a classifier's scores"),
        "model_type": Used("the kind of model; SparseEncoder and MultiVectorEncoder aren't served"),
        "keep_in_fp32_modules": NoEffect("heads are computed in float32 anyway"),
        "__version__": NoEffect("the versions that wrote the file"),
    },
    unknown="logged",
)
MODULES = FileKeys(
    "modules.json",
    {
        "type": Used("the kind of module"),
        "path": Used("the folder of its files"),
        "idx": NoEffect("modules run in the order of the list"),
        "name": NoEffect("modules run in the order of the list"),
        "kwargs": NoEffect("names of arguments of `encode`, which has none of them here"),
    },
)
TRANSFORMER = FileKeys(
    TRANSFORMER_FILES[0],
    {
        "max_seq_length": Used(
            "the tokens to which texts are cut; without it, the tokenizer's `model_max_length`"
        ),
        "transformer_task": Used(
            "feature-extraction, sequence-classification or text-generation; others are refused"
        ),
        "modality_config": Used(
            "how texts are computed; only `forward` and its usual output is served, and no chat "
            "template"
        ),
        "do_lower_case": Used("texts are put in lower case before the tokenizer's own rules"),
        "module_output_name": NoEffect("the modules that follow name their input"),
        "unpad_inputs": NoEffect("nothing is padded"),
        "processing_kwargs": Refused("arguments of the tokenizer", ({},)),
        "query_length": Refused(_MULTI_VECTOR),
        "document_length": Refused(_MULTI_VECTOR),
        "query_expansion": Refused(_MULTI_VECTOR),
        "tokenizer_name_or_path": Refused(
            "another model's tokenizer; name it by `tokenizer` in the config"
        ),
        **{
            f"{part}_{end}": Refused(
                "arguments for transformers",
                ({}, {"trust_remote_code": True}, {"trust_remote_code": False}),
            )
            for part, ends in (
                ("model", ("args", "kwargs")),
                ("config", ("args", "kwargs")),
                ("tokenizer", ("args",)),
                ("processor", ("kwargs",)),
            )
            for end in ends
        },
    },
)
POOLING = FileKeys(
    "Pooling/config.json",
    {
        "pooling_mode": Used(
            "cls, mean, lasttoken, max or weightedmean; others and several at once are refused"
        ),
        "pooling_mode_*": Used("the same in older files"),
        "include_prompt": Refused("prompts are pooled, too", (True,)),
        "word_embedding_dimension": _SIZE,
        "embedding_dimension": _SIZE,
    },
)
DENSE = FileKeys(
    "Dense/config.json",
    {
        "out_features": Used("the size of the result"),
        "activation_function": Used(
            "one of torch's GELU, Identity, ReLU, Sigmoid, SiLU, Softmax, Tanh"
        ),
        "in_features": _SIZE,
        "bias": NoEffect("it is there if its tensor is"),
        "module_input_name": Refused(_WHOLE, ("sentence_embedding",)),
        "module_output_name": Refused(_WHOLE, ("sentence_embedding",)),
        "use_residual": Refused("it adds the layer's input", (False,)),
    },
)
NORMALIZE = FileKeys(
    "Normalize/config.json",
    {
        "module_input_name": Refused(_WHOLE, ("sentence_embedding",)),
        "module_output_name": Refused(_WHOLE, ("sentence_embedding",)),
    },
)
LOGIT_SCORE = FileKeys(
    "LogitScore/config.json",
    {
        "true_token_id": Used("the token whose logit is the score"),
        "false_token_id": Used("the token whose logit is subtracted"),
        "module_input_name": Refused("only logits are scored", ("causal_logits",)),
    },
)
ALL = (OWN, MODULES, TRANSFORMER, POOLING, DENSE, NORMALIZE, LOGIT_SCORE)


def read_checked(path: Path, table: FileKeys) -> dict[str, Any]:
    """Return the content of a file; empty if there is none. Raises `ModelLoadError` if it isn't an
    object, `UnsupportedError` for keys that can't be honoured."""
    content = read_json_object(path, missing_ok=True)
    table.check(content, path)
    return content


def read_transformer(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Return the path and content of `sentence_bert_config.json`, by whichever of its names. Raises
    as `read_checked`, and `ModelLoadError` for a wrong `do_lower_case`."""
    paths = [directory / name for name in TRANSFORMER_FILES]
    path = next((path for path in paths if path.is_file()), paths[0])
    content = read_checked(path, TRANSFORMER)
    if type(lower := content.get("do_lower_case", False)) is not bool and lower is not None:
        raise ModelLoadError(f"{path}: do_lower_case must be true or false, got {shown(lower)}")
    return path, content


def read_own(directory: Path) -> dict[str, Any]:
    """Return the content of `config_sentence_transformers.json`. Raises as `read_checked`, and for
    a similarity that isn't served."""
    path = directory / OWN_FILE
    content = read_checked(path, OWN)
    if (name := content.get("similarity_fn_name")) not in (None, *SIMILARITIES):
        served = ", ".join(SIMILARITIES)
        raise UnsupportedError(
            f"{path}: similarity_fn_name {name!r} isn't served; served are {served}"
        )
    return content


def has_marks(directory: Path, config: dict[str, Any]) -> bool:
    """Return True if sentence-transformers has saved this checkpoint, whose `config.json` is
    given."""
    marks = ("sentence_transformers", "sbert_ce_default_activation_function")
    files = (MODULES.file, OWN_FILE)
    return any(config.get(mark) for mark in marks) or any(
        (directory / file).is_file() for file in files
    )
