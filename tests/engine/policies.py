"""Policies for the tests of the engine: a plain one, all built-in ones, and some that do silly
things which the contract allows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from pydantic import BaseModel

import dovetail_schedulers
from dovetail.api.component import ComponentSpec, NoOptions
from dovetail.api.scheduler import Scheduler, SchedulerCapabilities, SchedulerContext, Step
from dovetail.request import Request


class FCFS(Scheduler):
    """First come, first served: the running ones go on, the youngest make room; then who waits, in
    order."""

    capabilities = SchedulerCapabilities(order="arrival")

    def schedule(self, step: Step) -> None:
        for request in step.grant_each(step.running):
            step.grant(request, evict=reversed(step.running))
        for request in step.waiting:
            if not step.grant(request):
                break


class Silly(FCFS):
    """Base of those that throw dice. After a hundred plans they come to their senses, so that every
    request ends."""

    capabilities = SchedulerCapabilities(idles=True, starves=True, rejects=True)

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.random = random.Random(context.seed)
        self.plans = 0

    def schedule(self, step: Step) -> None:
        self.plans += 1
        if self.plans > 100:
            super().schedule(step)
        else:
            self.be_silly(step)
            step.wake_at(step.now + self.random.choice([1e-6, 0.01, 1.0]))

    def be_silly(self, step: Step) -> None:
        raise NotImplementedError

    def often(self, probability: float) -> bool:
        return self.random.random() < probability

    def shuffled(self, requests: tuple[Request, ...]) -> list[Request]:
        return self.random.sample(requests, len(requests))


class Chaos(Silly):
    """Anything that is allowed, in any order."""

    def be_silly(self, step: Step) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.act(step)

    def act(self, step: Step) -> None:
        everybody = self.shuffled(step.waiting + step.running)
        for request in everybody:
            if request in step.running and self.often(0.04):
                step.preempt(request)
            elif self.often(0.01):
                step.reject(request, "bad luck")
            elif self.often(0.8):
                self.grant(step, request, everybody)
        if self.often(0.3):
            step.grant_each(self.shuffled(step.running))
        if everybody and self.often(0.3):
            step.note(everybody[0], "why not")

    def grant(self, step: Step, request: Request, everybody: list[Request]) -> None:
        before = step.cost(request), step.tokens_left, step.seqs_left, step.free_pages
        victims = (
            self.random.sample(everybody, self.random.randint(0, len(everybody)))
            if self.often(0.2)
            else []
        )
        granted = step.grant(
            request,
            self.random.choice([None, None, 0, 1, 3, 8]),
            min_tokens=self.random.choice([1, 1, 2, 7]),
            reserve=self.often(0.3),
            evict=victims,
        )
        after = step.cost(request), step.tokens_left, step.seqs_left, step.free_pages
        if not granted and after != before and (*after[:3], before[3]) != before:
            raise AssertionError(f"a refused grant changed {before} into {after}")


class Regrets(Silly):
    """Preempts what it has just granted, and grants again."""

    def be_silly(self, step: Step) -> None:
        FCFS.schedule(self, step)
        for request in step.running:
            if self.often(0.15):
                step.preempt(request)
        FCFS.schedule(self, step)


class Backwards(Silly):
    """The youngest first, who push out the oldest."""

    def be_silly(self, step: Step) -> None:
        eager = self.often(0.3)
        for request in reversed(step.running + step.waiting):
            step.grant(request, evict=step.running if eager else ())


class NeverForgets(Silly):
    """Goes by what it heard in callbacks and keeps old lists: of requests that were running in some
    earlier step."""

    def __init__(self, options: BaseModel, context: SchedulerContext) -> None:
        super().__init__(options, context)
        self.alive: dict[str, Request] = {}
        self.once_running: tuple[Request, ...] = ()

    def on_arrived(self, request: Request) -> None:
        self.alive[request.id] = request

    def on_finished(self, request: Request) -> None:
        del self.alive[request.id]

    def be_silly(self, step: Step) -> None:
        stale = [request for request in self.once_running if request.id in self.alive]
        for request in self.shuffled(tuple(self.alive.values())):
            step.cost(request)
            if request in step.running and self.often(0.03):
                step.preempt(request)
            if self.often(0.01):
                step.reject(request, "old news")
            if self.often(0.9):
                step.grant(request, evict=stale if self.often(0.2) else ())
        step.grant_each(stale)
        if self.often(0.3):
            self.once_running = step.running


class RoundRobin(Scheduler):
    """Admits every request with its first token, then schedules them in turn: far more requests
    hold blocks than run in a step."""

    capabilities = SchedulerCapabilities(idles=True)
    turn = 0

    def schedule(self, step: Step) -> None:
        running = step.running
        self.turn += 1
        at = self.turn % max(1, len(running))
        for request in running[at:] + running[:at]:
            step.grant(request, 4, evict=reversed(running) if request is running[0] else ())
        for request in step.waiting:
            step.grant(request, 1)


def scripted(*plans: Callable[[Step], object]) -> type[Scheduler]:
    """A policy whose first plans are these; later ones are first come, first served."""

    class Scripted(FCFS):
        planned = 0

        def schedule(self, step: Step) -> None:
            self.planned += 1
            if self.planned <= len(plans):
                plans[self.planned - 1](step)
            else:
                super().schedule(step)

    return Scripted


def always(plan: Callable[[Step], object]) -> type[Scheduler]:
    """A policy that plans like this every time."""

    class Always(Scheduler):
        def schedule(self, step: Step) -> None:
            plan(step)

    return Always


def fcfs(step: Step) -> None:
    FCFS.schedule(None, step)  # type: ignore[arg-type]


def named(step: Step) -> dict[str, Request]:
    """The requests that a step shows, by id."""
    return {request.id: request for request in step.waiting + step.running}


@dataclass(frozen=True)
class Named:
    """A policy, and how to make it."""

    name: str
    policy: type[Scheduler]
    make_options: Callable[[], BaseModel] = NoOptions

    def __repr__(self) -> str:
        return self.name


def _built_in() -> list[Named]:
    """Return the policies that `dovetail_schedulers` declares, with their default options."""
    declared: list[ComponentSpec] = getattr(dovetail_schedulers, "dovetail_components", list)()
    return [
        Named(spec.name, _load(spec.target), _load(spec.options) if spec.options else NoOptions)
        for spec in declared
    ]


def _load(target: str) -> type:
    module, _, name = target.partition(":")
    found: type = getattr(import_module(module), name)
    return found


BUILT_IN = _built_in()
SILLY = [
    Named(policy.__name__, policy)
    for policy in (FCFS, Chaos, Regrets, Backwards, NeverForgets, RoundRobin)
]
EVERY_POLICY = BUILT_IN + SILLY
