"""`ExecutorSettings`: checks that no setting of an executor is ignored."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from dovetail.errors import DovetailError, UnsupportedError, describe
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suites.executor_bench import Bench
from dovetail.testing.suites.executor_subject import ExecutorSubject

# values that nothing can serve
IMPOSSIBLE: tuple[dict[str, Any], ...] = (
    {"dtype": "float7"},
    {"load_format": "no-such-file"},
    {"kv_cache_dtype": "float7"},
    {"kv_cache_scales": "no-such-scales"},
    {"quantization": "no-such-format"},
    {"state_dtype": "float7"},
    {"block_size": 0},
    {"block_size": -16},
)
BLOCK_SIZES = (7, 32)
DUMMY: dict[str, Any] = {"load_format": "dummy", "seed": 1}


class ExecutorSettings(ExecutorSubject):
    """Checks that an executor serves its settings, or refuses them."""

    @check("executor.settings", since="1.0", capability="samples")
    def test_settings_that_can_not_be_served_are_refused(self) -> None:
        """`start` accepted an unknown `dtype`, `load_format`, `kv_cache_dtype`, `kv_cache_scales`,
        `quantization` or `state_dtype`, or an impossible `block_size`, which it ignores then; or
        raised something other than `DovetailError`, or one that names neither the setting nor its
        value. Use each setting of `ExecutorConfig`, or refuse values other than its default by
        name."""
        for settings in IMPOSSIBLE:
            try:
                with self._bench(**settings):
                    pass
            except DovetailError as error:
                ((name, value),) = settings.items()
                require(
                    name in str(error) or str(value) in str(error),
                    f"with {settings}, it raised {describe(error)}, which doesn't name the setting",
                )
            except Exception as error:
                fail(f"with {settings}, it raised {describe(error)}", error)
            else:
                fail(f"with {settings}, it started")

    @check("executor.settings_used", since="1.0", capability="samples")
    def test_settings_are_used(self) -> None:
        """Blocks have another size than `block_size` says, the longest sequence is longer than
        `max_model_len`, the bank of adapters has another number of slots or another rank than
        `max_adapters` and `max_adapter_rank`, or the weights of `load_format: dummy` aren't a
        function of `seed`. A setting that can't be served is refused with `UnsupportedError`."""
        for size in BLOCK_SIZES:
            with suppress(UnsupportedError), self._bench(block_size=size) as bench:
                found = bench.capacity.layout.groups[0].block_tokens
                require(found == size, f"with block_size {size}, blocks have {found} tokens")
        with self._bench(max_model_len=48, max_adapters=3, max_adapter_rank=4, **DUMMY) as bench:
            longest = bench.capacity.max_model_len
            require(longest <= 48, f"with max_model_len 48, Capacity.max_model_len is {longest}")
            bank = bench.capacity.adapters
            require(
                bank is None or (bank.slots, bank.max_rank) == (3, 4),
                f"with 3 adapters of rank 4, Capacity.adapters is {bank!r:.200}",
            )
            first = _stream(bench)
        for seed in (1, 2):
            with self._bench(**{**DUMMY, "seed": seed}) as bench:
                told = f"with {DUMMY} it generated {first}, with seed {seed} {_stream(bench)}"
                require((_stream(bench) == first) == (seed == DUMMY["seed"]), told)


def _stream(bench: Bench) -> list[int]:
    """Return tokens that a model generates."""
    return [
        token
        for variant in range(4)
        for token in bench.alone("a", bench.prompt(9, variant), 2, room=2)
    ]
