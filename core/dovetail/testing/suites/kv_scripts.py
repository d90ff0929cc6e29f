"""Scripts for `kv_model`: drawn at random from a seed, and shortened after a violation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from dovetail.api.kv_cache import CacheGroup, KVCacheManager, KVContext
from dovetail.testing.checks import CheckFailed
from dovetail.testing.suites.kv_model import Act, Broken, KVWorld, Shape, plain

BLOCK_SIZES = (1, 2, 3, 16)
# block sizes of the groups of a layout
GROUP_SIZES = (
    (1, 1, 1),
    (2, 2, 2),
    (4, 2, 2),
    (2, 4, 1),
    (2, 3, 6),
    (1, 3, 3),
)
WEIGHTS = {
    "arrive": 4, "step": 4, "grant": 1, "evict": 2, "fork": 1, "preempt": 1, "preempt_last_granted": 1, "finish": 2, "trim": 1, "submit": 1,
    "deliver": 1, "hog": 1, "reset": 0.3, "take_back_last_granted": 0.5,
}  # fmt: skip


def draw_shape(random: Random) -> Shape:
    return plain(
        random.choice(BLOCK_SIZES), random.randint(1, 16), random.choice([None, None, 1, 2, 5])
    )


def draw_groups(random: Random) -> Shape:
    """Draw a shape of one to three groups, mostly one of full attention and others; blocks of up to
    three pages."""
    windows = [
        *random.sample([1, 2, 3, 5, 8, 20], random.choice([0, 1, 1, 2])),
        random.choice([None, None, None, 4]),
    ]
    windows.sort(key=lambda window: window or 0)
    sizes = random.choice(GROUP_SIZES)
    groups = tuple(
        CacheGroup((index,), sizes[index], window, random.choice([1, 1, 2, 3]))
        for index, window in enumerate(windows)
    )
    shape = Shape(groups, 0)
    return Shape(groups, random.randint(1, 12) * shape.layout.pages(shape.layout.hit_tokens))


def draw_states(random: Random) -> Shape:
    """Draw a shape of a state, of up to three pages, and mostly of groups of K and V; most pools
    have room for several requests."""
    paged = draw_groups(random).groups[: random.choice([0, 1, 1, 1, 2, 2, 3])]
    tokens = Shape(paged, 0).layout.hit_tokens if paged else random.choice([1, 2, 4])
    groups = (
        *paged,
        CacheGroup((len(paged),), tokens, None, random.choice([1, 1, 2, 3]), recurrent=True),
    )
    shape = Shape(groups, 0)
    return Shape(
        groups,
        random.randint(1, 12) * shape.layout.pages(random.choice([1, 3]) * shape.layout.hit_tokens),
    )


def draw_script(random: Random) -> list[Act]:
    """Draw up to 60 acts: mostly requests that begin alike, and steps that run them."""
    return [
        _draw_act(random, name)
        for name in random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=random.randint(1, 60))
    ]


def _draw_act(random: Random, name: str) -> Act:
    who = random.randrange(8)
    sampled = random.randrange(2)
    match name:
        case "arrive":
            base = random.choice([(0,), (0,), (0, 1), (0, 0, 0, 1)])
            keys = random.choice([(), (), (), (), ("salt",)])
            return name, (
                base,
                random.randint(0, 4),
                random.choice([0, 0, 1, 2]),
                keys,
                random.choice([None, None, None, None, 0]),
            )
        case "step":
            return name, (random.choice([100, 100, 7, 1]), sampled)
        case "grant":
            return name, (who, random.randint(1, 40), random.choice([0, 0, 5]))
        case "evict":
            return name, (who, random.randint(1, 3), random.randint(1, 40))
        case "fork":
            return name, (who, random.randint(1, 80))
        case "submit":
            return name, (sampled, random.random() < 0.5)
        case "hog":
            return name, (random.randint(0, 4), random.random() < 0.5)
        case "deliver" | "reset" | "preempt_last_granted" | "take_back_last_granted":
            return name, ()
        case _:
            return name, (who,)


def shortest(make: Callable[[KVContext], KVCacheManager], found: Broken) -> CheckFailed:
    """Return the same breach without the acts that it doesn't need; the message ends with the
    others."""
    broken = _breach(make, found, found.script)
    for at in reversed(range(len(found.script))):
        if broken is not None:
            broken = _breach(make, found, [*broken.script[:at], *broken.script[at + 1 :]]) or broken
    if broken is None:
        return CheckFailed(
            f"kv_cache.{found.claim}: {found}; the same acts, done again, didn't show it: the "
            f"manager isn't deterministic"
        )
    acts = ", ".join(
        f"{name}({', '.join(map(repr, arguments))})" for name, arguments in broken.script
    )
    return CheckFailed(
        f"{broken}; shown by {broken.shape} and these acts of {KVWorld.__module__}.KVWorld: "
        f"{acts or 'none'}"
    )


def _breach(
    make: Callable[[KVContext], KVCacheManager], found: Broken, script: Sequence[Act]
) -> Broken | None:
    try:
        KVWorld(make, found.shape, found.claim).run(script)
    except Broken as broken:
        return broken
    return None
