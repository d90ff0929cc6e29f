"""guidellm: a small benchmark of each of OpenAI's two APIs, with prompts that it makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from run import MODEL


def _benchmark(url: str, kind: str) -> None:
    tokenizer = os.environ["DOVETAIL_TEST_TOKENIZER"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [Path(sys.executable).parent / "guidellm", "run", "--disable-console-interactive"]
        command += [
            "--backend",
            f"kind=openai_http,target={url},model={MODEL},request_format={kind}",
        ]
        command += [
            "--data",
            "kind=synthetic_text,prompt_tokens=16,output_tokens=4",
            "--tokenizer",
            f"kind=huggingface_auto,model={tokenizer}",
        ]
        command += [
            "--profile",
            "kind=synchronous",
            "--constraint",
            "kind=max_requests,count=2",
            "--output",
            f"kind=json,path={report}",
        ]
        subprocess.run(command, check=True, timeout=500)
        [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (2, 0), totals


def chat(url: str) -> None:
    _benchmark(url, "/v1/chat/completions")


def completions(url: str) -> None:
    _benchmark(url, "/v1/completions")
