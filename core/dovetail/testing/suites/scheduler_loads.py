"""Handwritten long scenarios: `pressed`, with permanently scarce memory, and `flooded`, with more
arrivals than can be served."""

from __future__ import annotations

from dataclasses import replace

from dovetail.testing.suites.scheduler_world import Abort, Arrive, Run, Scenario, Shape

# layers with full attention, and with two windows
THREE_GROUPS = (
    (2, None, 1),
    (2, 6, 2),
    (4, 12, 1),
)

# equal in their first or last 8 characters, or without case
CLIENTS = (
    "client 1 of many",
    "client 2 of many",
    "Client 1 of many",
    "client 1 of most",
    "a",
    "A",
    "b",
)


def pressed(
    overlap: bool, *, reuse: bool = False, groups: tuple[tuple[int, int | None, int], ...] = ()
) -> Scenario:
    """Memory for only a few of two dozen requests of all kinds: many preemptions. `groups`: cache
    groups, instead of one without a window."""
    arrives = (
        Arrive(
            tuple(range(i % 5, i % 5 + 4 + i % 9)),
            max_tokens=6 + i % 11,
            delay=i * 0.01,
            client="abc"[i % 3],
            priority=i % 3,
            deadline=1e6 + i * 5 % 7,
            predicted_tokens=6 + i % 11,
        )
        for i in range(24)
    )
    shape = Shape(token_budget=12, max_num_seqs=8, overlap=overlap, reuse=reuse)
    return Scenario(
        replace(shape, groups=groups, num_pages=2 * shape.num_pages) if groups else shape,
        tuple(arrives),
    )


def crowd(*, scarce: bool) -> Scenario:
    """Two dozen requests at once, of all kinds: samples, salts, arrays, early ends, first tokens
    that are late already. There are sequences, tokens and memory for all, or, if `scarce`, for few."""
    arrives = tuple(
        Arrive(
            tuple(range(9 - i % 5, 3 - i % 4, -1)),
            max_tokens=4 + i % 7,
            client=CLIENTS[i % 7],
            priority=i % 4 - 2,
            deadline=1e6 + i * 5 % 7,
            ttft_deadline=(None, -1.0, 1e6)[i % 3],
            tbt_s=None if i % 2 else 1.0,
            n=2 if i % 6 == 5 else 1,
            stops_after=3 if i % 4 == 1 else None,
            cache_keys=("salt",) if i % 5 == 2 else (),
            as_array=i % 2 == 0,
        )
        for i in range(24)
    )
    shape = (
        Shape(token_budget=24, max_num_seqs=12)
        if scarce
        else Shape(num_pages=400, token_budget=400, max_num_seqs=40)
    )
    return Scenario(shape, (*arrives, Run(4), Abort(7), Run(6), Abort(2), *arrives[:4]))


def drafted() -> Scenario:
    """As `pressed`, and requests check drafts, so that a step yields one to four tokens of each; one
    request is aborted."""
    scenario = pressed(overlap=True)
    acts = (*scenario.acts, Run(9), Abort(4))
    return Scenario(replace(scenario.shape, token_budget=24, drafts=3), acts)


def ranked() -> Scenario:
    """One sequence at a time, and requests that wait for it with priorities and deadlines below, at
    and above 0, each twice, far apart and close together, and without a deadline. The last one
    arrives later."""
    ranks: tuple[float | None, ...] = (None, 3.0, 0.0, -2.0, 1.0, -1.0, None, 0.0, -2.0)
    ranks += (2e9, 1e9, 2e5, 1e5, 300.0, 200.0, 1.75, 1.5, -200.0, -300.0, -1e9, -2e9)
    ranks += (2.0**40 + 1, 2.0**40, -(2.0**40))
    first = Arrive((1, 2), max_tokens=3, priority=-9, deadline=-9.0)
    rest = (
        Arrive((1, i), max_tokens=2, priority=int(rank or 0), deadline=rank)
        for i, rank in enumerate(ranks)
    )
    later = Arrive((1, 99), max_tokens=2, priority=2, deadline=300.0 - 1e-6)
    return Scenario(Shape(max_num_seqs=1), (first, *rest, Run(2), later))


def alike(overlap: bool) -> Scenario:
    """Requests whose ids are equal in their first and last 8 characters, some of them but for case,
    all at once."""
    middles = ("1", "2", "10", "a", "A", "b", "\u00e4", "A ", " A", "")
    arrives = tuple(
        Arrive(
            tuple(range(4 + index % 3)),
            max_tokens=3 + index % 4,
            client=CLIENTS[index % 7],
            deadline=1e6,
            predicted_tokens=3,
            id=f"request-{middle}-of-user",
        )
        for index, middle in enumerate(middles)
    )
    return Scenario(Shape(num_pages=32, overlap=overlap), (*arrives, Run(3), Abort(5), Abort(8)))


LONG_BATCHES = 150  # before a policy's size is taken, and again as many
LONG_BATCH = tuple(
    Arrive(
        (7,) * (2 + index),
        max_tokens=2 + index % 3,
        client="abc"[index % 3],
        priority=index % 3,
        deadline=1e6,
        predicted_tokens=3,
    )
    for index in range(8)
)


def adapted(overlap: bool) -> Scenario:
    """More adapters than slots, requests without one between them, and one of a rare adapter while
    others are in demand; some samples."""
    arrives = [
        Arrive(
            tuple(range(i % 5, i % 5 + 4)),
            max_tokens=3 + i % 5,
            delay=i * 0.02,
            client="abc"[i % 3],
            priority=i % 3,
            deadline=1e6 + i,
            predicted_tokens=3 + i % 5,
            n=2 if i % 11 == 7 else 1,
            adapter=(None, "x", "y", "x", "y", "z" if i % 2 else "x")[i % 6],
        )
        for i in range(40)
    ]
    return Scenario(
        Shape(num_pages=64, token_budget=24, max_num_seqs=8, overlap=overlap, adapters=2),
        (*arrives, Run(9), Abort(3), Run(5), Abort(12)),
    )


FLOOD = Arrive((7, 7, 7, 7), max_tokens=3, client="flood", deadline=1e5, predicted_tokens=3)
VICTIMS = {  # requests that a policy might starve during the flood
    "one like all others": FLOOD,
    "a long prompt": Arrive(
        (5,) * 24, max_tokens=6, client="flood", deadline=1e5, predicted_tokens=6
    ),
    "a prompt that needs nearly all memory": Arrive(
        (5,) * 40, max_tokens=4, client="flood", deadline=1e5, predicted_tokens=4
    ),
    "a long answer": Arrive(
        (5, 5), max_tokens=20, client="flood", deadline=1e5, predicted_tokens=20
    ),
    "the least important": Arrive(
        (7, 7, 7, 7), max_tokens=3, client="flood", priority=9, deadline=1e5, predicted_tokens=3
    ),
    "the one with the latest deadline": Arrive(
        (7, 7, 7, 7), max_tokens=3, client="flood", deadline=9e5, predicted_tokens=3
    ),
    "a client with one request": Arrive(
        (7, 7, 7, 7), max_tokens=3, client="alone", deadline=1e5, predicted_tokens=3
    ),
    "a request of nobody": Arrive((5, 6), max_tokens=3),
    "one of two samples": replace(FLOOD, n=2),
    "one with a salt": replace(FLOOD, cache_keys=("salt",)),
}
FLOOD_S = 400  # seconds with one arrival each, twice as many as can be served


def streamed(overlap: bool) -> Scenario:
    """Three streamed answers while prompts arrive that are longer than the prefill limit
    allows in a step; there are sequences and memory for all."""
    shape = Shape(
        num_pages=800,
        block_size=16,
        token_budget=1024,
        max_num_seqs=16,
        max_model_len=2048,
        overlap=overlap,
        prefill_limit=2.0,
        seconds_per_step=0.1,
    )
    answers = [
        Arrive((7, 8, index), max_tokens=40, client="a", deadline=1e5, predicted_tokens=40)
        for index in range(3)
    ]
    prompts = [
        Arrive(
            (9, index) * 600,
            max_tokens=2,
            delay=1.0 + index,
            client="b",
            deadline=1e4,
            predicted_tokens=2,
        )
        for index in range(3)
    ]
    return Scenario(shape, (*answers, *prompts))


def indivisible(overlap: bool, prefill_limit: float | None) -> Scenario:
    """Prompts of up to a step's whole budget that can't be divided, as an encoder's, two dozen at
    once and some later; each holds a page."""
    shape = Shape(
        groups=((32, None, 1),),
        num_pages=4,
        token_budget=12,
        overlap=overlap,
        prefill_limit=prefill_limit,
    )
    prompts = [
        Arrive(
            tuple(range(i, i + (12, 3, 7, 1, 11)[i % 5])),
            max_tokens=1,
            delay=0.05 * (i // 24),
            client="abc"[i % 3],
            priority=i % 3,
            deadline=1e6 + i * 5 % 7,
            predicted_tokens=1,
            indivisible=True,
        )
        for i in range(30)
    ]
    return Scenario(shape, tuple(prompts))


def begun_without_memory() -> tuple[Scenario, ...]:
    """A decode, a prompt computed in chunks that runs out of memory, and a short arrival that would
    fit into the pages left: it must not pass."""
    decode = Arrive((1,) * 8, max_tokens=20, priority=0, deadline=10.0)
    prompt = Arrive((2,) * 28, max_tokens=2, priority=1, delay=0.001, deadline=20.0)
    short = Arrive((3, 3), max_tokens=2, priority=2, delay=0.01, deadline=30.0)
    shape = Shape(num_pages=16, token_budget=8)
    return tuple(
        Scenario(replace(shape, overlap=overlap), (decode, prompt, short))
        for overlap in (True, False)
    )


def held_back() -> tuple[Scenario, ...]:
    """Samples that are aborted while the first one computes their prompt in chunks."""
    acts = (Arrive((1,) * 24, n=3), Run(2), Abort(2), Run(1), Abort(1))
    return tuple(
        Scenario(Shape(token_budget=4, overlap=overlap), acts) for overlap in (True, False)
    )


BEFORE_VICTIM = 5  # requests
CROWDED = 12  # watched requests of a crowd
CROWD = Arrive((7, 7, 7, 7), max_tokens=8, client="crowd", deadline=1e5, predicted_tokens=8)


def flooded(victim: Arrive, overlap: bool) -> Scenario:
    """Steps of a second, two sequences at a time, and an endless stream of short requests; the `victim` arrives
    after the first few."""
    shape = Shape(
        num_pages=26,
        token_budget=16,
        max_num_seqs=2,
        max_model_len=48,
        overlap=overlap,
        reuse=True,
        seconds_per_step=1.0,
        seconds_per_token=0.0,
    )
    flood = [replace(FLOOD, delay=float(second)) for second in range(FLOOD_S)]
    return Scenario(
        shape,
        (
            *flood[:BEFORE_VICTIM],
            replace(victim, delay=BEFORE_VICTIM - 0.5),
            *flood[BEFORE_VICTIM:],
        ),
    )


def flooded_by(which: str) -> Scenario:
    """The same, for a victim like all others, which differ from it in `which`: "tbt_s" or
    "client"."""
    scenario = flooded(FLOOD, overlap=True)
    victim = scenario.acts[BEFORE_VICTIM]
    acts = [
        replace(act, tbt_s=1.0) if which == "tbt_s" else replace(act, client=f"client {index}")
        for index, act in enumerate(scenario.acts)
        if isinstance(act, Arrive)
    ]
    acts[BEFORE_VICTIM : BEFORE_VICTIM + 1] = [victim] if isinstance(victim, Arrive) else []
    return Scenario(scenario.shape, tuple(acts))


def crowded(overlap: bool) -> Scenario:
    """The same, but more requests can start than finish: each needs three times the memory at its
    end, so the last is likely to be preempted."""
    shape = Shape(
        num_pages=12,
        max_num_seqs=6,
        max_model_len=12,
        overlap=overlap,
        seconds_per_step=1.0,
        seconds_per_token=0.0,
    )
    return Scenario(shape, tuple(replace(CROWD, delay=float(second)) for second in range(FLOOD_S)))


def same_time() -> tuple[Arrive | Run, ...]:
    """Equal requests at one time, whose ids are in another order than they are added in."""
    return tuple(
        Arrive((7, 7, 7), max_tokens=2, client="a", deadline=1e6, id=id) for id in "dbfacge"
    )


RETURNED_STEPS = 6  # the last of `returning` that are compared


def returning(earlier: str) -> tuple[Arrive | Run, ...]:
    """Requests of several lengths, which end, and then others whose ids begin with "again". Those
    of the first begin with `earlier`, and are long where later ones are short."""

    def some(name: str, order: int) -> list[Arrive]:
        return [
            Arrive(
                tuple(range(4 + 3 * (order * index % 8))),
                max_tokens=2,
                client="a",
                deadline=1e6,
                predicted_tokens=2,
                id=f"{name} {index}",
            )
            for index in range(8)
        ]

    return (*some(earlier, 1), Run(60), *some("again", 7))
