"""The simulated executor under the real engine: the model determines times, and only the executor
knows the length of an answer."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.api.scheduler import Step
from dovetail.errors import ConfigError, DovetailError, PolicyError, UnsupportedError
from dovetail_lab.metrics import measure
from dovetail_lab.recording import Recorder
from dovetail_lab.replicas import replay_replicas
from dovetail_lab.routers import parse_router
from dovetail_lab.simulate import replay
from dovetail_lab.step_time import LinearStepTime, StepShape
from dovetail_lab.traces import Span, TraceRequest
from dovetail_lab.traces.request import stream_of
from dovetail_schedulers.fcfs import FCFS
from tests.lab.runs import LINEAR, engine, request, run, trace
from tests.support import examples

MODEL = LinearStepTime(**LINEAR)  # type: ignore[arg-type]


def seconds(*rows: tuple[int, int]) -> float:
    """Of a step whose rows compute (new, after so many) tokens."""
    new, had = np.array(rows, np.int64).T
    return MODEL.seconds(StepShape.of(new, had))


def test_a_request_alone_takes_its_prefill_and_then_a_decode_a_token() -> None:
    [record] = run([request(0, 2.5, prompt=20, output=4)])
    steps = [seconds((20, 0)), seconds((1, 20)), seconds((1, 21)), seconds((1, 22))]
    np.testing.assert_allclose(record.token_times_s, 2.5 + np.cumsum(steps), rtol=1e-12)
    assert (record.first_scheduled_s, record.finish_reason, record.output_tokens) == (
        2.5,
        "length",
        4,
    )


@dataclass
class _Plain:
    """A request in the oracle below."""

    arrival: float
    prompt: int
    output: int
    computed: int = 0
    times: list[float] = field(default_factory=list)


def first_come_first_served(requests: list[_Plain], budget: int, max_num_seqs: int) -> None:
    """Chunked prefills among decodes, one step after the other, memory without end: an oracle that
    shares nothing with the engine."""
    now = 0.0
    while unfinished := [one for one in requests if len(one.times) < one.output]:
        here = [one for one in unfinished if one.arrival <= now]
        if not here:
            now = min(one.arrival for one in unfinished)
            continue
        left = budget
        rows: list[tuple[_Plain, int, int]] = []
        for one in sorted(
            here, key=lambda one: (one.computed < one.prompt, one.computed == 0)
        ):  # decodes, those begun, those new; each by arrival
            new = min(left, max(one.prompt, one.computed + 1) - one.computed)
            if new and len(rows) < max_num_seqs:
                rows.append((one, new, one.computed))
                left -= new
        now += seconds(*((new, had) for _, new, had in rows))
        for one, new, _ in rows:
            one.computed += new
            if one.computed >= one.prompt:
                one.times.append(now)


@given(
    st.lists(
        st.tuples(st.floats(0, 0.5), st.integers(1, 150), st.integers(1, 12)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([16, 64]),
)
@examples(quick=40, full=500)
def test_every_token_comes_when_a_plain_simulation_says(
    requests: list[tuple[float, int, int]], budget: int
) -> None:
    plain = [_Plain(*one) for one in sorted(requests, key=lambda one: one[0])]
    result = run(
        [request(index, one.arrival, one.prompt, one.output) for index, one in enumerate(plain)],
        max_num_batched_tokens=budget,
        max_num_seqs=12,
    )
    first_come_first_served(plain, budget, max_num_seqs=12)
    for record, one in zip(result, plain, strict=True):
        np.testing.assert_allclose(record.token_times_s, one.times, rtol=1e-9)


def test_the_cores_time_lies_between_steps_without_overlap_and_under_them_with() -> None:
    requests = [request(0, prompt=20, output=6)]
    bare, serial = run(requests), run(requests, executor={"core_s": 0.004})
    overlapped = run(requests, executor={"core_s": 0.004, "plans_late": False}, overlap=True)
    own = [result.requests[0].token_times_s for result in (bare, serial, overlapped)]
    np.testing.assert_allclose(own[1] - own[0], 0.004 * np.arange(1, 7))
    np.testing.assert_allclose(own[2] - own[0], 0.004)


def test_an_admission_costs_the_core_once_and_once_a_request() -> None:
    plain = {"name": "made", "step_time": LINEAR, "core_s": 0.001, "core_per_row_s": 1e-4}
    costly = {**plain, "admission_s": 0.01, "per_admitted_s": 0.002}
    requests = [request(index, prompt=20, output=5) for index in range(3)]
    ours, theirs = (run(requests, executor={"step_time": profile}) for profile in (costly, plain))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.token_times_s - other.token_times_s, 0.01 + 3 * 0.002)


def test_taking_a_request_in_delays_steps_where_it_outlasts_the_one_under_way_and_nothing_while_the_engine_is_idle() -> (
    None
):
    def e2e(arrivals: list[float], request_s: float) -> float:
        """Of the first request; the others come after it, and are made a second before that: while
        it decodes, or not."""
        requests = [
            request(0, prompt=5, output=40),
            *(
                request(index, arrival, prompt=2, output=1)
                for index, arrival in enumerate(arrivals, 1)
            ),
        ]
        profile = {"name": "taking in", "step_time": LINEAR, "request_s": request_s}
        return float(
            run(requests, overlap=True, executor={"step_time": profile}).requests[0].finished_s
        )

    beside, after = [1.1, 1.2, 1.3], [5.0, 6.0]
    assert e2e(beside, 0.001) == pytest.approx(e2e(beside, 0.0)), (
        "a step takes thirteen times as long"
    )
    assert 2 * (0.1 - 0.02) < e2e(beside, 0.1) - e2e(beside, 0.0) <= 2 * 0.1, (
        "the first two are made before the trace begins"
    )
    assert e2e(after, 0.1) == e2e(after, 0.0)


def test_an_engine_that_plans_at_once_takes_up_an_arrival_a_step_later() -> None:
    # early in the sixth step
    requests = [
        request(0, prompt=5, output=12),
        request(1, arrival_s=0.072, prompt=5, output=1),
    ]
    late, at_once = (
        run(requests, overlap=True, executor={"plans_late": plans_late}).requests[1]
        for plans_late in (True, False)
    )
    assert at_once.token_times_s[0] - late.token_times_s[0] == pytest.approx(
        seconds((1, 10)), rel=0.01
    )


SPECULATION = {"drafter": "simulated", "max_drafts": 4}
# costs of lines with which the engine checks as many drafts as it may
FREE = [
    [1, 0.01],
    [512, 0.01],
]


def ends(
    count: int, acceptance: float | None, *, token_s: float = 1e-4, **options: Any
) -> tuple[float, int]:
    """Return when `count` requests at once have ended, and after how many steps; `acceptance`: of
    drafts, None: without speculation."""
    requests = [request(index, prompt=10, output=101) for index in range(count)]
    step_time = {"kind": "linear", "base_s": 0.01, "per_token_s": token_s}
    changes = {} if acceptance is None else {"speculation": SPECULATION}
    executor = {"step_time": step_time, "acceptance": (acceptance or 0.0,), **options}
    result = run(
        requests, executor=executor, max_num_seqs=64, max_num_batched_tokens=1024, **changes
    )
    assert all(len(record.token_times_s) == 101 for record in result.requests)
    return max(record.finished_s for record in result.requests), len(result.timeline.time_s)


def test_accepted_drafts_save_steps_which_take_as_long_as_their_lines_do() -> None:
    assert ends(1, 1.0) == (pytest.approx(0.01 + 10 * 1e-4 + 20 * (0.01 + 5 * 1e-4)), 21)
    assert ends(1, 1.0, draft_s=1e-4) == (
        pytest.approx(0.01 + 10 * 1e-4 + 20 * (0.01 + 5 * 1e-4 + 4e-4)),
        21,
    )


def test_the_engine_drafts_less_if_drafts_cost_more_than_they_gain() -> None:
    assert ends(1, 1.0, draft_s=0.1)[1] == 101


def test_drafts_are_accepted_as_often_as_the_simulation_says() -> None:
    _, steps = ends(8, 0.5, token_s=1e-6)
    length = 1 + sum(0.5**place for place in range(1, 5))
    assert 101 / length < steps < 1.5 * 101 / length  # the slowest of 8


@pytest.mark.parametrize(("count", "token_s"), [(1, 1e-4), (64, 1e-4), (64, 2e-3)])
@pytest.mark.parametrize("acceptance", [0.0, 0.3])
def test_speculation_costs_little_where_it_does_not_pay(
    count: int, token_s: float, acceptance: float
) -> None:
    without, _ = ends(count, None, token_s=token_s)
    assert ends(count, acceptance, token_s=token_s)[0] <= 1.03 * without


def test_steps_with_drafts_take_what_as_many_lines_were_measured_to_take() -> None:
    model = {"kind": "linear", "base_s": 0.01, "per_token_s": 1e-4}
    dear, cheap = (
        {"name": "mine", "step_time": model, "line_costs": [[1, 0.01], [5, seconds]]}
        for seconds in (0.1, 0.012)
    )
    assert ends(1, 1.0, step_time=cheap) == (pytest.approx(0.011 + 20 * 0.012), 21)
    assert ends(1, 1.0, step_time=dear)[1] == 101, "drafts don't pay"
    assert ends(1, 1.0, step_time=dear, line_costs=FREE) == (pytest.approx(0.011 + 20 * 0.1), 21), (
        "and the engine doesn't know it"
    )


@pytest.mark.slow("simulates many drafts")
@examples(quick=3, full=100)
@given(odds=st.lists(st.floats(0, 1), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_a_draft_is_accepted_with_the_probability_of_its_place(
    odds: list[float], seed: int
) -> None:
    requests = [request(index, prompt=4, output=400) for index in range(2)]
    result = run(
        requests,
        executor={"acceptance": odds, "line_costs": FREE},
        speculation=SPECULATION,
        max_num_seqs=1,
        seed=seed,
    )
    drafts, accepted = result.timeline.draft_tokens, result.timeline.accepted_drafts
    assert drafts.max() == 4
    for place in range(4):
        tried = int(((drafts > place) & (accepted >= place)).sum())
        right, share = int((accepted > place).sum()), odds[min(place, len(odds) - 1)]
        assert abs(right - share * tried) <= 5 * (tried * share * (1 - share)) ** 0.5 + 1e-9


def test_drafts_go_on_after_prompts_that_filled_a_step() -> None:
    requests = [
        request(0, output=401),
        *(request(index, 0.5, prompt=100, output=1) for index in range(1, 4)),
    ]
    result = run(
        requests,
        executor={"acceptance": 1.0, "line_costs": FREE},
        speculation=SPECULATION,
        overlap=True,
    )
    assert result.timeline.prefill_tokens.max() >= 60, "of 64 in a step"
    assert len(np.unique(result.requests[0].token_times_s)) < 401 / 4


def test_requests_of_a_trace_have_an_acceptance_of_their_own() -> None:
    requests = [
        request(index, 10.0 * index, output=101, acceptance=share)
        for index, share in enumerate((0.0, 1.0, None))
    ]
    result = run(
        requests, executor={"acceptance": 0.5, "line_costs": FREE}, speculation=SPECULATION
    )
    never, always, often = (len(np.unique(record.token_times_s)) for record in result.requests)
    assert (never, always) == (101, 21)
    assert always < often < never


def test_metrics_tell_how_long_accepted_drafts_are() -> None:
    result = run(
        [request(0, output=101)],
        executor={"acceptance": 1, "line_costs": FREE},
        speculation=SPECULATION,
    )
    metrics = measure(result)
    assert (metrics.draft_rows, metrics.draft_tokens, metrics.accepted_drafts) == (20, 80, 80)
    assert metrics.acceptance_length == metrics.tokens_per_step == 5
    plain = measure(run([request(0, output=101)]))
    assert plain.tokens_per_step == 1
    assert np.isnan(plain.acceptance_length)


@pytest.mark.slow("simulates a trace several times")
@examples(quick=3, full=100)
@given(share=st.floats(0, 1), blocks=st.integers(128, 300), seed=st.integers(0, 2**32))
def test_with_speculation_a_trace_has_the_same_tokens_every_time(
    share: float, blocks: int, seed: int
) -> None:
    """Whatever is accepted, preempted, and found in the cache."""
    requests = [
        request(
            index,
            0.02 * index,
            prompt=10 + 7 * index,
            output=20 + 30 * index,
            spans=(Span(5, 0, 8),),
        )
        for index in range(8)
    ]

    def tokens(**changes: Any) -> dict[str, list[tuple[float, int]]]:
        found: dict[str, list[tuple[float, int]]] = {}
        take = Recorder.take

        def taken(recorder: Recorder, delivery: Any) -> None:
            for one, token in zip(delivery.requests, delivery.token_ids, strict=True):
                found.setdefault(one.id, []).append((one.last_token_time, token))
            take(recorder, delivery)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recorder, "take", taken)
            run(
                requests,
                executor={"num_pages": blocks, "acceptance": share, "line_costs": FREE},
                seed=seed,
                overlap=True,
                kv_cache="prefix",
                **changes,
            )
        return found

    drafted, again, plain = (
        tokens(speculation=SPECULATION),
        tokens(speculation=SPECULATION),
        tokens(),
    )
    assert drafted == again
    assert {name: [token for _, token in own] for name, own in drafted.items()} == {
        name: [token for _, token in own] for name, own in plain.items()
    }


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"acceptance": []}, "acceptance"),
        ({"acceptance": 1.5}, "acceptance"),
        ({"acceptance": [0.5, -0.1]}, "acceptance"),
        ({"acceptance": float("nan")}, "acceptance"),
        ({"acceptance": "often"}, "acceptance"),
        ({"line_costs": [[1, 0.1]]}, "two or more"),
        ({"line_costs": [[2, 0.1], [1, 0.2]]}, "ascending"),
        ({"line_costs": [[1, 0.1], [2, 0.0]]}, "above 0"),
        ({"line_costs": [[1, 0.1], [2, float("inf")]]}, "line_costs"),
        (
            {
                "step_time": {
                    "name": "mine",
                    "step_time": LINEAR,
                    "line_costs": [[0, 0.1], [2, 0.1]],
                }
            },
            "line_costs: expected",
        ),
    ],
)
def test_impossible_drafts_are_refused_by_name(option: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run([request(0)], executor=option, speculation=SPECULATION)


def test_policies_see_the_limit_and_the_guess_but_never_the_true_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int | None, int]] = []
    monkeypatch.setattr(
        FCFS,
        "on_arrived",
        lambda _, one: seen.append((one.max_tokens, one.predicted_tokens, one.output_left)),
    )
    [record] = run([request(0, output=7, max_tokens=100, predicted_tokens=9)])
    assert seen == [(100, 9, 100)]
    assert (record.output_tokens, record.finish_reason, record.stop_reason, record.max_tokens) == (
        7,
        "stop",
        None,
        100,
    )


def test_a_preempted_request_generates_as_many_tokens_and_the_loss_is_counted() -> None:
    requests = [request(index, prompt=30, output=40) for index in range(4)]
    result = run(requests, executor={"num_pages": 40}, max_model_len=120)
    assert [record.output_tokens for record in result] == [40] * 4
    assert sum(record.preemptions for record in result) == result.timeline.preemptions.sum() > 0
    assert (
        sum(record.recomputed_tokens for record in result)
        == result.timeline.recomputed_tokens.sum()
        > 0
    )


def test_the_timeline_adds_up() -> None:
    result = run([request(index, index * 0.02, prompt=20 + index, output=5) for index in range(10)])
    timeline = result.timeline
    assert timeline.generated_tokens.sum() == sum(record.output_tokens for record in result) == 50
    assert timeline.prefill_tokens.sum() == sum(record.prompt_tokens for record in result)
    assert set((timeline.kv_free + timeline.kv_held + timeline.kv_cached).tolist()) == {2000}
    assert (np.diff(timeline.time_s) > 0).all()


def test_a_later_turn_finds_its_history_the_answer_included() -> None:
    chat = stream_of("chat")
    first = TraceRequest("first", 0.0, 40, 21, spans=(Span(chat, 0, 61),))
    second = TraceRequest("second", 9.0, 80, 5, spans=(Span(chat, 0, 80),))
    result = run([first, second], kv_cache="prefix")
    assert result.requests[1].cached_tokens == 60  # the last answered token has no K and V


def test_what_does_not_fit_is_rejected_and_the_others_go_on() -> None:
    result = run([request(0, prompt=600), request(1), request(2, prompt=510, output=50)])
    assert [record.finish_reason for record in result] == ["rejected", "length", "length"]
    assert "max_model_len 512" in str(result.requests[0].stop_reason)
    assert result.requests[2].output_tokens == 2
    assert len(result.notes) == 2


def test_a_rejected_request_does_not_hide_those_that_come_after_it() -> None:
    result = run(
        [request(0), request(1, 5.0, prompt=600), request(2, 9.0), request(3, 20.0, prompt=600)]
    )
    assert [record.output_tokens for record in result] == [5, 0, 5, 0]
    assert result.requests[2].first_scheduled_s == 9.0


def test_what_ends_the_engine_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def schedule(policy: FCFS, step: Step) -> None:
        raise ValueError("no idea")

    monkeypatch.setattr(FCFS, "schedule", schedule)
    with pytest.raises(PolicyError, match="no idea"):
        run([request(0)])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"step_time": "nowhere.json"}, ConfigError, "nowhere.json"),
        ({"step_time": "h9000"}, ConfigError, "a10g-llama-2-7b"),
        ({"step_time": {"kind": "linear"}}, ConfigError, "base_s"),
        (
            {"step_time": {"kind": "linear", "base_s": 0.01}, "num_pages": None},
            UnsupportedError,
            "num_pages",
        ),
        ({"num_pages": 0}, ConfigError, "num_pages"),
    ],
)
def test_wrong_options_are_named(
    options: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run([request(0)], executor=options)


def test_a_step_that_takes_no_time_is_refused() -> None:
    with pytest.raises(DovetailError, match=r"positive and finite, got 0\.0"):
        run([request(0)], executor={"step_time": {"kind": "linear", "base_s": 0.0}})


_SAVE = """
import sys
from dovetail_lab.metrics import measure
from dovetail_lab.recording import Recorder
from dovetail_lab.replicas import replay_replicas
from dovetail_lab.routers import parse_router
from dovetail_lab.simulate import replay
from tests.lab.test_simulated import busy
replay(*busy(), seed=5).save(sys.argv[1])
"""

VARYING = {
    "name": "varying",
    "step_time": LINEAR,
    "core_s": 0.001,
    "launch": {"kind": "linear", "base_s": 0.004, "per_token_s": 1e-5},
    "recorded_tokens": 32,
    "sampling_share": 0.3,
    "launch_spread": {
        "decode": [0.5 + 0.07 * part for part in range(26)],
        "launched": [1.0] * 25 + [9.0],
    },
    "core_spread": {"recorded": [0.9 + 0.03 * part for part in range(26)]},
}


def busy() -> tuple[dict[str, object], object]:
    """Preemptions, overlap, late planning, prefix reuse, launching that varies, grammars: all that
    could depend on something it shouldn't."""
    requests = [
        request(
            index,
            index * 0.013,
            prompt=5 + index * 7 % 60,
            output=1 + index * 11 % 40,
            client="abc"[index % 3],
            grammar=index % 4 == 0,
        )
        for index in range(60)
    ]
    config = engine(
        overlap=True,
        kv_cache="prefix",
        executor={"num_pages": 90, "step_time": VARYING},
        scheduler="vtc",
        max_model_len=120,
    )
    return config, trace(*requests)


@pytest.mark.slow("simulates many requests")
def test_same_inputs_give_the_same_bytes_whatever_the_process(tmp_path: Path) -> None:
    config, requests = busy()
    replay(config, requests, seed=5).save(tmp_path / "here.json")  # type: ignore[arg-type]
    environment = {**os.environ, "PYTHONHASHSEED": "271828"}
    subprocess.run(
        [sys.executable, "-c", _SAVE, str(tmp_path / "there.json")],
        check=True,
        env=environment,
        cwd=Path(__file__).parents[2],
    )
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()


@pytest.mark.slow("simulates several traces")
def test_launching_varies_with_the_seed_and_the_step_alone() -> None:
    config, requests = busy()
    runs = [replay(config, requests, seed=seed) for seed in (5, 5, 6)]  # type: ignore[arg-type]
    times = [np.concatenate([record.token_times_s for record in run]) for run in runs]
    np.testing.assert_array_equal(times[0], times[1])
    assert (times[0] != times[2]).any()


def test_what_the_spread_says_is_what_launching_takes() -> None:
    """Alone and without overlap a request takes its steps and their launching, each three times as
    long as the model says."""
    profile = {
        "name": "slow",
        "step_time": LINEAR,
        "launch": {"kind": "linear", "base_s": 0.004},
        "recorded_tokens": 100,
    }
    spread = {regime: [3.0] * 26 for regime in ("decode", "recorded")}
    [record] = run(
        [request(0, prompt=20, output=3)],
        executor={"step_time": {**profile, "launch_spread": spread}},
    )
    np.testing.assert_allclose(
        record.token_times_s,
        np.cumsum([0.012 + seconds(*rows) for rows in ([(20, 0)], [(1, 20)], [(1, 21)])]),
        rtol=1e-9,
    )


def test_a_trace_s_objectives_reach_the_policy() -> None:
    """The second of the busy ones is due before the first is through. The third asks for short
    gaps, so the prompt of the fourth comes in chunks."""
    sizes = {"max_num_batched_tokens": 1024, "max_model_len": 4096}
    warm = [request(index, 2.0 * index, prompt=50 + 90 * index, output=2) for index in range(12)]
    busy = [
        request(20, 40.0, prompt=1000, output=3),
        request(21, 40.01, prompt=1000, output=3, ttft_deadline=40.5),
        request(22, 50.0, prompt=10, output=60, tbt_s=0.2),
        request(23, 50.1, prompt=600, output=1),
    ]
    slo = {"name": "slo", "ttft_s": None, "tbt_s": None}
    finished = {record.id: record for record in run([*warm, *busy], scheduler=slo, **sizes)}
    assert {record.id for record in finished.values() if record.finish_reason == "rejected"} == {
        "21"
    }
    assert np.diff(finished["22"].token_times_s).max() < 0.45, (
        "256 tokens, the least of a step; all 600 take 0.8 s"
    )


def test_clients_read_along_and_the_prefill_limit_spares_them() -> None:
    requests = [
        request(0, prompt=20, output=60),
        *(request(index, 0.3, prompt=1000, output=2) for index in range(1, 4)),
    ]
    sizes = {"max_num_batched_tokens": 1024, "max_model_len": 2048}
    records = {
        limit: run(requests, prefill_limit=limit, **sizes).requests[0] for limit in (None, 2.0)
    }
    longest = {
        limit: float(np.diff(record.token_times_s).max()) for limit, record in records.items()
    }
    assert longest[2.0] < longest[None] / 2


@pytest.mark.parametrize("replicas", [0, 2])
@pytest.mark.parametrize(
    ("measured", "settings", "overlap", "said"),
    [
        (1, {}, False, ""),
        (2, {}, True, ""),
        (None, {}, True, ""),
        (3, {}, True, ""),
        (
            2,
            {"overlap": False},
            False,
            "measured with overlap on (steps in flight: 2), and are used here with overlap off "
            "(steps in flight: 1)",
        ),
        (
            1,
            {"max_in_flight": 2},
            True,
            "measured with overlap off (steps in flight: 1), and are used here with overlap on "
            "(steps in flight: 2)",
        ),
        (None, {"overlap": False}, False, ""),
    ],
)
def test_a_simulation_overlaps_as_the_engine_that_was_measured_or_says_that_it_does_not(
    measured: int | None, settings: dict[str, Any], overlap: bool, said: str, replicas: int
) -> None:
    settings = {"overlap": True} | settings
    profile = {"name": "mine", "step_time": LINEAR, "max_in_flight": measured}
    executor = {
        "step_time": profile,
        **({"max_in_flight": settings.pop("max_in_flight")} if "max_in_flight" in settings else {}),
    }
    config, requests = engine(executor=executor, **settings), trace(request(0), request(1))
    result = (
        replay_replicas(config, requests, replicas, parse_router("least_tokens"))
        if replicas
        else replay(config, requests)
    )
    assert result.settings["overlap"] is overlap
    assert [note for note in result.notes if "overlap" in note] == (
        [f"step times mine were {said}"] if said else []
    )
