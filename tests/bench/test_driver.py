"""The driver of `bench/latency.py`: every token is stamped, from the intended arrival on."""

from __future__ import annotations

from array import array

import pytest
from bench.driver import Driver, Timeline, poisson, quantiles
from bench.latency import show
from bench.limits import Limits, busy_floor_seconds, floor_seconds
from bench.shapes import SHAPES

from dovetail import LLMEngine

LIMITS = Limits(4e12, 7e14)


def test_every_token_is_stamped_in_order_and_none_before_its_request_arrives() -> None:
    with LLMEngine.from_config("demo", max_model_len=128) as engine:
        driver, ended = Driver(engine), []
        begin = engine.now()
        for index in range(4):
            driver.schedule(
                "request",
                begin + 0.01 * index,
                [3, 1, 4, 1, 5 + index],
                3 + index,
                then=ended.append,
            )
        driver.schedule("other", begin, [2, 7], 1)
        driver.run()
    timelines = driver.of("request")
    assert [len(timeline.stamps) for timeline in timelines] == [3, 4, 5, 6]
    assert all(
        list(timeline.stamps) == sorted(timeline.stamps) and timeline.ttft > 0
        for timeline in timelines
    )
    assert sorted(ended) == sorted(timeline.stamps[-1] for timeline in timelines)
    assert sum(driver.decodes) == 2 + 3 + 4 + 5
    assert [len(timeline.stamps) for timeline in driver.of("other")] == [1]


@pytest.mark.slow("runs a benchmark twice")
def test_a_run_that_ends_early_continues_later() -> None:
    with LLMEngine.from_config("demo", max_model_len=128) as engine:
        driver = Driver(engine)
        driver.schedule("request", engine.now(), [1, 2], 50)
        driver.run(until=engine.now())
        assert not driver.timelines
        driver.run()
        assert len(driver.timelines[0].stamps) == 50


def test_each_step_is_reported_with_what_it_computed_and_the_longest_first() -> None:
    with LLMEngine.from_config("demo", max_model_len=128) as engine:
        driver = Driver(engine)
        for index in range(3):
            driver.schedule("request", engine.now(), [3, 1, 4, 1, 5 + index], 4)
        driver.run()
    assert sum(step.prefill_tokens for step in driver.steps) == 15
    assert sum(step.decode_tokens for step in driver.steps) == 9
    assert all(
        step.since_last_s > 0 and step.device_s > 0 and step.core_s > 0 for step in driver.steps
    )
    longest = driver.longest(2, driver.steps[0].ended, float("inf"))
    assert [step.since_last_s for step in longest] == sorted(
        (step.since_last_s for step in driver.steps if step.decode_tokens), reverse=True
    )[:2]
    assert driver.longest(2, 0.0, driver.steps[0].ended) == []


def test_what_a_run_prints_of_a_list_is_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        {
            "steps": [{"ended": 1.5, "tokens": 3}, {"ended": 2.5, "tokens": 4}],
            "quantiles": {"p50": 1.0},
            "count": 7,
        }
    )
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line] == [
        "steps ended 1.5 tokens 3",
        "ended 2.5 tokens 4",
        "quantiles p50 1.000",
        "count 7",
    ]


def test_latencies_are_of_the_stamps() -> None:
    timeline = Timeline("request", 8, 4, arrival=1.0, stamps=array("d", [1.5, 1.6, 1.8, 2.4]))
    assert timeline.ttft == pytest.approx(0.5)
    assert timeline.tpot == pytest.approx(0.3)
    assert timeline.gaps() == pytest.approx([0.1, 0.2, 0.6])
    assert timeline.gaps(since=1.7, until=2.0) == pytest.approx([0.2])
    assert quantiles(timeline.gaps())["max"] == pytest.approx(600)
    assert quantiles([]) == {}


def test_poisson_arrivals_are_as_many_as_asked_for_and_the_same_for_a_seed() -> None:
    times = poisson(50, 100, seed=1)
    assert times == poisson(50, 100, seed=1) == sorted(times)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert 0 < times[0] < times[-1] < 100


def test_the_floor_of_requests_that_come_and_go_is_no_less_than_of_all_at_once() -> None:
    shape, lens = SHAPES["qwen3-0.6b"], [(500, 100)] * 8
    together = floor_seconds(shape, lens, LIMITS)
    assert busy_floor_seconds(shape, lens, [8] * 99, LIMITS) == pytest.approx(together)
    assert busy_floor_seconds(shape, lens, [1] * 8 * 99, LIMITS) > 2 * together
