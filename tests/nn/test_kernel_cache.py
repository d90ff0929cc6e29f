"""Kernels that are brought along are found wherever their folder is, and never written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.cache import FileCacheManager

from dovetail.nn.kernels.cache import VARIABLE, kernel_cache, prepare_cache

KEY = "KERNEL"
FILES = {"_add.cubin": b"machine code", "_add.json": b"{}"}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder in which Triton keeps kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that Triton has filled elsewhere, and that has been moved and made read-only."""
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
        manager = FileCacheManager(KEY)
        paths = {name: manager.put(content, name) for name, content in FILES.items()}
        manager.put_group("_add.json", paths)
    shutil.move(tmp_path / "elsewhere", tmp_path / "brought")
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'missing'}:{tmp_path / 'brought'}")
    return tmp_path / "brought"


def test_a_kernel_is_found_in_a_folder_that_was_moved(own: Path, brought: Path) -> None:
    assert FileCacheManager(KEY).get_group("_add.json") is None
    manager = kernel_cache()(KEY)
    group = manager.get_group("_add.json")
    assert group == {name: str(brought / KEY / name) for name in FILES}
    assert Path(manager.get_file("_add.cubin")).read_bytes() == FILES["_add.cubin"]


def test_kernels_of_triton_s_own_folder_come_first_and_new_ones_go_there(
    own: Path, brought: Path
) -> None:
    before = sorted(path for path in brought.rglob("*") if path.is_file())
    manager = kernel_cache()(KEY)
    path = manager.put(b"newer", "_add.cubin")
    manager.put_group("_add.json", {"_add.cubin": path})
    assert manager.get_group("_add.json") == {"_add.cubin": str(own / KEY / "_add.cubin")}
    assert sorted(path for path in brought.rglob("*") if path.is_file()) == before


def test_other_kernels_and_files_are_not_there(own: Path, brought: Path) -> None:
    assert kernel_cache()("OTHER").get_group("_add.json") is None
    assert kernel_cache()(KEY).get_group("_sub.json") is None
    assert kernel_cache()(KEY).get_file("_sub.cubin") is None


@pytest.mark.parametrize(
    "group", ["", "null", "[]", '{"child_paths": 1}', '{"child_paths": null}', "{}", "\xff"]
)
def test_a_group_that_is_broken_is_compiled_again(own: Path, brought: Path, group: str) -> None:
    (brought / KEY / "__grp___add.json").write_text(group, encoding="latin-1")
    assert kernel_cache()(KEY).get_group("_add.json") is None


def test_a_group_with_a_file_missing_is_compiled_again(own: Path, brought: Path) -> None:
    (brought / KEY / "_add.cubin").unlink()
    assert kernel_cache()(KEY).get_group("_add.json") is None


def test_a_group_with_an_empty_file_is_compiled_again(own: Path, brought: Path) -> None:
    (brought / KEY / "_add.cubin").write_bytes(b"")
    assert kernel_cache()(KEY).get_group("_add.json") is None


def test_a_folder_that_cannot_be_read_is_passed_over(
    own: Path, brought: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    odd = [tmp_path / "file", tmp_path / ("x" * 300), brought]
    monkeypatch.setenv(VARIABLE, ":".join(map(str, odd)))
    assert kernel_cache()(KEY).get_group("_add.json") is not None


def test_names_of_other_folders_are_not_followed(own: Path, brought: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    group = {"child_paths": {"../../secret": "x"}}
    (brought / KEY / "__grp___add.json").write_text(json.dumps(group))
    assert kernel_cache()(KEY).get_group("_add.json") is None


def test_the_cache_of_the_program_is_left_alone(
    own: Path, brought: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = prepare_cache.__wrapped__
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    prepare()
    assert knobs.cache.manager_class is kernel_cache()

    class Own(FileCacheManager): ...

    monkeypatch.setattr(knobs.cache, "manager_class", Own)
    prepare()
    assert knobs.cache.manager_class is Own


def test_without_the_variable_triton_s_cache_is_used(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(knobs.cache, "manager_class", None)
    prepare_cache.__wrapped__()
    assert knobs.cache.manager_class is None
