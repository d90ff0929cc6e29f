"""`dovetail batch run --on ray`: the same answers and files as a run without Ray, each row once
despite failures, and errors by name.

CI runs this with `FakeRay`; `make test-cluster` sets DOVETAIL_TEST_RAY=1, and the same tests run
with Ray itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.toy import answer

from dovetail import LLM, SamplingParams
from dovetail_batch.open_job import OpenJob
from dovetail_cluster import ray_jobs
from tests.batch.jobs import answers, run_job, write_job, write_rows
from tests.batch.test_run import ThreadLink
from tests.cluster.fake_ray import ActorPoolStrategy, FakeDataset, FakeRay
from tests.cluster.ray_clusters import FakePlace, Place, fake_only, place, real_cluster, real_only

__all__ = ["place", "real_cluster"]  # fixtures

TOY = {"model": "demo", "executor": {"name": "toy"}, "max_num_seqs": 8}
TOKENS = 5


def toy_rows(count: int) -> list[dict[str, Any]]:
    sampling = {"max_tokens": TOKENS, "ignore_eos": True}
    return [
        {"id": f"q{seed}", "prompt": f"row {seed}", "sampling": {"seed": seed, **sampling}}
        for seed in range(count)
    ]


def on_ray(job: Path, place: Place, *options: str, code: int = 0) -> str:
    return run_job(job, "--on", "ray", "--address", place.address, *options, code=code)


def check_whole(directory: Path, rows: int) -> None:
    """Every row has its own answer, once, in order."""
    found = answers(directory)
    assert [one["row"] for one in found] == list(range(1, rows + 1))
    assert [one["outputs"][0]["text"] for one in found] == [
        answer(seed, TOKENS) for seed in range(rows)
    ]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "answers").glob("part-*")}


@pytest.mark.slow("makes two engines")
def test_answers_of_the_demo_model_are_those_of_generate(tmp_path: Path, place: Place) -> None:
    prompts: list[Any] = ["ROMEO:", "JULIET:\nO", [5, 6, 7], "The king", [199], "Enter"]
    params = [
        SamplingParams(seed=seed, max_tokens=8 + seed, temperature=0.8, n=1 + seed % 2)
        for seed in range(6)
    ]
    rows: list[Any] = [
        {
            "id": f"q{at}",
            "prompt" if isinstance(prompt, str) else "token_ids": prompt,
            "sampling": {"seed": at, "max_tokens": 8 + at, "n": 1 + at % 2},
        }
        for at, prompt in enumerate(prompts)
    ]
    rows += ['{"id": "broken"', {"id": "ids", "token_ids": [5000]}]
    write_rows(tmp_path / "rows.jsonl", rows)
    told = on_ray(write_job(tmp_path, sampling={"temperature": 0.8}, shard_rows=3), place)
    assert "failed: 2 rows" in told
    with LLM("demo") as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = answers(tmp_path)
    assert [one["row"] for one in found] == list(range(1, 9))
    for one, output in zip(found, outputs, strict=False):
        assert [sample["text"] for sample in one["outputs"]] == [
            sample.text for sample in output.outputs
        ]
        assert [sample["token_ids"] for sample in one["outputs"]] == [
            list(sample.token_ids) for sample in output.outputs
        ]
    assert "not valid JSON" in found[6]["error"]
    assert "out of the vocabulary" in found[7]["error"]


def test_a_job_begun_here_is_finished_there_and_files_are_the_same(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that are whole, begun and untouched are left by a run without Ray; a run without Ray
    then finds all of them."""
    monkeypatch.setattr("dovetail_batch.runner.EngineLink", ThreadLink)
    write_rows(tmp_path / "rows.jsonl", toy_rows(50))
    job = write_job(tmp_path, engine=TOY, shard_rows=10)
    run_job(job)
    alone = files(tmp_path)
    for shard in (1, 3, 4):
        (tmp_path / "answers" / f"part-{shard:06d}.jsonl").unlink()
    (tmp_path / "answers" / "part-000003.jsonl.open").write_bytes(
        b"".join(alone["part-000003.jsonl"].splitlines(keepends=True)[4:9]) + b'{"cut'
    )
    assert "50 rows, 25 of them before" in on_ray(job, place)
    assert files(tmp_path) == alone
    assert "all of them computed before" in on_ray(job, place)
    (tmp_path / "answers" / "part-000002.jsonl").unlink()
    assert "50 rows, 40 of them before" in run_job(job)
    assert files(tmp_path) == alone


@pytest.mark.slow("answers a batch many times")
def test_no_row_is_lost_or_doubled_when_workers_die(tmp_path: Path, place: Place) -> None:
    write_rows(tmp_path / "rows.jsonl", toy_rows(400))
    engine = {
        **TOY,
        "executor": {"name": "toy", "step_s": 0.002 if isinstance(place, FakePlace) else 0.05},
    }
    place.kill_a_worker_soon()
    on_ray(write_job(tmp_path, engine=engine, engines=2, shard_rows=30), place)
    assert place.killed() == 1
    check_whole(tmp_path, 400)


def test_an_engine_that_fails_is_replaced_while_it_brings_answers(
    tmp_path: Path, place: Place
) -> None:
    """Each attempt has engines of its own, whose device is lost at a step. Some forty rows need
    more steps than one has."""
    write_rows(tmp_path / "rows.jsonl", toy_rows(40))
    engine = {**TOY, "executor": {"name": "toy", "fails_at_step": 21}}
    on_ray(write_job(tmp_path, engine=engine), place)
    check_whole(tmp_path, 40)


def test_an_engine_that_fails_before_its_first_answer_ends_the_job(
    tmp_path: Path, place: Place
) -> None:
    write_rows(tmp_path / "rows.jsonl", toy_rows(3))
    told = on_ray(
        write_job(tmp_path, engine={**TOY, "executor": {"name": "toy", "fails_at_step": 2}}),
        place,
        code=1,
    )
    assert "an engine on Ray has failed" in told
    assert "the device was lost at step 2" in told
    assert "the same command goes on with the job" in told
    assert answers(tmp_path) == []
    on_ray(write_job(tmp_path, engine=TOY), place, "--anew")
    check_whole(tmp_path, 3)


def test_an_engine_that_cannot_start_is_reported(tmp_path: Path, place: Place) -> None:
    write_rows(tmp_path / "rows.jsonl", toy_rows(3))
    assert "error: engine: " in on_ray(
        write_job(tmp_path, engine=str(tmp_path / "no-model")), place, code=2
    )


def test_an_input_that_changes_while_the_job_begins_ends_it(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", toy_rows(5))
    rows_left = OpenJob.rows_left

    def changed(job: OpenJob) -> Any:
        write_rows(rows, toy_rows(4))
        return rows_left(job)

    monkeypatch.setattr(OpenJob, "rows_left", changed)
    assert "rows.jsonl: it was changed while the job ran" in on_ray(
        write_job(tmp_path, engine=TOY), place, code=2
    )


@fake_only
def test_groups_that_come_twice_or_never_change_no_answer(tmp_path: Path, place: Place) -> None:
    assert isinstance(place, FakePlace)
    write_rows(tmp_path / "rows.jsonl", toy_rows(60))
    place.ray.doubles, place.ray.loses = {1, 4, 7}, {2, 5}
    assert "computed now: 60 rows, 300 tokens" in on_ray(
        write_job(tmp_path, engine=TOY, engines=2, shard_rows=7), place
    )
    check_whole(tmp_path, 60)


@fake_only
def test_an_error_of_rays_is_followed_by_another_attempt_if_there_was_an_answer(
    tmp_path: Path, place: Place
) -> None:
    assert isinstance(place, FakePlace)
    write_rows(tmp_path / "rows.jsonl", toy_rows(60))
    place.ray.fails_after = 3
    on_ray(write_job(tmp_path, engine=TOY), place)
    assert place.ray.workers_started == 2
    check_whole(tmp_path, 60)
    place.ray.fails_after = place.ray.answered
    told = on_ray(write_job(tmp_path, engine=TOY), place, "--anew", code=1)
    assert "an engine on Ray has failed: a worker is gone; the same command" in told


@fake_only
def test_an_interrupted_job_continues_and_leaves_no_connection(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(place, FakePlace)
    write_rows(tmp_path / "rows.jsonl", toy_rows(60))
    store, calls = OpenJob.store, []

    def interrupted(job: OpenJob, given: Any) -> int:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return store(job, given)

    monkeypatch.setattr(OpenJob, "store", interrupted)
    on_ray(write_job(tmp_path, engine=TOY, shard_rows=7), place, code=130)
    assert not place.ray.connected
    assert "60 rows, 6 of them before" in on_ray(
        write_job(tmp_path, engine=TOY, shard_rows=7), place
    )
    check_whole(tmp_path, 60)


@fake_only
@pytest.mark.parametrize(
    ("keys", "options", "nodes", "told"),
    [
        (
            {},
            ["--on", "ray"],
            [{"CPU": 2}],
            "say where the cluster is, with --address HOST:PORT or RAY_ADDRESS",
        ),
        (
            {},
            ["--on", "ray", "--address", "ray://10.0.0.1:10001"],
            [{"CPU": 2}],
            "Ray's client can't stream rows",
        ),
        (
            {},
            ["--on", "ray", "--address", "nowhere"],
            [{"CPU": 2}],
            "--address: nowhere: no cluster can be reached there: could not connect",
        ),
        (
            {},
            ["--on", "ray", "--address", "127.0.0.1:1"],
            [{"CPU": 2}],
            "no cluster can be reached there: ",
        ),
        ({}, ["--on", "roy"], [{"CPU": 2}], "--on: expected ray, got 'roy'"),
        ({}, ["--address", "auto"], [{"CPU": 2}], "--address: it belongs to --on ray"),
        (
            {"gpus": ["0"]},
            ["--on", "ray", "--address", "auto"],
            [{"CPU": 2}],
            "gpus: with --on ray, Ray chooses which",
        ),
        (
            {},
            ["--on", "ray", "--address", "auto"],
            [{"CPU": 2, "GPU": 4}],
            "gpus: the cluster has 4: say how many each engine gets",
        ),
        (
            {"engines": 3},
            ["--on", "ray", "--address", "auto"],
            [{"CPU": 2}],
            "engines: 3 don't fit: each takes a CPU, and Ray has room for 2",
        ),
        (
            {"engines": 3, "gpus": 2},
            ["--on", "ray", "--address", "auto"],
            [{"CPU": 9, "GPU": 3}, {"CPU": 9, "GPU": 2}],
            "engines: 3 don't fit: each takes a CPU and 2 GPUs of one machine, and Ray has room "
            "for 2",
        ),
        (
            {"engine": [TOY, {**TOY, "max_num_seqs": 4}]},
            ["--on", "ray", "--address", "auto"],
            [{"CPU": 2}],
            "all engines have one config",
        ),
    ],
)
def test_what_does_not_fit_is_rejected_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Place,
    keys: dict[str, Any],
    options: Sequence[str],
    nodes: Sequence[dict[str, float]],
    told: str,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    FakeRay(nodes).installed(monkeypatch)
    write_rows(tmp_path / "rows.jsonl", toy_rows(3))
    assert told in run_job(write_job(tmp_path, **{"engine": TOY, **keys}), *options, code=2)
    assert not list((tmp_path / "answers").glob("*"))


@fake_only
def test_the_address_may_come_from_the_environment(
    tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    write_rows(tmp_path / "rows.jsonl", toy_rows(3))
    run_job(write_job(tmp_path, engine=TOY), "--on", "ray")
    check_whole(tmp_path, 3)


@fake_only
def test_answers_stay_when_the_cluster_is_the_wrong_one(tmp_path: Path, place: Place) -> None:
    write_rows(tmp_path / "rows.jsonl", toy_rows(3))
    on_ray(write_job(tmp_path, engine=TOY), place)
    run_job(
        write_job(tmp_path, engine=TOY), "--on", "ray", "--address", "nowhere", "--anew", code=2
    )
    check_whole(tmp_path, 3)


@fake_only
def test_without_ray_the_pip_line_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    write_rows(tmp_path / "rows.jsonl", toy_rows(3))
    told = run_job(write_job(tmp_path), "--on", "ray", "--address", "auto", code=2)
    assert 'install with: pip install "dovetail-llm[ray]"' in told


@fake_only
def test_a_batch_engine_gives_a_row_that_is_asked_for_twice_to_its_engine_once(
    place: Place,
) -> None:
    """As Ray may do with a group whose caller it has lost."""
    import pickle
    import threading

    from dovetail_batch.rows import RowReader
    from dovetail_cluster.ray_job_worker import COLUMN, BatchEngine, packed

    row = RowReader({"max_tokens": TOKENS, "ignore_eos": True}, 0).read(
        1, {"prompt": "x", "sampling": {"seed": 7}}
    )
    engine = BatchEngine({**TOY, "executor": {"name": "toy", "step_s": 0.01}})
    given: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: given.append(pickle.loads(engine(packed([row]))[COLUMN][0]))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [
        (kind, [one["outputs"][0]["text"] for one in content]) for kind, content, _ in given
    ] == [("answers", [answer(7, TOKENS)])] * 2


@real_only
def test_the_fake_has_no_parameter_that_ray_has_not() -> None:
    import ray
    import ray.data

    pairs = [
        (FakeDataset.map_batches, ray.data.Dataset.map_batches),
        (FakeDataset.iter_batches, ray.data.Dataset.iter_batches),
        (FakeRay.from_items, ray.data.from_items),
        (FakeRay.init, ray.init),
        (ActorPoolStrategy.__init__, ray.data.ActorPoolStrategy.__init__),
    ]
    for fake, real in pairs:
        assert set(inspect.signature(fake).parameters) - {"self"} <= set(
            inspect.signature(real).parameters
        ), real
    assert issubclass(ray.exceptions.RayError, Exception)
    assert ray_jobs.MODE_VARIABLE == "RAY_AUTH_MODE"
