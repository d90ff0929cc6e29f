"""A config that was read by another process is, to the built-in models, transformers' own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from dovetail.api.model import ModelContext
from dovetail.base import kept_configs
from dovetail.base.config_reader import keep
from dovetail.base.kept_configs import begin_reading, kept_config
from dovetail.errors import ModelLoadError, UnsupportedError
from dovetail.nn.model_files import PlainConfig, kept_text_config, read_config, text_of
from dovetail.nn.parallel import SINGLE
from dovetail.testing.suites.model_configs import tiny, variants
from dovetail_executors.runtime.architecture import find_architecture
from tests.models.oracle import MODELS, context

# built-in models that read plain values, and whose configs hold others: configs of layers
NOT_KEPT = {"Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"}
KEEP = """
import hashlib, json, sys
from pathlib import Path
from dovetail.base.config_reader import keep
sys.modules["torch"] = None
for directory in json.loads(sys.argv[1]):
    content = Path(directory, "config.json").read_bytes()
    keep(directory, Path(directory) / "kept.json", hashlib.sha256(content).hexdigest())
"""


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dovetail" / "configs"


def saved(folder: Path, architecture: str = "Qwen3ForCausalLM", **fields: Any) -> Path:
    """Return a directory with a tiny config of this architecture."""
    config = tiny(architecture, **fields)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def write_kept(own_folder: Path, directory: Path, content: str) -> None:
    """Write the file in which the directory's config would be kept."""
    own_folder.mkdir(parents=True, exist_ok=True)
    kept_configs.path_of(directory).write_text(content)


def kept(**fields: Any) -> str:
    """Return a kept config with these fields."""
    empty: dict[str, Any] = {"dict": []}
    packed = {"dict": [*fields.items()]}
    parts = {"fields": packed, "defaults": empty, "derived": empty, "causal_model": None}
    return json.dumps({"name": "Qwen3Config", **parts})


def told(arch: Any, config: Any) -> tuple[Any, ...]:
    """Return what an engine asks of a model before it has weights, and the model's layers."""
    model = arch.build(config, context(make_state=lambda spec: nn.Module()))
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    return (
        arch.layer_specs(config, SINGLE),
        arch.state_specs(config, SINGLE),
        arch.pooling(config),
        repr(model),
        shapes,
    )


@pytest.mark.slow("starts a process that imports transformers, and builds many models")
def test_built_in_models_are_the_same_by_a_kept_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = [model for model in MODELS if model.make(ModelContext()).capabilities.plain_config]
    names = sorted({name for model in plain for name in model.architectures})
    directories = []
    for architecture in names:
        for index, config in enumerate(variants(architecture, ())):
            directories.append(tmp_path / f"{architecture}-{index}")
            config.architectures = [architecture]
            config.save_pretrained(directories[-1])
    texts = json.dumps([*map(str, directories)])
    subprocess.run([sys.executable, "-c", KEEP, texts], check=True, stderr=subprocess.DEVNULL)
    monkeypatch.setattr(kept_configs, "path_of", lambda directory: directory / "kept.json")
    compared = set()
    for directory in directories:
        kept = find_architecture(directory, MODELS)
        if not isinstance(kept.config, PlainConfig):
            continue
        real = text_of(read_config(directory), directory)
        vars(real).pop("quantization_config", None)
        assert vars(kept.config) == vars(real)
        assert vars(type(kept.config)()) == vars(type(real)())
        assert told(kept.arch, kept.config) == told(kept.arch, real)
        compared.add(directory.name.partition("-")[0])
    assert set(names) - compared == NOT_KEPT


@pytest.mark.slow("starts a process that imports transformers")
def test_a_config_is_read_in_a_process_of_its_own_and_then_kept(
    tmp_path: Path, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers")
    begin_reading(directory)
    assert (kept := kept_config(directory)) is not None
    assert (kept.name, kept.causal_model) == ("Qwen3Config", "Qwen3ForCausalLM")
    assert kept.fields["_name_or_path"] == str(directory)
    assert len([*own_folder.iterdir()]) == 1
    begin_reading(directory)
    assert kept_config(directory) == kept
    found = find_architecture(directory, MODELS)
    assert isinstance(found.config, PlainConfig)
    assert found.config.dtype in (None, torch.float32)
    assert "transformers" not in sys.modules


def test_a_process_that_has_imported_transformers_reads_the_config_itself(
    tmp_path: Path, own_folder: Path
) -> None:
    begin_reading(saved(tmp_path))
    assert not own_folder.exists()
    assert kept_text_config(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "[]",
        "{",
        "[" * 9999,
        '{"name": "Qwen3Config"}',
        '{"name": 1, "fields": {"x": 1}}',
        kept(model_type="qwen3").replace("Qwen3Config", "\\u0000"),
        kept(model_type="qwen3").replace('"model_type"', "5"),
        kept(model_type="qwen3").replace('"derived": {"dict": []}', '"derived": null'),
        kept(model_type="qwen3").replace('"defaults": {"dict": []}', '"defaults": {"list": []}'),
        kept(model_type="qwen3").replace('"causal_model": null', '"causal_model": 5'),
    ],
)
def test_a_file_that_is_no_kept_config_is_ignored(
    tmp_path: Path, own_folder: Path, content: str
) -> None:
    write_kept(own_folder, saved(tmp_path), content)
    assert kept_config(tmp_path) is None
    assert isinstance(find_architecture(tmp_path, MODELS).config, PreTrainedConfig)


def test_a_kept_config_that_no_built_in_model_serves_is_read_again(
    tmp_path: Path, own_folder: Path
) -> None:
    """So that errors are those of transformers' config."""
    write_kept(own_folder, saved(tmp_path), kept(architectures=None, model_type="qwen3"))
    assert kept_text_config(tmp_path) is not None
    assert isinstance(find_architecture(tmp_path, MODELS).config, PreTrainedConfig)


@pytest.mark.parametrize("dtype", ["nn", 5, {"dict": [["a", "float32"]]}])
def test_a_kept_config_of_a_dtype_that_torch_lacks_is_read_again(
    tmp_path: Path, own_folder: Path, dtype: Any
) -> None:
    write_kept(own_folder, saved(tmp_path), kept(dtype=dtype))
    assert kept_text_config(tmp_path) is None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of processes that are started, in a program without transformers."""
    commands: list[list[str]] = []
    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.setattr(kept_configs, "_reading", {})
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: commands.append(command))
    return commands


@pytest.mark.parametrize("content", ["[]", "null", "3", '{"configuration_files": ["other.json"]}'])
def test_a_file_that_is_no_config_is_left_to_its_reader(
    tmp_path: Path, started: list[list[str]], content: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    begin_reading(tmp_path)
    assert not started


def test_configs_in_further_files_are_refused(tmp_path: Path) -> None:
    """Bounds are checked in config.json, and by its content configs are kept."""
    content = {"model_type": "qwen3", "configuration_files": ["config.4.0.0.json"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedError, match="configuration_files"):
        kept_text_config(tmp_path)


def test_other_entries_than_texts_of_the_search_path_are_ignored(
    tmp_path: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python does."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    texts = [*sys.path]
    monkeypatch.setattr(sys, "path", [tmp_path, *texts])
    begin_reading(tmp_path)
    (command,) = started
    assert json.loads(command[3]) == texts


def test_a_config_that_changes_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    digest = hashlib.sha256((directory / "config.json").read_bytes()).hexdigest()
    saved(directory, hidden_size=96)
    keep(str(directory), tmp_path / "kept.json", digest)
    assert not (tmp_path / "kept.json").exists()


def test_a_directory_is_checked_also_if_its_config_is_kept(
    tmp_path: Path, own_folder: Path
) -> None:
    (tmp_path / "config.json").write_text('{"speculators_model_type": "eagle3"}')
    write_kept(own_folder, tmp_path, kept(model_type="qwen3"))
    with pytest.raises(UnsupportedError, match="draft head"):
        kept_text_config(tmp_path)
    with pytest.raises(ModelLoadError, match="no such file"):
        kept_text_config(tmp_path / "elsewhere")


def test_a_config_that_changes_is_another(tmp_path: Path, own_folder: Path) -> None:
    directory = saved(tmp_path)
    write_kept(own_folder, directory, kept(model_type="qwen3"))
    assert kept_config(directory) is not None
    saved(directory, hidden_size=96)
    assert kept_config(directory) is None


START = """
import sys
from dovetail import LLMEngine, SamplingParams
with LLMEngine.from_config("demo", load_format="dummy", max_model_len=64) as engine:
    params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
    engine.add_request("r", [1, 2, 3], params)
    while engine.has_unfinished_requests():
        engine.step()
dear = "transformers", "torchvision", "torch._dynamo", "torch._inductor", "tokenizers", "PIL"
print([name for name in dear if name in sys.modules])
"""


@pytest.mark.slow("starts a process that imports torch, and one that imports transformers")
def test_an_engine_with_a_built_in_model_and_token_ids_does_without_what_takes_long_to_import(
    own_folder: Path,
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", START], check=True, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout == "[]\n"
    assert len([*own_folder.iterdir()]) == 1
