"""Random small scenarios from hypothesis: any engine, any requests, any order of events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import strategies as st

from dovetail.testing.suites.scheduler_world import Abort, Act, Arrive, Run, Scenario, Shape

# beyond the need of one request of full length: memory is mostly scarce
SLACK_PAGES = (
    0,
    0,
    1,
    2,
    4,
    8,
    30,
)


@st.composite
def shapes(draw: st.DrawFn, *, reuse: bool | None = None) -> Shape:
    block_size = draw(st.integers(1, 4))
    max_model_len = draw(st.integers(6, 32))
    return Shape(
        num_pages=-(-max_model_len // block_size) + draw(st.sampled_from(SLACK_PAGES)),
        block_size=block_size,
        token_budget=draw(st.integers(1, 24)),
        max_num_seqs=draw(st.integers(1, 5)),
        max_model_len=max_model_len,
        overlap=draw(st.booleans()),
        max_in_flight=draw(st.integers(1, 3)),
        reuse=draw(st.booleans()) if reuse is None else reuse,
        seed=draw(st.integers(0, 9)),
    )


@st.composite
def arrivals(draw: st.DrawFn, shape: Shape, *, plain: bool = False) -> Arrive:
    """Draw a request. Prompts often share a beginning. `plain`: one sample. Objectives are derived
    from the deadline, one of them without `tbt_s`, since more draws would reduce the coverage of
    the few examples."""
    length = draw(st.integers(1, shape.max_model_len - 1))
    own = draw(st.integers(0, min(3, length)))
    return Arrive(
        prompt=(
            *([draw(st.sampled_from([1, 1, 2]))] * (length - own)),
            *([3 + draw(st.integers(0, 5))] * own),
        ),
        max_tokens=draw(st.integers(1, shape.max_model_len - length)),
        delay=draw(st.sampled_from([0.0, 0.0, 0.005, 0.1, 2.0])),
        client=draw(st.sampled_from([None, "a", "b"])),
        priority=draw(st.integers(-1, 2)),
        deadline=(deadline := draw(st.sampled_from([None, 0.01, 0.3, 100.0]))),
        ttft_deadline=None if deadline is None else deadline / 2,
        tbt_s=None if deadline in (None, 0.3) else deadline / 4,
        predicted_tokens=draw(st.sampled_from([None, 1, 10])),
        n=1 if plain else draw(st.sampled_from([1, 1, 1, 2, 3])),
        stops_after=draw(st.sampled_from([None, None, 1, 4])),
    )


@st.composite
def scenarios(
    draw: st.DrawFn, *, aborts: bool = False, plain: bool = False, reuse: bool | None = None
) -> Scenario:
    """Arrivals, steps and aborts in any order, in an engine of any size; unfinished requests then
    run to their end."""
    shape = draw(shapes(reuse=reuse))
    arrive = arrivals(shape, plain=plain)
    run = st.builds(Run, st.integers(1, 8))
    kinds: list[st.SearchStrategy[Act]] = [arrive, arrive, run]
    if aborts:
        kinds.append(st.builds(Abort, st.integers(0, 9)))
    first = draw(st.lists(arrive, min_size=1, max_size=6))
    return Scenario(shape, (*first, *draw(st.lists(st.one_of(kinds), max_size=14))))


def smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield the scenario with half of the acts, and with one of them omitted."""
    acts = scenario.acts
    if len(acts) > 2:
        yield replace(scenario, acts=acts[: len(acts) // 2])
    for index in range(len(acts)):
        yield replace(scenario, acts=(*acts[:index], *acts[index + 1 :]))
