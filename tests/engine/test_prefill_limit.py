"""The prefill limit: prompts that arrive during streaming lengthen a step only to a limit, with
any policy; in simulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ClassVar

import pytest
from pydantic import BaseModel

from dovetail.api.component import NoOptions
from dovetail.api.observer import StepFinished
from dovetail.api.prefix_cache import PrefixCache
from dovetail.api.scheduler import Grant, Refusal, Scheduler, SchedulerCapabilities, Step
from dovetail.engine import step_times
from dovetail.engine.step_times import LEAST_PROMPT_TOKENS, prompt_tokens_within
from dovetail.request import Request
from dovetail.request.sampling_params import OutputKind, SamplingParams
from dovetail.testing import make_request
from tests.engine.policies import FCFS
from tests.engine.world import Shape, Spec, World
from tests.schedulers.helpers import POLICIES, Policy

DECODES = 4
STEP_S, TOKEN_S = 0.6, 0.001  # of the fake device
ALONE_S = STEP_S + DECODES * TOKEN_S


def shape(prefill_limit: float | None) -> Shape:
    sizes: dict[str, int] = {
        "num_pages": 2_000,
        "block_size": 16,
        "token_budget": 4096,
        "max_num_seqs": 16,
        "max_model_len": 6000,
    }
    return Shape(**sizes, prefill_limit=prefill_limit, seconds_per_step=STEP_S, events=True)


@cache
def steps_beside_decodes(
    prefill_limit: float | None,
    policy: type[Scheduler] = FCFS,
    output_kind: OutputKind = OutputKind.DELTA,
    options: type[BaseModel] = NoOptions,
) -> tuple[float, float]:
    """(the longest device time of a step while four answers go on and prompts of 4,000 tokens come,
    when the last prompt was through)."""
    world = World(policy, shape(prefill_limit), options())
    specs = [Spec(f"d{i}", (i,) * 20, max_tokens=120) for i in range(DECODES)]
    specs += [
        Spec(
            f"p{i}",
            tuple((j * (i + 3)) % 90 for j in range(4000)),
            max_tokens=1,
            delay=15.0 + 12 * i,
        )
        for i in range(3)
    ]
    for spec in specs:
        for request in world.add(spec):
            request.params = SamplingParams(max_tokens=spec.max_tokens, output_kind=output_kind)
    world.drain()
    steps = [
        event
        for event in world.observer.events
        if isinstance(event, StepFinished) and event.decode_tokens
    ]
    assert any(event.prefill_tokens for event in steps) or world.policy.capabilities.stalls_decodes
    return max(event.ended - event.started for event in steps), max(
        world.requests[f"p{i}"].first_token_time or 0.0 for i in range(3)
    )


@pytest.mark.parametrize("prefill_limit", [1.5, 2.0, 4.0])
def test_no_step_with_a_streamed_answer_is_longer_than_the_limit_lets_it(
    prefill_limit: float,
) -> None:
    longest, _ = steps_beside_decodes(prefill_limit)
    assert longest <= 1.05 * max(prefill_limit * ALONE_S, ALONE_S + LEAST_PROMPT_TOKENS * TOKEN_S)


@pytest.mark.parametrize(
    "policy",
    [policy for policy in POLICIES if policy.cls.capabilities.is_prefill_limited],
    ids=repr,
)
def test_the_limit_is_no_difference_between_policies(policy: Policy) -> None:
    longest, _ = steps_beside_decodes(2.0, policy.cls, options=policy.options)
    assert longest <= 1.05 * 2.0 * ALONE_S


def test_without_a_limit_a_step_is_as_long_as_the_budget_lets_it() -> None:
    longest, _ = steps_beside_decodes(None)
    assert longest > 6 * ALONE_S


def declaring(capabilities: SchedulerCapabilities) -> type[FCFS]:
    return type("Declaring", (FCFS,), {"capabilities": capabilities})


@pytest.mark.parametrize(
    ("capabilities", "prefill_limited"),
    [
        (SchedulerCapabilities(), True),
        (SchedulerCapabilities(stalls_decodes=True), False),
        (SchedulerCapabilities(stalls_decodes=True, prefill_limited=True), True),
        (SchedulerCapabilities(prefill_limited=False), False),
    ],
)
def test_a_policy_that_declares_not_to_be_limited_is_left_alone(
    capabilities: SchedulerCapabilities, prefill_limited: bool
) -> None:
    assert steps_beside_decodes(2.0, declaring(capabilities)) == steps_beside_decodes(
        2.0 if prefill_limited else None
    )


def test_prompts_are_through_about_as_soon() -> None:
    (_, limited), (_, free) = steps_beside_decodes(2.0), steps_beside_decodes(None)
    assert limited <= 1.15 * free


@pytest.mark.slow("computes long prompts")
def test_who_wants_the_final_output_alone_does_not_hold_prompts_up() -> None:
    assert steps_beside_decodes(2.0, output_kind=OutputKind.FINAL) == steps_beside_decodes(
        None, output_kind=OutputKind.FINAL
    )


@pytest.mark.parametrize(
    ("base_s", "token_s", "tokens"),
    [
        pytest.param(0.0, 0.0, 4096, id="no step was seen yet"),
        pytest.param(0.01, 0.0, LEAST_PROMPT_TOKENS, id="prompt tokens seem to cost nothing"),
        pytest.param(0.01, 1e-5, 1000, id="both are known"),
        pytest.param(0.01, 1e-3, LEAST_PROMPT_TOKENS, id="a token takes long"),
        pytest.param(0.01, 1e-9, 4096, id="a token takes no time to speak of"),
    ],
)
def test_how_many_prompt_tokens_a_step_takes_beside_streams(
    base_s: float, token_s: float, tokens: int
) -> None:
    class Fit:
        def estimate_s(self, prefill_tokens: int, decodes: int, context_tokens: int) -> float:
            return base_s + token_s * prefill_tokens

    stream, fit = make_request("stream", 8, generated=2), Fit()
    assert prompt_tokens_within(2.0, [stream], fit, 4096) == pytest.approx(tokens, abs=1)  # type: ignore[arg-type]


class TwoPrompts(Scheduler):
    """Decodes, and does what `act` says with two prompts once both are there."""

    act: ClassVar[Callable[[Step, Request, Request], list[Grant]]]
    grants: ClassVar[list[Grant]]

    def schedule(self, step: Step) -> None:
        step.grant_each(step.decoding)
        prompts = [request for request in (*step.running, *step.waiting) if request.prefill_left]
        if len(prompts) == 2 and not self.grants:
            self.grants += type(self).act(step, *prompts)
        elif prompts:
            step.grant(prompts[0])


def granted(
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Step, Request, Request], list[Grant]],
    *,
    indivisible: bool = False,
) -> list[Grant]:
    """Return the tokens granted by `act` for two prompts of 1,000 tokens that arrive during a
    stream; the limit allows 100 tokens per step."""
    monkeypatch.setattr(TwoPrompts, "act", staticmethod(act), raising=False)
    monkeypatch.setattr(TwoPrompts, "grants", [], raising=False)
    monkeypatch.setattr(step_times, "LEAST_PROMPT_TOKENS", 100)
    world = World(
        TwoPrompts,
        Shape(
            num_pages=2_000,
            block_size=16,
            token_budget=4096,
            max_num_seqs=4,
            max_model_len=2000,
            prefill_limit=1.1,
        ),
    )
    world.add(Spec("stream", (1, 2, 3), max_tokens=60))
    for name in "ab":
        world.add(
            Spec(name, (ord(name) % 90, 5) * 500, max_tokens=1, delay=0.1, indivisible=indivisible)
        )
    world.drain()
    return TwoPrompts.grants


def test_prompts_share_what_the_limit_allows_and_the_rest_is_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert granted(monkeypatch, lambda step, a, b: [step.grant(a, 30), step.grant(b)]) == [
        Grant(30),
        Grant(70),
    ]
    assert granted(monkeypatch, lambda step, a, b: [step.grant(a), step.grant(b)]) == [
        Grant(100),
        Grant(0, Refusal.PREFILL_LIMIT),
    ]


def test_no_prompt_is_looked_up_once_the_limit_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix-cache lookup takes time proportional to the length of the prompt, and a policy may
    try to grant every waiting request in each step."""
    lookups: list[str] = []
    lookup = PrefixCache.lookup

    def noting(cache: PrefixCache, request: Request) -> int:
        lookups.append(request.id)
        return lookup(cache, request)

    def act(step: Step, a: Request, b: Request) -> list[Grant]:
        first = step.grant(a)
        with monkeypatch.context() as patched:
            patched.setattr(PrefixCache, "lookup", noting)
            return [first, step.grant(b), step.grant(b, 0)]

    grants = granted(monkeypatch, act)
    assert grants[1:] == [Grant(0, Refusal.PREFILL_LIMIT), Grant(0, Refusal.BUDGET)]
    assert lookups == ["b"], "no tokens are refused for another reason"


def test_a_whole_prompt_beyond_the_limit_is_taken_if_it_is_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = granted(
        monkeypatch,
        lambda step, a, b: [step.grant(a, min_tokens=1000), step.grant(b, min_tokens=1000)],
    )
    assert whole == [Grant(1000), Grant(0, Refusal.PREFILL_LIMIT)]


def test_a_prompt_that_is_taken_back_gives_its_share_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(step: Step, a: Request, b: Request) -> list[Grant]:
        first = step.grant(a)
        step.preempt(a)
        return [first, step.grant(b)]

    assert granted(monkeypatch, act) == [Grant(100), Grant(100)]


def test_what_cannot_be_divided_is_taken_whole_beyond_the_limit_if_it_is_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = granted(
        monkeypatch, lambda step, a, b: [step.grant(a, 30), step.grant(b)], indivisible=True
    )
    assert whole == [Grant(1000), Grant(0, Refusal.PREFILL_LIMIT)]
