"""The digest of a model: it differs with all that decides K and V."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.api.clock import VirtualClock
from dovetail.api.executor import ComponentRef, ExecutorConfig, ExecutorContext
from dovetail.errors import DovetailError
from dovetail.front.tiers import model_digest

HEAD = ComponentRef("drafter", "dovetail:eagle3", "package:Head", {"layers": 1})
FILES = ("config.json", "hf_quant_config.json", "model.safetensors.index.json", "a.safetensors")


@pytest.fixture
def context(tmp_path: Path) -> ExecutorContext:
    for folder in ("model", "draft"):
        (tmp_path / folder).mkdir()
        for name in FILES:
            (tmp_path / folder / name).write_text("one")
    config = ExecutorConfig(
        model=str(tmp_path / "model"),
        draft_model=str(tmp_path / "draft"),
        draft_head=HEAD,
        dtype="auto",
        load_format="auto",
        max_model_len=None,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        gpu_memory_utilization=0.5,
        kv_cache_memory=None,
        block_size=None,
        cuda_graphs=False,
        overlap=False,
        seed=0,
    )
    return ExecutorContext(config, VirtualClock())


@pytest.mark.parametrize("folder", ["model", "draft"])
@pytest.mark.parametrize("name", FILES)
def test_the_content_of_each_file_counts(context: ExecutorContext, folder: str, name: str) -> None:
    before = model_digest(context, "float32")
    assert model_digest(context, "float32") == before
    path = Path(context.config.model).parent / folder / name
    path.write_text("two")
    assert model_digest(context, "float32") != before


def with_config(**changes: Any) -> Callable[[ExecutorContext], ExecutorContext]:
    return lambda context: replace(context, config=replace(context.config, **changes))


@pytest.mark.parametrize(
    "change",
    [
        with_config(quantization="fp8"),
        with_config(kv_cache_dtype="float8_e4m3fn"),
        with_config(kv_cache_scales="calibrate"),
        with_config(state_dtype="bfloat16"),
        with_config(load_format="dummy"),
        with_config(draft_model=None),
        with_config(draft_head=replace(HEAD, options={"layers": 2})),
        lambda context: replace(context, models=(ComponentRef("model", "acme:own", "acme:Own"),)),
    ],
)
def test_settings_and_packages_count(
    context: ExecutorContext, change: Callable[[ExecutorContext], ExecutorContext]
) -> None:
    assert model_digest(change(context), "float32") != model_digest(context, "float32")
    assert model_digest(context, "bfloat16") != model_digest(context, "float32")


def test_a_model_whose_files_change_while_they_are_read_has_no_digest(
    context: ExecutorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = hashlib.file_digest

    def changing(opened: Any, name: str) -> Any:
        (Path(context.config.model) / "a.safetensors").write_text("other")
        return plain(opened, name)

    monkeypatch.setattr(hashlib, "file_digest", changing)
    with pytest.raises(DovetailError, match="changed"):
        model_digest(context, "float32")
