"""A slow reader has one waiting output, no larger than the answer, with everything that a fast
reader would have received."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from dovetail.front.engine_thread import Unread
from dovetail.request.outputs import CompletionOutput, Logprob, RequestOutput
from tests.support import examples


def output(*samples: CompletionOutput, finished: bool = False) -> RequestOutput:
    return RequestOutput("r", "prompt", (1,), list(samples), finished)


def told(outputs: Sequence[RequestOutput]) -> list[tuple[object, ...]]:
    """Return what a reader has received in the end about each sample and the request."""
    known = []
    for index in sorted({sample.index for one in outputs for sample in one.outputs}):
        deltas = [sample for one in outputs for sample in one.outputs if sample.index == index]
        newest = deltas[-1]
        token_ids = [token for delta in deltas for token in delta.token_ids]
        logprobs = (
            None
            if newest.logprobs is None
            else [entry for delta in deltas for entry in delta.logprobs or ()]
        )
        text = "".join(delta.text for delta in deltas)
        known.append(
            (
                index,
                text,
                token_ids,
                logprobs,
                newest.cumulative_logprob,
                newest.finish_reason,
                newest.stop_reason,
            )
        )
    return [*known, (outputs[-1].finished, outputs[-1].request_id, outputs[-1].prompt)]


@st.composite
def answers(draw: st.DrawFn) -> list[RequestOutput]:
    """Deltas of an answer of a few samples, any of which may have nothing new."""
    with_logprobs, count = draw(st.booleans()), draw(st.integers(1, 3))
    outputs = []
    for step in range(draw(st.integers(1, 12))):
        samples = []
        for index in draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1)):
            tokens = draw(st.sampled_from([(), (7,), (8, 9)]))
            logprobs = (
                [{token: Logprob(-float(step))} for token in tokens] if with_logprobs else None
            )
            reason = draw(st.sampled_from([None, None, "stop"]))
            samples.append(
                CompletionOutput(
                    index, draw(st.text(max_size=3)), tokens, float(step), logprobs, reason, reason
                )
            )  # type: ignore[arg-type]
        outputs.append(output(*samples))
    outputs[-1].finished = True
    return outputs


@examples(quick=100, full=1000)
@given(answers(), st.lists(st.booleans(), min_size=12, max_size=12))
def test_a_slow_reader_s_deltas_together_say_what_a_prompt_reader_s_do(
    answer: list[RequestOutput], reads: list[bool]
) -> None:
    unread, slow = Unread(lambda: None, joins=True), []
    for one, read in zip(answer, reads, strict=False):
        unread.put(one)
        if read:
            slow.append(unread.take()[0])
    slow.append(unread.take()[0])
    assert told([one for one in slow if one is not None]) == told(answer)


@given(answers())
@examples(quick=20, full=200)
def test_a_prompt_reader_gets_each_output_itself(answer: list[RequestOutput]) -> None:
    unread = Unread(lambda: None, joins=True)
    for one in answer:
        unread.put(one)
        assert unread.take()[0] is one
    assert unread.take() == (None, None)


def test_of_cumulative_outputs_the_newest_waits() -> None:
    notices: list[str] = []
    unread, outputs = (
        Unread(lambda: notices.append("read")),
        [output(CompletionOutput(0, "x" * length, [5] * length)) for length in (1, 2, 3)],
    )
    for one in outputs:
        unread.put(one)
    assert notices == ["read"], "the reader is told once"
    assert unread.take()[0] is outputs[-1]


def test_the_end_comes_after_what_came_before_it_and_stays() -> None:
    unread, error = Unread(lambda: None, joins=True), ValueError()
    last = output(CompletionOutput(0, "x", [5]))
    unread.put(last)
    unread.end(error)
    assert unread.take() == (last, error)
    assert unread.take() == (None, error)


def test_what_waits_takes_the_memory_of_the_answer() -> None:
    """900 unread tokens: cumulative outputs would need 3 MB for token ids alone, and separate
    deltas 0.5 MB."""
    for is_delta in (False, True):
        tracemalloc.start()
        try:
            unread = Unread(lambda: None, joins=is_delta)
            for length in range(1, 901):
                new = (
                    CompletionOutput(0, "x", (5,))
                    if is_delta
                    else CompletionOutput(0, "x" * length, (5,) * length)
                )
                unread.put(output(new))
            del new
            assert tracemalloc.get_traced_memory()[0] < 30_000
        finally:
            tracemalloc.stop()
        taken, _ = unread.take()
        assert taken is not None
        assert (taken.outputs[0].text, list(taken.outputs[0].token_ids)) == ("x" * 900, [5] * 900)
