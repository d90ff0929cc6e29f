"""Tiny checkpoints with a vector for each token: of PyLate, of sentence-transformers, and BGE-M3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.models.pooling_checkpoints import dense, save, sentence_transformer

CLS, SEP, UNK, MASK, QUERY, DOCUMENT = 1, 2, 3, 4, 5, 6
WORDS = {
    "[PAD]": 0,
    "[CLS]": CLS,
    "[SEP]": SEP,
    "[UNK]": UNK,
    "[MASK]": MASK,
    "[Q] ": QUERY,
    "[D] ": DOCUMENT,
    ",": 7,
    ".": 8,
    **{f"w{index}": 9 + index for index in range(80)},
}
SPECIAL = {
    name: f"[{name.removesuffix('_token').upper()}]"
    for name in ("pad_token", "cls_token", "sep_token", "unk_token", "mask_token")
}
FIELDS: dict[str, dict[str, Any]] = {
    "ModernBertModel": {
        "local_attention": 40,
        "num_hidden_layers": 4,
        **dict.fromkeys(("cls_token_id", "sep_token_id"), 2),
    },
    "RobertaModel": {"max_position_embeddings": 66},
    "DistilBertModel": {"dim": 48, "hidden_dim": 64, "n_layers": 2, "n_heads": 4},
    "MPNetModel": {"pad_token_id": 1, "max_position_embeddings": 66},
}
_MODULES = "multi_vector_encoder.modules"
PYLATE: dict[str, Any] = {
    "model_type": "ColBERT",
    "prompts": {},
    "similarity_fn_name": "MaxSim",
    "query_prefix": "[Q] ",
    "document_prefix": "[D] ",
    "query_length": 10,
    "document_length": 12,
    "do_query_expansion": True,
    "attend_to_expansion_tokens": True,
    "skiplist_words": [",", ".", ";"],
}


def ids_of(words: str) -> list[int]:
    return [WORDS[word] for word in words.split()]


def save_tokenizer(directory: Path, **settings: Any) -> None:
    """Save one whose tokens are words in lower case. It has PyLate's marks, but doesn't find them
    in texts."""
    made = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    made.add_tokens([AddedToken("[Q] ", normalized=True), AddedToken("[D] ", normalized=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **{**SPECIAL, **settings})
    tokenizer.save_pretrained(directory)


def pylate(directory: Path, kind: str = "BertModel", **config: Any) -> tuple[Any, torch.nn.Linear]:
    """Save a model in PyLate's layout, and return transformers' model and the layer after it."""
    model = save(directory, kind, **FIELDS.get(kind, {}))
    save_tokenizer(directory)
    stored = {**PYLATE, **config}
    sentence_transformer(
        directory,
        "Dense",
        config_sentence_transformers={key: one for key, one in stored.items() if one is not None},
        sentence_bert_config={"max_seq_length": 9, "do_lower_case": False},
    )
    modules = json.loads((directory / "modules.json").read_text())
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (directory / "modules.json").write_text(json.dumps(modules))
    layer = dense(directory / "1_Dense", 48, 16, bias=False)
    path = directory / "1_Dense" / "config.json"
    fields = json.loads(path.read_text())
    fields |= {"activation_function": "torch.nn.modules.linear.Identity", "use_residual": False}
    path.write_text(json.dumps(fields))
    return model, layer


def stanford(directory: Path, **metadata: Any) -> tuple[Any, torch.nn.Linear]:
    """Save a model in the layout of ColBERT's own program."""
    model = save(directory, "BertModel")
    save_tokenizer(directory)
    torch.manual_seed(9)
    layer = torch.nn.Linear(48, 16, bias=False)
    path = directory / "model.safetensors"
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, "linear.weight": layer.weight.data}, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    tokens = {"query_token_id": "w70", "doc_token_id": "w71"}
    lengths = {"query_maxlen": 10, "doc_maxlen": 12}
    (directory / "artifact.metadata").write_text(json.dumps({**tokens, **lengths, **metadata}))
    return model, layer


def multi_vector(
    directory: Path, expansion: dict[str, Any] | None, **mask: Any
) -> tuple[Any, torch.nn.Linear]:
    """Save a model in the layout of sentence-transformers' `MultiVectorEncoder`."""
    model = save(directory, "BertModel")
    save_tokenizer(directory)
    sentence_transformer(
        directory,
        *("Dense", "MultiVectorMask", "Normalize"),
        config_sentence_transformers={
            "model_type": "MultiVectorEncoder",
            "prompts": {"query": "w1 ", "document": "w2 "},
            "similarity_fn_name": "meanmaxsim",
        },
        sentence_bert_config={
            "query_length": None if expansion else 8,
            "document_length": 12,
            "query_expansion": expansion,
        },
    )
    path = directory / "modules.json"
    for old, new in (
        ("models.Dense", "base.modules.dense.Dense"),
        ("models.MultiVectorMask", f"{_MODULES}.multi_vector_mask.MultiVectorMask"),
        ("models.Normalize", "base.modules.normalize.Normalize"),
    ):
        path.write_text(
            path.read_text().replace(f"sentence_transformers.{old}", f"sentence_transformers.{new}")
        )
    layer = dense(directory / "1_Dense", 48, 16, module_input_name="token_embeddings")
    for folder, content in (
        ("2_MultiVectorMask", mask),
        ("3_Normalize", {"module_input_name": "token_embeddings"}),
    ):
        (directory / folder).mkdir()
        (directory / folder / "config.json").write_text(json.dumps(content))
    return model, layer


def bge_m3(directory: Path) -> tuple[Any, torch.nn.Linear, torch.nn.Linear]:
    """Save a model in BGE-M3's layout, and return transformers' model and the layers of tokens'
    vectors and of their lexical weights."""
    model = save(directory, "XLMRobertaModel", pad_token_id=0, max_position_embeddings=66, seed=3)
    save_tokenizer(directory, eos_token="[SEP]")
    sentence_transformer(
        directory,
        *("Pooling", "Normalize"),
        pooling={"word_embedding_dimension": 48, "pooling_mode_cls_token": True},
        sentence_bert_config={"max_seq_length": 60, "do_lower_case": False},
    )
    torch.manual_seed(5)
    colbert = torch.nn.Linear(48, 48)
    sparse = torch.nn.Linear(48, 1)
    with torch.no_grad():  # some weights are negative
        sparse.weight.normal_()
        sparse.bias.fill_(-5)
    torch.save(colbert.state_dict(), directory / "colbert_linear.pt")
    torch.save(sparse.state_dict(), directory / "sparse_linear.pt")
    return model, colbert, sparse
