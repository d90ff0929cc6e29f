"""Several threads on one engine: each gets its own, in turn, and none can harm another."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dovetail import LLM, LLMEngine, RequestOutput, SamplingParams
from dovetail.engine.flight import Delivery
from dovetail.errors import DovetailError, EngineDeadError, RequestError

torch.set_num_threads(1)

PATIENCE_S = 60  # a hang fails the test; nothing here takes nearly as long
SETTINGS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=6)
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPTS = ["ROMEO:", "JULIET:\nO", "KING HENRY:", "A"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **SETTINGS) as llm:
        yield llm


@pytest.fixture
def fresh() -> Iterator[LLM]:
    """For those who break it."""
    with LLM("demo", **SETTINGS) as llm:
        yield llm


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begin it; what is returned waits for its result, and raises its error."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it hangs"
        if errors:
            raise errors[0]
        return results[0]

    return result


def ids_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def generate(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [ids_of(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def drained(engine: LLMEngine) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def nothing_is_left(llm: LLM) -> bool:
    return not llm.engine.has_unfinished_requests() and llm.engine.stats().pages.held == 0


# `LLM`


@pytest.mark.slow("answers in several threads and alone")
def test_threads_that_share_an_llm_get_the_tokens_of_one_that_is_alone(llm: LLM) -> None:
    alone = [generate(llm, prompt) for prompt in PROMPTS]
    threads = [
        in_thread(lambda i=i: [generate(llm, PROMPTS[(i + k) % 4]) for k in range(2)])
        for i in range(8)
    ]  # type: ignore[misc]
    for i, result in enumerate(threads):
        assert result() == [alone[(i + k) % 4] for k in range(2)]
    assert nothing_is_left(llm)


@pytest.mark.slow("long answers of three kinds at once")
def test_a_stream_a_list_and_other_requests_are_served_concurrently(llm: LLM) -> None:
    [[expected]] = [generate(llm, "ROMEO:", LONG)]
    llm.engine.add_request("theirs", "ROMEO:", LONG)

    def streamed() -> list[int]:
        return [token for output in llm.stream("ROMEO:", LONG) for token in ids_of(output)]

    def stepped() -> list[int]:
        outputs = drained(llm.engine)
        assert {output.request_id for output in outputs} == {"theirs"}
        return ids_of(outputs[-1])

    threads = [
        in_thread(streamed),
        in_thread(stepped),
        in_thread(lambda: generate(llm, "ROMEO:", LONG)[0]),
        in_thread(streamed),
    ]
    assert [result() for result in threads] == [expected] * 4
    assert nothing_is_left(llm)


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_what_a_list_brings_of_others_waits_for_their_next_step(llm: LLM, kind: Any) -> None:
    for request_id in ("a", "b"):
        llm.engine.add_request(
            request_id, "ROMEO:", SamplingParams(temperature=0, max_tokens=5, output_kind=kind)
        )
    [expected] = generate(llm, "ROMEO:", LONG)
    assert llm.engine.has_unfinished_requests()
    assert llm.engine.get_num_unfinished_requests() == 0
    llm.engine.abort_request("b")
    outputs = llm.engine.step()
    assert [(output.request_id, output.finished, ids_of(output)) for output in outputs] == [
        ("a", True, expected[:5])
    ]
    assert nothing_is_left(llm)


def test_closing_ends_what_other_threads_wait_for(fresh: LLM) -> None:
    begun = threading.Event()
    compute = fresh.engine.core.step

    def step(wait_until: Any) -> Any:
        begun.set()
        return compute(wait_until)

    fresh.engine.core.step = step  # type: ignore[method-assign]
    waiting = in_thread(lambda: fresh.generate([[1]] * 200, LONG, use_tqdm=False))
    assert begun.wait(PATIENCE_S)
    fresh.close()
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        waiting()


def test_the_engines_death_reaches_every_thread(
    fresh: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, steps, all_in = fresh.engine.core.executor, [], threading.Barrier(3)
    submit = executor.submit

    def dies(batch: Any) -> Any:
        steps.append(batch)
        if len(steps) == 20:
            raise DovetailError("the device is gone")
        return submit(batch)

    monkeypatch.setattr(executor, "submit", dies)

    def work() -> None:
        all_in.wait(PATIENCE_S)
        generate(fresh, PROMPTS, LONG)

    threads = [in_thread(work) for _ in range(3)]
    for result in threads:
        with pytest.raises(EngineDeadError, match="the device is gone"):
            result()


def test_aborting_a_request_notifies_its_waiting_reader(llm: LLM) -> None:
    llm.engine.add_request("other", [1], LONG, arrival_time=1e9)
    stream = llm.stream(["ROMEO:", "JULIET:"], LONG)
    llm.engine.abort_request(next(stream).request_id)
    with pytest.raises(RequestError, match="aborted by another caller"):
        list(stream)
    assert llm.engine.get_num_unfinished_requests() == 1, "the stream's other request ended with it"
    llm.engine.abort_request("other")
    assert nothing_is_left(llm)


# Ids


def test_a_list_never_takes_an_id_that_a_user_would_think_of(llm: LLM) -> None:
    seen = [output.request_id for output in llm.generate(["A", "B"], GREEDY, use_tqdm=False)]
    taken = [f"{word}-{i}" for word in ("generate", "stream") for i in range(20)] + seen
    for request_id in taken:
        llm.engine.add_request(request_id, [1], SamplingParams(max_tokens=1, detokenize=False))
    assert len(generate(llm, PROMPTS)) == 4
    assert sorted(output.request_id for output in drained(llm.engine)) == sorted(taken)


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_list_that_is_refused_aborts_its_own_requests_alone(llm: LLM, call: str) -> None:
    llm.engine.add_request("generate-1", "ROMEO:", GREEDY)
    steps = llm.engine.stats().steps
    with pytest.raises(RequestError, match="the prompt is empty"):
        getattr(llm, call)(["A", "B", [], "C"], GREEDY)
    assert llm.engine.get_num_unfinished_requests() == 1
    assert llm.engine.stats().steps == steps, "nothing was computed"
    [*_, output] = drained(llm.engine)
    assert (output.request_id, ids_of(output)) == ("generate-1", generate(llm, "ROMEO:")[0])
    assert nothing_is_left(llm)


# Streams


def test_deltas_add_up_to_the_list(llm: LLM) -> None:
    params = [SamplingParams(seed=i, max_tokens=4 + i, n=1 + i % 2) for i in range(4)]
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    texts: dict[tuple[int, int], str] = {}
    for output in llm.stream(PROMPTS, params):
        assert output.prompt == PROMPTS[output.prompt_index]
        for sample in output.outputs:
            place = (output.prompt_index, sample.index)
            texts[place] = texts.get(place, "") + sample.text
    assert texts == {
        (i, sample.index): sample.text
        for i, output in enumerate(expected)
        for sample in output.outputs
    }
    assert list(llm.stream([])) == []


@pytest.mark.parametrize("how", ["close", "with", "forgotten", "collected"])
def test_a_stream_that_is_left_aborts_its_requests(llm: LLM, how: str) -> None:
    llm.engine.add_request("theirs", "ROMEO:", GREEDY)
    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    if how == "with":
        with stream:
            next(stream)
    elif how == "close":
        stream.close()
        stream.close()
    elif how == "collected":
        stream.itself = stream  # type: ignore[attr-defined]
    if how in ("with", "close"):
        assert list(stream) == []
    del stream
    gc.collect()
    assert llm.engine.get_num_unfinished_requests() == 1
    [*_, output] = drained(llm.engine)
    assert output.request_id == "theirs"
    assert nothing_is_left(llm)


def test_a_stream_that_is_collected_amidst_a_step_waits_for_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs whenever it likes: an abort then would change the books under the loop."""
    held, seen = [llm.stream("ROMEO:", LONG)], list[int]()
    submit = llm.engine.core.executor.submit

    def collected(batch: Any) -> Any:
        held.clear()
        seen.append(llm.engine.get_num_unfinished_requests())
        return submit(batch)

    monkeypatch.setattr(llm.engine.core.executor, "submit", collected)
    expected = generate(llm, "ROMEO:", LONG)
    assert len(expected[0]) == 30
    assert seen[-1] == 1
    assert nothing_is_left(llm)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_stream_leaves_an_engine_that_can_be_used(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = generate(llm, "ROMEO:")
    submit, calls = llm.engine.core.executor.submit, []

    def interrupted(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return submit(batch)

    monkeypatch.setattr(llm.engine.core.executor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(llm.stream(PROMPTS, LONG))
    assert nothing_is_left(llm)
    assert generate(llm, "ROMEO:") == [expected]


@pytest.mark.slow("long answers in several threads")
@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_harms_no_other_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = llm.engine.core.executor.submit

    def interrupted(batch: Any) -> Any:
        monkeypatch.setattr(llm.engine.core.executor, "submit", submit)
        os.kill(os.getpid(), signal.SIGINT)
        return submit(batch)

    [expected] = generate(llm, "ROMEO:", LONG)
    others = [in_thread(lambda: generate(llm, "ROMEO:", LONG)) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come as soon as there is a step
        monkeypatch.setattr(llm.engine.core.executor, "submit", interrupted)
        generate(llm, ["JULIET:"] * 8, LONG)
    assert [result() for result in others] == [[expected]] * 3
    assert nothing_is_left(llm)


# `LLMEngine`


@pytest.mark.parametrize("driven", [True, False])
def test_a_step_that_waits_for_the_future_lets_others_in(
    driven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        LLM("demo", **SETTINGS)
        if driven
        else LLMEngine.from_config({"model": "demo"}, **SETTINGS) as one
    ):
        engine, asleep = one.engine if isinstance(one, LLM) else one, threading.Event()
        step = engine.core.step

        def told(wait_until: Callable[[float], None]) -> Delivery:
            def tell(instant: float) -> None:
                asleep.set()
                wait_until(instant)

            return step(tell)

        monkeypatch.setattr(engine.core, "step", told)
        engine.add_request("future", [1], GREEDY, arrival_time=1e9)
        for call in (
            engine.get_num_unfinished_requests,
            lambda: engine.add_request("now", [1], GREEDY),
        ):
            asleep.clear()
            stepping = in_thread(engine.step)
            assert asleep.wait(PATIENCE_S)
            call()
            assert stepping() == []
        assert isinstance(one, LLMEngine) or len(generate(one, "ROMEO:")[0]) == 6
        engine.abort_request("future")
        [*_, output] = drained(engine)
        assert output.request_id == "now"


def test_a_core_that_is_stepped_by_hand_waits_for_an_arrival() -> None:
    with LLMEngine.from_config({"model": "demo"}, **SETTINGS) as engine:
        engine.add_request("soon", [1], GREEDY, arrival_time=(due := engine.now() + 0.05))
        while engine.core.has_unfinished():
            engine.core.step()
        assert engine.now() >= due


@pytest.mark.parametrize(
    "wrong", [None, 5, {}, {"a": 1}, b"a", [1], ["a", None], [["a"]], Ellipsis, range(3)], ids=str
)
def test_what_is_no_id_cannot_be_aborted(llm: LLM, wrong: Any) -> None:
    with pytest.raises(
        RequestError, match="a request id must be a string, and several a list of strings"
    ):
        llm.engine.abort_request(wrong)


def test_a_repr_tells_what_it_is_and_how_it_fares(fresh: LLM) -> None:
    fresh.engine.add_request("a", [1], GREEDY)
    text = repr(fresh)
    for part in (
        "LLM(LLMEngine(model='demo'",
        "scheduler='fcfs'",
        "max_model_len=128",
        "device='cpu",
        "dtype='float32'",
        "unfinished=1, running",
    ):
        assert part in text
    fresh.close()
    assert repr(fresh).endswith("unfinished=0, closed))")


def test_an_unreferenced_llm_is_collected_and_its_thread_ends() -> None:
    before = threading.active_count()
    llm = LLM("demo", **SETTINGS)
    generate(llm, "ROMEO:")
    engine = weakref.ref(llm.engine)
    [thread] = [thread for thread in threading.enumerate() if thread.name == "dovetail-engine"][-1:]
    del llm
    for _ in range(20 * PATIENCE_S):  # the thread may not have returned from its last step yet
        gc.collect()
        thread.join(0.05)
        if not thread.is_alive():
            break
    assert engine() is None
    assert threading.active_count() == before
