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
LATE_SIMILARITIES = ("maxsim", "meanmaxsim")  # of models with a vector for each token
OWN_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_VECTORS = Used(
    "which vectors it computes: of each token in models of late interaction, otherwise embeddings; "
    "others are refused"
)
_LATE = "late interaction: "
_SIZE = NoEffect("the tensors and what comes before say it")

OWN = FileKeys(
    OWN_FILE,
    {
        "prompts": Used("texts to put before prompts, by name"),
        "default_prompt_name": Used("the prompt of texts that name none"),
        "similarity_fn_name": Used(
            "what `score` computes of two embeddings: cosine, dot, euclidean or manhattan; of two "
            "texts' vectors: maxsim or meanmaxsim"
        ),
        "truncate_dim": Used(
            "the size to which embeddings are cut after normalization, if a request sets no "
            "`dimensions`"
        ),
        "activation_fn": Used("the activation of a classifier's scores"),
        "model_type": Used(
            "the kind of model: ColBERT and MultiVectorEncoder have a vector for each token; "
            "SparseEncoder isn't served"
        ),
        "query_prefix": Used(_LATE + "the token, or text, before a query"),
        "document_prefix": Used(_LATE + "the token, or text, before a document"),
        "query_length": Used(_LATE + "the tokens of a query"),
        "document_length": Used(_LATE + "the tokens to which documents are cut"),
        "do_query_expansion": Used(_LATE + "mask tokens fill a query to its length"),
        "query_expansion": Used(_LATE + "the same in newer files"),
        "attend_to_expansion_tokens": Used(_LATE + "the others attend to these mask tokens"),
        "attend_to_mask_tokens": Used(_LATE + "the same in older files"),
        "skiplist_words": Used(_LATE + "tokens whose vectors documents leave out"),
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
        "query_length": Used(_LATE + "the tokens to which queries are cut"),
        "document_length": Used(_LATE + "the tokens to which documents are cut"),
        "query_expansion": Used(_LATE + "the mask tokens that fill a query"),
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
        "module_input_name": _VECTORS,
        "module_output_name": _VECTORS,
        "use_residual": Refused("it adds the layer's input", (False,)),
    },
)
NORMALIZE = FileKeys(
    "Normalize/config.json",
    {
        "module_input_name": _VECTORS,
        "module_output_name": _VECTORS,
    },
)
MASK = FileKeys(
    "MultiVectorMask/config.json",
    {
        "skiplist_words": Used("tokens whose vectors are left out"),
        "skiplist_tasks": Used("of which texts: queries, documents"),
        "keep_only_token_ids": Refused("vectors of some tokens only", ([],)),
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
ALL = (OWN, MODULES, TRANSFORMER, POOLING, DENSE, NORMALIZE, MASK, LOGIT_SCORE)


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
    a similarity that isn't served. A model of late interaction has one of its own, whatever other
    models' it stores."""
    path = directory / OWN_FILE
    content = read_checked(path, OWN)
    name = content.get("similarity_fn_name")
    known: tuple[str, ...] = SIMILARITIES
    if is_late(content):
        name = name.lower() if isinstance(name, str) else name
        name = "maxsim" if name in (None, *SIMILARITIES) else name
        content = {**content, "similarity_fn_name": name}
        known = LATE_SIMILARITIES
    if name not in (None, *known):
        served = ", ".join(known)
        raise UnsupportedError(
            f"{path}: similarity_fn_name {name!r} isn't served; served are {served}"
        )
    return content


def module_of(module: Any, path: Path) -> tuple[str, str]:
    """Return the type of a module that `modules.json`, at `path`, lists, and its folder below the
    model's. Raises `ModelLoadError`, and as `read_checked`."""
    if isinstance(module, dict):
        kind = module.get("type")
        folder = module.get("path")
        if isinstance(kind, str) and isinstance(folder, str):
            is_below = ".." not in Path(folder).parts and not Path(folder).is_absolute()
            if is_below:
                MODULES.check(module, path)
                return kind, folder
    raise ModelLoadError(
        f"{path}: expected modules, each with its 'type' and 'path', got {shown(module)}"
    )


def is_late(own: dict[str, Any]) -> bool:
    """Return True if `config_sentence_transformers.json`, with this content, is of a model with a
    vector for each token."""
    return own.get("model_type") in ("ColBERT", "MultiVectorEncoder") or "query_prefix" in own


def has_marks(directory: Path, config: dict[str, Any]) -> bool:
    """Return True if sentence-transformers has saved this checkpoint, whose `config.json` is
    given."""
    marks = ("sentence_transformers", "sbert_ce_default_activation_function")
    files = (MODULES.file, OWN_FILE)
    return any(config.get(mark) for mark in marks) or any(
        (directory / file).is_file() for file in files
    )
