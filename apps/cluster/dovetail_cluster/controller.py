"""`Controller`: keeps the wanted number of replicas behind the router. It works through
`interfaces`, without processes or HTTP of its own.

`tick` is called several times a second and never blocks. The states of a replica:

    STARTING -> JOINING  -> SERVING -> LEAVING    -> DRAINING
    its server  added to    gets       removed from  SIGTERM: finishes
    starts      the router  requests   the router    requests under way

A replica that ends in any state but DRAINING has died and is replaced. Each tick compares the
router's list with the wanted one, so that a restarted router gets all replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from dovetail.errors import DovetailError
from dovetail_cluster.interfaces import (
    Launcher,
    Listed,
    Prober,
    Replica,
    ReplicaStatus,
    Router,
    Vitals,
)
from dovetail_cluster.settings import ClusterSettings, Replicas, Scale

# replicas in a row that die before they serve: then the cluster gives up if none has ever served
FUTILE_STARTS = 3
LONGEST_PAUSE_S = 30.0  # between starts, once they are futile
LETS_GO_S = 30.0  # that the router may take to finish requests before the replica is drained


class Scaler:
    """Changes the target by one at a time, after the queue has been too long, or empty, without
    interruption."""

    def __init__(self, bounds: Replicas, scale: Scale) -> None:
        self._bounds = bounds
        self._scale = scale
        self.target = bounds.min
        self._long_since: float | None = None
        self._empty_since: float | None = None

    def note(self, now: float, serving: int, waiting: int) -> int:
        """Update the target from the number of serving replicas and of waiting requests at `now`
        seconds, and return it.

        While fewer replicas serve than targeted it stays: a new replica must first show its
        effect.
        """
        if serving < self.target:
            self._long_since = self._empty_since = None
            return self.target
        is_long = waiting > self._scale.queue_per_replica * serving
        self._long_since = (
            (self._long_since if self._long_since is not None else now) if is_long else None
        )
        self._empty_since = (
            (self._empty_since if self._empty_since is not None else now) if waiting == 0 else None
        )
        if (
            self._long_since is not None
            and now - self._long_since >= self._scale.up_after_s
            and self.target < self._bounds.max
        ):
            self.target += 1
            self._long_since = None
        elif (
            self._empty_since is not None
            and now - self._empty_since >= self._scale.down_after_s
            and self.target > self._bounds.min
        ):
            self.target -= 1
            self._empty_since = now
        return self.target


class State(Enum):
    """The state of a replica."""

    STARTING = "starting"
    JOINING = "joining"
    SERVING = "serving"
    LEAVING = "leaving"
    DRAINING = "draining"


_COMING = (State.STARTING, State.JOINING)
_WANTED_BY_ROUTER = (State.JOINING, State.SERVING)


@dataclass(eq=False, slots=True)
class Member:
    """A replica and its state."""

    name: str
    replica: Replica
    since: float  # when its state began, on the controller's clock
    is_old: bool = False  # to be replaced by the rolling restart
    state: State = State.STARTING
    url: str | None = None
    vitals: Vitals = field(default_factory=Vitals)


class ClusterFailed(DovetailError):
    """Replicas die before they serve, and none has ever served."""


class Controller:
    """Not thread safe."""

    def __init__(
        self,
        settings: ClusterSettings,
        launcher: Launcher,
        router: Router,
        prober: Prober,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = print,
    ):
        """`say` logs a line per event."""
        self._settings = settings
        self._launcher = launcher
        self._router = router
        self._prober = prober
        self._clock = clock
        self._say = say
        self._scaler = Scaler(settings.replicas, settings.scale)
        self._members: list[Member] = []
        self._number = 0
        self._futile = 0  # replicas in a row that died before they served
        self._not_before = 0.0  # time of the next start
        self._has_served = self._is_ending = False
        self._listed: dict[str, Listed] | None = None
        self.deaths = 0
        self.last_death: str | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(self._members)

    @property
    def target(self) -> int:
        """The number of replicas that should serve."""
        return self._scaler.target

    @property
    def router_answers(self) -> bool:
        return self._listed is not None

    @property
    def is_rolling(self) -> bool:
        """True during a rolling restart."""
        return any(member.is_old for member in self._members)

    @property
    def serves(self) -> bool:
        """True if enough replicas serve."""
        return self._count(State.SERVING) >= self.target

    def roll(self) -> None:
        """Replace all present replicas one by one. Raises `DovetailError` if there is only one and
        no room for another."""
        if len(self._members) == self.target == 1 and not self._launcher.has_room():
            raise DovetailError(
                "a single replica isn't replaced where there are no GPUs for another: nobody would "
                "serve meanwhile"
            )
        for member in self._members:
            member.is_old = True

    def end(self) -> None:
        """Drain all replicas; `is_done` is True once they have ended."""
        self._is_ending = True

    @property
    def is_done(self) -> bool:
        return self._is_ending and not self._members

    def tick(self) -> None:
        """Check everything once and act on it. Raises `ClusterFailed` if replicas keep dying and
        none has ever served."""
        for member in list(self._members):
            self._advance(member, member.replica.poll())
        if self._is_ending:
            for member in self._members:
                self._drain(member)
        self._sync_router()
        if not self._is_ending:
            self._scale()
            self._replace()
            self._fill()

    # One replica

    def _advance(self, member: Member, status: ReplicaStatus) -> None:
        """Advance a replica to its next state if it is due."""
        now = self._clock()
        member.url = status.url
        if status.ended is not None:
            self._remove(member, status.ended)
            return
        if member.url is not None:
            member.vitals = self._prober.vitals(member.url) or member.vitals
        age = now - member.since
        if member.state is State.STARTING and member.vitals.ready:
            self._enter(member, State.JOINING)
        elif member.state in _COMING and age > self._settings.start_timeout_s:
            self._kill(member, f"didn't serve within {self._settings.start_timeout_s:g} s")
        elif (
            member.state is State.SERVING
            and now - max(member.vitals.healthy_at, member.since) > self._settings.unhealthy_after_s
        ):
            self._kill(
                member, f"gave no good answer at /health for {self._settings.unhealthy_after_s:g} s"
            )
        elif (
            member.state is State.DRAINING
            and age > self._settings.server.drain_timeout_s + LETS_GO_S
        ):
            self._kill(member, "didn't end when it was told to")

    def _kill(self, member: Member, reason: str) -> None:
        member.replica.kill()
        self._remove(member, reason)

    def _remove(self, member: Member, how: str) -> None:
        """Remove a replica that has ended; unless it was drained it counts as dead."""
        self._members.remove(member)
        if member.url is not None:
            self._prober.forget(member.url)
        if member.state is State.DRAINING:
            self._say(f"{member.name} has ended")
            return
        self.deaths += 1
        self.last_death = f"{member.name} {how}"
        self._say(f"{member.name} {how}")
        if member.state not in _COMING:
            return
        self._futile += 1
        self._not_before = self._clock() + min(2.0 ** (self._futile - 1), LONGEST_PAUSE_S)
        if self._futile >= FUTILE_STARTS and not self._has_served:
            raise ClusterFailed(f"replicas die before they serve; {self.last_death}")

    def _drain(self, member: Member) -> None:
        if member.state is not State.DRAINING:
            self._enter(member, State.DRAINING)
            member.replica.drain()

    def _enter(self, member: Member, state: State) -> None:
        member.state, member.since = state, self._clock()
        self._say(
            f"{member.name} is {state.value}"
            + (f" at {member.url}" if state is State.SERVING else "")
        )

    # The router

    def _sync_router(self) -> None:
        """Make the router's list match the wanted replicas, and update their states from it."""
        listed = self._router.poll()
        self._listed = None if listed is None else dict(listed)
        if self._listed is None:
            return
        wanted = {
            member.url: member
            for member in self._members
            if member.state in _WANTED_BY_ROUTER and member.url is not None
        }
        for url in wanted.keys() - self._listed.keys():
            self._router.add(url)
        for url, how in self._listed.items():
            if url not in wanted and how is not Listed.LEAVING:
                self._router.remove(url)
        for member in self._members:
            how_listed = None if member.url is None else self._listed.get(member.url)
            if member.state is State.JOINING and how_listed is Listed.READY:
                self._has_served = True
                self._futile = 0
                self._enter(member, State.SERVING)
            elif member.state is State.LEAVING and (
                how_listed is None or self._clock() - member.since > LETS_GO_S
            ):
                self._drain(member)

    # All of them

    def _scale(self) -> None:
        serving = [member for member in self._members if member.state is State.SERVING]
        before = self.target
        target = self._scaler.note(
            self._clock(), len(serving), sum(member.vitals.waiting for member in serving)
        )
        if target != before:
            self._say(
                f"the number of replicas goes from {before} to {target}, because "
                f"{'too many' if target > before else 'no'} requests wait"
            )

    def _replace(self) -> None:
        """Retire one replica: an old one when its replacement serves, or a surplus one."""
        if self._listed is None or self._count(State.LEAVING, State.DRAINING):
            return
        serving = [
            member
            for member in self._members
            if member.state is State.SERVING and self._gets_requests(member)
        ]
        old = [member for member in serving if member.is_old]
        has_spare = len(serving) > self.target
        # Where there are no GPUs for one more, the old one goes first, and the others serve
        # meanwhile.
        must_make_room = (
            bool(old)
            and len(serving) == self.target == len(self._members) > 1
            and not self._launcher.has_room()
        )
        if has_spare or must_make_room:
            self._enter(old[0] if old else serving[-1], State.LEAVING)

    def _fill(self) -> None:
        """Start missing replicas; in a rolling restart, one extra at a time."""
        now = self._clock()
        here = self._count(*_COMING, State.SERVING)
        missing = self.target - here
        is_due = (
            self.is_rolling
            and missing == 0
            and not self._count(*_COMING, State.LEAVING, State.DRAINING)
        )
        if is_due and self._launcher.has_room():
            missing = 1
        while missing > 0 and now >= self._not_before and self._launcher.has_room():
            try:
                replica = self._launcher.start(name := f"replica-{self._number}")
            except DovetailError as error:
                self._say(f"no replica can be started: {error}")
                self._not_before = now + LONGEST_PAUSE_S
                return
            self._number += 1
            self._members.append(Member(name, replica, now))
            self._say(f"{name} is starting")
            missing -= 1

    def _gets_requests(self, member: Member) -> bool:
        return (
            self._listed is not None
            and member.url is not None
            and self._listed.get(member.url) is Listed.READY
        )

    def _count(self, *states: State) -> int:
        return sum(member.state in states for member in self._members)
