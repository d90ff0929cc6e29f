"""`RouterSuite`: checks of a router of replicas.

class TestByClient(RouterSuite):
    name = "by-client"
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from dovetail.errors import DovetailError, describe
from dovetail.serving import Registry
from dovetail.testing.checks import fail, require
from dovetail.testing.extensions.base import ExtensionSuite
from dovetail_lab.routers import Arrival, Completion, ReplicaLoad, Router, parse_router

ARRIVALS = 400
REPLICAS = (1, 2, 7)
LENGTHS = (1, 16, 17, 500, 20_000)  # of prompts, in tokens


class RouterSuite(ExtensionSuite):
    """Checks of a router: its choices are valid, and the same in every run."""

    # options, as `--router "name(…)"` has them: "blocks=1500"
    arguments: ClassVar[str] = ""

    @classmethod
    def offers(cls, registry: Registry) -> Sequence[Any]:
        return registry.routers()

    def test_it_is_a_router_with_its_options(self) -> None:
        """The class isn't a `Router`, or can't be made with `arguments`, or takes an option that it
        doesn't have."""
        self._made()
        try:
            parse_router(f"{self.name}(no_router_has_this=1)")
        except DovetailError:
            return
        fail("an option that doesn't exist was accepted")

    def test_it_chooses_one_of_the_replicas(self) -> None:
        """`choose` raised, or returned something else than an index of `replicas`."""
        for count in REPLICAS:
            for choice in self._choices(count):
                require(
                    isinstance(choice, int | np.integer) and 0 <= choice < count,
                    f"of {count} replicas, it chose {choice!r}",
                )

    def test_it_chooses_the_same_in_every_run(self) -> None:
        """Two new routers chose differently from the same arrivals: state is kept in the class or
        module, or choices are random without a seed. Keep state in private attributes."""
        for count in REPLICAS:
            first, second = (self._choices(count) for _ in range(2))
            differ = [index for index in range(ARRIVALS) if first[index] != second[index]]
            require(
                not differ,
                f"of {count} replicas, arrival {differ[0] if differ else 0} went elsewhere the "
                f"second time",
            )

    def test_it_only_reads_what_it_is_given(self) -> None:
        """`choose` changed the loads. They belong to the caller."""
        router = self._made()
        for arrival, loads in self._arrivals(3):
            before = [_values(load) for load in loads]
            router.choose(arrival, loads)
            require(before == [_values(load) for load in loads], f"it changed the loads: {before}")

    def _made(self) -> Router:
        return parse_router(f"{self.name}({self.arguments})")

    def _choices(self, count: int) -> list[int]:
        """Return the choices of a new router. It is notified when every second request ends."""
        router = self._made()
        choices = []
        for number, (arrival, loads) in enumerate(self._arrivals(count)):
            try:
                choice = router.choose(arrival, loads)
                choices.append(choice)
                if number % 2:
                    router.ended(_end_of(arrival, choice, completed=number % 5 > 0))
            except Exception as error:
                fail(f"of {count} replicas, at arrival {number} it raised {describe(error)}", error)
        return choices

    def _arrivals(self, count: int) -> list[tuple[Arrival, list[ReplicaLoad]]]:
        """Return requests of a few clients and sessions, with and without, and loads."""
        chance = random.Random(count)
        shared = np.arange(max(LENGTHS), dtype=np.int32) % 997
        found = []
        for number in range(ARRIVALS):
            own = np.random.default_rng(number).integers(0, 997, 8, dtype=np.int32)
            prompt = np.concatenate([shared[: chance.choice(LENGTHS)], own])
            arrival = Arrival(
                str(number),
                chance.choice((None, "", "alice", "böb", "alice2")),
                chance.choice((0, 0, -1, 5)),
                number * 0.1,
                prompt,
                chance.choice((1, 100)),
                chance.choice((None, "one", "two")),
            )
            loads = [
                ReplicaLoad(
                    chance.randrange(5),
                    chance.randrange(9),
                    chance.randrange(10_000),
                    chance.randrange(3),
                    chance.randrange(1_000),
                    chance.choice((0, len(prompt))),
                )
                for _ in range(count)
            ]
            found.append((arrival, loads))
        return found


def _values(load: ReplicaLoad) -> tuple[int, ...]:
    return (load.waiting, load.running, load.tokens, load.sent, load.sent_tokens)


def _end_of(arrival: Arrival, replica: int, *, completed: bool) -> Completion:
    return Completion(
        arrival.id,
        arrival.session,
        replica,
        arrival.arrival_s + 1.0,
        len(arrival.prompt),
        3 if completed else 0,
        completed,
    )
