"""Clients of other projects get the embeddings that `LLM.embed` makes. Each runs in a venv of its own, which needs the package index."""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path

import pytest

from dovetail import LLM
from tests.server import embedding_clients

PACKAGES = {
    "langchain": "langchain-openai",
    "litellm": "litellm",
    "llama_index": "llama-index-embeddings-openai-like",
    "haystack": "haystack-ai",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_client_gets_the_embeddings_of_the_model(name: str, server_url: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGES[name]], check=True)
    environment = {**os.environ, "HAYSTACK_TELEMETRY_ENABLED": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "true", "PYTHONPATH": ""}
    program = [python, embedding_clients.__file__, name, server_url]
    done = subprocess.run(program, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=120)
    with LLM("demo") as llm:
        outputs = llm.embed(embedding_clients.TEXTS, use_tqdm=False)
    for vector, output in zip(json.loads(done.stdout.splitlines()[-1]), outputs, strict=True):
        assert output.outputs is not None
        assert vector == pytest.approx(output.outputs.embedding, abs=1e-6)
