"""`RemoteEngine` and `EngineHost`: a front end returns the same as the offline engine, regardless
of the transport."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import DovetailError, EngineDeadError, RequestError
from dovetail.front.assembly import assemble
from dovetail.request.outputs import RequestOutput
from dovetail_server.frames import StepFrame, ToEngine, ToFrontEnd
from dovetail_server.host import EngineHost
from dovetail_server.links import Line, Take, ZmqLine, ZmqPost
from dovetail_server.remote import RemoteEngine
from tests.e2e import drafting
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401
from tests.rounding import rounded, roundings_of_demo
from tests.server.engines import DEMO, PATIENCE_S, Collector, Link, Served, served

both = pytest.mark.parametrize("link", ["thread", "zmq"])


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def patiently() -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(patiently())


async def ask(
    engine: Any,
    name: str,
    prompt: Any,
    params: SamplingParams,
    *,
    is_plain: bool = False,
    **fields: Any,
) -> Collector:
    """Submit a request and wait for its end."""
    listener = Collector(is_plain=is_plain)
    await engine.submit(name, prompt, params, listener, **fields)
    await listener.over.wait()
    return listener


def many_params() -> list[SamplingParams]:
    """64 requests that end in all ways, and use all parameters."""
    kinds: list[dict[str, Any]] = [
        {},
        {"stop": ["the", ","], "max_tokens": 60},
        {"stop": ["e"], "include_stop_str_in_output": True, "min_tokens": 10},
        {"logprobs": 3},
        {"prompt_logprobs": 2, "logprobs": 0},
        {"n": 3, "stop": ["a "], "logprobs": 1},
        {"stop_token_ids": list(range(0, 400, 3)), "include_stop_str_in_output": True},
        {
            "bad_words": ["the"],
            "logit_bias": {5: 3.0},
            "temperature": 0.7,
            "top_k": 20,
            "repetition_penalty": 1.2,
            "min_tokens": 4,
        },
    ]
    return [
        SamplingParams(
            **{"seed": 1000 + index, "max_tokens": 16 + index % 7, **kinds[index % len(kinds)]}
        )
        for index in range(64)
    ]


def essence(samples: Any) -> list[Any]:
    return [(s.text, list(s.token_ids), s.finish_reason, s.stop_reason) for s in samples]


def own_logprobs(positions: Any) -> list[float]:
    """Return the log-probabilities of the tokens themselves. Their last bits depend on the rest of
    the batch."""
    return [next(iter(position.values())).logprob for position in positions or () if position]


PROMPTS = [f"{'ROMEO: JULIET: '[: 3 + index % 12]}{index}" for index in range(64)]


@pytest.fixture(scope="module")
def offline(request: pytest.FixtureRequest) -> list[RequestOutput]:
    """Return the outputs of the first `request.param` requests."""
    with LLM(**DEMO) as llm:
        return llm.generate(
            PROMPTS[: request.param], many_params()[: request.param], use_tqdm=False
        )


counts = pytest.mark.parametrize(
    "offline", [8, pytest.param(64, marks=pytest.mark.slow("answers many requests"))], indirect=True
)


@counts
@both
def test_requests_at_once_give_what_they_give_offline(
    link: Link, tmp_path: Path, offline: list[RequestOutput]
) -> None:
    async def main() -> None:
        async with served(link, tmp_path) as at:
            heard = await asyncio.gather(
                *(
                    ask(at.engine, str(i), PROMPTS[i], params)
                    for i, params in enumerate(many_params()[: len(offline)])
                )
            )
            await at.until_all_is_free()
        for listener, expected in zip(heard, offline, strict=True):
            last = listener.outputs[-1]
            assert essence(listener.samples()) == essence(expected.outputs)
            for sample, its in zip(listener.samples(), expected.outputs, strict=True):
                assert own_logprobs(sample.logprobs) == rounded(
                    own_logprobs(its.logprobs), roundings_of_demo()
                )
                assert [len(position) for position in sample.logprobs or ()] == [
                    len(position) for position in its.logprobs or ()
                ]
            assert own_logprobs(last.prompt_logprobs) == rounded(
                own_logprobs(expected.prompt_logprobs), roundings_of_demo()
            )
            assert (last.prompt, list(last.prompt_token_ids)) == (
                expected.prompt,
                list(expected.prompt_token_ids),
            )
            assert last.metrics is not None
            assert last.metrics.first_token_time is not None

    run(main())


@counts
@pytest.mark.parametrize("is_plain", [False, True])
def test_steps_that_yield_several_tokens_give_the_same_in_fewer_outputs(
    is_plain: bool,
    tmp_path: Path,
    offline: list[RequestOutput],
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafting.install(site)
    answers: dict[tuple[int, ...], list[Sequence[int]]] = {}
    for output in offline:
        answers.setdefault(tuple(output.prompt_token_ids), []).extend(
            sample.token_ids for sample in output.outputs
        )
    monkeypatch.setattr(drafting, "ANSWERS", answers)

    async def main() -> None:
        async with served(
            "zmq",
            tmp_path,
            speculation={"drafter": "alternating", "max_drafts": 4},
            executor="free",
        ) as at:
            asked = (
                ask(at.engine, str(i), PROMPTS[i], params, is_plain=is_plain)
                for i, params in enumerate(many_params()[: len(offline)])
            )
            heard = await asyncio.gather(*asked)
            await at.until_all_is_free()
            load = at.engine.load
            assert load.draft_tokens > sum(load.accepted_drafts) > load.draft_rows / 4
        for listener, params, expected in zip(
            heard, many_params()[: len(offline)], offline, strict=True
        ):
            for sample, its in zip(listener.samples(), expected.outputs, strict=True):
                assert (sample.text, sample.finish_reason, sample.stop_reason) == (
                    its.text,
                    its.finish_reason,
                    its.stop_reason,
                )
                assert is_plain or list(sample.token_ids) == list(its.token_ids)
                assert own_logprobs(sample.logprobs) == rounded(
                    own_logprobs(its.logprobs), roundings_of_demo()
                )
                assert len(sample.logprobs or ()) == (
                    len(its.token_ids) if params.logprobs is not None else 0
                )
        assert sum(len(listener.outputs) for listener in heard) < 0.7 * sum(
            len(s.token_ids) for output in offline for s in output.outputs
        )

    run(main())


@pytest.mark.slow("answers twice in several processes")
@counts
@pytest.mark.parametrize(
    "link", [pytest.param("thread", marks=pytest.mark.full), "zmq"]
)  # what such a listener hears, both make in one place
def test_a_listener_that_wants_only_text_gets_the_same_text(
    link: Link, tmp_path: Path, offline: list[RequestOutput]
) -> None:
    async def main() -> None:
        async with served(link, tmp_path) as at:
            heard = await asyncio.gather(
                *(
                    ask(at.engine, str(i), PROMPTS[i], params, is_plain=True)
                    for i, params in enumerate(many_params()[: len(offline)])
                )
            )
            await at.until_all_is_free()
        for listener, params, expected in zip(
            heard, many_params()[: len(offline)], offline, strict=True
        ):
            ends = [(s.text, s.finish_reason, s.stop_reason) for s in listener.samples()]
            assert ends == [(s.text, s.finish_reason, s.stop_reason) for s in expected.outputs]
            told_more = (
                params.n > 1
                or params.stop
                or params.logprobs is not None
                or params.prompt_logprobs is not None
            )
            assert bool(listener.texts) == (
                not told_more and len(expected.outputs[0].token_ids) > 2
            )

    run(main())


async def begin_endless(at: Served, count: int) -> list[Collector]:
    params = SamplingParams(max_tokens=None, ignore_eos=True, logit_bias={0: -100})
    listeners = [Collector() for _ in range(count)]
    for index, listener in enumerate(listeners):
        await at.engine.submit(f"endless {index}", "ROMEO:", params, listener)
    for listener in listeners:
        await listener.begun.wait()
    return listeners


@both
def test_an_abort_frees_the_blocks_and_is_the_last_that_is_heard(
    link: Link, tmp_path: Path
) -> None:
    async def main() -> None:
        async with served(link, tmp_path) as at:
            listeners = await begin_endless(at, 5)
            for index in range(5):
                at.engine.abort(f"endless {index}")
            heard = [len(listener.outputs) for listener in listeners]
            await at.until_all_is_free()
            assert at.engine.num_unfinished == 0
            assert [len(listener.outputs) for listener in listeners] == heard
            await at.until(lambda: at.engine.load.held_pages == 0)
            assert all(listener.error is None for listener in listeners)

    run(main())


@both
def test_what_is_wrong_with_one_request_is_told_to_it_alone(link: Link, tmp_path: Path) -> None:
    async def main() -> None:
        async with served(link, tmp_path) as at:
            wrongs: list[dict[str, Any]] = [
                {"prompt": [10**6]},
                {"params": SamplingParams(n=2000)},
                {"extra": {"nobody": {}}},
                {"colour": "red"},
                {"priority": "x"},
            ]
            for wrong in wrongs:
                given: dict[str, Any] = {"prompt": "ROMEO:", "params": SamplingParams(), **wrong}
                with pytest.raises(RequestError):
                    await at.engine.submit(
                        "wrong", given.pop("prompt"), given.pop("params"), Collector(), **given
                    )
            listener = await ask(at.engine, "right", "ROMEO:", SamplingParams(max_tokens=3))
            assert listener.outputs[-1].finished
            await at.until_all_is_free()
            assert at.engine.num_unfinished == 0

    run(main())


def test_an_id_in_use_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with served("zmq", tmp_path) as at:
            await begin_endless(at, 1)
            with pytest.raises(RequestError, match="in use"):
                await at.engine.submit("endless 0", "ROMEO:", SamplingParams(), Collector())
            at.engine.abort("endless 0")

    run(main())


def test_a_text_that_was_tokenized_before_is_answered_as_one_that_was_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with served("thread", tmp_path) as at:
            text, params = "To be. " * 20, SamplingParams(max_tokens=5, seed=1)
            [before] = await asyncio.to_thread(at.engine.source([text]).all)
            first, second = (
                await ask(at.engine, "before", before, params),
                await ask(at.engine, "not before", text, params),
            )
            assert essence(first.samples()) == essence(second.samples())
            assert first.outputs[0].prompt == text
            with pytest.raises(RequestError, match=r"limits.max_prompt_chars"):
                at.engine.source(["To be. " * 10_000])

    run(main())


@both
def test_when_the_engine_dies_all_clients_are_notified(link: Link, tmp_path: Path) -> None:
    async def main() -> None:
        async with served(link, tmp_path) as at:
            listeners = await begin_endless(at, 3)

            def broken(*_: Any) -> Any:
                raise RuntimeError("the device is gone")

            at.core.executor.collect = broken  # type: ignore[method-assign, assignment]
            for listener in listeners:
                await listener.over.wait()
                assert isinstance(listener.error, EngineDeadError)
                assert "the device is gone" in str(listener.error)
            with pytest.raises(EngineDeadError):
                at.engine.check_health()
            with pytest.raises(EngineDeadError):
                await at.engine.submit("late", "ROMEO:", SamplingParams(), Collector())

    run(main())


@pytest.mark.parametrize("where", ["on_output", "on_text"])
def test_a_failing_listener_is_told_and_does_not_affect_others(tmp_path: Path, where: str) -> None:
    class Broken(Collector):
        def on_output(self, output: RequestOutput) -> None:
            if where == "on_output":
                raise ValueError("a bug")

        def on_text(self, text: str, tokens: int) -> None:
            raise ValueError("a bug")

    async def main() -> None:
        async with served("thread", tmp_path) as at:
            broken = Broken(is_plain=True)
            await at.engine.submit("broken", "ROMEO:", SamplingParams(max_tokens=50), broken)
            await broken.over.wait()
            assert "failed to process an output" in str(broken.error)
            listener = await ask(at.engine, "sound", "ROMEO:", SamplingParams(max_tokens=5))
            assert len(listener.samples()[0].token_ids) == 5
            await at.until_all_is_free()

    run(main())


def test_all_front_ends_together_may_have_as_many_requests_as_the_engine_takes(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with served("zmq", tmp_path, limits={"max_waiting": 3}) as at:
            other = await RemoteEngine.connect(
                ZmqLine(f"ipc://{tmp_path}/engine", b"another"), "another"
            )
            try:
                await begin_endless(at, 2)
                both_samples = Collector()
                await other.submit(
                    "two samples",
                    "ROMEO:",
                    SamplingParams(n=2, ignore_eos=True, max_tokens=200),
                    both_samples,
                )
                await both_samples.begun.wait()
                refused = await ask(other, "one more", "ROMEO:", SamplingParams())
                assert "max_waiting" in str(refused.error)
                at.engine.abort("endless 0")
                other.abort("two samples")
                for name in ("taken", "as well"):
                    assert (
                        await ask(other, name, "ROMEO:", SamplingParams(max_tokens=2))
                    ).error is None
            finally:
                other.close()

    run(main())


def test_a_front_end_that_takes_nothing_loses_its_requests_and_is_told(tmp_path: Path) -> None:
    async def main() -> None:
        async with served("zmq", tmp_path) as at:
            listeners = await begin_endless(at, 2)
            post = at.post
            assert post is not None
            send = post.send
            post.send = lambda *_: False  # type: ignore[method-assign]
            await at.until_all_is_free()
            post.send = send  # type: ignore[method-assign]
            for listener in listeners:
                await listener.over.wait()
                assert isinstance(listener.error, DovetailError)
            assert (
                (await ask(at.engine, "next", "ROMEO:", SamplingParams(max_tokens=2)))
                .outputs[-1]
                .finished
            )

    run(main())


def test_a_message_that_cant_be_read_fails_the_front_end_once(tmp_path: Path) -> None:
    class Torn:
        """A line whose frames can be torn."""

        def __init__(self, line: Line) -> None:
            self.line, self.torn, self.several = line, 0, asyncio.Event()
            self.send, self.close = line.send, line.close

        def open(self, take: Take) -> None:
            self.line.open(lambda message: take(self._torn(message)))

        def tear(self) -> None:
            self.torn = 1

        def _torn(self, message: ToFrontEnd) -> ToFrontEnd:
            if not self.torn or not isinstance(message, StepFrame):
                return message
            self.torn += 1
            if self.torn > 3:
                self.several.set()
            return msgspec.structs.replace(message, numbers=b"x")

    async def main() -> None:
        async with served("zmq", tmp_path):
            line, reasons = Torn(ZmqLine(f"ipc://{tmp_path}/engine", b"another")), []

            def failed(reason: str) -> None:
                reasons.append(reason)
                other.fail(reason)

            other = await RemoteEngine.connect(line, "another", failed)
            try:
                listener = Collector()
                await other.submit(
                    "endless", "ROMEO:", SamplingParams(ignore_eos=True, max_tokens=500), listener
                )
                await listener.begun.wait()
                line.tear()
                await line.several.wait()
                assert isinstance(listener.error, EngineDeadError)
                with pytest.raises(EngineDeadError, match="couldn't read a message"):
                    other.check_health()
                assert len(reasons) == 1
            finally:
                other.close()

    run(main())


def test_a_host_that_hangs_between_steps_is_seen(tmp_path: Path) -> None:
    class Stuck(ZmqPost):
        stuck, release = threading.Event(), threading.Event()

        def take(self) -> list[tuple[bytes, ToEngine]]:
            self.stuck.set()
            self.release.wait(PATIENCE_S)
            return super().take()

    post = Stuck(f"ipc://{tmp_path}/engine")
    host = EngineHost(assemble(DEMO, {}), post)
    thread = threading.Thread(target=host.run, daemon=True)
    thread.start()
    assert post.stuck.wait(PATIENCE_S)
    assert 0 < host.busy_s() < host.busy_s()
    post.release.set()
    host.stop()
    post.wake()
    thread.join(PATIENCE_S)
    assert host.busy_s() == 0
    post.close()


@pytest.mark.slow("answers many requests")
def test_the_times_of_preemptions_arrive_with_the_end(tmp_path: Path) -> None:
    """Two requests that the cache can't hold together: the younger one is preempted, and goes on
    when the first has ended."""

    async def main() -> list[Collector]:
        settings = {
            "max_model_len": 128,
            "executor": {"name": "local", "num_pages": 8},
            "kv_cache": {"name": "prefix", "reuse": False},
        }
        async with served("zmq", tmp_path, **settings) as one:
            params = SamplingParams(max_tokens=90, ignore_eos=True, temperature=0)
            return list(
                await asyncio.gather(*(ask(one.engine, name, [5, 6], params) for name in "ab"))
            )

    times = [collector.outputs[-1].metrics for collector in run(main())]
    assert times[0].preemptions == len(times[0].pauses) == 0
    assert times[1].preemptions == len(times[1].pauses) > 0
    moments = [at for pause in times[1].pauses for at in pause]
    assert moments == sorted(moments)
    assert times[1].first_scheduled_time < moments[0] < moments[-1] < times[1].finished_time


@both
def test_a_reset_of_the_prefix_cache_precedes_later_requests(link: Link, tmp_path: Path) -> None:
    async def main() -> None:
        async with served(link, tmp_path, **DEMO) as one:
            prompt = "ROMEO: What light through yonder window breaks?"
            params = SamplingParams(max_tokens=1)
            await ask(one.engine, "a", prompt, params)
            cached = (await ask(one.engine, "b", prompt, params)).outputs[0].num_cached_tokens
            await one.engine.reset_prefix_cache()
            assert (
                (await ask(one.engine, "c", prompt, params)).outputs[0].num_cached_tokens
                == 0
                < cached
            )
            one.engine.fail("the engine died")
            with pytest.raises(EngineDeadError, match="the engine died"):
                await one.engine.reset_prefix_cache()

    run(main())


def test_ends_of_lines_that_nobody_closed_can_be_collected_as_garbage(tmp_path: Path) -> None:
    """A context of ZeroMQ that is freed before its socket waits for it forever, in whichever thread
    the collector runs."""

    class Owner:
        def __init__(self, *owned: object) -> None:
            self.owned = self, *owned  # a cycle

    def forget() -> None:
        Owner(ZmqPost(f"ipc://{tmp_path}/engine"))
        Owner(ZmqLine(f"ipc://{tmp_path}/engine", b"forgotten"))
        gc.collect()

    thread = threading.Thread(target=forget, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
