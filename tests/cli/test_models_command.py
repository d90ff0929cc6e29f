"""`dovetail models`: what it lists, and that its verdict is what loading comes to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dovetail.cli.app import app
from tests.rounding import DEMO

COMMIT = "a" * 40


def listed(*args: str) -> dict[str, dict[str, Any]]:
    result = CliRunner().invoke(app, ["models", "--json", *args])
    assert result.exit_code == 0, result.output
    return {model["name"]: model for model in json.loads(result.stdout)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub, empty."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(hub: Path, name: str, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Put the demo model into the cache and return its directory."""
    repo = hub / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    shutil.copytree(DEMO, snapshot)
    if ref is not None:
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    return snapshot


def change(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_bundled_and_cached_models_are_listed_by_the_name_that_the_engine_takes(hub: Path) -> None:
    put(hub, "some/model")
    put(hub, "some/model", "b" * 40, "v1")
    put(hub, "some/model", "c" * 40, None)
    found = listed()
    assert {"demo", "demo-draft", "some/model", "some/model@v1", f"some/model@{'c' * 40}"} == {
        *found
    }
    weights = (DEMO / "model.safetensors").stat().st_size
    assert found["some/model"]["size"] > weights
    assert Path(found["some/model"]["path"]).name == COMMIT
    assert listed("--check")["some/model@v1"]["served"]


def test_an_empty_cache_is_no_error(hub: Path) -> None:
    assert {*listed()} == {"demo", "demo-draft"}


def test_what_wouldnt_load_is_told_with_the_reason_that_loading_gives(
    hub: Path, tmp_path: Path
) -> None:
    broken = put(hub, "a/broken")
    (broken / "config.json").write_text("{" * 100_000)
    unknown = put(hub, "an/unknown")
    change(unknown, architectures=["NobodysModel"], model_type="nobody")
    wrong = put(hub, "a/wrong")
    change(wrong, hidden_size="many")
    found = listed("--check")
    assert [found[name]["served"] for name in ("a/broken", "an/unknown", "a/wrong", "demo")] == [
        False,
        False,
        False,
        True,
    ]
    assert "nobody" in found["an/unknown"]["how"]
    assert "config.json" in found["a/broken"]["how"]
    assert found["demo"]["how"] == "Qwen3, up to 1024 tokens, weights of 10.0 MB"


def test_a_download_that_was_interrupted_is_incomplete(hub: Path) -> None:
    snapshot = put(hub, "half/there")
    files = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (snapshot / "model-2-of-2.safetensors").touch()
    assert listed()["half/there"]["lacks"] == ["model-1-of-2.safetensors"]
    says = listed("--check")["half/there"]
    assert not says["served"]
    assert "model-1-of-2.safetensors" in says["how"]


@pytest.mark.parametrize("index", ["[", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_lists_nothing(hub: Path, index: str) -> None:
    snapshot = put(hub, "odd/index")
    (snapshot / "model.safetensors.index.json").write_text(index)
    assert listed()["odd/index"]["lacks"] == []


def test_odd_names_in_an_index_are_of_files_that_are_missing(hub: Path) -> None:
    snapshot = put(hub, "odd/names")
    files = {"a": "x" * 5000, "b": "\0", "c": "..", "d": "model.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert listed()["odd/names"]["lacks"] == ["\0", "..", "x" * 5000]


def test_a_cache_that_is_none_is_told_and_the_rest_is_listed(hub: Path) -> None:
    hub.write_text("no directory")
    result = CliRunner().invoke(app, ["models"])
    assert result.exit_code == 0
    assert f"{hub}: the cache of the hub can't be read" in result.stderr
    assert "demo" in result.stdout


def test_names_of_directories_are_shown_without_control_characters(
    hub: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "mine" / "a\x1b[31m\nb\udcff"
    shutil.copytree(DEMO, directory)
    for options in ([], ["--check"]):
        result = CliRunner().invoke(app, ["models", str(directory.parent), *options])
        assert result.exit_code == 0
        assert r"/a\x1b[31m\nb\udcff" in result.stdout
        assert "\x1b" not in result.stdout
    assert str(directory) in listed(str(directory.parent))


def test_directories_are_searched_one_level_deep(hub: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(DEMO, folder / "one")
    shutil.copytree(DEMO, folder / "far" / "two")
    (folder / "q4.gguf").write_bytes(b"not one")
    found = listed(str(folder), "--check")
    assert {str(folder / "one"), str(folder / "q4.gguf")} == {*found} - {"demo", "demo-draft"}
    assert found[str(folder / "one")]["served"]
    assert "GGUF" in found[str(folder / "q4.gguf")]["how"]


def test_the_table_has_a_line_for_each(hub: Path) -> None:
    change(put(hub, "an/unknown"), architectures=["Nobody\x1b[31ms"], model_type="nobody")
    result = CliRunner().invoke(app, ["models", "--check"])
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["MODEL", "demo", "demo-draft", "an/unknown"]
    assert "yes: Qwen3, up to 1024 tokens, weights of 10.0 MB" in lines[1]
    assert "no: " in lines[3]
    assert "\x1b" not in result.stdout
