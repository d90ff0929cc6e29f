"""Files are written whole or not at all, and what can't be is said before the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail.errors import ConfigError
from dovetail_lab.writing import make_folder, write_whole


def test_what_was_there_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.csv", "old\n")
    write_whole(tmp_path / "a.csv", "néw\n")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [
        ("a.csv", "néw\n".encode())
    ]


def test_an_interruption_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "a.csv", "old")

    def interrupted(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.csv", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.csv", "old")]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"folder: can't be written: "):
        write_whole(tmp_path / "folder", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_cannot_be_written_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(
        ConfigError, match=r"--out: .*: can't be created or written to: Permission denied"
    ):
        make_folder(tmp_path / "new")
