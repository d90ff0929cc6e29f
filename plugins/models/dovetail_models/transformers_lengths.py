"""Lengths of sequences at which what a model of transformers computes may change: its windows,
chunks and sparse attention, and rotary embeddings that switch their frequencies.

The check compares sequences beyond each of them (`longest_needed`). What no check can cross, and
what the length of one request would change for others, is rejected.
"""

from __future__ import annotations

from typing import Any

from dovetail.errors import UnsupportedError
from dovetail_models.transformers_attention import AttentionCall
from dovetail_models.transformers_loading import SWITCHING_ROPES

_ORIGINAL = "original_max_position_embeddings"
_LONGEST = 8192  # tokens of the check's longest sequence
_BEYOND = 17  # tokens that it has after the last length at which the numbers may change


def longest_needed(config: Any, calls: list[AttentionCall]) -> int:
    """Return the length of a sequence that exceeds every length in the config, up to the check's
    limit."""
    named = [2 * length for length in _windows(config, calls).values()]
    named += _hidden_lengths(config).values()
    named += [rope[_ORIGINAL] for rope in _ropes(config) if isinstance(rope.get(_ORIGINAL), int)]
    return min(_LONGEST, max(named, default=33) + _BEYOND)


def _windows(config: Any, calls: list[AttentionCall]) -> dict[str, int]:
    """Return the windows of attention: those of the calls, and those that only the config names,
    which a mask may have."""
    windows = {
        key: value
        for key, value in config.to_dict().items()
        if type(value) is int and "window" in key and not key.endswith("_layers")
    }
    return windows | {
        f"sliding_window of {call.module}": call.window for call in calls if call.window is not None
    }


def _hidden_lengths(config: Any) -> dict[str, int]:
    """Return the lengths, by fields of the config, from which on a layer may leave out tokens
    without a word to the backend: of chunks, and of sparse attention."""
    sizes = {key: value for key, value in config.to_dict().items() if type(value) is int}
    sparse = {key: value for key, value in sizes.items() if "index" in key or "sparse" in key}
    block = max((value for key, value in sparse.items() if "block_size" in key), default=1)
    chunks = {key: value for key, value in sizes.items() if "chunk" in key}
    return chunks | {
        key: value * (block if "block" in key else 1)
        for key, value in sparse.items()
        if "topk" in key or "top_k" in key
    }


def check_lengths(config: Any, calls: list[AttentionCall], max_len: int) -> None:
    """Raise `UnsupportedError` if sequences may be so long that no check crosses a length at which
    the numbers may change."""
    for key, length in (_hidden_lengths(config) | _windows(config, calls)).items():
        if length + _BEYOND > _LONGEST and max_len > length:
            raise UnsupportedError(
                f"{key}: what changes beyond {length} tokens can't be checked; set max_model_len "
                f"to {length} or less"
            )


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embeddings; there may be one per kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        list(rope.values())
        if rope and all(isinstance(value, dict) for value in rope.values())
        else [rope]
    )


def check_rope(config: Any, max_len: int) -> None:
    """Raise `UnsupportedError` if the rotary frequencies of one request would depend on another's
    length."""
    for rope in _ropes(config):
        kind = rope.get("rope_type")
        if kind not in SWITCHING_ROPES:
            continue
        original = int(
            rope.get(_ORIGINAL) or getattr(config, _ORIGINAL, 0) or config.max_position_embeddings
        )
        if max_len > original:
            raise UnsupportedError(
                f"rope_parameters.rope_type: with {kind!r} a sequence of more than {original} "
                f"tokens changes the frequencies of all others in its "
                f"batch; set max_model_len to {original} or less"
            )
