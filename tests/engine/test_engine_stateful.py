"""Any policy, any engine sizes, requests that arrive and leave: no request is lost, no token is
wrong or duplicated, no block leaks, replays are equal.

The fake executor remembers which tokens were written where, and fails if a request would read
another's; the expected tokens of a request depend only on its prompt and seed.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.api.kv_cache import CacheGroup, KVLayout
from tests.engine.drafters import DRAFTERS
from tests.engine.policies import EVERY_POLICY, Named
from tests.engine.world import Shape, Spec, World
from tests.support import examples


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    max_model_len, token_budget = draw(st.integers(4, 40)), draw(st.integers(1, 64))
    windows = draw(
        st.sampled_from(
            [(None,), (None,), (1,), (3,), (8,), (None, 3), (None, 8), (2, 9), (None, 1, 6)]
        )
    )
    unit = draw(st.integers(1, 5))
    groups = tuple(
        (unit * draw(st.sampled_from([1, 1, 2])), window, draw(st.sampled_from([1, 1, 3])))
        for window in windows
    )
    layout = KVLayout(
        tuple(CacheGroup((index,), *group) for index, group in enumerate(groups)), 1, "none"
    )
    drafter = draw(st.sampled_from([None, None, None, *DRAFTERS]))
    state_pages = draw(st.sampled_from([0, 0, 0, 1, 3]))
    return Shape(
        num_pages=layout.most_pages(max_model_len, token_budget)
        + state_pages
        + draw(st.sampled_from([0, 0, 1, 2, 5, 10, 60])),
        groups=groups,
        state_pages=state_pages,
        max_in_flight=draw(st.integers(1, 4)),
        overlap=draw(st.sampled_from([True, True, False])),
        token_budget=token_budget,
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=max_model_len,
        vocab_size=draw(st.sampled_from([3, 11, 97])),
        reuse=draw(st.sampled_from([True, True, True, False])),
        seed=draw(st.integers(0, 1000)),
        events=draw(st.booleans()),
        drafter=drafter,
        max_drafts=draw(st.integers(1, 6)),
        max_lines=draw(st.integers(1, 24)),
        seconds_per_token=draw(st.sampled_from([0.0, 0.0, 0.001])),
        adapters=draw(st.sampled_from([0, 0, 1, 2, 4])),
        slot_wait_s=draw(st.sampled_from([0.02, 1.0])),
        deterministic_window=0 if state_pages else draw(st.sampled_from([0, 0, 1, 2, 5, 8])),
        changes_rows=draw(st.booleans()),
    )


@st.composite
def specs(draw: st.DrawFn, shape: Shape, id: str) -> Spec:
    """Prompts share beginnings often: they are cut from three sequences, some with a tail of their
    own."""
    length = draw(st.integers(1, shape.max_model_len - 1))
    pattern = draw(st.sampled_from([(0,), (0,), (0, 1), (1, 0, 0)]))
    prompt = [pattern[position % len(pattern)] for position in range(length)]
    prompt[length - draw(st.integers(0, min(2, length))) :] = []
    prompt += [2] * (length - len(prompt))
    return Spec(
        id,
        tuple(prompt),
        max_tokens=draw(st.integers(1, shape.max_model_len - length)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3, 4])),
        delay=draw(st.sampled_from([0.0, 0.0, 0.0, 0.005, 0.1, 3.0])),
        stop_ids=draw(
            st.frozensets(
                st.integers(0, shape.vocab_size - 1), max_size=max(1, shape.vocab_size // 6)
            )
        ),
        min_tokens=draw(st.sampled_from([0, 0, 0, 2, 5])),
        client=draw(st.sampled_from([None, "a", "b"])),
        priority=draw(st.integers(-1, 2)),
        deadline=draw(st.sampled_from([None, None, 0.01, 0.5, 100.0])),
        predicted_tokens=draw(st.sampled_from([None, 1, 10])),
        cache_keys=draw(st.sampled_from([(), (), (), ("salt",)])),
        prompt_logprobs=draw(st.sampled_from([None] * 7 + [0])),
        rule=draw(st.sampled_from([None, None, None, 1, 2, 5])),
        rule_length=draw(st.sampled_from([0, 0, 1, 4])),
        max_drafts=draw(st.sampled_from([None, None, None, 0, 2])),
        adapter=draw(st.sampled_from([None, "x", "y", "z"])) if shape.adapters else None,
        deterministic=shape.deterministic_window > 0 and draw(st.booleans()),
    )


class EngineMachine(RuleBasedStateMachine):
    @initialize(named=st.sampled_from(EVERY_POLICY), shape=shapes())
    def start(self, named: Named, shape: Shape) -> None:
        self.named, self.shape = named, shape
        self.world = self.make()
        self.acts: list[tuple[str, object]] = []
        self.count = 0

    def make(self) -> World:
        return World(self.named.policy, self.shape, self.named.make_options())

    def act(self, what: str, argument: object = None) -> None:
        self.acts.append((what, argument))
        perform(self.world, what, argument)

    @precondition(lambda self: self.count < 12)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        self.count += 1
        self.act("add", data.draw(specs(self.shape, f"r{self.count}")))

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.act("abort", data.draw(st.sampled_from(sorted(self.world.requests))))

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.act("step")
            self.world.check()

    @rule()
    def forget_the_cache(self) -> None:
        self.act("reset")

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        if self.world.core.dead is None:
            self.world.drain(5_000)
            again = self.make()
            for what, argument in self.acts:
                perform(again, what, argument)
            again.drain(5_000)
            assert again.story() == self.world.story(), "a replay differs"


def perform(world: World, what: str, argument: object) -> None:
    if what == "add":
        assert isinstance(argument, Spec)
        world.add(argument)
    elif what == "abort":
        world.abort(str(argument))
    elif what == "reset":
        world.kv.reset()
    else:
        world.step()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(examples(quick=7, full=3_000), stateful_step_count=30)


@pytest.mark.slow("tries many runs")
class TestMoreRuns(EngineMachine.TestCase):  # type: ignore[misc]
    settings = settings(examples(quick=100, full=1), stateful_step_count=30)
