"""`AsyncLLMEngine`: many readers that start, finish and stop at any time; none is left waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from dovetail import LLM, AsyncLLMEngine, LLMEngine, RequestOutput, SamplingParams
from dovetail.api.clock import VirtualClock
from dovetail.errors import DovetailError, EngineDeadError, ModelLoadError, RequestError
from tests.e2e.test_same_tokens import model_dir

PATIENCE_S = 60  # a hang fails the test; nothing here takes nearly as long


def model() -> dict[str, Any]:
    return {"model": str(model_dir()), "generation_config": "none", "max_num_seqs": 8}


@pytest.fixture(scope="module")
def shared() -> Iterator[AsyncLLMEngine]:
    engine = AsyncLLMEngine.from_config(model())
    yield engine
    engine.close()


@pytest.fixture
def fresh() -> Iterator[AsyncLLMEngine]:
    """For those who break it."""
    engine = AsyncLLMEngine.from_config(model())
    yield engine
    engine.close()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def patiently() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(patiently())


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "seed": 1,
            "max_tokens": 20,
            "ignore_eos": True,
            "detokenize": False,
            "output_kind": "delta",
            **fields,
        }
    )


ENDLESS = params(max_tokens=None)  # 95 tokens: long enough to be broken off


async def tokens_of(stream: AsyncIterator[RequestOutput]) -> list[int]:
    return [
        token async for output in stream for sample in output.outputs for token in sample.token_ids
    ]


async def is_idle(engine: AsyncLLMEngine) -> bool:
    """Return True if the engine holds no other requests after finishing all earlier calls."""
    await asyncio.sleep(0)  # whoever was cancelled says so first
    await tokens_of(engine.generate("last", [1], params(max_tokens=1)))
    return (
        engine.engine.get_num_unfinished_requests() == 0 and engine.engine.stats().pages.held == 0
    )


# Texts


class SlowTokenizer:
    """Takes the place of `LLMEngine.tokenized`: a text is one token, and isn't tokenized before
    `go` is set."""

    def __init__(self, engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.texts: list[str] = []
        monkeypatch.setattr(engine.engine, "tokenized", self)

    def __call__(self, prompt: Any, *, cut: bool = False) -> Any:
        if not isinstance(prompt, str):
            return prompt
        self.began.set()
        assert self.go.wait(PATIENCE_S)
        self.texts.append(prompt)
        return [len(prompt)]


def test_no_request_waits_while_a_text_is_tokenized(
    fresh: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = SlowTokenizer(fresh, monkeypatch)

    async def main() -> None:
        texts = [
            asyncio.create_task(anext(fresh.generate(text, text, params(max_tokens=1))))
            for text in ("a", "bb", "ccc")
        ]
        assert await asyncio.to_thread(tokenizer.began.wait, PATIENCE_S)
        before = fresh.engine.now()
        assert len(await tokens_of(fresh.generate("ids", [1], params()))) == 20
        tokenizer.go.set()
        outputs = await asyncio.gather(*texts)
        assert [len(output.prompt_token_ids) for output in outputs] == [1, 1, 1]
        assert all(output.metrics.arrival_time < before for output in outputs)

    run(main())
    assert tokenizer.texts == ["a", "bb", "ccc"]


@pytest.mark.parametrize("how", ["abort", "cancel", "close", "die"])
def test_a_request_that_ends_while_its_text_is_tokenized_never_begins(
    fresh: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tokenizer = SlowTokenizer(fresh, monkeypatch)

    async def main() -> None:
        text = asyncio.create_task(tokens_of(fresh.generate("a", "a", ENDLESS)))
        assert await asyncio.to_thread(tokenizer.began.wait, PATIENCE_S)
        if how == "abort":
            await fresh.abort(["a"])
        elif how == "cancel":
            text.cancel()
            await asyncio.sleep(0)
        elif how == "close":
            await asyncio.to_thread(fresh.close)
        else:
            monkeypatch.setattr(fresh.engine.core.executor, "submit", lambda batch: 1 / 0)
            with pytest.raises(EngineDeadError):
                await tokens_of(fresh.generate("other", [1], params()))
        tokenizer.go.set()
        [result] = await asyncio.gather(text, return_exceptions=True)
        if how == "abort":
            assert result == []
            assert await is_idle(fresh)
        elif how == "cancel":
            assert isinstance(result, asyncio.CancelledError)
            assert await is_idle(fresh)
        else:
            assert isinstance(result, EngineDeadError)

    run(main())
    assert not fresh.engine.has_unfinished_requests()


# Streams


@pytest.mark.slow("makes several engines or many tokens")
def test_concurrent_streams_have_the_tokens_of_requests_that_run_alone(
    shared: AsyncLLMEngine,
) -> None:
    prompts = [[i % 97] * (1 + i % 9) for i in range(30)]
    each = [params(seed=i) for i in range(30)]

    async def main() -> list[list[int]]:
        return await asyncio.gather(
            *(tokens_of(shared.generate(str(i), prompts[i], each[i])) for i in range(30))
        )

    with LLM(**model()) as llm:
        expected = [
            list(llm.generate([prompt], one, use_tqdm=False)[0].outputs[0].token_ids)
            for prompt, one in zip(prompts, each, strict=True)
        ]
    assert run(main()) == expected


def test_a_stream_gives_every_token_once_and_ends_with_the_finished_output(
    shared: AsyncLLMEngine,
) -> None:
    async def main() -> list[RequestOutput]:
        return [output async for output in shared.generate("a", [1, 2], params(max_tokens=7))]

    outputs = run(main())
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 7


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_a_reader_who_comes_late_gets_all_of_it_as_one_output(
    shared: AsyncLLMEngine, kind: str
) -> None:
    asked = params(n=2, logprobs=2, max_tokens=40, output_kind=kind)

    async def main() -> list[RequestOutput]:
        stream = shared.generate("late", [1], asked)
        first = await anext(stream)
        while shared.engine.get_num_unfinished_requests():
            pass  # the event loop stands still
        return [first, *[output async for output in stream]]

    outputs = run(main())
    assert len(outputs) <= 3, "the first, all others, and perhaps the last by itself"
    with LLM(**model()) as llm:
        [expected] = llm.generate([[1]], asked, use_tqdm=False)
    for index, sample in enumerate(expected.outputs):
        parts = [
            one
            for output in (outputs if kind == "delta" else outputs[-1:])
            for one in output.outputs
            if one.index == index
        ]
        assert [token for part in parts for token in part.token_ids] == list(sample.token_ids)
        assert [list(one) for part in parts for one in part.logprobs or ()] == [
            list(one) for one in sample.logprobs or ()
        ]
        assert parts[-1].finish_reason == sample.finish_reason


def test_fields_of_the_request_are_passed_on(shared: AsyncLLMEngine) -> None:
    async def main() -> None:
        arrival = shared.engine.now()
        async for output in shared.generate(
            "a",
            [1],
            params(),
            arrival_time=arrival,
            priority=3,
            client="me",
            deadline=1.0,
            cache_salt="s",
        ):
            assert output.metrics.arrival_time == arrival

    run(main())


def test_readers_in_several_event_loops_share_an_engine(shared: AsyncLLMEngine) -> None:
    results: dict[str, list[int]] = {}

    def reader(name: str) -> None:
        results[name] = run(tokens_of(shared.generate(name, [5], params())))

    threads = [threading.Thread(target=reader, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(results) == 3
    assert len({tuple(tokens) for tokens in results.values()}) == 1


# Breaking off


def test_closing_the_iterator_aborts_the_request(shared: AsyncLLMEngine) -> None:
    async def main() -> None:
        other = asyncio.create_task(tokens_of(shared.generate("other", [3], params())))
        async with aclosing(shared.generate("a", [1], ENDLESS)) as stream:
            async for _ in stream:
                break
        assert len(await other) == 20
        assert await is_idle(shared)

    run(main())


def test_cancelling_the_task_aborts_the_request(shared: AsyncLLMEngine) -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in shared.generate("a", [1], ENDLESS):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await is_idle(shared)

    run(main())


def test_a_task_cancelled_before_its_first_output_leaves_nothing(shared: AsyncLLMEngine) -> None:
    async def main() -> None:
        tasks = [
            asyncio.create_task(tokens_of(shared.generate(str(i), [i], ENDLESS))) for i in range(20)
        ]
        await asyncio.sleep(0)  # each has asked, and none has heard
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(result, asyncio.CancelledError)
            for result in await asyncio.gather(*tasks, return_exceptions=True)
        )
        assert await is_idle(shared)

    run(main())


def test_abort_ends_the_iterator_without_an_error_and_frees_the_id(shared: AsyncLLMEngine) -> None:
    async def main() -> None:
        seen = 0
        async for output in shared.generate("a", [1], ENDLESS):
            assert not output.finished
            seen += 1
            if seen == 1:
                await shared.abort("a")
        assert 1 <= seen < 95
        await shared.abort("a")
        await shared.abort("nobody")
        assert len(await tokens_of(shared.generate("a", [1], params()))) == 20

    run(main())


@pytest.mark.parametrize("kind", [list, tuple, set])
def test_several_requests_are_aborted_at_once(shared: AsyncLLMEngine, kind: Any) -> None:
    async def main() -> None:
        streams = [shared.generate(name, [1], ENDLESS) for name in "abc"]
        began = [list((await anext(stream)).outputs[0].token_ids) for stream in streams]
        await shared.abort(kind(["a", "nobody", "c"]))
        rest = await asyncio.gather(*(tokens_of(stream) for stream in streams))
        assert [len(first + more) == 95 for first, more in zip(began, rest, strict=True)] == [
            False,
            True,
            False,
        ]
        assert await is_idle(shared)

    run(main())


@pytest.mark.parametrize(
    "wrong", [None, 5, {}, {"a": 1}, b"a", [5], [["a"]], ["a", None], Ellipsis], ids=str
)
def test_an_invalid_id_is_rejected_in_the_caller_without_affecting_others(
    shared: AsyncLLMEngine, wrong: Any
) -> None:
    async def main() -> None:
        other = asyncio.create_task(tokens_of(shared.generate("a", [3], params())))
        with pytest.raises(
            RequestError, match="a request id must be a string, and several a list of strings"
        ):
            await shared.abort(wrong)
        assert len(await other) == 20

    run(main())


def test_a_loop_that_ends_silently_does_not_affect_others(shared: AsyncLLMEngine) -> None:
    """Its reader can't be notified any more."""
    loop = asyncio.new_event_loop()
    stream = shared.generate("silent", [1], ENDLESS)
    loop.run_until_complete(asyncio.wait_for(anext(stream), PATIENCE_S))
    loop.close()

    async def main() -> None:
        assert len(await tokens_of(shared.generate("a", [1], params()))) == 20
        await shared.abort("silent")
        assert await is_idle(shared)

    run(main())
    run(stream.aclose())


# Errors


@pytest.mark.parametrize(
    ("prompt", "fields", "error"),
    [
        ([], {}, RequestError),
        ([97], {}, RequestError),
        ("text", {}, ModelLoadError),
        ([1], {"priority": "high"}, RequestError),
        ([1], {"no_such_field": 1}, RequestError),
        ([1], {"params": {"n": 1}}, RequestError),
    ],
    ids=str,
)
def test_errors_of_a_request_reach_its_caller_alone(
    shared: AsyncLLMEngine, prompt: Any, fields: dict[str, Any], error: type[Exception]
) -> None:
    async def main() -> None:
        other = asyncio.create_task(tokens_of(shared.generate("other", [3], params())))
        with pytest.raises(error):
            await tokens_of(shared.generate("bad", prompt, **{"params": params(), **fields}))
        assert len(await other) == 20
        assert await is_idle(shared)

    run(main())


@pytest.mark.slow("makes an engine, and writes a long answer")
def test_a_duplicate_id_is_refused_and_the_first_continues(shared: AsyncLLMEngine) -> None:
    async def main() -> None:
        first = asyncio.create_task(tokens_of(shared.generate("a", [3], ENDLESS)))
        second = asyncio.create_task(tokens_of(shared.generate("a", [3], ENDLESS)))
        with pytest.raises(RequestError, match="request_id 'a' is in use"):
            await second
        assert len(await first) == 95

    run(main())


@pytest.mark.parametrize("error", [ArithmeticError, SystemExit])
def test_an_unforeseen_error_in_taking_a_request_is_its_callers_alone(
    shared: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    add = shared.engine.add_request

    def fails(request_id: str, *args: Any, **fields: Any) -> None:
        if request_id == "cursed":
            raise error("surprise")
        add(request_id, *args, **fields)

    monkeypatch.setattr(shared.engine, "add_request", fails)

    async def main() -> None:
        with pytest.raises(error, match="surprise"):
            await tokens_of(shared.generate("cursed", [1], params()))
        assert len(await tokens_of(shared.generate("a", [1], params()))) == 20

    run(main())


@pytest.mark.slow("many calls of several threads")
def test_other_threads_may_ask_the_engine_itself(shared: AsyncLLMEngine) -> None:
    async def main() -> None:
        streams = [
            asyncio.create_task(tokens_of(shared.generate(str(i), [i], ENDLESS))) for i in range(4)
        ]
        while not all(stream.done() for stream in streams):
            assert await asyncio.to_thread(shared.engine.get_num_unfinished_requests) <= 4
            assert await asyncio.to_thread(lambda: shared.engine.stats().running) <= 4
            await asyncio.to_thread(shared.engine.reset_prefix_cache)
        assert [len(stream.result()) for stream in streams] == [95] * 4
        waiting = asyncio.create_task(
            anext(shared.generate("future", [1], params(), arrival_time=1e9))
        )
        assert (
            len(await tokens_of(shared.generate("present", [1], params()))) == 20
        )  # now it sleeps
        assert await asyncio.to_thread(shared.engine.get_num_unfinished_requests) == 1
        waiting.cancel()
        assert await is_idle(shared)

    run(main())


# The engine's end


def test_the_engines_death_reaches_every_stream(
    fresh: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, steps = fresh.engine.core.executor, []
    submit = executor.submit

    def dies(batch: Any) -> Any:
        steps.append(batch)
        if len(steps) == 10:
            raise DovetailError("the device is gone")
        return submit(batch)

    monkeypatch.setattr(executor, "submit", dies)

    async def main() -> None:
        streams = [
            tokens_of(fresh.generate(str(i), [i], params(max_tokens=None, n=1 + i % 2)))
            for i in range(12)
        ]
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert {(type(result), "the device is gone" in str(result)) for result in results} == {
            (EngineDeadError, True)
        }
        assert len({id(result) for result in results}) == 12, "each has an error of its own"
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await tokens_of(fresh.generate("late", [1], params()))
        await fresh.abort("0")

    run(main())


def test_an_error_outside_of_the_core_reaches_every_stream_too(
    fresh: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh.engine._builder, "build", lambda *_: 1 / 0)

    async def main() -> None:
        results = await asyncio.gather(
            *(tokens_of(fresh.generate(str(i), [i], ENDLESS)) for i in range(3)),
            return_exceptions=True,
        )
        assert {type(result) for result in results} == {EngineDeadError}
        assert "ZeroDivisionError" in str(results[0])

    run(main())


def test_close_while_running_reaches_every_stream(fresh: AsyncLLMEngine) -> None:
    async def main() -> None:
        streams = [fresh.generate(str(i), [i], ENDLESS) for i in range(3)]
        await asyncio.gather(*(anext(stream) for stream in streams))
        await asyncio.to_thread(fresh.close)
        for stream in streams:
            with pytest.raises(EngineDeadError, match="the engine was closed"):
                await tokens_of(stream)
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            await tokens_of(fresh.generate("late", [1], params()))
        await fresh.abort("late")

    run(main())
    fresh.close()
    assert not fresh.engine.has_unfinished_requests()


def test_close_within_the_loop_does_not_wait_for_its_readers(fresh: AsyncLLMEngine) -> None:
    async def main() -> None:
        stream = fresh.generate("a", [1], ENDLESS)
        await anext(stream)
        fresh.close()
        await stream.aclose()  # type: ignore[attr-defined]

    run(main())


# without an end they would take the interpreter from the engine's thread, and this would test that
MANY = 2_000


@pytest.mark.parametrize("asked", range(6))
def test_whoever_comes_as_it_closes_gets_tokens_or_an_error(asked: int) -> None:
    async def main() -> None:
        engine = AsyncLLMEngine.from_config(model())
        tasks = [
            asyncio.create_task(tokens_of(engine.generate(str(i), [i], params())))
            for i in range(asked)
        ]
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while not closing.done():
            if len(tasks) < MANY:
                tasks.append(
                    asyncio.create_task(tokens_of(engine.generate(str(len(tasks)), [1], params())))
                )
            await asyncio.sleep(0)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError) or len(result) == 20  # type: ignore[arg-type]

    run(main())


def test_its_context_closes_it() -> None:
    async def main() -> None:
        async with AsyncLLMEngine.from_config(model()) as engine:
            await anext(engine.generate("a", [1], ENDLESS))
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            await tokens_of(engine.generate("late", [1], params()))

    run(main())


# The future


@pytest.mark.slow("makes an engine, and waits for a step")
def test_a_request_of_the_far_future_does_not_delay_others(fresh: AsyncLLMEngine) -> None:
    async def main() -> None:
        future = asyncio.create_task(
            tokens_of(fresh.generate("future", [1], params(), arrival_time=1e9))
        )
        for i in range(5):
            assert len(await tokens_of(fresh.generate(str(i), [1], params()))) == 20
        assert not future.done()
        future.cancel()
        assert await is_idle(fresh)
        waiting = asyncio.create_task(
            tokens_of(fresh.generate("waiting", [1], params(), arrival_time=1e9))
        )
        assert len(await tokens_of(fresh.generate("a", [1], params()))) == 20
        await asyncio.to_thread(fresh.close)
        with pytest.raises(EngineDeadError):
            await waiting

    run(main())


def test_a_virtual_clock_passes_over_the_time_until_an_arrival() -> None:
    async def main() -> None:
        async with AsyncLLMEngine(LLMEngine.from_config(model(), clock=VirtualClock())) as engine:
            assert (
                len(await tokens_of(engine.generate("future", [1], params(), arrival_time=1e9)))
                == 20
            )
            assert engine.engine.now() >= 1e9

    run(main())
