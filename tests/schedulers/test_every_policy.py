"""Common behaviour of all built-in policies, beyond their suite (tests/conformance)."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dovetail.api.kv_cache import CacheGroup, KVLayout
from dovetail.request import Request
from dovetail.testing import make_request, plan
from dovetail.testing.planning import Plan
from dovetail_schedulers import dovetail_components
from tests.engine.world import Shape, Spec, World
from tests.schedulers.helpers import POLICIES, Policy
from tests.support import examples

BLOCK = 4

every_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)


def test_sixteen_policies_are_declared() -> None:
    specs = dovetail_components()
    names = (
        "fcfs priority vtc mlfq lpm edf prefill_first sarathi sjf srpt lcf lightllm rpm andes "
        "slo prefix_batch"
    )
    assert [spec.name for spec in specs] == names.split()
    assert all(spec.kind == "scheduler" and spec.summary for spec in specs)


def test_declaring_imports_no_policy() -> None:
    code = (
        "import sys, dovetail_schedulers as d; d.dovetail_components(); print([m for m in "
        "sys.modules if m.startswith('dovetail_schedulers.')])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


@every_policy
def test_options_are_described_checked_and_frozen(policy: Policy) -> None:
    assert all(field.description for field in policy.options.model_fields.values())
    assert policy.options.model_config["frozen"]
    with pytest.raises(ValidationError, match="no_such_option"):
        policy.options.model_validate({"no_such_option": 1})


@every_policy
def test_a_policy_fits_on_two_screens(policy: Policy) -> None:
    assert len(inspect.getsource(inspect.getmodule(policy.cls) or policy.cls).splitlines()) <= 125


@pytest.mark.parametrize(
    "policy", [policy for policy in POLICIES if not policy.cls.capabilities.idles], ids=repr
)
def test_decodes_run_beside_a_prompt_longer_than_the_budget(policy: Policy) -> None:
    decodes = [
        make_request(f"d{i}", generated=2, arrival_time=i / 10, priority=i, deadline=9.0)
        for i in range(4)
    ]
    done = plan(
        policy.cls,
        running=decodes,
        waiting=[make_request("long", 200, priority=-1, deadline=8.0)],
        options=policy.options(),
        token_budget=32,
    )
    assert [done.granted[f"d{i}"] for i in range(4)] == [1, 1, 1, 1]
    assert done.granted["long"] == 28


@st.composite
def situations(draw: st.DrawFn) -> dict[str, object]:
    """Requests in any state, memory nearly used up."""

    def request(id: str, computed: int | None, prompt: int) -> Request:
        return make_request(
            id,
            prompt,
            generated=0 if computed is not None else draw(st.integers(1, 8)),
            computed=computed,
            arrival_time=draw(st.sampled_from([0.0, 0.1, 0.2])),
            client=draw(st.sampled_from([None, "a", "b"])),
            priority=draw(st.integers(0, 2)),
            deadline=draw(st.sampled_from([None, 0.5, 50.0])),
        )

    prompts = [draw(st.integers(1, 24)) for _ in range(draw(st.integers(1, 8)))]
    count = draw(st.integers(0, len(prompts)))
    running = []
    for i, prompt in enumerate(prompts[:count]):
        amid_prefill = draw(st.booleans()) and prompt > 1
        running.append(
            request(f"r{i}", draw(st.integers(1, prompt - 1)) if amid_prefill else None, prompt)
        )
    waiting = [
        make_request(f"w{i}", prompt, arrival_time=0.3, priority=draw(st.integers(0, 2)))
        for i, prompt in enumerate(prompts[count:])
    ]
    held = sum(
        -(-r.num_computed // BLOCK if r.num_computed >= 0 else -(-(r.num_tokens - 1) // BLOCK))
        for r in running
    )
    # as the engine sees to: any request fits, alone
    enough = max(-(-r.num_tokens // BLOCK) for r in running + waiting)
    limits = {
        "token_budget": draw(st.integers(1, 40)),
        "max_num_seqs": draw(st.integers(1, 5)),
        "block_size": BLOCK,
    }
    return {
        "running": running,
        "waiting": waiting,
        "free_pages": max(draw(st.integers(0, 7)), enough - held),
        **limits,
    }


@every_policy
@examples(quick=25, full=2000)
@given(data=st.data())
def test_some_request_runs_or_makes_room(policy: Policy, data: st.DataObject) -> None:
    situation = data.draw(situations())
    done: Plan = plan(policy.cls, options=policy.options(), now=1.0, **situation)  # type: ignore[arg-type]
    assert done.granted or done.rejected
    assert not set(done.granted) & set(done.preempted)


@st.composite
def specs(draw: st.DrawFn, index: int) -> Spec:
    return Spec(
        f"r{index}",
        tuple(
            draw(st.integers(0, 2)) for _ in range(draw(st.integers(1, 20)))
        ),  # prefixes are shared often
        max_tokens=draw(st.integers(1, 12)),
        n=draw(st.sampled_from([1, 1, 1, 2])),
        delay=draw(st.sampled_from([0.0, 0.0, 0.005, 0.3, 5.0])),
        stop_ids=frozenset({draw(st.integers(0, 96))}),
        client=draw(st.sampled_from([None, "a", "b"])),
        priority=draw(st.integers(0, 2)),
        predicted_tokens=draw(st.sampled_from([None, 1, 5, 100])),
    )


@every_policy
@examples(quick=6, full=500)
@given(data=st.data())
def test_whoever_comes_and_goes_all_are_answered_rightly(
    policy: Policy, data: st.DataObject
) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4]))
    shape = Shape(
        num_pages=-(-32 // block_size) + data.draw(st.integers(0, 8)),
        block_size=block_size,
        token_budget=data.draw(st.sampled_from([3, 8, 40])),
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_model_len=32,
        overlap=data.draw(st.booleans()),
    )
    world = World(policy.cls, shape, policy.options())
    for index in range(data.draw(st.integers(1, 8))):
        world.add(data.draw(specs(index)))
        for _ in range(data.draw(st.integers(0, 3))):
            world.step()
    if data.draw(st.booleans()):
        world.abort(data.draw(st.sampled_from(sorted(world.requests))))
    world.drain(check=True)


# (block_tokens, window, pages_per_block): full, and two windows with larger blocks, of several
# pages
THREE_GROUPS = (
    ((2, None, 1), (2, 5, 3), (4, 12, 1)),
    ((4, None, 2), (4, 3, 1), (2, 10, 2)),
)


@every_policy
@examples(quick=5, full=500)
@given(data=st.data())
def test_over_three_cache_groups_nobody_stalls_and_nothing_leaks(
    policy: Policy, data: st.DataObject
) -> None:
    groups, token_budget = (
        data.draw(st.sampled_from(THREE_GROUPS)),
        data.draw(st.sampled_from([3, 8, 40])),
    )
    layout = KVLayout(
        tuple(CacheGroup((index,), *group) for index, group in enumerate(groups)), 1, "none"
    )
    shape = Shape(
        num_pages=layout.most_pages(32, token_budget)
        + data.draw(st.integers(0, 12)),  # one of full length fits; hardly two do
        groups=groups,
        token_budget=token_budget,
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_model_len=32,
        overlap=data.draw(st.booleans()),
    )
    world = World(policy.cls, shape, policy.options())
    for index in range(data.draw(st.integers(1, 8))):
        world.add(data.draw(specs(index)))
        for _ in range(data.draw(st.integers(0, 3))):
            world.step()
    world.drain(check=True)
    reasons = {
        id: finish.stop_reason for id, finish in world.finished.items() if finish.reason == "length"
    }
    assert "kv_capacity" not in reasons.values(), (
        f"ended for lack of pages, although one of full length fits: {reasons}"
    )


@every_policy
def test_requests_that_fit_to_their_end_once_windows_release_pages_all_run_to_it(
    policy: Policy,
) -> None:
    groups = ((4, None, 1), (4, 8, 6))  # four tokens take 7 pages, until the window is full
    shape = Shape(
        num_pages=4 * (64 // 4 + 3 * 6),
        groups=groups,
        token_budget=64,
        max_num_seqs=8,
        max_model_len=64,
        overlap=False,
        reuse=False,
    )
    world = World(policy.cls, shape, policy.options())
    for index in range(4):
        world.add(Spec(f"r{index}", tuple(range(index, index + 8)), max_tokens=50, priority=index))
    most = 0
    while world.core.has_unfinished():
        world.step()
        most = max(most, len(world.core.books.running.as_tuple()))
    world.check_end()
    assert (most, world.core.update_stats().preemptions) == (4, 0)
