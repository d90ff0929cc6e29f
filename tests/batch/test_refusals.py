"""Errors in a job are reported by name before an engine starts; until then only the folder and its
lock are written."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from tests.batch.jobs import run_job, write_job, write_rows

GOOD = {"id": "a", "prompt": "ROMEO:"}


@pytest.fixture(autouse=True)
def no_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's process is started while the input is read, and ended if that is refused: not in
    these tests, which would take seconds each."""

    class NoLink:
        def __init__(self, *args: object) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr("dovetail_batch.runner.EngineLink", NoLink)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"engin": "demo"}, "job.yaml:1: engin: unknown key, did you mean engine?"),
        ({"engine": None}, "engine: this key is required"),
        ({"engine": {"modle": "demo"}}, "engine: modle: unknown key, did you mean model?"),
        ({"engine": "nowhere.yaml"}, "engine: nowhere.yaml: can't be read: No such file"),
        ({"engine": []}, "engine: expected"),
        (
            {"engine": ["demo", "other"]},
            "engine: the engines of a job must have one model, got demo, other",
        ),
        (
            {"engine": ["demo"], "engines": 2},
            "engines: engine is a list of 1, which says how many there are: leave this out",
        ),
        ({"engines": 0}, "engines: expected greater than or equal to 1, got 0"),
        ({"engines": 2, "gpus": ["0"]}, "gpus: expected one for each engine, which are 2, got 1"),
        ({"input": "-"}, "input: a job reads its rows twice"),
        (
            {"input": "rows.txt"},
            "rows.txt: its name doesn't end in .jsonl, .ndjson, .csv, .parquet: say the `format`",
        ),
        ({"input": {"path": "rows.jsonl", "format": "xml"}}, "input.format: expected"),
        (
            {"input": {"path": "rows.jsonl", "columns": {"id": "x"}}},
            "input.columns: name the column of a prompt, messages or token_ids",
        ),
        ({"input": {"path": "rows.jsonl", "columns": {"promt": "x"}}}, "input.columns"),
        (
            {"input": {"path": "rows.jsonl", "format": "openai", "columns": {"prompt": "x"}}},
            "input.columns: OpenAI's format has names of its own",
        ),
        (
            {"input": "nowhere.jsonl"},
            "input: nowhere.jsonl: can't be read: No such file or directory",
        ),
        ({"input": "a\0b.jsonl"}, "can't be read: embedded null byte"),
        ({"input": "/"}, "its name doesn't end in"),
        ({"input": {"path": "/", "format": "jsonl"}}, "input: /: can't be read: Is a directory"),
        ({"output": "answers.jsonl"}, "output: answers.jsonl: the answers are a folder of files"),
        (
            {"output": {"path": "answers", "format": "csv"}},
            "output.format: expected 'jsonl', 'parquet' or 'openai', got 'csv'",
        ),
        ({"output": "a\0b"}, "can't be written to: embedded null byte"),
        (
            {"output": "/proc/nowhere"},
            "output: /proc/nowhere: can't be written to: No such file or directory",
        ),
        ({"sampling": {"max_tokens": 0}}, "sampling: max_tokens must be an integer >= 1"),
        (
            {"sampling": {"max_token": 1}},
            "sampling: max_token: unknown sampling parameter, did you mean max_tokens?",
        ),
        (
            {"sampling": {"output_kind": "delta"}},
            "sampling: output_kind: a job writes whole answers",
        ),
        (
            {"sampling": {"stop": {"a"}}},
            "sampling: expected values that JSON has, too: Object of type set is not JSON "
            "serializable",
        ),
        ({"shard_rows": 0}, "shard_rows: expected greater than or equal to 1, got 0"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    write_rows(tmp_path / "rows.jsonl", [GOOD])
    assert told in run_job(write_job(tmp_path, **keys), code=2)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "rows.jsonl: no rows in it"),
        (["", "  "], "rows.jsonl: no rows in it"),
        ([GOOD, {"id": "b", "prompt": "x"}, GOOD], "rows 1 and 3 have the same id, 'a'"),
        (
            [GOOD, {**GOOD, "id": 2}, {"prompt": "x"}, {**GOOD, "id": "3"}],
            "rows 3 and 4 have the same id, '3'",
        ),
        (
            [{"id": 1, "promt": "x"}, {"id": 2, "promt": "x"}],
            "its first 2 rows are all wrong, row 1 for instance: promt: unknown key, did you mean "
            "prompt?",
        ),
        (["ROMEO:"], "its only row is wrong: not valid JSON"),
        (
            [{"custom_id": "a", "body": {}}],
            "sampling, pooling, extra, predicted_tokens; is this OpenAI's batch format?",
        ),
    ],
)
def test_an_input_of_which_nothing_would_come_is_refused(
    tmp_path: Path, rows: list[Any], told: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", rows)
    assert told in run_job(write_job(tmp_path), code=2)
    assert [path.name for path in (tmp_path / "answers").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("text", "columns", "told"),
    [
        ("id,promt\n1,x\n", {}, "unknown column 'promt', did you mean prompt?"),
        (
            "id,question\n1,x\n",
            {"prompt": "quest"},
            "no column 'quest', which is to be the prompt, did you mean question?",
        ),
        ("id,promt\n1,x\n", {}, "prompt? Say with `columns` of the input which are to be used"),
        (
            "id,x\n1,x\n",
            {},
            "unknown column 'x'; known are id, prompt, messages, token_ids, sampling, pooling, "
            "extra, predicted_tokens. Say with",
        ),
        ("id,id\n1,x\n", {}, "the header has the column 'id' twice"),
        ('id,prompt\n1,"x\n', {}, "not CSV from byte 15 on: unexpected end of data"),
        ("", {}, "no rows in it"),
        ("id,prompt\n", {}, "no rows in it"),
    ],
)
def test_a_table_whose_columns_are_others_is_refused(
    tmp_path: Path, text: str, columns: dict[str, str], told: str
) -> None:
    (tmp_path / "rows.csv").write_text(text)
    job = write_job(tmp_path, input={"path": str(tmp_path / "rows.csv"), "columns": columns})
    assert told in run_job(job, code=2)


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_rows(tmp_path / "rows.parquet", [GOOD])
    assert "rows.parquet: not a Parquet file" in run_job(
        write_job(tmp_path, input=str(tmp_path / "rows.parquet")), code=2
    )


def test_what_can_be_read_once_alone_is_refused(tmp_path: Path) -> None:
    # a pipe would keep the one who opens it
    job = write_job(tmp_path, input={"path": "/dev/null", "format": "jsonl"})
    assert "/dev/null: a pipe or a device: a job reads its rows twice" in run_job(job, code=2)


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(
        pa.table([["a"], ["x"], ["y"]], names=["id", "prompt", "prompt"]), tmp_path / "rows.parquet"
    )
    assert "the header has the column 'prompt' twice" in run_job(
        write_job(tmp_path, input=str(tmp_path / "rows.parquet")), code=2
    )


def test_an_input_that_has_the_name_of_answers_is_kept(tmp_path: Path) -> None:
    named = write_rows(tmp_path / "part-000000.jsonl", [GOOD])
    (tmp_path / "link.jsonl").symlink_to(named)
    for name in (named.name, "link.jsonl"):
        job = write_job(tmp_path, input=str(tmp_path / name), output=str(tmp_path))
        assert "the input is in it, and has the name of a file of answers" in run_job(
            job, "--anew", code=2
        )
    assert named.exists()


@pytest.mark.parametrize(
    "keys", [{"input": "rows.parquet"}, {"output": {"path": "answers", "format": "parquet"}}]
)
def test_without_pyarrow_parquet_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    monkeypatch.setattr("dovetail_batch.parquet.find_spec", lambda name: None)
    write_rows(tmp_path / "rows.jsonl", [GOOD])
    assert 'Parquet needs pyarrow; install with: pip install "dovetail-llm[batch]"' in run_job(
        write_job(tmp_path, **keys), code=2
    )


def test_a_folder_that_another_run_writes_to_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "answers").mkdir()
    with (tmp_path / "answers" / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "answers: another run of a job is writing to it" in run_job(
            write_job(tmp_path), code=2
        )


def test_answers_without_a_manifest_are_rejected(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "part-000000.jsonl").write_text("{}\n")
    assert "there is part-000000.jsonl and no manifest that says what it is of" in run_job(
        write_job(tmp_path), code=2
    )


MANIFEST_OF_TEXTS = json.dumps(
    {"version": 1, "sha256": "x", "settings": {}, "rows": "1", "starts": ["0"]}
)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"version": 2}',
        json.dumps({"version": 1, "sha256": "x"}),
        MANIFEST_OF_TEXTS,
        "[" * 10**5,
    ],
)
def test_an_invalid_manifest_is_reported(tmp_path: Path, text: str) -> None:
    write_rows(tmp_path / "rows.jsonl", [GOOD])
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "manifest.json").write_text(text)
    assert "manifest.json: can't be read" in run_job(write_job(tmp_path), code=2)
