"""Synthetic workloads: what is written is what is drawn."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail_lab.token_ids import output_ids, prompt_ids
from dovetail_lab.traces import Trace, TraceError, load_trace
from dovetail_lab.workloads import WorkloadOptions, load_workload, parse_spec
from dovetail_lab.workloads.arrivals import (
    ARRIVALS,
    Arrivals,
    Constant,
    Gamma,
    OnOff,
    Poisson,
    Ramp,
)
from dovetail_lab.workloads.load import paper_workloads
from tests.lab import trace_files
from tests.lab.trace_files import written
from tests.support import examples

SHORT = "prompt=10 output=5"
DEMO_TOKENIZER = files("dovetail_models") / "demo" / "tokenizer.json"


def drawn(text: str, seed: int = 0) -> Trace:
    return load_workload(text, WorkloadOptions(seed=seed))


def times(arrivals: Arrivals, count: int = 20_000, seed: int = 0) -> np.ndarray:
    return arrivals.times(np.random.default_rng(seed), count, None)


def test_the_same_text_and_seed_give_the_same_trace_and_another_seed_another() -> None:
    text = (
        "arrivals=gamma(5, 2) requests=50 prompt=lognormal(100, 1) output=uniform(1, 9) "
        "clients=zipf(3, 1)"
    )
    assert drawn(text) == drawn(text)
    assert drawn(text).requests != drawn(text, seed=1).requests


def test_these_very_numbers_come_on_any_machine() -> None:
    trace = drawn("arrivals=poisson(2) requests=3 prompt=lognormal(100, 1) output=uniform(1, 9)")
    assert [(r.arrival_time, r.prompt_tokens, r.output_tokens) for r in trace] == [
        (0.077162, 329, 5),
        (0.851016, 70, 1),
        (0.938698, 77, 6),
    ]


def test_another_rate_leaves_the_lengths_as_they_are() -> None:
    slow, fast = (
        drawn(
            f"arrivals=poisson({rate}) requests=40 prompt=lognormal(100, 1) output=uniform(1, 99)"
        )
        for rate in (1, 10)
    )
    assert [(r.prompt_tokens, r.output_tokens) for r in slow] == [
        (r.prompt_tokens, r.output_tokens) for r in fast
    ]


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Poisson(rate=4), 1.0),
        (Gamma(rate=4, cv=3), 3.0),
        (Gamma(rate=4, cv=0.5), 0.5),
        (Constant(rate=4), 0.0),
    ],
)
def test_gaps_have_the_mean_and_the_variation_that_was_asked_for(
    arrivals: Arrivals, cv: float
) -> None:
    gaps = np.diff(times(arrivals))
    assert gaps.mean() == pytest.approx(0.25, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06, abs=1e-4)


def test_on_off_arrives_at_its_rate_while_on_and_not_at_all_while_off() -> None:
    at = times(OnOff(rate=5, on=10, off=30))
    assert (at % 40 <= 10).all()
    assert len(at) / (at[-1] / 40 * 10) == pytest.approx(5, rel=0.05)


@pytest.mark.parametrize(("start", "end"), [(0, 10), (10, 2), (3, 3), (8, 0.5)])
def test_a_ramp_has_at_each_moment_the_rate_of_its_line(start: float, end: float) -> None:
    at = times(Ramp(start=start, end=end, over=1000), 30_000)
    for low in (0, 250, 500, 750):
        middle = start + (end - start) * (low + 125) / 1000
        assert ((at >= low) & (at < low + 250)).sum() == pytest.approx(middle * 250, rel=0.2)
    after = at[at >= 1000]
    if len(after) > 3000:
        assert 1 / np.diff(after).mean() == pytest.approx(end, rel=0.1)


@pytest.mark.parametrize(
    "kind", ["poisson(3)", "gamma(3, 2)", "constant(3)", "onoff(3, 5, 5)", "ramp(1, 5, 20)"]
)
def test_a_duration_ends_arrivals_which_are_those_of_the_longer_run(kind: str) -> None:
    short, long = (drawn(f"arrivals={kind} duration={seconds} {SHORT}") for seconds in (50, 3000))
    assert short.requests == long.requests[: len(short)]
    assert short.duration_s < 50 <= long.requests[len(short)].arrival_time


@examples(quick=50, full=1000)
@given(
    kind=st.sampled_from(sorted(ARRIVALS)),
    rate=st.floats(0.01, 100),
    other=st.floats(0.1, 10),
    count=st.integers(1, 300),
)
def test_arrivals_are_as_many_as_asked_and_in_order(
    kind: str, rate: float, other: float, count: int
) -> None:
    arguments = [rate, other, other][: len(ARRIVALS[kind].model_fields)]
    trace = drawn(f"arrivals={kind}({', '.join(map(repr, arguments))}) requests={count} {SHORT}")
    at = [request.arrival_time for request in trace]
    assert len(at) == count
    assert at == sorted(at)
    assert at[0] >= 0


def test_lengths_are_of_their_distribution() -> None:
    trace = drawn(
        "arrivals=poisson(9) requests=20000 prompt=lognormal(500, 1.2, most=4000) "
        "output=uniform(16, 32)"
    )
    prompts = np.array([request.prompt_tokens for request in trace])
    assert np.median(prompts) == pytest.approx(500, rel=0.05)
    assert np.log(prompts[prompts < 500] / 500).std() > 0
    assert prompts.max() == 4000
    assert Counter(request.output_tokens for request in trace).keys() == set(range(16, 33))


def test_lengths_may_be_those_of_a_trace_in_pairs_or_apart(tmp_path: Path) -> None:
    path = written(tmp_path, trace_files.SARATHI, "lengths.csv")
    pairs = drawn(f"arrivals=poisson(9) requests=200 lengths={path}")
    assert {(r.prompt_tokens, r.output_tokens) for r in pairs} == {(74, 918), (290, 905)}
    apart = drawn(
        f"arrivals=poisson(9) requests=200 prompt=trace({path}, prompt) output=trace({path}, "
        f"output)"
    )
    assert len({(r.prompt_tokens, r.output_tokens) for r in apart}) == 4


def test_streams_stand_side_by_side_and_name_their_clients() -> None:
    batch = f"arrivals=at_once requests=5 {SHORT} clients=2 deadline=60 ttft_deadline=2 tbt=0.1"
    trace = drawn(f"chat: arrivals=poisson(2) requests=20 {SHORT} priority=-1 ; batch: {batch}")
    clients = Counter(request.client for request in trace)
    assert clients["chat"] == 20
    assert clients["batch-0"] + clients["batch-1"] == 5
    assert {request.priority for request in trace if request.client == "chat"} == {-1}
    assert {
        (request.deadline, request.ttft_deadline, request.tbt_s)
        for request in trace
        if request.client != "chat"
    } == {(60.0, 2.0, 0.1)}
    assert {
        (request.deadline, request.ttft_deadline, request.tbt_s)
        for request in trace
        if request.client == "chat"
    } == {(None, None, None)}
    assert [request.arrival_time for request in trace] == sorted(
        request.arrival_time for request in trace
    )


def test_no_two_requests_have_one_id() -> None:
    trace = drawn(
        f"a: arrivals=at_once requests=12 {SHORT} turns=2; a1: arrivals=at_once requests=2 {SHORT} "
        f"turns=2; b-1: arrivals=at_once requests=2 {SHORT}"
    )
    assert len({request.id for request in trace}) == len(trace)


def test_a_client_s_stream_is_the_same_next_to_any_other() -> None:
    chat = f"chat: arrivals=poisson(2) requests=20 {SHORT}"
    both = drawn(f"{chat}; batch: arrivals=constant(1) requests=5 {SHORT}")
    assert drawn(chat).requests == tuple(request for request in both if request.client == "chat")


def test_zipf_gives_the_first_client_the_most() -> None:
    clients = Counter(
        r.client for r in drawn(f"arrivals=poisson(9) requests=6000 {SHORT} clients=zipf(3, 1)")
    )
    assert [clients[f"client-{i}"] / 6000 for i in range(3)] == pytest.approx(
        [6 / 11, 3 / 11, 2 / 11], abs=0.03
    )


def test_each_turn_of_a_chat_begins_with_all_that_was_said_before() -> None:
    trace = drawn(
        "arrivals=poisson(1) requests=3 prompt=uniform(5, 9) output=uniform(2, 6) turns=3 think=20 "
        "system=7"
    )
    for chat in "012":
        turns = [request for request in trace if request.id.startswith(f"{chat}/")]
        assert [b.arrival_time - a.arrival_time for a, b in pairwise(turns)] == pytest.approx(
            [20, 20]
        )
        said: list[int] = []
        for turn in turns:
            prompt = prompt_ids(turn, 1000).tolist()
            assert prompt[: len(said)] == said
            assert len(prompt) > len(said)
            said = prompt + output_ids(turn, 1000).tolist()
    first, second = (prompt_ids(request, 1000).tolist() for request in trace.requests[:2])
    assert first[:7] == second[:7], "all begin with the system prompt"
    assert first[7:12] != second[7:12]


def test_yaml_says_the_same(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "arrivals: poisson(4)\nrequests: 9\nprompt: lognormal(90, 1)\noutput: 7\n",
        "load.yaml",
    )
    assert (
        drawn(str(path)).requests
        == drawn("arrivals=poisson(4) requests=9 prompt=lognormal(90, 1) output=7").requests
    )
    path = written(
        tmp_path,
        "a: {arrivals: constant(4), requests: 9, prompt: 9, output: 7}\nb: {arrivals: at_once, "
        "requests: 1, prompt: 1, output: 1}\n",
        "x.yml",
    )
    assert {request.client for request in drawn(str(path))} == {"a", "b"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"arrivals=poison(3) requests=1 {SHORT}",
            "arrivals: unknown 'poison', did you mean poisson?",
        ),
        (
            f"arrivals=poisson(-3) requests=1 {SHORT}",
            "rate: Input should be greater than 0; it is poisson(rate)",
        ),
        (f"arrivals=poisson(nan) requests=1 {SHORT}", "rate: Input should be a finite number"),
        (f"arrivals=poisson(1, 2) requests=1 {SHORT}", "expected at most 1 arguments (rate)"),
        (f"arrivals=poisson(1, rate=2) requests=1 {SHORT}", "rate is given twice"),
        (f"arrivals=poisson() requests=1 {SHORT}", "rate: Field required"),
        (f"arrivals=poisson(,) requests=1 {SHORT}", "an argument is empty"),
        (f"arrivals=ramp(1, 0, 5) duration=1 {SHORT}", "end must be above 0"),
        (
            f"arrivals=poisson(3) {SHORT}",
            "the number of arrivals is missing: requests=1000, or duration=600",
        ),
        (
            f"arrivals=at_once duration=5 {SHORT}",
            "the number of arrivals is missing: requests=1000",
        ),
        ("arrivals=poisson(3) requests=1 prompt=5", "lengths are missing"),
        (f"arrivals=poisson(3) requests=1 lengths=x.csv {SHORT}", "lengths are missing"),
        (f"requests=1 {SHORT}", "arrivals: Field required"),
        (f"arrivals=poisson(3) requests=0 {SHORT}", "requests: Input should be greater than 0"),
        (f"arrivals=poisson(3) requests=1e15 {SHORT}", "requests: Input should be a valid integer"),
        (
            f"arrivals=poisson(3) requests=999999999999 {SHORT}",
            "requests: Input should be less than or equal to 10000000",
        ),
        (
            f"arrivals=poisson(1e9) duration=1e9 {SHORT}",
            "more than 10,000,000 would arrive in 1e+09 s",
        ),
        (f"arrivals=poisson(3) requests=1 {SHORT} turns=1e9", "more than 10,000,000 turns"),
        (
            "arrivals=poisson(3) requests=1 prompt=1e12 output=1",
            "prompt: 1,000,000,000,000 tokens were drawn; the limit is 16,777,216",
        ),
        (
            "arrivals=poisson(3) requests=1 prompt=-3 output=1",
            "value: Input should be greater than or equal to 0",
        ),
        (
            f"arrivals=poisson(3) request=1 {SHORT}",
            "request: unknown key; there are arrivals, requests",
        ),
        (
            "arrivals=poisson(3) requests=1 prompt=uniform(5, 2) output=1",
            "high must be at least low (5)",
        ),
        (
            "arrivals=poisson(3) requests=1 prompt=long output=1",
            "prompt: distribution: unknown 'long'",
        ),
        ("arrivals=poisson(3) requests=1 requests=2", "requests is given twice"),
        (
            "arrivals=poisson(3 requests=1",
            "expected key=value, such as arrivals=poisson(4), at 'arrivals=poisson(3 requests=1'",
        ),
        (
            f"arrivals=poisson(3) requests=1 {SHORT}; arrivals=poisson(3) requests=1 {SHORT}",
            "two streams have no name",
        ),
        (
            f"arrivals=poisson(0.001) duration=1 {SHORT}",
            "expected at least one request, but none arrives in that time",
        ),
        ("nothing.csv", "nothing.csv: can't be read"),
        ("nothing.yaml", "nothing.yaml: can't be read"),
    ],
)
def test_what_is_wrong_is_answered_in_words(text: str, message: str) -> None:
    with pytest.raises(TraceError) as caught:
        drawn(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1", "5", "a: 5", "{", "arrivals: 5"])
def test_yaml_that_is_no_workload_is_answered_in_words(text: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"load\.yaml: "):
        drawn(str(written(tmp_path, text, "load.yaml")))


@examples(quick=100, full=3000)
@given(text=st.text(alphabet="arivls=poison(3,) ;:qute\n1.", max_size=40))
def test_any_text_is_parsed_or_refused_but_nothing_else(text: str) -> None:
    with suppress(TraceError):
        parse_spec(text)


def test_a_file_whose_name_holds_an_equals_sign_is_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, trace_files.AZURE, "rate=4.csv")
    assert drawn(str(path)).requests == load_trace(path).requests


def test_a_tokenizer_counts_tokens_where_a_trace_holds_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = str(written(tmp_path, trace_files.OPENAI))
    (request,) = load_workload(path, WorkloadOptions(tokenizer=str(DEMO_TOKENIZER)))
    (by_words,) = load_workload(path)
    assert request.prompt_tokens > by_words.prompt_tokens == 2


def test_a_tokenizer_that_is_none_is_answered_in_words(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = str(written(tmp_path, trace_files.OPENAI))
    for wrong in (path, str(tmp_path / "nothing.json")):
        with pytest.raises(TraceError, match=r"expected a tokenizer\.json: "):
            load_workload(path, WorkloadOptions(tokenizer=wrong))


def test_new_arrivals_leave_deadlines_as_far_away() -> None:
    text = f"arrivals=poisson(2) requests=20 {SHORT} deadline=uniform(1, 9)"
    old, new = load_workload(text), load_workload(text, WorkloadOptions(arrivals="constant(5)"))
    for before, after in zip(old, new, strict=True):
        assert before.deadline is not None
        assert after.deadline is not None
        assert after.deadline - after.arrival_time == pytest.approx(
            before.deadline - before.arrival_time
        )


def test_a_spec_may_be_longer_than_the_name_of_a_file() -> None:
    spec = "; ".join(
        f"client-{index}: arrivals=poisson(1) requests=2 prompt=uniform(10, 90) output=20"
        for index in range(100)
    )
    assert len(load_workload(spec)) == 200


def test_requests_counts_a_chat_of_several_turns_once_with_a_note() -> None:
    trace = load_workload("arrivals=poisson(1) requests=10 prompt=5 output=5 turns=3")
    assert len(trace) == 30
    assert "30 requests: each turn of 10 arrivals is one" in trace.notes


def test_a_clients_prompts_begin_alike_after_the_system_prompt_and_those_of_others_dont() -> None:
    trace = load_workload(
        "arrivals=at_once requests=40 clients=3 system=10 client_prefix=uniform(20, 30) prompt=5 output=2"
    )
    prefixes = {request.client: request.spans for request in trace}
    assert len({spans[1] for spans in prefixes.values()}) == 3
    for request in trace:
        system, own = request.spans
        assert request.spans == prefixes[request.client]
        assert request.prompt_tokens == system.tokens + own.tokens + 5


def test_a_client_prefix_without_clients_is_rejected() -> None:
    with pytest.raises(TraceError, match="client_prefix needs clients"):
        load_workload("arrivals=at_once requests=4 client_prefix=9 prompt=5 output=2")


def test_an_images_place_counts_what_the_prompt_begins_with() -> None:
    trace = load_workload(
        "arrivals=at_once requests=4 clients=2 system=7 client_prefix=9 prompt=5 output=2 image_share=1"
    )
    assert {image.start for request in trace for image in request.images} == {16}


@pytest.mark.parametrize("name", paper_workloads())
def test_workloads_of_papers_load_and_the_same_seed_gives_the_same_requests(name: str) -> None:
    assert load_workload(f"paper:{name}").requests == load_workload(f"paper:{name}").requests


def test_an_unknown_workload_of_a_paper_names_the_nearest() -> None:
    with pytest.raises(TraceError, match="did you mean serial-burst"):
        load_workload("paper:serial-brst")
