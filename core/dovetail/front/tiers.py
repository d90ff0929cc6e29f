"""Makes the tiers of K and V of an engine, or refuses them with the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from dovetail.api.clock import Clock
from dovetail.api.executor import Executor
from dovetail.api.kv_cache import KVCacheManager, KVLayout
from dovetail.api.kv_tier import KVTier, TierContext
from dovetail.engine.tiers.feature import TierFeature
from dovetail.engine.tiers.host_pool import HostPool
from dovetail.engine.tiers.keys import HEADER_BYTES, FrameLayout, namespaces
from dovetail.errors import UnsupportedError

logger = logging.getLogger("dovetail")


def check_manager(kv: KVCacheManager, layout: KVLayout, name: str) -> None:
    """Raise `UnsupportedError` if nothing can be restored to the cache of manager `name`."""
    can = kv.capabilities
    if not can.reuse:
        raise UnsupportedError(
            f"kv_host_memory: KV-cache manager {name} doesn't reuse K and V, so nothing can be "
            "restored for it: leave kv_host_memory and kv_tiers out, or use the manager `prefix`"
        )
    if layout.has_windows and not can.trim:
        raise UnsupportedError(
            f"kv_host_memory: KV-cache manager {name} doesn't release what leaves a sliding window "
            "(`trim`), as restoring needs it for this model: leave kv_host_memory and kv_tiers "
            "out, or use the manager `prefix`"
        )
    if layout.recurrent:
        raise UnsupportedError(
            "kv_host_memory: the recurrent states of this model can't be kept beyond the device "
            "yet: leave kv_host_memory and kv_tiers out"
        )


def tier_feature(
    executor: Executor,
    executor_name: str,
    layout: KVLayout,
    kv: KVCacheManager,
    kv_name: str,
    clock: Clock,
    host_bytes: int,
    make_tiers: Callable[[TierContext], Sequence[tuple[str, KVTier]]] = lambda context: (),
    model: Callable[[], bytes] = bytes,
) -> TierFeature:
    """Return the feature of an engine that has `host_bytes` of host memory for K and V.

    `make_tiers`: makes them, with their names. `model`: returns a digest of all that decides K and
    V besides the layout and the tokens; it may take long. Raises `UnsupportedError` if the executor
    or the manager can't, and `ConfigError` if the memory is too small.
    """
    check_manager(kv, layout, kv_name)
    transfers = executor.transfers()
    if transfers is None:
        raise UnsupportedError(
            f"kv_host_memory: executor {executor_name} can't copy K and V to host memory here: "
            "leave kv_host_memory and kv_tiers out"
        )
    frames = FrameLayout(layout, transfers.page_bytes)
    sizes = sorted({group.bytes for group in frames.groups})
    pool = HostPool(transfers.allocate, host_bytes, sizes)
    feature = TierFeature(layout, kv, transfers, pool, frames, clock)
    context = TierContext(clock, feature.woken.set, tuple(HEADER_BYTES + size for size in sizes))
    name = transfers.name
    feature.use(make_tiers(context), lambda: namespaces(model(), layout, name))
    return feature
