"""Files that are written whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.api.whole_files import write_whole


def test_a_file_is_replaced_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("old")

    def write(beside: Path) -> None:
        beside.write_text("new")
        assert path.read_text() == "old"

    write_whole(path, write)
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("old")

    def fail(beside: Path) -> None:
        beside.write_text("half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_whole(path, fail)
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]
