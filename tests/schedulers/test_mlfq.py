"""The skip-join multi-level feedback queue."""

from __future__ import annotations

from dovetail.api.scheduler import Ran, Scheduler, StepDone
from dovetail.request import Request
from dovetail.testing import make_request, plan
from dovetail_schedulers.mlfq import MLFQ, MLFQOptions
from tests.engine.world import Shape, Spec, World

OPTIONS = MLFQOptions(levels=3, quantum=8, growth=4, starve_s=100.0)  # quanta 8, 32, and the rest


def after_generating(request: Request, tokens: int) -> Scheduler:
    """A policy that has seen `request` generate that much."""
    policy = plan(MLFQ, options=OPTIONS, waiting=[request]).policy
    for index in range(tokens):
        policy.on_step(StepDone(index, 1.0, 1.0, (Ran(request=request, computed=1, generated=1),)))
    return policy


def test_a_prompt_joins_the_first_level_whose_quantum_holds_it() -> None:
    waiting = [
        make_request("long", 33),
        make_request("middle", 32, arrival_time=0.1),
        make_request("short", 8, arrival_time=0.2),
    ]
    assert list(plan(MLFQ, options=OPTIONS, waiting=waiting).granted) == ["short", "middle", "long"]


def test_a_request_sinks_when_it_has_generated_its_quantum() -> None:
    levels = []
    for tokens in (7, 8, 8 + 31, 8 + 32, 500):
        request = make_request("r", 8, max_tokens=1000)
        levels.append(after_generating(request, tokens)._level[request])  # type: ignore[attr-defined]
    assert levels == [0, 1, 1, 2, 2]


def test_lower_levels_pause_when_max_num_seqs_run_and_keep_their_blocks() -> None:
    old = make_request("old", 20, generated=3)
    new = [make_request(f"new{i}", 4, arrival_time=0.5) for i in range(2)]
    done = plan(MLFQ, options=OPTIONS, running=[old], waiting=new, max_num_seqs=2)
    assert list(done.granted) == ["new0", "new1"]
    assert done.preempted == ()


def test_the_lowest_level_gives_way_when_memory_lacks() -> None:
    running = [
        make_request("lowest", 40, generated=3),
        make_request("lower", 20, generated=2, arrival_time=0.1),
    ]
    done = plan(
        MLFQ,
        options=OPTIONS,
        running=running,
        waiting=[make_request("short", 4, arrival_time=0.5)],
        free_pages=0,
    )
    assert done.preempted == ("lowest",)
    assert done.granted == {"short": 4, "lower": 1}


def test_who_waits_takes_no_blocks_from_an_equal() -> None:
    running = [make_request("young", 7, generated=1, arrival_time=0.9)]
    done = plan(
        MLFQ, options=OPTIONS, running=running, waiting=[make_request("old", 8)], free_pages=0
    )
    assert done.preempted == ()
    assert done.granted == {"young": 1}


def test_the_starved_rise_and_are_served() -> None:
    options = MLFQOptions(levels=3, quantum=8, growth=4, starve_s=0.5)
    waiting = [make_request("starved", 40), make_request("short", 8, arrival_time=0.9)]
    assert list(plan(MLFQ, options=options, waiting=waiting, now=1.0, token_budget=16).granted) == [
        "starved"
    ]
    world = World(MLFQ, Shape(max_num_seqs=1, token_budget=16, max_model_len=64), options)
    world.add(Spec("long", tuple(range(40)), max_tokens=8))
    for i in range(200):
        world.add(Spec(f"short{i}", (i % 7,) * 4, max_tokens=4, delay=i * 0.05))
    world.drain(10_000)
    assert list(world.finished).index("long") < 100


def test_short_answers_pass_long_ones() -> None:
    world = World(MLFQ, Shape(max_num_seqs=1), OPTIONS)
    world.add(Spec("long", (1, 2, 3), max_tokens=40))
    world.add(Spec("short", (1, 2, 3), max_tokens=4, delay=0.2))
    world.drain()
    assert list(world.finished) == ["short", "long"]
