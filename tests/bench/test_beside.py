"""`bench/beside.py` measures 21 workloads, each engine once for a model."""

from __future__ import annotations

from dataclasses import replace

from bench.beside import BESIDE, models, table


def row(workload: str, engine: str, seconds: float) -> dict[str, object]:
    return {"workload": workload, "engine": engine, "median_s": seconds, "tok_s": 100 / seconds}


def test_every_workload_runs_once_and_an_engine_serves_one_model() -> None:
    groups = models(list(BESIDE))
    assert sorted(name for group in groups for name in group) == sorted(BESIDE)
    assert len(BESIDE) == 21
    for group in groups:
        assert len({BESIDE[name].shape for name in group}) == 1


def test_no_two_runs_draw_the_same_token_ids() -> None:
    short = [replace(work, lens=((30, 1),), shared_prefix=0) for work in BESIDE.values()]
    begins = [tuple(work.prompts(seed)[0]) for work in short for seed in (0, 1, 2, 100)]
    assert len(set(begins)) == len(begins)


def test_only_the_workloads_asked_for_run() -> None:
    assert models(["one", "8b-one"]) == [["8b-one"], ["one"]]


def test_the_ratio_is_the_other_engines_time_over_ours() -> None:
    lines = table([row("one", "dovetail", 2.0), row("one", "vllm", 5.0)]).splitlines()
    assert lines[1].split() == ["one", "50", "2.000", "s", "20", "5.000", "s", "2.500"]


def test_a_workload_that_one_engine_did_not_reach_has_no_ratio() -> None:
    lines = table([row("one", "dovetail", 2.0)]).splitlines()
    assert lines[1].split() == ["one", "50", "2.000", "s"]
