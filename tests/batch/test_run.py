"""`dovetail batch run` from input to output files: answers equal `LLM.generate`'s, each row has
one, and an interrupted job resumes."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from bench.batch import main as bench_main
from bench.toy import answer, installed_in

from dovetail import LLM, LLMEngine, PoolingParams, SamplingParams
from dovetail.api import process_watch
from dovetail.errors import ConfigError, EngineDeadError, ModelLoadError
from dovetail.front.tokenizer import Tokenizer
from dovetail_batch import open_job, runner
from dovetail_batch.engine_process import EngineWorker, start_engine
from dovetail_batch.job import load_plan
from dovetail_batch.rows import JobRow
from dovetail_batch.runner import EngineLink, SentRows
from dovetail_batch.shards import ShardStore
from dovetail_batch.sources import Jsonl
from tests.batch.jobs import answers, run_job, write_job, write_rows

TOY = {"model": "demo", "executor": {"name": "toy"}, "max_num_seqs": 8}


class ThreadLink(EngineLink):
    """An engine in a thread of this process, which starts in no time. The test of docs/batch.md and
    `bench/batch.py` start processes."""

    def __init__(self, index: int, source: str | Mapping[str, Any], gpus: str | None) -> None:
        self.sent, self._window, self._index = SentRows(), 0, index
        self.connection, self._theirs = Pipe()
        self._threads = [
            threading.Thread(target=self._receive, daemon=True),
            threading.Thread(target=self._work, args=(source,), daemon=True),
        ]
        self._received: queue.SimpleQueue[list[JobRow] | None] = queue.SimpleQueue()
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        return os.getpid()

    def _receive(self) -> None:
        try:
            while (rows := self._theirs.recv()) is not None:
                self._received.put(rows)
        except (EOFError, OSError):
            pass
        self._received.put(None)

    def _work(self, source: Any) -> None:
        with LLMEngine.from_config(source) as engine:
            self._theirs.send(("ready", engine.config.max_num_seqs))
            try:
                EngineWorker(
                    engine, self._received, lambda some: self._theirs.send(("answers", some))
                ).run()
            except OSError:  # the job was interrupted
                return
            except EngineDeadError as error:
                self._theirs.send(("dead", str(error)))

    def finish(self) -> None:
        self.connection.send(None)

    def close(self) -> None:
        self._received.put(None)
        for thread in self._threads[1:]:
            thread.join()
        self.connection.close()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run in this process, and the executor `toy` is there."""
    installed_in(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(runner, "EngineLink", ThreadLink)


def toy_rows(count: int, tokens: int = 5) -> list[dict[str, Any]]:
    sampling = {"max_tokens": tokens, "ignore_eos": True}
    return [
        {"id": f"q{seed}", "prompt": f"row {seed}", "sampling": {"seed": seed, **sampling}}
        for seed in range(count)
    ]


def texts(directory: Path) -> list[str]:
    return [one["outputs"][0]["text"] for one in answers(directory)]


@pytest.mark.slow("makes two engines")
@pytest.mark.usefixtures("toy")
def test_answers_of_the_demo_model_are_those_of_generate(tmp_path: Path) -> None:
    """Texts and token ids, one sample and two. With processes, docs/batch.md runs a job."""
    params = [
        SamplingParams(seed=seed, max_tokens=8 + seed, temperature=0.8, n=1 + seed % 2)
        for seed in range(6)
    ]
    prompts = ["ROMEO:", "JULIET:\nO", [5, 6, 7], "The king", [199], "Enter"]
    rows: list[Any] = [
        {
            "id": f"q{at}",
            "prompt" if isinstance(prompt, str) else "token_ids": prompt,
            "sampling": {"seed": at, "max_tokens": 8 + at, "n": 1 + at % 2},
        }
        for at, prompt in enumerate(prompts)
    ]
    rows.append({"id": "bad", "prompt": "x" * 100_000})
    write_rows(tmp_path / "rows.jsonl", rows)
    told = run_job(write_job(tmp_path, sampling={"temperature": 0.8}, shard_rows=3))
    assert "7 rows computed now: 7 rows" in told
    assert "failed: 1 row; `error` says why: row 7: the prompt has 100000 characters" in told
    with LLM("demo") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = answers(tmp_path)
    assert [(one["id"], one["row"]) for one in found] == [
        (row["id"], at) for at, row in enumerate(rows, start=1)
    ]
    for one, output in zip(found, outputs, strict=False):
        assert one["error"] is None
        assert [sample["text"] for sample in one["outputs"]] == [
            sample.text for sample in output.outputs
        ]
        assert [sample["token_ids"] for sample in one["outputs"]] == [
            list(sample.token_ids) for sample in output.outputs
        ]
        assert one["prompt_tokens"] == len(output.prompt_token_ids)
    assert found[-1]["outputs"] == []


@pytest.mark.usefixtures("toy")
def test_rows_that_fail_say_why_and_the_others_are_answered(tmp_path: Path) -> None:
    bad: list[Any] = [
        '{"id": "broken"',
        {"id": "bad", "prompt": "x", "sampling": {"n": 0}},
        {"id": "ids", "token_ids": [5000]},
        {"id": "two"},
    ]
    bad += [{"id": "half", "prompt": "\ud800"}, {"id": "role", "messages": [{"content": "x"}]}]
    write_rows(tmp_path / "rows.jsonl", [*toy_rows(3), *bad])
    assert "failed: 6 rows" in run_job(write_job(tmp_path, engine=TOY))
    found = answers(tmp_path)
    assert [one["outputs"][0]["text"] for one in found[:3]] == [
        answer(seed, 5) for seed in range(3)
    ]
    errors = [(one["id"], one["error"]) for one in found[3:]]
    for (name, told), (wanted, part) in zip(
        errors,
        [
            (None, "not valid JSON"),
            ("bad", "sampling: n must be an integer >= 1"),
            ("ids", "prompt token id 5000 is out of the vocabulary"),
            ("two", "expected exactly one of prompt, messages, token_ids, got none"),
            ("half", "half a surrogate pair"),
            ("role", "role"),
        ],
        strict=True,
    ):
        assert name == wanted
        assert part in told


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("engines", [1, 3])
def test_a_job_that_is_interrupted_anywhere_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: int
) -> None:
    """Every run is stopped after at most nine stored answers, regardless of what else was computed;
    changing performance settings doesn't make another job."""
    write_rows(tmp_path / "rows.jsonl", toy_rows(40))
    kept: list[int] = []
    add = ShardStore.add

    def interrupted(store: ShardStore, some: Any) -> Any:
        some = list(some)[:9]
        kept.extend(one["row"] for one in some)
        add(store, some)
        raise KeyboardInterrupt

    runs = 0
    with monkeypatch.context() as patch:
        patch.setattr(ShardStore, "add", interrupted)
        while len(kept) < 20:
            runs += 1
            assert "interrupted: what is computed is in" in run_job(
                write_job(
                    tmp_path,
                    engine={**TOY, "max_num_seqs": 4 + runs},
                    engines=engines,
                    shard_rows=7,
                ),
                code=130,
            )
    assert runs > 1
    told = run_job(write_job(tmp_path, engine=TOY, engines=1, shard_rows=7))
    assert f"40 rows, {len(kept)} of them before" in told
    assert f"computed now: {40 - len(kept)} rows" in told
    assert len(set(kept)) == len(kept)
    assert texts(tmp_path) == [answer(seed, 5) for seed in range(40)]
    assert "40 rows, all of them computed before" in run_job(
        write_job(tmp_path, engine=TOY, shard_rows=7)
    )


@pytest.mark.usefixtures("toy")
def test_another_input_or_other_settings_are_refused_and_taken_anew(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", toy_rows(3))
    run_job(write_job(tmp_path, engine=TOY))
    told = run_job(
        write_job(tmp_path, engine={**TOY, "dtype": "bfloat16"}, sampling={"top_k": 3}, seed=1),
        code=2,
    )
    assert "engine.dtype: was 'auto', now it is 'bfloat16'" in told
    assert "sampling.top_k: was None, now it is 3" in told
    assert "seed: was 0, now it is 1" in told
    assert "--anew" in told
    write_rows(tmp_path / "rows.jsonl", toy_rows(5))
    assert "its answers are of an input with other content: its SHA-256 was" in run_job(
        write_job(tmp_path, engine=TOY), code=2
    )
    assert len(texts(tmp_path)) == 3
    (tmp_path / "answers" / "notes.txt").write_text("mine")
    run_job(write_job(tmp_path, engine=TOY, shard_rows=2), "--anew")
    assert texts(tmp_path) == [answer(seed, 5) for seed in range(5)]
    assert (tmp_path / "answers" / "notes.txt").read_text() == "mine"


@pytest.mark.usefixtures("toy")
def test_formats_hold_the_same_answers(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "rows.jsonl",
        [*toy_rows(3), {"id": "bad", "prompt": 5}, {"id": "\ud800", "prompt": "x"}],
    )
    run_job(write_job(tmp_path, engine=TOY))
    wanted = answers(tmp_path)
    assert wanted[-1].pop("id") == "\ud800", (
        "half a surrogate pair, which JSON has and Parquet hasn't"
    )
    wanted[-1]["id"] = r"\ud800"
    parquet = pytest.importorskip("pyarrow.parquet")
    run_job(
        write_job(
            tmp_path, engine=TOY, output={"path": str(tmp_path / "columns"), "format": "parquet"}
        )
    )
    table = parquet.read_table(tmp_path / "columns" / "part-000000.parquet").to_pylist()
    for one, row in zip(wanted, table, strict=True):
        assert [row[key] for key in ("id", "row", "error", "prompt_tokens")] == [
            one[key] for key in ("id", "row", "error", "prompt_tokens")
        ]
        assert [(sample["text"], sample["token_ids"]) for sample in row["outputs"]] == [
            (s["text"], s["token_ids"]) for s in one["outputs"]
        ]


@pytest.mark.usefixtures("toy")
def test_a_file_of_openais_batch_api_becomes_one(tmp_path: Path) -> None:
    def line(name: str, url: str, **body: Any) -> dict[str, Any]:
        return {
            "custom_id": name,
            "method": "POST",
            "url": f"/v1/{url}",
            "body": {"model": "toy", "seed": 3, "ignore_eos": True, **body},
        }

    lines = [
        line("a", "completions", prompt="ROMEO:", max_tokens=5),
        line(
            "b",
            "chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=6,
        ),
        line("c", "completions", prompt=[1, 2], max_tokens=7, temperature=None, user="x"),
        line("d", "embeddings", input="x"),
        line("e", "chat/completions", messages=[{"role": "user", "content": "hi"}], tools=[]),
        line("f", "chat/completions", messages=[{"role": "user", "content": "hi"}], stream=True),
        line("g", "completions", prompt=["x", "y"]),
        line("h", "chat/completions", messages=[{"role": "user", "content": "hi"}], logprobs=True),
    ]
    write_rows(tmp_path / "rows.jsonl", lines)
    job = write_job(
        tmp_path,
        engine=TOY,
        input={"path": str(tmp_path / "rows.jsonl"), "format": "openai"},
        output={"path": str(tmp_path / "answers"), "format": "openai"},
    )
    assert "failed: 5 rows" in run_job(job)
    found = {one["custom_id"]: one for one in answers(tmp_path)}
    assert list(found) == list("abcdefgh")
    assert found["a"]["response"]["body"]["choices"][0] == {
        "index": 0,
        "text": answer(3, 5),
        "logprobs": None,
        "finish_reason": "length",
    }
    assert found["b"]["response"]["body"]["choices"][0]["message"] == {
        "role": "assistant",
        "content": answer(3, 6),
    }
    assert found["c"]["response"]["body"]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 7,
        "total_tokens": 9,
    }
    for name, part in {
        "h": "logprobs: answers in the format openai have none",
        "d": "pooling: this job's task is generate",
        "e": "tools: `dovetail batch` doesn't read it",
        "f": "stream: a job",
        "g": "one text",
    }.items():
        assert found[name]["response"] is None
        assert part in found[name]["error"]["message"]


@pytest.mark.usefixtures("toy")
def test_a_job_embeds_rows_as_embed_does(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"id": "a", "prompt": "ROMEO:"},
        {"id": "b", "token_ids": [5, 6, 7], "pooling": {"dimensions": 8}},
        {"id": "c", "prompt": "x", "pooling": {"dimension": 8}},
        {"id": "d", "prompt": "x", "pooling": {"prompt_name": "query"}},
        {"id": "e", "prompt": "x", "sampling": {"max_tokens": 1}},
        {"id": "f", "token_ids": [5], "pooling": {"prompt_name": "query"}},
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert "failed: 4 rows" in run_job(write_job(tmp_path, task="embed", pooling={"dimensions": 4}))
    found = answers(tmp_path)
    with LLM("demo") as llm:
        sizes: list[tuple[Any, int]] = [("ROMEO:", 4), ([5, 6, 7], 8)]
        wanted = [
            llm.embed(prompt, pooling_params=PoolingParams(dimensions=size), use_tqdm=False)[0]
            for prompt, size in sizes
        ]
    for one, output in zip(found, wanted, strict=False):
        assert output.outputs is not None
        assert one["embedding"] == pytest.approx(output.outputs.embedding, abs=1e-6)
        assert (one["prompt_tokens"], one["outputs"]) == (len(output.prompt_token_ids), [])
    said = (
        "dimension: unknown key, did you mean dimensions?",
        "no prompt named 'query'",
        "sampling: this job's task is embed",
        "these are token ids",
    )
    for one, part in zip(found[2:], said, strict=True):
        assert part in one["error"]
    lines = [
        {
            "custom_id": "a",
            "url": "/v1/embeddings",
            "body": {"model": "m", "input": "ROMEO:", "dimensions": 4},
        }
    ]
    lines += [{"custom_id": "b", "url": "/v1/embeddings", "body": {"input": ["x", "y"]}}]
    write_rows(tmp_path / "rows.jsonl", lines)
    parts = {
        "input": {"path": str(tmp_path / "rows.jsonl"), "format": "openai"},
        "output": {"path": str(tmp_path / "lines"), "format": "openai"},
    }
    run_job(write_job(tmp_path, task="embed", **parts))
    [line, failed] = [
        json.loads(text)
        for text in (tmp_path / "lines" / "part-000000.jsonl").read_text().splitlines()
    ]
    assert line["response"]["body"]["data"][0]["embedding"] == pytest.approx(
        found[0]["embedding"], abs=1e-6
    )
    assert "one text" in failed["error"]["message"]


def test_parameters_of_another_task_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "x"}])
    assert "sampling: a job that embeds has" in run_job(
        write_job(tmp_path, task="embed", sampling={"seed": 1}), code=2
    )
    assert "pooling: it is for jobs with" in run_job(
        write_job(tmp_path, pooling={"dimensions": 1}), code=2
    )


@pytest.mark.usefixtures("toy")
def test_an_engine_that_dies_takes_no_row_with_it(tmp_path: Path) -> None:
    """The device is lost: no row is reported as failed, and the next run computes it."""
    write_rows(tmp_path / "rows.jsonl", toy_rows(40, tokens=4))
    lost = {**TOY, "executor": {"name": "toy", "fails_at_step": 12}}
    assert "engine 0 has failed: " in run_job(
        write_job(tmp_path, engine=lost, shard_rows=10), code=1
    )
    kept = [
        json.loads(line)
        for path in (tmp_path / "answers").glob("part-*")
        for line in path.read_text().splitlines()
    ]
    assert 0 < len(kept) < 40
    assert all(one["error"] is None for one in kept)


@pytest.mark.usefixtures("toy")
def test_an_input_is_read_in_one_pass_however_small_the_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a format can't be entered anywhere, as with the large groups of rows in Parquet,
    beginning again for each shard would take forever."""
    begun: list[int] = []
    records = Jsonl.records

    def counted(source: Jsonl, position: int) -> Any:
        begun.append(position)
        return records(source, position)

    write_rows(tmp_path / "rows.jsonl", toy_rows(20, tokens=1))
    monkeypatch.setattr(Jsonl, "records", counted)
    run_job(write_job(tmp_path, engine=TOY, shard_rows=1))
    assert begun == [0, 0, 0], "to see whether rows are right, to scan them, to compute them"
    begun.clear()
    (tmp_path / "answers" / "part-000007.jsonl").unlink()
    assert "computed now: 1 row," in run_job(write_job(tmp_path, engine=TOY, shard_rows=1))
    assert [position > 0 for position in begun] == [False, True]
    assert texts(tmp_path) == [answer(seed, 1) for seed in range(20)]


@pytest.mark.usefixtures("toy")
def test_an_input_that_changes_while_it_is_read_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", toy_rows(5))
    scan = open_job.scan

    def changed(*args: Any) -> Any:
        found = scan(*args)
        write_rows(rows, toy_rows(4))
        return found

    monkeypatch.setattr(open_job, "scan", changed)
    assert "rows.jsonl: it was changed while the job ran" in run_job(
        write_job(tmp_path, engine=TOY), code=2
    )


def test_each_engine_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    ends: list[int] = []

    class Process:
        def __init__(
            self, command: list[str], *, env: Mapping[str, str], pass_fds: list[int], **others: Any
        ) -> None:
            seen.append(env.get("CUDA_VISIBLE_DEVICES", "all"))
            ends.append(os.dup(pass_fds[0]))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("dovetail_batch.runner.subprocess.Popen", Process)
    for place, gpus in enumerate(["0", "1,2", None]):
        EngineLink(place, "demo", gpus).connection.close()
    assert seen == ["0", "1,2", "all"]
    for end in ends:
        os.close(end)


@pytest.mark.parametrize(
    ("gpus", "visible", "seen"),
    [
        (1, None, ("0", "1")),
        (2, "3,5,7,9,11", ("3,5", "7,9")),
        (0, "3", ("", "")),
        (["4", "2,3"], "0", ("4", "2,3")),
        ([], "0", (None, None)),
        (1, "3", "gpus: 2 engines of 1 need 2 GPUs, and CUDA_VISIBLE_DEVICES names 1"),
        (1, "", "gpus: 2 engines of 1 need 2 GPUs, and CUDA_VISIBLE_DEVICES names 0"),
    ],
)
def test_a_number_of_gpus_is_shared_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: Any, visible: str | None, seen: Any
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    plan = load_plan(str(write_job(tmp_path, engines=2, gpus=gpus)))
    if isinstance(seen, str):
        with pytest.raises(ConfigError, match=seen):
            _ = plan.gpus
    else:
        assert plan.gpus == seen


@pytest.mark.usefixtures("sockets_with_a_time_limit")
@pytest.mark.slow("takes more than the budget")
def test_a_job_runs_where_the_program_gives_all_sockets_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    monkeypatch.setenv("PYTHONPATH", installed_in(site)["PYTHONPATH"])
    monkeypatch.syspath_prepend(str(site))
    write_rows(tmp_path / "rows.jsonl", toy_rows(2))
    run_job(write_job(tmp_path, engine=TOY | {"sampler": "toy"}))  # its process imports no torch
    assert texts(tmp_path) == [answer(seed, 5) for seed in range(2)]


@pytest.mark.slow("starts a process")
def test_an_engine_that_cannot_start_is_reported(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", toy_rows(2))
    assert "engine: " in run_job(write_job(tmp_path, engine=str(tmp_path / "no-model")), code=2)


def test_an_engine_whose_process_is_stopped_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StoppedLink(EngineLink):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            os.kill(self.pid, signal.SIGSTOP)

    monkeypatch.setattr(runner, "EngineLink", StoppedLink)
    for module in (process_watch, runner):
        monkeypatch.setattr(module, "STOPPED_S", 0.1)
    write_rows(tmp_path / "rows.jsonl", toy_rows(2))
    assert "engine 0 has failed: it had been stopped (SIGSTOP) for 0.1 s" in run_job(
        write_job(tmp_path), code=1
    )


@pytest.mark.full
def test_a_job_that_is_killed_again_and_again_is_whole(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["batch", "kills", "--rows", "20000", "--kills", "5", "--step-s", "0.01"]
    )
    bench_main()
    assert capfd.readouterr().out.count("{'lost': 0, 'doubled': 0, 'wrong': 0}") == 2


def test_an_engine_loads_its_tokenizer_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Path | str] = []
    load = Tokenizer.load
    monkeypatch.setattr(
        Tokenizer, "load", lambda directory: loaded.append(directory) or load(directory)
    )
    with start_engine({"model": "demo"}) as engine:
        assert len(loaded) == 1
        assert engine.tokenizer.encode("ROMEO:")
        assert len(loaded) == 1


def test_an_engine_without_a_tokenizer_starts_for_rows_of_token_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(directory: Path | str) -> Tokenizer:
        raise ModelLoadError("it has none")

    monkeypatch.setattr(Tokenizer, "load", none)
    with start_engine({"model": "demo"}) as engine:
        output = engine.add_request(
            "a", {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2, detokenize=False)
        )
        assert output is None
        assert engine.has_unfinished_requests()
