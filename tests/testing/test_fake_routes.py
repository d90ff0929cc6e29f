"""`FakeRouteContext` gives what a route asks for, as the server does."""

from __future__ import annotations

import asyncio

from dovetail.request.sampling_params import SamplingParams
from dovetail.testing import FakeRouteContext


def test_log_probabilities_come_where_they_are_asked_for() -> None:
    context = FakeRouteContext("ab")
    asked = SamplingParams(logprobs=0, prompt_logprobs=0)
    output = asyncio.run(context.answer("xyz", asked))
    assert list(output.prompt_token_ids) == [120, 121, 122]
    assert output.prompt_logprobs is not None
    assert [line and set(line) for line in output.prompt_logprobs] == [None, {121}, {122}]
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert [set(line) for line in logprobs] == [{97}, {98}]


def test_log_probabilities_that_nobody_asked_for_are_left_out() -> None:
    output = asyncio.run(FakeRouteContext().answer([1, 2], SamplingParams()))
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
