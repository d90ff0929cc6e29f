"""`plan`: run one real step of a policy over a fake pool, and return its decisions, for a policy
author's first test.

```python
done = plan(MyPolicy, waiting=[make_request("a", 16), make_request("b", 5)], free_pages=4)
assert done.granted == {"a": 16}
assert done.refused == {"b": Refusal.MEMORY}
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from dovetail.api.component import NoOptions
from dovetail.api.kv_cache import CacheGroup, KVContext, KVLayout
from dovetail.api.observer import Act
from dovetail.api.scheduler import Refusal, Scheduler, SchedulerContext
from dovetail.engine.books import Books
from dovetail.engine.live_request import LiveRequest, Status
from dovetail.engine.step import PlannedStep
from dovetail.errors import DovetailError
from dovetail.request import Request
from dovetail.request.sampling_params import SamplingParams
from dovetail.testing.fake_kv import FakeKVCache

EARLIER = -2  # index of the steps in which running requests made their progress; -1 means none


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions of a policy in one step, by request id, in the order in which they were made."""

    granted: Mapping[str, int]  # -> tokens
    refused: Mapping[str, Refusal]  # requests that weren't granted -> the last reason
    preempted: tuple[str, ...]
    rejected: Mapping[str, str]  # -> reason
    wake_at: float | None
    notes: tuple[tuple[str, str], ...]  # (request id, reason)
    free_pages: int  # afterwards
    policy: Scheduler  # to inspect its state


def make_request(
    id: str,
    prompt_tokens: int = 8,
    *,
    max_tokens: int = 16,
    generated: int = 0,
    computed: int | None = None,
    arrival_time: float = 0.0,
    client: str | None = None,
    priority: int = 0,
    deadline: float | None = None,
    predicted_tokens: int | None = None,
    extra: Mapping[str, Any] | None = None,
    ttft_deadline: float | None = None,
    tbt_s: float | None = None,
    prompt: Sequence[int] | None = None,
) -> Request:
    """Create a request for one `plan`. `generated`: number of its output tokens. `computed`: number
    of computed tokens, if it is passed in `running`; by default all but the last generated one, so
    that it decodes. Fewer than `prompt_tokens` means that it is within its prefill. `prompt`: token
    ids instead of synthetic ones."""
    request = _Planned(
        id,
        prompt if prompt is not None else [(i * 7 + len(id)) % 50 for i in range(prompt_tokens)],
        SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        arrival_time=arrival_time,
        client=client,
        priority=priority,
        deadline=deadline,
        predicted_tokens=predicted_tokens,
        extra=extra,
        ttft_deadline=ttft_deadline,
        tbt_s=tbt_s,
    )
    request.output.extend([1] * generated)
    request.to_compute = computed
    return request


class _Planned(LiveRequest):
    """A request of `make_request`, with its progress before the planned step."""

    __slots__ = ("to_compute",)
    to_compute: int | None  # number of its tokens; None: all but the last generated one


def plan(
    policy: type[Scheduler] | Scheduler,
    *,
    waiting: Sequence[Request] = (),
    running: Sequence[Request] = (),
    free_pages: int = 64,
    options: BaseModel | None = None,
    block_size: int = 4,
    token_budget: int = 256,
    max_num_seqs: int = 16,
    now: float = 1.0,
    cached: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Plan:
    """Let `policy` plan one step. The requests arrive (running ones first), the running ones take
    their pages, and `free_pages` remain. Afterwards the policy is notified of preempted and
    rejected requests, as by the engine.

    `policy`: a class, constructed with `options`, or an instance from an earlier plan, which keeps
    its state. `cached`: tokens found in the prefix cache, whole blocks, by request id; None: there
    is no prefix cache. Raises the policy's errors, `PolicyError` on misuse, and `DovetailError` for
    inconsistent requests.
    """
    going = _planned(running)
    coming = _planned(waiting)
    _check_requests([*going, *coming], dict(cached or {}), block_size)
    held = sum(-(-_computed_of(r) // block_size) for r in going)
    layout = KVLayout((CacheGroup((0,), block_size),), 1, "none")
    kv = FakeKVCache(
        NoOptions(),
        KVContext(layout, held + free_pages),
        cached if cached is None else dict(cached),
    )
    if isinstance(policy, type):
        policy = policy(
            options or NoOptions(),
            SchedulerContext(token_budget, max_num_seqs, held + free_pages, block_size, seed),
        )
    books = Books(
        kv, layout, held + free_pages, max(max_num_seqs, len(running)), type(policy).__name__
    )
    for order, request in enumerate([*going, *coming]):
        request.order = order
        if order < len(going):
            _start(books, request)
        else:
            books.arrive(request)
        policy.on_arrived(request)
    step = PlannedStep(books, 0, now, token_budget, max_num_seqs, log=True)
    policy.schedule(step)
    step.close()
    for preempted in step.preempted:
        policy.on_preempted(preempted)
    for rejected in step.rejected:
        policy.on_finished(rejected)
    decisions = step.decisions or []
    return Plan(
        granted={r.id: tokens for r, tokens in step.granted.items()},
        refused={
            d.request.id: Refusal[d.reason]
            for d in decisions
            if d.act is Act.REFUSED and d.request not in step.granted
        },
        preempted=tuple(r.id for r in step.preempted),
        rejected={r.id: reason for r, reason in step.rejected.items()},
        wake_at=step.wake_time if step.wake_time < float("inf") else None,
        notes=tuple((d.request.id, d.reason) for d in decisions if d.act is Act.NOTED),
        free_pages=kv.available_pages,
        policy=policy,
    )


def _planned(requests: Sequence[Request]) -> list[_Planned]:
    for request in requests:
        if not isinstance(request, _Planned):
            raise DovetailError(f"plan() takes requests of make_request(), got {request!r}")
    return [request for request in requests if isinstance(request, _Planned)]


def _check_requests(
    requests: Sequence[_Planned], cached: Mapping[str, int], block_size: int
) -> None:
    if len({request.id for request in requests}) < len(requests):
        raise DovetailError("the ids of the requests must differ")
    for request in requests:
        if request.status is not Status.NEW:
            raise DovetailError(
                f"request {request.id!r} was planned before: create a new one, since planning "
                f"modifies it"
            )
        if request.generated >= request.max_tokens:
            raise DovetailError(
                f"request {request.id!r} has generated all of its max_tokens={request.max_tokens}, "
                f"so it would have finished"
            )
        tokens = cached.get(request.id, 0)
        if not 0 <= tokens < request.num_tokens or tokens % block_size:
            raise DovetailError(
                f"{tokens} tokens of request {request.id!r} can't be cached: whole blocks of "
                f"{block_size}, fewer than all its tokens"
            )


def _computed_of(request: _Planned) -> int:
    return (
        request.to_compute
        if request.to_compute is not None
        else request.num_tokens - (1 if request.generated else 0)
    )


def _start(books: Books, request: _Planned) -> None:
    """Run a request before the planned step: grant the tokens that it should have computed, and
    append the sampled token."""
    computed = _computed_of(request)
    if computed < 1 or computed >= request.num_tokens + (not request.generated):
        raise DovetailError(
            f"running request {request.id!r} has computed {computed} of {request.num_tokens} "
            f"tokens: give it `generated` tokens"
        )
    if request.generated and computed == request.num_tokens - 1:
        request.output.pop()  # sampled again by the grant
    books.arrive(request)
    before = PlannedStep(books, EARLIER, request.arrival_time, computed, 1)
    if not before.grant(request, computed - before.cost(request).cached):
        raise DovetailError("the pool is too small for the running requests")
    books.rows.assign(request)
    books.submitted([*before.granted])
    if request.yields_token:
        request.receive(1)
