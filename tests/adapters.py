"""Adapters in PEFT's format, written without PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dovetail.testing.fake_executor import ADAPTED
from tests.registry.fakes import Site, components


def config_of(**changes: Any) -> dict[str, Any]:
    """Return an adapter's config, as PEFT writes it, but for the `changes`."""
    plain = {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "demo",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    return plain | changes


def weights_of(
    modules: Mapping[str, tuple[int, int]] = ADAPTED,
    rank: int = 4,
    seed: int = 0,
    prefix: str = "base_model.model.",
    dtype: Any = np.float32,
) -> dict[str, NDArray[Any]]:
    """Return random A and B for modules of (in, out) features, by PEFT's names."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (size_in, size_out) in modules.items():
        tensors[f"{prefix}{name}.lora_A.weight"] = random.standard_normal((rank, size_in)).astype(
            dtype
        )
        tensors[f"{prefix}{name}.lora_B.weight"] = random.standard_normal((size_out, rank)).astype(
            dtype
        )
    return tensors


def write_adapter(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    weights: Mapping[str, NDArray[Any]] | None = None,
    *,
    seed: int = 0,
) -> Path:
    """Write an adapter for the fake executor's model, with other files if they are given; in place
    of one that is there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(
        json.dumps(config_of() if config is None else config)
    )
    save_file(
        dict(weights_of(seed=seed) if weights is None else weights),
        folder / "adapter_model.safetensors",
    )
    return folder


def install_fake(site: Site) -> None:
    """Offer the fake executor as `fake`."""
    fake = 'kind="executor", name="fake", target="dovetail.testing.fake_executor:FakeExecutor"'
    options = 'options="dovetail.testing.fake_executor:FakeExecutorOptions"'
    site.install("dovetail-fakes", modules={"fakes_plugin": components(f"{fake}, {options}")})
