"""Jobs for tests: their files, and `dovetail batch run` called as a user would."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from dovetail.cli.app import app

Fields = Mapping[str, Any]


def write_rows(path: Path, rows: Iterable[Fields | str]) -> Path:
    """Write JSONL; texts are lines as they stand."""
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows),
        encoding="utf-8",
    )
    return path


def write_job(directory: Path, **keys: Any) -> Path:
    """Write a job file with usual keys, but for those given; None leaves a key out."""
    usual = {
        "engine": "demo",
        "input": str(directory / "rows.jsonl"),
        "output": str(directory / "answers"),
    }
    path = directory / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {key: value for key, value in {**usual, **keys}.items() if value is not None}
        )
    )
    return path


def run_job(job: Path, *options: str, code: int = 0) -> str:
    """Return the command's output; its exit code must be `code`."""
    result = CliRunner().invoke(app, ["batch", "run", str(job), *options])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def answers(directory: Path) -> list[dict[str, Any]]:
    """All answers in the folder of a job in JSONL, in the order of the files."""
    return [
        json.loads(line)
        for path in sorted((directory / "answers").glob("part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
