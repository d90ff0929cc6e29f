"""`plan`: run one real step of a policy over a fake pool, and see what it did. For a policy author's first test.

done = plan(MyPolicy, waiting=[make_request("a", 30), make_request("b", 5)], free_blocks=4)
assert done.granted == {"a": 30}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from dovetail.api.component import NoOptions
from dovetail.api.kv_cache import KVContext, KVGroup, KVLayout
from dovetail.api.scheduler import Context, Scheduler
from dovetail.engine.books import Books
from dovetail.engine.step import PlannedStep
from dovetail.errors import DovetailError
from dovetail.request import Request, SamplingParams, Status
from dovetail.testing.fake_kv import FakeKVCache


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy did in one step, by request id, each in the order it did it."""

    granted: Mapping[str, int]  # -> tokens
    preempted: tuple[str, ...]
    rejected: Mapping[str, str]  # -> reason
    wake_at: float | None
    notes: tuple[tuple[str, str], ...]
    free_blocks: int  # afterwards
    policy: Scheduler


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
) -> Request:
    """A request for `plan`. Among `running`, it has computed all but its last token, unless `computed` says otherwise."""
    request = Request(
        id,
        [(i * 7 + len(id)) % 50 for i in range(prompt_tokens)],
        SamplingParams(max_tokens=max_tokens),
        max_tokens=max_tokens,
        arrival_time=arrival_time,
        client=client,
        priority=priority,
        deadline=deadline,
        predicted_tokens=predicted_tokens,
    )
    request._output_ids = [1] * generated
    request._computed = -1 if computed is None else computed
    return request


def plan(
    policy: type[Scheduler] | Scheduler,
    *,
    waiting: Sequence[Request] = (),
    running: Sequence[Request] = (),
    free_blocks: int = 64,
    options: BaseModel | None = None,
    block_size: int = 4,
    max_tokens: int = 256,
    max_seqs: int = 16,
    now: float = 1.0,
    cached: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Plan:
    """Let `policy` plan one step. The requests arrive (the running ones first), the running ones take their blocks, and `free_blocks` remain.

    `cached`: tokens found in the prefix cache, by request id. Raises what the policy raises, and `PolicyError` on misuse.
    """
    held = sum(-(-_computed_of(r) // block_size) for r in running)
    layout = KVLayout((KVGroup((0,), None, 1),), block_size, "none")
    kv = FakeKVCache(NoOptions(), KVContext(layout, held + free_blocks), dict(cached or {}))
    if isinstance(policy, type):
        policy = policy(options or NoOptions(), Context(max_tokens, max_seqs, held + free_blocks, block_size, seed))
    books = Books(kv, block_size, None, max(max_seqs, len(running)), type(policy).__name__)
    for order, request in enumerate([*running, *waiting]):
        request._order = order
        request._status = Status.WAITING
        if order < len(running):
            _start(books, request)
        else:
            request._computed = 0
            books.waiting.add(request)
        policy.on_arrival(request)
    step = PlannedStep(books, 0, now, max_tokens, max_seqs, log=True)
    policy.schedule(step)
    step.close()
    notes = tuple((d.request.id, d.why) for d in step.decisions or () if d.act == "noted")
    return Plan(
        granted={r.id: tokens for r, tokens in step.granted.items()},
        preempted=tuple(r.id for r in step.preempted),
        rejected={r.id: reason for r, reason in step.rejected.items()},
        wake_at=step.wake_time if step.wake_time < float("inf") else None,
        notes=notes,
        free_blocks=kv.available_blocks,
        policy=policy,
    )


def _computed_of(request: Request) -> int:
    return request._computed if request._computed >= 0 else request.num_tokens - (1 if request.generated else 0)


def _start(books: Books, request: Request) -> None:
    computed = _computed_of(request)
    if computed < 1 or computed >= request.num_tokens + (not request.generated):
        raise DovetailError(f"running request {request.id!r} has computed {computed} of {request.num_tokens} tokens: give it `generated` tokens")
    allocation = books.kv.allocate(request, computed)
    if allocation is None:
        raise DovetailError("the pool is too small for the running requests")
    if not request.generated and computed == request.prompt_tokens:
        request._output_ids = [1]  # its prefill is done: it has sampled
    books.extend(request, allocation.blocks)
    request._computed = computed
    request._prefill_end = computed if request.generated else request.prompt_tokens
    request._status = Status.RUNNING
    books.running.add(request)
    books.rows.assign(request)
