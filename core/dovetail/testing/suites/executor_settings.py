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
MEMORIES = (8 << 20, 20 << 20)  # bytes of a pool
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
        settings = {"max_model_len": 48, "max_adapters": 3, "max_adapter_rank": 4, **DUMMY}
        for size in BLOCK_SIZES:
            with suppress(UnsupportedError):
                first = self._require_used({**settings, "block_size": size})
                settings["block_size"] = size
                break
        else:
            first = self._require_used(settings)
        for seed in (1, 2):
            with self._bench(**{**settings, "seed": seed}) as bench:
                found = _stream(bench)
            told = f"with {settings} it generated {first}, with seed {seed} {found}"
            require((found == first) == (seed == DUMMY["seed"]), told)

    @check("executor.memory", since="1.1", capability="samples")
    def test_the_pool_takes_the_memory_that_it_is_given(self) -> None:
        """The pool's pages take more bytes than `kv_cache_memory`, or as many with two and a half
        times the memory, although no option of the executor says otherwise."""
        pages = []
        for memory in MEMORIES:
            with self._bench(kv_cache_memory=memory) as bench:
                capacity = bench.capacity
            pages.append(capacity.num_pages)
            taken = capacity.num_pages * capacity.layout.page_bytes
            told = f"{capacity.num_pages} pages of {capacity.layout.page_bytes} bytes"
            require(taken <= memory, f"with kv_cache_memory {memory}, the pool has {told}")
        require(
            self.options or pages[0] < pages[1],
            f"with kv_cache_memory {MEMORIES}, the pool has {pages} pages",
        )

    def _require_used(self, settings: dict[str, Any]) -> list[int]:
        """Start with these settings, require that the capacity follows them, and return what is
        generated."""
        with self._bench(**settings) as bench:
            capacity = bench.capacity
            size = settings.get("block_size")
            found = capacity.layout.groups[0].block_tokens
            require(
                size is None or found == size, f"with block_size {size}, blocks have {found} tokens"
            )
            most = settings["max_model_len"]
            require(
                capacity.max_model_len <= most,
                f"with max_model_len {most}, Capacity.max_model_len is {capacity.max_model_len}",
            )
            bank = capacity.adapters
            asked = (settings["max_adapters"], settings["max_adapter_rank"])
            require(
                bank is None or (bank.slots, bank.max_rank) == asked,
                f"with slots and rank {asked}, Capacity.adapters is {bank!r:.200}",
            )
            return _stream(bench)


def _stream(bench: Bench) -> list[int]:
    """Return tokens that a model generates."""
    return [
        token
        for variant in range(4)
        for token in bench.alone("a", bench.prompt(9, variant), 2, room=2)
    ]
