"""The steps that `calibrate` measures, most useful first.

decodes            rows × context, at sizes of graphs and others; few rows at more contexts
prompts join       decodes × their tokens
prompts in chunks  tokens × history, beside a growing number of decodes; a small last chunk beside decodes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail import LLMEngine
from dovetail.api.token_sizes import ALWAYS_TOKENS, padded_sizes
from dovetail.errors import ConfigError
from dovetail_lab.cache_layout import pool_tokens
from dovetail_lab.rig import NEVER

TOGETHER = 6  # decode steps timed as one

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)
# sizes without a graph: if they take as long as the next size, decodes are padded
BETWEEN = (
    3,
    6,
    12,
    20,
    44,
)
# (tokens of a decode, chunk), most useful first
CONTEXTS = (
    (512, 512),
    (64, 128),
    (2048, 1024),
    (6144, 2048),
)
# prompts that join one step; some in turn at each number of rows
JOINING = (
    *((tokens,) for tokens in (16, 48, 700, 128, 1500, 300, 1000, 90, 3000, 200, 1900, 450)),
    *((64, 64, 64, 64), (250, 250, 250), (30, 400), (600, 600), (150, 40, 10)),
)
AT_ONCE = 4  # half as many at contexts other than the first
# (tokens, chunk) of prompts that end in a small chunk, also in turn
LEFTOVERS = (
    (560, 512),
    (640, 512),
    (90, 64),
    (812, 512),
    (1100, 512),
)
FEW_ROWS = (1, 2, 4, 8)  # the split of their keys over the device depends on the context
FEW_ROWS_CONTEXTS = (1024, 256, 1500, 3072)
GRAPHS = padded_sizes(ALWAYS_TOKENS)  # each of these sizes may have a graph, and so its own time
FEW_GRAPHS = GRAPHS[1::3]
# (tokens, chunk), without decodes: a first chunk finds the device idle, a second doesn't
PREFILLS = (
    *(
        (tokens, chunk)
        for size in FEW_GRAPHS
        for tokens, chunk in ((size, NEVER), (2 * size, size))
    ),
    (4000, NEVER),
    *(
        (tokens, chunk)
        for size in GRAPHS
        if size not in FEW_GRAPHS
        for tokens, chunk in ((size, NEVER), (2 * size, size))
    ),
    *((2 * size + 16, size + 8) for size in GRAPHS[7:-1:3]),  # just above a size
    *(
        (tokens, 512) for tokens in (5632, 4096, 2560, 1536, 4608, 3072, 2048)
    ),  # only the last chunk is measured: few queries after a long history
    *((2600, NEVER), (5000, 2500), (8000, NEVER), (8000, 4000), (16_000, NEVER)),
)
FIRST = 2 * len(FEW_GRAPHS) + 1  # this many come first: they show which steps are graphs
# larger prompts aren't repeated: such steps hardly vary
REPEATS = 3
LARGE = 6000
ROUNDS = 2
LEVEL_TOKENS = 120_000  # of KV cache: filling more takes too long
QUICK_CONTEXTS = ((8, 512), (48, 128))
QUICK_JOINING = ((4,), (24,))
QUICK_PREFILLS = tuple((tokens, NEVER) for tokens in (6, 16, 40, 60))


@dataclass(frozen=True, slots=True)
class Level:
    """Measurements with decodes of about `context` tokens each. At each number of `rows`, some
    steps have only decodes, then `prompts` join, then `leftovers`; `between` these numbers there
    are only decodes."""

    context: int
    rows: tuple[int, ...]
    between: tuple[int, ...] = ()
    chunk: int = NEVER  # prompt tokens beside decodes while rows are added
    prompts: tuple[tuple[int, ...], ...] = ()  # prompts that join one step
    at_once: int = 0  # number of `prompts` to try at each number of rows, in turn
    leftovers: tuple[tuple[int, int], ...] = ()  # (tokens, chunk) of prompts: one of them


@dataclass(frozen=True, slots=True)
class Design:
    """Measurements to make, most useful first, since the time may run out."""

    warm_up: Level
    prefills: tuple[tuple[int, int], ...]  # (prompt tokens, chunk), without decodes
    levels: tuple[Level, ...]
    decode_steps: int
    repeats: int
    rounds: int

    @classmethod
    def of(cls, engine: LLMEngine, quick: bool) -> Design:
        """Return as much of the grid as fits into the engine; the tiny grid if `quick`, or if the
        engine is too small. Raises `ConfigError` if nothing fits."""
        capacity = engine.capacity
        config = engine.config
        pool = int(
            0.6
            * pool_tokens(capacity.layout, capacity.num_pages, min(config.max_num_seqs, ROWS[-1]))
        )
        most_rows = min(config.max_num_seqs, 4 if quick else 256)
        rows = sorted({rows for rows in ROWS if rows < most_rows} | {most_rows})
        steps, repeats, rounds = (2 * TOGETHER, 1, 1) if quick else (4 * TOGETHER, REPEATS, ROUNDS)
        longest = min(capacity.max_model_len - 1 - steps, pool)
        tiny = quick or 2 * min(CONTEXTS)[0] > longest
        contexts = [
            (context, chunk)
            for context, chunk in (QUICK_CONTEXTS if tiny else CONTEXTS)
            if 2 * context <= longest
        ]
        if not contexts:
            least = 2 * min(QUICK_CONTEXTS)[0]
            raise ConfigError(
                f"the engine is too small to calibrate: expected a max_model_len of "
                f"{least + 1 + steps} or more, and room for {least} tokens in "
                f"60 % of its KV pool; got {capacity.max_model_len}, and {pool}"
            )
        joining = [
            group
            for group in (QUICK_JOINING if tiny else JOINING)
            if sum(group) <= min(config.max_num_batched_tokens, longest)
        ]

        def that_fit(counts: Sequence[int], context: int) -> tuple[int, ...]:
            return tuple(
                count
                for count in counts
                if count == 1 or count * (context + 64) <= min(pool, LEVEL_TOKENS)
            )

        leftovers = () if tiny else _that_fit(LEFTOVERS, longest, config.max_num_batched_tokens)
        levels = [
            Level(
                context,
                that_fit(rows[:: 1 if index < 2 else 2], context),
                that_fit(
                    [count for count in BETWEEN if count < most_rows and count not in rows], context
                )
                if index < 2
                else (),
                chunk,
                tuple(joining),
                AT_ONCE // 2 if index else AT_ONCE,
                () if index else leftovers,
            )
            for index, (context, chunk) in enumerate(contexts)  # the first in full
        ]
        few_rows = [count for count in FEW_ROWS if count <= most_rows]
        levels[2:2] = [
            Level(context, that_fit(few_rows, context))
            for context in FEW_ROWS_CONTEXTS
            if not tiny and 2 * context <= longest
        ]
        prefills = _that_fit(
            QUICK_PREFILLS if tiny else PREFILLS, longest, config.max_num_batched_tokens
        )
        return cls(levels[0], prefills, tuple(levels), steps, repeats, rounds)

    @property
    def cells(self) -> int:
        return len(self.prefills) + sum(
            len(level.rows) + len(level.between) for level in self.levels
        )


def _that_fit(
    prefills: Sequence[tuple[int, int]], longest: int, max_tokens: int
) -> tuple[tuple[int, int], ...]:
    """Return the (prompt tokens, chunk) that fit: with whole chunks, if a step of `max_tokens` can
    hold them; unchunked prompts unchanged or not at all."""
    chunked = [
        (min(tokens, longest // chunk * chunk), chunk) if chunk < NEVER else (tokens, chunk)
        for tokens, chunk in prefills
    ]
    return tuple(
        (tokens, chunk)
        for tokens, chunk in chunked
        if 0 < tokens <= longest and (chunk == NEVER or chunk <= max_tokens)
    )
