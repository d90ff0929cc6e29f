"""Run vLLM's offline examples with changed imports and small local models, and record what happens.

    python -m tools.vllm_examples vllm-0.33.0.tar.gz [part of a name ...]

The source distribution comes from a package index
(`pip download --no-deps --no-binary :all: vllm`). Nothing of it is kept but the names of its
examples. Each runs in a process of its own, with `vllm` replaced by `dovetail.compat.vllm` in its
imports, names of models on the hub replaced by checkpoints with random weights, and adapters
likewise. `docs/assets/vllm_examples.json` gets a row for each: "runs", "refused" with the sentence,
"needs" with the package that isn't installed, or "broken" with the error. Without parts of names
all are run, which takes some ten minutes.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "assets" / "vllm_examples.json"
DEMO = Path(__file__).parents[1] / "plugins" / "models" / "dovetail_models" / "demo"
TIMEOUT_S = 400  # a busy machine may take a minute for what takes seconds
LENGTHS = {"generator": 2**17, "long": 2**20}  # generator -> tokens
LONG = re.compile(r"_1m")  # part of a name, of examples that get the long one
ENGINES = re.compile(r"\b(LLM|LLMEngine|AsyncLLM|AsyncLLMEngine|EngineArgs|AsyncEngineArgs)\b")
SERVED = re.compile(r"online|client|server|subscriber|http")  # examples that talk to a server
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
OWNERS = re.compile(
    r"(application|image|video|audio|text|path|tmp|outputs?|data)/.*|.*\.(py|json|jinja|png|jpg|wav|csv)"
)
# part of a name -> labels of the classifier that it gets
LABELS = (
    ("score/", 1),
    ("basic/.*/score", 1),
    ("reward/|classif", 2),
)
START = "import sys, tools.vllm_examples as tool; tool.start(*sys.argv[1:])"


def examples(source: Path) -> Iterator[Path]:
    """Yield the examples that make an engine."""
    for path in sorted((source / "examples").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        imports = re.findall(r"^\s*(?:from|import) vllm\b.*", text, re.MULTILINE)
        if imports and ENGINES.search(text) and not SERVED.search(path.stem):
            yield path


def changed(text: str, model: Path) -> str:
    """Return a program with its imports changed, and names of the hub replaced by a local model."""
    text = re.sub(
        r"^(\s*)(from|import) vllm\b", r"\1\2 dovetail.compat.vllm", text, flags=re.MULTILINE
    )
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_hub_id(node.value):
            node.value = str(model)
    return ast.unparse(tree)


def is_hub_id(text: str) -> bool:
    """Return True for what looks like the name of a model on the hub."""
    return bool(HUB_ID.fullmatch(text)) and not OWNERS.fullmatch(text)


def make_models(folder: Path) -> dict[str, Path]:
    """Save generators and classifiers with random weights; return name -> folder."""
    from tests.models.pooling_checkpoints import save

    made = {}
    for name, kind, fields in (
        *(
            (name, "Qwen3ForCausalLM", {"max_position_embeddings": length})
            for name, length in LENGTHS.items()
        ),
        *(
            (
                f"labels-{count}",
                "Qwen3ForSequenceClassification",
                {"num_labels": count, "max_position_embeddings": 4096},
            )
            for count in sorted({count for _, count in LABELS})
        ),
    ):
        path = made[name] = folder / name
        save(path, kind, vocab_size=1024, tie_word_embeddings=False, **fields)
        for file in DEMO.glob("*"):
            if file.name.startswith(("tokenizer", "chat_template", "special")):
                shutil.copy(file, path)
    return made


def model_for(example: str) -> str:
    """Return the name of the model that an example gets."""
    labels = next(
        (f"labels-{count}" for pattern, count in LABELS if re.search(pattern, example)), None
    )
    return labels or ("long" if LONG.search(example) else "generator")


def make_adapter(folder: Path) -> Path:
    """Save an adapter of the generator with random weights."""
    import torch
    from safetensors.torch import save_file

    path = folder / "adapter"
    path.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    weights = {
        f"{name}.lora_A.weight": torch.ones(4, 48),
        f"{name}.lora_B.weight": torch.ones(48, 4),
    }
    save_file(weights, path / "adapter_model.safetensors")
    return path


def start(adapter: str, program: str, *given: str) -> None:
    """Run an example in this process, with an adapter and a text instead of downloads."""
    import io
    import runpy
    import urllib.request

    import huggingface_hub

    huggingface_hub.snapshot_download = lambda *args, **named: adapter  # type: ignore[assignment]
    huggingface_hub.hf_hub_download = lambda *args, **named: adapter  # type: ignore[assignment]
    urllib.request.urlopen = lambda *args, **named: io.BytesIO(
        b"A text that was on the network. " * 20
    )
    sys.argv = [program, *given]
    runpy.run_path(program, run_name="__main__")


def verdict_of(code: int | None, errors: str) -> tuple[str, str]:
    """Return the verdict and its reason, given the exit code and what was written to stderr."""
    if code == 0:
        return "runs", ""
    if code is None:
        return "broken", "it doesn't end"
    told = [line for line in errors.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    last = told[-1] if told else (errors.strip().splitlines() or ["no message"])[-1]
    kind, _, text = last.partition(": ")
    if absent := re.fullmatch(r"No module named '([\w.]+)'", text):
        return "needs", absent[1]
    if kind.startswith("dovetail.") or "dovetail.compat.vllm" in text:
        return "refused", text
    usage = [line for line in errors.splitlines() if "error: " in line]
    if code == 2 and usage and "arguments are required" in usage[-1]:
        return "needs", usage[-1].rpartition(": ")[2]
    if code == 2 and usage:
        return "refused", usage[-1].partition("error: ")[2]
    return "broken", last


def arguments(text: str, model: Path) -> list[str]:
    """Return the arguments that a program can't do without, as far as they are known."""
    required = re.findall(r"add_argument\(\s*['\"](--[\w-]+)['\"][^)]*required=True", text)
    return ["--model", str(model)] if "--model" in required else []


def run(path: Path, text: str, adapter: Path, folder: Path, *given: str) -> tuple[str, str]:
    """Run a program, and return its verdict."""
    path.write_text(text, encoding="utf-8")  # beside the files that it reads
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.getcwd(),
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryDirectory(dir=folder) as work:
        try:
            done = subprocess.run(
                [sys.executable, "-c", START, str(adapter), str(path), *given],
                cwd=work,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return verdict_of(None, "")
    return verdict_of(done.returncode, done.stderr)


def plain(text: str, folder: Path) -> str:
    """Return a sentence without the names of local folders, and of bounded length."""
    text = re.sub(rf"{re.escape(str(folder))}/\S*?([\w-]+)'", r"\1'", text)
    text = text.replace("dovetail.compat.vllm.", "vllm.")
    return text if len(text) <= 240 else text[:239] + "…"


def main() -> None:
    given, *parts = sys.argv[1:]
    known: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {"examples": {}}
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = Path(given)
        if source.is_file():
            with tarfile.open(source) as archive:
                members = [one for one in archive.getmembers() if "/examples/" in one.name]
                archive.extractall(folder / "source", members=members, filter="data")
            [source] = (folder / "source").iterdir()
        else:
            shutil.copytree(source / "examples", folder / source.name / "examples")
            source = folder / source.name
        models = make_models(folder)
        adapter = make_adapter(folder)
        rows = dict(known["examples"]) if parts else {}
        for path in examples(source):
            example = str(path.relative_to(source / "examples").with_suffix(""))
            if parts and not any(part in example for part in parts):
                continue
            model = models[model_for(example)]
            text = changed(path.read_text(encoding="utf-8"), model)
            verdict, why = run(path, text, adapter, folder, *arguments(text, model))
            rows[example] = {"verdict": verdict, "why": plain(why, folder)}
            print(f"{example}: {verdict} {rows[example]['why']}", flush=True)
    version = source.name.removeprefix("vllm-")
    RESULTS.write_text(
        json.dumps({"version": version, "examples": dict(sorted(rows.items()))}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
