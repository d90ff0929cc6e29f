"""Whether a model and an engine's components fit each other: `assembly` asks, before weights are
read where it can.

Each check raises `UnsupportedError` with what doesn't fit, and what would.
"""

from __future__ import annotations

from pathlib import Path

from dovetail.api.executor import Capacity
from dovetail.api.json_files import read_json_object
from dovetail.api.kv_cache import KVCacheManager, KVLayout
from dovetail.config.engine import EngineConfig
from dovetail.config.parts import Parts
from dovetail.errors import UnsupportedError


def refuse_encoder_decoder(model_dir: Path) -> None:
    """Reject a model with an encoder, before other files are found wrong."""
    path = model_dir / "config.json"
    if path.is_file() and read_json_object(path).get("is_encoder_decoder"):
        reason = "is_encoder_decoder: a model with an encoder beside its decoder isn't served"
        raise UnsupportedError(f"{path}: {reason}")


def check_sampler(config: EngineConfig, parts: Parts) -> None:
    """Reject speculation with a sampler that can't sample after drafts."""
    if config.speculation is None or parts.executor.load().capabilities.virtual_clock:
        return
    if not parts.sampler.load().capabilities.drafts:
        raise UnsupportedError(
            f"sampler {parts.sampler.qualified_name} can't sample after drafts, so there can be "
            "no speculation: leave `speculation` out, use the sampler `default`, or ask its author "
            "for the capability `drafts`"
        )


def check_processors(parts: Parts) -> None:
    """Reject logits processors that the sampler or the executor can't apply, and import them."""
    can = parts.executor.load().capabilities
    if not parts.logits_processors or can.virtual_clock:
        return
    if not can.logits_processors:
        raise UnsupportedError(
            f"logits_processors: executor {parts.executor.qualified_name} can't apply them: "
            "leave them out, or use `local`"
        )
    if not parts.sampler.load().capabilities.processors:
        raise UnsupportedError(
            f"logits_processors: sampler {parts.sampler.qualified_name} can't apply them: leave "
            "them out, use the sampler `default`, or ask its author for the capability `processors`"
        )
    for part in parts.logits_processors:
        part.load()


def check_pool(capacity: Capacity, max_tokens: int, *, trims: bool) -> None:
    """Reject a pool without room for one sequence of `max_model_len`, computed in steps of
    `max_tokens`: some request could stop the engine.

    `trims`: the KV-cache manager releases blocks that have left a window.
    """
    layout = capacity.layout
    length = capacity.max_model_len
    needed = layout.most_pages(length, max_tokens) if trims else layout.pages(length)
    if capacity.num_pages < needed:
        raise UnsupportedError(
            f"the KV cache has {capacity.num_pages} pages, but one sequence of max_model_len = "
            f"{length} tokens needs {needed}: lower max_model_len, or raise kv_cache_memory or "
            "gpu_memory_utilization"
        )


def check_deterministic(config: EngineConfig, capacity: Capacity) -> None:
    """Reject `deterministic: always` if the executor can't promise it for a single request."""
    if config.deterministic == "always" and capacity.not_deterministic:
        raise UnsupportedError(
            f"deterministic: this engine can't promise it: {capacity.not_deterministic}"
        )


def check_groups(layout: KVLayout, kv: KVCacheManager, name: str) -> None:
    """Reject a KV-cache manager that serves fewer kinds of layers than the model has."""
    wide = any(group.pages_per_block > 1 for group in layout.groups)
    needs_groups = wide or len(layout.groups) > 1
    if needs_groups and not kv.capabilities.groups:
        windows = ", ".join(
            "full" if group.window is None else str(group.window) for group in layout.groups
        )
        raise UnsupportedError(
            f"KV-cache manager {name} serves models of one cache group, and this one has "
            f"{len(layout.groups)} (windows: {windows}); use `prefix`, or ask its author for the "
            "capability `groups`"
        )
    if layout.recurrent and not kv.capabilities.states:
        raise UnsupportedError(
            f"KV-cache manager {name} can't keep the states of recurrent layers, which this model "
            "has; use `prefix`, or ask its author for the capability `states`"
        )
