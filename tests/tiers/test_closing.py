"""Memory of a closed engine that is still held."""

from __future__ import annotations

import gc
import mmap
import weakref

from dovetail import LLMEngine, SamplingParams


def test_a_closed_engine_with_a_host_pool_frees_the_memory_of_device_and_host() -> None:
    engine = LLMEngine.from_config({"model": "demo", "kv_host_memory": "32MiB"})
    with engine:
        engine.add_request("a", [1] * 600, SamplingParams(max_tokens=2))
        while engine.has_unfinished_requests():
            engine.step()
        pool = weakref.ref(engine.core.executor.worker.runner.pool)  # type: ignore[attr-defined]
        views = (each for each in gc.get_objects() if isinstance(each, memoryview))
        slabs = [weakref.ref(view.obj) for view in views if isinstance(view.obj, mmap.mmap)]
        assert slabs
    gc.collect()
    assert pool() is None
    assert not any(slab() for slab in slabs)
