"""Routers: a `Router` chooses one of several equal replicas for each request, using only
information that a router in front of real engines could have.

It sees the prompt, the session, the last reported loads of the replicas, the requests sent since,
and which requests have ended; optionally how much of the prompt each replica has cached; never the
length of an answer. It is called once per request, in order of arrival, and must return the same
choices in every run.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import xxhash
from pydantic import Field, PrivateAttr

from dovetail.errors import ConfigError
from dovetail.serving import Registry
from dovetail_lab.calls import Value, parse_call
from dovetail_lab.token_ids import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request as a router sees it."""

    id: str
    client: str | None
    priority: int  # smaller is more important
    arrival_s: float  # since the trace began
    prompt: TokenIds  # [prompt_tokens]
    max_tokens: int  # the limit that policies see
    session: str | None = None  # the conversation or agent that it belongs to


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that has ended, as seen by a router that forwards answers."""

    id: str
    session: str | None
    replica: int
    time_s: float  # since the trace began
    prompt_tokens: int
    output_tokens: int
    completed: bool  # False if it was rejected, or failed


@dataclass(slots=True)
class ReplicaLoad:
    """A replica's last reported load, and what was sent to it since. A request's tokens: prompt and
    answer so far."""

    waiting: int  # requests
    running: int
    tokens: int  # of both
    sent: int = 0  # requests, since the report
    sent_tokens: int = 0  # of their prompts
    # of the prompt that is routed now, in the replica's cache; only for routers with `sees_cache`
    cached_tokens: int = 0

    @property
    def all_requests(self) -> int:
        return self.waiting + self.running + self.sent

    @property
    def all_tokens(self) -> int:
        return self.tokens + self.sent_tokens


class Router(Value, ABC):
    """A way of routing requests to replicas. Fields are its options, as `prefix_aware(blocks=1500)`
    gives them. State is in private attributes; each run creates a new router."""

    # how often replicas report their loads; 0: at each arrival
    reported_every_s: ClassVar[float] = 0.0
    # True: set `ReplicaLoad.cached_tokens`, as known from cache events of the replicas
    sees_cache: ClassVar[bool] = False

    @abstractmethod
    def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        """Return the index in `replicas` of the request's replica. `replay_replicas` raises
        `ConfigError` for any other number."""

    def ended(self, completion: Completion) -> None:
        """Called for each request that has ended, in order of time, before the next request is
        routed. Does nothing by default."""

    @property
    def label(self) -> str:
        """Return its name, with non-default options."""
        own = {
            name: value
            for name, value in self.model_dump().items()
            if value != type(self).model_fields[name].default
        }
        name = next(
            (name for name, kind in ROUTERS.items() if kind is type(self)), type(self).__name__
        )
        return name + (
            f"({', '.join(f'{option}={value}' for option, value in own.items())})" if own else ""
        )

    def reports_at(self, arrival_s: float) -> float:
        """Return when, at or before an arrival, the loads were last reported. Seconds since the
        trace began."""
        every = self.reported_every_s
        return min(math.floor(arrival_s / every) * every, arrival_s) if every else arrival_s


class RoundRobin(Router):
    """Chooses each replica in turn."""

    _routed: int = PrivateAttr(0)

    def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        self._routed += 1
        return (self._routed - 1) % len(replicas)


class LeastTokens(Router):
    """Chooses the replica whose requests have the fewest tokens; of equal ones, the first."""

    def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        return min(range(len(replicas)), key=lambda index: replicas[index].all_tokens)


class LeastLoaded(Router):
    """Chooses like vLLM (`DPLBAsyncMPClient`, since 0.9): the replica with the smallest 4 x
    waiting + running; of equal ones, the first. Replicas report every 100 ms; in between, each
    request sent counts as waiting."""

    WAITING_COUNTS: ClassVar[int] = 4
    reported_every_s: ClassVar[float] = 0.1

    def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        scores = [self.WAITING_COUNTS * (one.waiting + one.sent) + one.running for one in replicas]
        return scores.index(min(scores))


class PrefixAware(Router):
    """Chooses the replica that was sent the longest prefix of the prompt while loads are balanced;
    otherwise, or if no prefix is long enough, the one with the fewest tokens. This is the rule of
    SGLang's cache-aware router; see also Preble (Srivatsa et al., arXiv:2407.00023).

    It stores prefixes in whole blocks of `block_tokens` tokens, the `blocks` most recently used for
    each replica, to approximate its cache.
    """

    # loads are unbalanced if the most requests exceed the fewest by more than this
    BALANCED_BY: ClassVar[int] = 64
    BALANCED_TIMES: ClassVar[float] = 1.5  # and this many times

    blocks: int = Field(default=100_000, ge=1)
    block_tokens: int = Field(default=16, ge=1)
    # minimum share of the prompt for a match to count
    least_match: float = Field(default=0.5, ge=0, le=1)
    # replica -> names of blocks, most recently used last
    _sent: dict[int, OrderedDict[int, None]] = PrivateAttr(default_factory=dict)

    def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        names = self._names(request.prompt)
        matches = [self._match(index, names) for index in range(len(replicas))]
        loads = [one.all_requests for one in replicas]
        balanced = max(loads) - min(loads) <= self.BALANCED_BY or max(
            loads
        ) <= self.BALANCED_TIMES * min(loads)
        follows = balanced and max(matches) * self.block_tokens > self.least_match * len(
            request.prompt
        )
        chosen = min(
            range(len(replicas)),
            key=lambda index: (-matches[index] if follows else 0, replicas[index].all_tokens),
        )
        self._note(chosen, names)
        return chosen

    def _names(self, prompt: TokenIds) -> list[int]:
        """Return a name for each whole block, which identifies it and all blocks before it."""
        whole = len(prompt) // self.block_tokens
        names = []
        before = 0
        for block in np.ascontiguousarray(prompt[: whole * self.block_tokens], np.int32).reshape(
            whole, self.block_tokens
        ):
            before = xxhash.xxh3_64_intdigest(block.tobytes(), seed=before)
            names.append(before)
        return names

    def _match(self, replica: int, names: Sequence[int]) -> int:
        sent = self._sent.get(replica, OrderedDict())
        return next((index for index, name in enumerate(names) if name not in sent), len(names))

    def _note(self, replica: int, names: Sequence[int]) -> None:
        sent = self._sent.setdefault(replica, OrderedDict())
        for name in reversed(
            names
        ):  # the start is marked as used last, so it is evicted after the rest
            sent[name] = None
            sent.move_to_end(name)
        while len(sent) > self.blocks:
            sent.popitem(last=False)


class Sticky(Router):
    """Chooses the replica of the session's last request, unless its tokens exceed `most` times
    those of the least loaded replica plus this prompt. Then, and for the first request of a
    session, the replica with the fewest tokens. Sessions idle for `forget_s` are forgotten."""

    most: float = Field(default=2.0, ge=1)
    forget_s: float = Field(default=600.0, gt=0)
    _home: dict[str, int] = PrivateAttr(default_factory=dict)  # session -> replica
    # session -> when its last request ended, the oldest first
    _idle: OrderedDict[str, float] = PrivateAttr(default_factory=OrderedDict)

    def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        while self._idle and next(iter(self._idle.values())) + self.forget_s < request.arrival_s:
            self._home.pop(self._idle.popitem(last=False)[0], None)
        least = min(range(len(replicas)), key=lambda index: replicas[index].all_tokens)
        if request.session is None:
            return least
        home = self._home.get(request.session, least)
        if replicas[home].all_tokens > self.most * (
            replicas[least].all_tokens + len(request.prompt)
        ):
            home = least
        self._home[request.session] = home
        self._idle.pop(request.session, None)
        return home

    def ended(self, completion: Completion) -> None:
        if completion.session is not None:
            self._idle[completion.session] = completion.time_s
            self._idle.move_to_end(completion.session)


class CacheAware(Router):
    """Chooses the replica with the smallest sum of `overlap_weight` x uncached prompt tokens and
    the tokens of its requests; of equal ones, the first. It tracks caches by their events, like
    NVIDIA Dynamo's KV router."""

    sees_cache: ClassVar[bool] = True

    overlap_weight: float = Field(default=1.0, ge=0)

    def choose(self, request: Arrival, replicas: Sequence[ReplicaLoad]) -> int:
        costs = [
            self.overlap_weight * (len(request.prompt) - one.cached_tokens) + one.all_tokens
            for one in replicas
        ]
        return costs.index(min(costs))


ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_tokens": LeastTokens,
    "sticky": Sticky,
    "cache_aware": CacheAware,
    "prefix_aware": PrefixAware,
    "vllm": LeastLoaded,
}


@dataclass(frozen=True, slots=True)
class Routing:
    """Number of replicas, and the text that names the router in front of them. Raises the errors of
    `parse_router`, and `ConfigError` for an invalid number."""

    replicas: int
    router: str

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= 1024:
            raise ConfigError(f"--replicas: expected 1 to 1024, got {self.replicas}")
        parse_router(self.router)


def parse_router(text: str) -> Router:
    """Return a new router: `round_robin`, `prefix_aware(blocks=1500)`, a router of an installed
    plugin by its short or full name, or `module:Class`. Raises `ConfigError`, `PluginError` or
    `TraceError`."""
    name, bracket, arguments = text.strip().partition("(")
    if name in ROUTERS:
        return parse_call(text, dict(ROUTERS), "router")
    offers = Registry.discover(enforce_require=False).routers()
    found = [one for one in offers if name in (one.spec.name, one.qualified_name)]
    if len(found) > 1:
        names = " and ".join(one.qualified_name for one in found)
        raise ConfigError(
            f"router {name!r} is offered more than once, by {names}: write it in full"
        )
    if found:
        path = found[0].spec.target
        kind = _checked(found[0].load(), path, name)
    elif ":" in name:
        kind = _checked(_imported(name), name, name)
    else:
        others: dict[str, type[Router]] = {one.spec.name: RoundRobin for one in offers}
        return parse_call(text, ROUTERS | others, "router")  # raises, with all names
    return parse_call(f"router{bracket}{arguments}", {"router": kind}, f"router {name}")


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # a module's code may raise any
        raise ConfigError(
            f"router {path}: it can't be imported: {type(error).__name__}: {error}"
        ) from error


def _checked(found: Any, path: str, name: str) -> type[Router]:
    if not (isinstance(found, type) and issubclass(found, Router)):
        raise ConfigError(
            f"router {name}: {path} is no class that is made from dovetail_lab.routers.Router"
        )
    return found
