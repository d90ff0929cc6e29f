"""Engines whose executor pools without a model, for tests of what is above it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.api.executor import PoolingCapacity, RowPooling
from dovetail.testing.fake_executor import expected_pooled
from tests.registry.fakes import Site, components

EMBEDDER = PoolingCapacity(("embed", "token_embed"), "mean", 6, generates=False)
GENERATOR = PoolingCapacity(("embed", "token_embed"), "last", 6)
SCORER = PoolingCapacity(
    ("classify", "token_classify"), "cls", 6, ("relevant",), generates=False, indivisible=True
)
CLASSIFIER = PoolingCapacity(
    ("classify", "token_classify"), "last", 6, ("bad", "fair", "good"), generates=False
)
LEXICAL = PoolingCapacity(
    ("embed", "token_classify", "token_embed"),
    *("cls", 6, ("lexical weight",)),
    generates=False,
    token_size=5,
    is_lexical=True,
)
EXECUTOR = (
    'kind="executor", name="fake", target="dovetail.testing:FakeExecutor", '
    'options="dovetail.testing:FakeExecutorOptions"'
)


def install(site: Site) -> None:
    """Offer the executor as the distribution dovetail-pooled."""
    site.install("dovetail-pooled", modules={"pooled_plugin": components(EXECUTOR)})


def config(capacity: PoolingCapacity | None, **more: Any) -> dict[str, Any]:
    """The config of an engine that pools so, with the tokenizer of the demo model."""
    executor = {"name": "fake", "vocab_size": 1024, "num_pages": 512, "pooling": capacity}
    return {
        "model": "demo",
        "executor": executor,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        **more,
    }


def expected(
    token_ids: Any, task: Any, capacity: PoolingCapacity, **fields: Any
) -> NDArray[np.float32]:
    """What the executor makes of a prompt."""
    return expected_pooled(list(token_ids), RowPooling(task, **fields), capacity)
