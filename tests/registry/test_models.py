"""A model's name: bundled, a directory, or a hub id; ambiguity is reported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dovetail.api import BundledModel
from dovetail.errors import (
    DISTRIBUTION,
    ConfigError,
    MissingExtraError,
    ModelLoadError,
    PluginError,
)
from dovetail.registry.models import HUB_FILES, locate_model, resolve_model
from dovetail.registry.plugin import LoadedPlugin, PluginOrigin
from dovetail.registry.registry import Registry
from tests.registry.fakes import Site

BUNDLING = """
from dovetail.api import BundledModel, hookimpl
@hookimpl
def dovetail_models():
    return [BundledModel("tiny", "tiny_package", "models/tiny"), BundledModel("lost", "tiny_package", "models/lost")]
"""


def built_in(name: str, package: str = "tests", path: str = "registry") -> Registry:
    return Registry(
        [
            LoadedPlugin(
                PluginOrigin(DISTRIBUTION, "models", "0.1.0"),
                models=(BundledModel(name, package, path),),
            )
        ]
    )


@pytest.fixture
def bundle(site: Site) -> Registry:
    """A third party that bundles "tiny", and "lost", whose files aren't there."""
    site.install("dovetail-tiny", modules={"tiny_plugin": BUNDLING})
    (site.path / "tiny_package" / "models" / "tiny").mkdir(parents=True)
    (site.path / "tiny_package" / "__init__.py").write_text("")
    return Registry.discover()


def test_demo_is_bundled_and_there() -> None:
    assert (resolve_model("demo", Registry.discover()) / "config.json").is_file()


def test_third_party_bundle_needs_its_full_name(bundle: Registry) -> None:
    assert resolve_model("dovetail-tiny:tiny", bundle).name == "tiny"
    assert locate_model("tiny", bundle).kind == "hub"
    with pytest.raises(
        ModelLoadError, match=r"bundled with dovetail-tiny/main 1\.0: .* is not a directory"
    ):
        resolve_model("dovetail-tiny:lost", bundle)


def test_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), Registry()) == tmp_path


def test_bundled_name_that_is_a_directory_too_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    registry = built_in("demo")
    with pytest.raises(ConfigError, match=r"write dovetail:demo or \./demo"):
        resolve_model("demo", registry)
    assert resolve_model("./demo", registry) == tmp_path / "demo"
    assert locate_model("dovetail:demo", registry).kind == "bundled"


@pytest.mark.parametrize(
    "name",
    [
        "/there/is/no/such/place",
        "./demo2",
        "~/nothing-here",
        "a/b/c",
        "who:knows",
        "-",
        "~nosuchuser/x",
        "x" * 5000,
        "a/" * 3000,
        "a\0b",
    ],
)
def test_an_invalid_name_is_reported(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a directory") as caught:
        locate_model(name, built_in("demo"))
    assert len(str(caught.value)) < 250


def test_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(
        ConfigError, match=r"is a file; a model is a directory .*, a config ends in \.yaml"
    ):
        locate_model(str(tmp_path / "model.safetensors"), Registry())


def test_a_gguf_file_is_a_model_and_so_is_a_directory_of_one(tmp_path: Path) -> None:
    file = tmp_path / "q4.gguf"
    file.touch()
    (tmp_path / "mmproj-f16.gguf").touch()  # of a vision tower
    for name in (file, tmp_path):
        place = locate_model(str(name), Registry())
        assert (place.kind, place.path, str(place)) == ("gguf", file.resolve(), str(file.resolve()))
    (tmp_path / "q8.gguf").touch()
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files \(q4\.gguf, q8\.gguf\).*name one"):
        locate_model(str(tmp_path), Registry())
    (tmp_path / "config.json").touch()  # beside a checkpoint they are no harm
    assert locate_model(str(tmp_path), Registry()).kind == "directory"
    with pytest.raises(ModelLoadError, match=r"q4\.gguf: not a GGUF file|q4\.gguf: can't be read"):
        resolve_model(str(file), Registry())


def test_hub_failure_lists_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def fail(repo: str, **fields: object) -> str:
        asked[repo] = fields
        raise OSError("no network")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(ModelLoadError) as caught:
        resolve_model("demmo", built_in("demo"))
    for part in ("did you mean demo?", "no directory ", "the Hugging Face hub: no network"):
        assert part in str(caught.value)
    assert asked["demmo"]["allow_patterns"] == list(HUB_FILES)
    assert not any(pattern.endswith((".py", ".bin")) for pattern in HUB_FILES)


@pytest.mark.parametrize(
    ("name", "repo", "revision"),
    [
        ("who/knows", "who/knows", None),
        ("who/knows@v1.2", "who/knows", "v1.2"),
        ("who/knows@refs/pr/3", "who/knows", "refs/pr/3"),
        ("gpt2@main", "gpt2", "main"),
    ],
)
def test_a_revision_follows_the_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, repo: str, revision: str | None
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    fetched = Mock(return_value=str(tmp_path))
    monkeypatch.setattr(hub, "snapshot_download", fetched)
    assert resolve_model(name, Registry()) == tmp_path
    assert fetched.call_args.args == (repo,)
    assert fetched.call_args.kwargs["revision"] == revision


NO_REVISIONS = (
    *("who/knows@", "who@a@b", "@main", "who/knows@/etc", "a/b@c d"),
    *("a/b@..", "a/b@../../x", "a/b@x/../y", "a../b"),
)


@pytest.mark.parametrize("name", NO_REVISIONS)
def test_what_is_no_revision_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="nor can it be a hub id"):
        locate_model(name, Registry())


def hub_error(name: str) -> Exception:
    errors = pytest.importorskip("huggingface_hub.errors")
    kind: Any = getattr(errors, name)
    return kind.__new__(kind)  # type: ignore[no-any-return]  # what it is made of differs between versions


@pytest.mark.parametrize(
    ("name", "offline", "says"),
    [
        (
            "LocalEntryNotFoundError",
            True,
            "HF_HUB_OFFLINE keeps us from asking the hub, and the model is not in the cache, /",
        ),
        (
            "LocalEntryNotFoundError",
            False,
            "https://huggingface.co can't be reached, and the model is not in the cache, /",
        ),
        ("GatedRepoError", False, "the model is gated: ask for access on its page"),
        (
            "RepositoryNotFoundError",
            False,
            "it has no model of that name, or one that only its owners see",
        ),
        ("RevisionNotFoundError", False, "it has the model, but no such revision"),
        ("HFValidationError", False, "that can't be the name of a model there"),
    ],
)
def test_a_hub_that_gives_nothing_is_reported_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, name: str, offline: bool, says: str
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(hub, "snapshot_download", Mock(side_effect=hub_error(name)))
    with pytest.raises(ModelLoadError) as caught:
        resolve_model("who/knows", built_in("demo"))
    assert f"the Hugging Face hub: {says}" in str(caught.value)
    assert "Error" not in str(caught.value)


def test_without_the_package_of_the_hub_its_pip_line_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        MissingExtraError,
        match=r"'dmo' is neither bundled nor a directory here \(bundled models: demo, did you mean "
        r"demo\?\)",
    ) as caught:
        resolve_model("dmo", built_in("demo"))
    assert "pip install" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        ("Bad Name", "a", "b"),
        ("x", "not-a-module", "b"),
        ("x", "a", "/abs"),
        ("x", "a", "b/../../c"),
    ],
)
def test_malformed_bundle_is_refused(fields: tuple[str, str, str]) -> None:
    with pytest.raises(PluginError, match="BundledModel"):
        BundledModel(*fields)
