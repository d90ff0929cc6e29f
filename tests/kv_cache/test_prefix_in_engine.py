"""The manager `prefix` under an engine whose executor remembers which tokens were written where."""

from __future__ import annotations

from dovetail.api.blocks.hash_chain import HashName
from dovetail.api.scheduler import Scheduler, Step
from tests.engine.world import Shape, Spec, World


class Script(Scheduler):
    """Grants what the test says, then everything."""

    def schedule(self, step: Step) -> None:
        known = {request.id: request for request in step.running + step.waiting}
        if step.index == 0:
            step.grant(known["first"], 4)  # the first block
            step.grant(known["second"], 4)  # finds it, computes the second
        elif step.index == 1:
            # computes the second again and the third, which can be found
            step.grant(known["first"], 8)
            assert step.cost(known["third"]).cached == 12
            step.grant(known["third"])
            step.preempt(known["first"])
            assert known["third"] in step.waiting, "it found what won't be written"
        else:
            step.grant_each(step.running + step.waiting)


def test_who_found_what_is_not_written_after_all_is_preempted_even_behind_a_block_computed_twice() -> (
    None
):
    world, prompt = World(Script, Shape(block_size=4)), tuple(range(16))
    for id, tail in (("first", ()), ("second", ()), ("third", (50,))):
        world.add(Spec(id, (*prompt, *tail)))
    world.drain(check=True)


def test_turns_of_a_conversation_compute_only_what_is_new() -> None:
    world = World(shape=Shape(block_size=1))
    history: tuple[int, ...] = (1, 2, 3)
    for turn in range(4):
        world.add(Spec(f"turn{turn}", history, max_tokens=5))
        world.drain()
        assert world.requests[f"turn{turn}"].cached_tokens == (
            len(history) - 2 if turn else 0
        )  # the last answer's last token was never computed
        history += (*world.tokens[f"turn{turn}"], 90 + turn)


def test_a_run_is_the_same_whatever_the_hashes_are() -> None:
    """Those of xxh3 differ from run to run, as those of other processes do; no decision, block or
    token does."""

    def story(hash: HashName) -> list[object]:
        world = World(shape=Shape(num_pages=12, block_size=2, max_model_len=24, hash=hash))
        for index in range(24):
            prompt = tuple(range(index % 3, index % 3 + 5 + index % 7))  # many begin alike
            world.add(
                Spec(
                    f"r{index}",
                    prompt,
                    max_tokens=1 + index % 9,
                    n=1 + index % 2,
                    delay=0.01 * index,
                    cache_keys=("salt",) * (index % 5 == 0),
                )
            )
        world.drain(check=True)
        assert world.core.stats.cached_tokens > 0
        assert world.core.stats.preemptions > 0
        return world.story()

    first, again, other = story("xxh3"), story("xxh3"), story("sha256")
    assert first == again == other
