"""Makes the tiers of K and V of an engine, or refuses them with the reason."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from dovetail.api.clock import Clock
from dovetail.api.executor import Capacity, Executor, ExecutorConfig, ExecutorContext
from dovetail.api.kv_cache import KVCacheManager, KVLayout
from dovetail.api.kv_tier import KVTier, TierContext
from dovetail.config.engine import EngineConfig
from dovetail.config.parts import Parts
from dovetail.engine.tiers.feature import CLOSE_S, TierFeature
from dovetail.engine.tiers.host_pool import HostPool
from dovetail.engine.tiers.keys import HEADER_BYTES, FrameLayout, namespaces
from dovetail.errors import DISTRIBUTION, DovetailError, UnsupportedError

logger = logging.getLogger("dovetail")

_WEIGHTS = {".safetensors", ".gguf", ".bin", ".pt", ".pth"}
# which say what the weights are: the others are of the tokenizer, or defaults of requests
_CONFIGS = {"config.json", "hf_quant_config.json", "model.safetensors.index.json"}
# of the engine, which change K and V without a change of their layout
_SETTINGS = ("load_format", "quantization", "kv_cache_dtype", "kv_cache_scales", "state_dtype")


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
    if layout.recurrent and not can.place:
        raise UnsupportedError(
            f"kv_host_memory: KV-cache manager {name} can't restore this model's recurrent states "
            "(`place`): leave kv_host_memory and kv_tiers out, or use the manager `prefix`"
        )


def make_tier_feature(
    config: EngineConfig,
    parts: Parts,
    executor: Executor,
    capacity: Capacity,
    kv: KVCacheManager,
    clock: Clock,
) -> TierFeature | None:
    """Return the feature of an engine that keeps K and V beyond the device; None: it keeps none.

    Raises `UnsupportedError` if the executor or the manager can't, and `ConfigError` if the memory
    is too small or a tier's options can't be served.
    """
    if not config.host_pool_bytes:
        return None
    layout = capacity.layout
    check_manager(kv, layout, parts.kv_cache.qualified_name)
    transfers = executor.transfers()
    if transfers is None:
        raise UnsupportedError(
            f"kv_host_memory: executor {parts.executor.qualified_name} can't copy K and V to the "
            "host's memory here: leave kv_host_memory and kv_tiers out"
        )
    frames = FrameLayout(layout, transfers.page_bytes)
    sizes = sorted({group.bytes for group in frames.groups})
    pool = HostPool(transfers.allocate, config.host_pool_bytes, sizes)
    feature = TierFeature(layout, kv, transfers, pool, frames, clock)
    context = TierContext(clock, feature.woken.set, tuple(HEADER_BYTES + size for size in sizes))
    made: list[tuple[str, KVTier]] = []
    try:
        for part in parts.kv_tiers:
            made.append((part.qualified_name, part.make(context)))
    except BaseException:
        for _, tier in made:
            tier.close(CLOSE_S)
        pool.close()
        raise
    name = transfers.name
    own = executor.context
    dtype = capacity.details.get("dtype", "")
    feature.use(made, lambda: namespaces(model_digest(own, dtype), layout, name))
    if executor.capabilities.virtual_clock:  # a thread's time would make runs differ
        feature.wait_until_open()
    _log(pool, frames, made)
    return feature


def _log(pool: HostPool, frames: FrameLayout, made: Sequence[tuple[str, KVTier]]) -> None:
    """Log where K and V are kept, and who can change answers."""
    logger.info(
        "K and V beyond the device: %s of host memory, in frames of %d tokens%s",
        _size(pool.limit),
        frames.tokens,
        "".join(f"; tier {name}" for name, _ in made),
    )
    for name, tier in made:
        if tier.capabilities.shared:
            logger.info(
                "KV tier %s is shared: whoever can write to it can change this engine's answers",
                name,
            )


def _size(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"


def model_digest(context: ExecutorContext, dtype: str) -> bytes:
    """Return a digest of what decides K and V besides their layout and the tokens: the settings,
    the packages that have models and weight formats, and the content of the models' config and
    weights, of which all is read. `dtype`: of activations.

    Raises `DovetailError` if a file changes meanwhile: the device may have other weights.
    """
    config = context.config
    names = [ref.name for ref in context.models] + [ref.name for ref in context.quantizations]
    packages = {name.partition(":")[0] for name in names}
    head = config.draft_head
    parts = (
        [dtype, *(str(getattr(config, name)) for name in _SETTINGS)],
        [(name, _version(name)) for name in sorted({DISTRIBUTION, *packages})],
        None if head is None else (head.name, sorted(head.options.items())),
        config.seed if config.load_format == "dummy" else None,
    )
    total = hashlib.sha256(repr(parts).encode())
    files = _model_files(config)
    stamps = [_stamp(file) for file in files]
    for file in files:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").digest()
        total.update(repr((file.name, digest)).encode())
    if [_stamp(file) for file in files] != stamps:
        raise DovetailError(f"files of {config.model} were changed after the engine's start")
    return total.digest()


def _model_files(config: ExecutorConfig) -> list[Path]:
    wanted = {".json"} if config.load_format == "dummy" else {".json", *_WEIGHTS}
    return [
        file
        for directory in filter(None, (config.model, config.draft_model))
        for file in sorted(Path(directory).iterdir())
        if file.suffix in wanted and (file.suffix != ".json" or file.name in _CONFIGS)
    ]


def _stamp(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
