"""Translation of vLLM's `speculative_config` to `speculation` and options of its drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import ConfigError

_LOOKUP = ("ngram", "[ngram]")  # instead of a model's name
_DRAFTER_FIELDS = {  # method -> field -> option of the drafter
    "draft_model": {"model": "model"},
    "eagle3": {"model": "model"},
    "mtp": {},
    "ngram": {"prompt_lookup_min": "min_match", "prompt_lookup_max": "max_match"},
    "suffix": {
        "suffix_decoding_max_tree_depth": "max_match",
        "suffix_decoding_max_spec_factor": "max_factor",
        "suffix_decoding_min_token_prob": "min_share",
        "suffix_decoding_max_cached_requests": "kept_tokens",
    },
}


def speculation_of(name: str, value: Any) -> Mapping[str, Any] | None:
    """Return the overrides for a value of the argument `name`, or None if it is rejected.

    Raises `ConfigError` for an unknown field.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return None
    given = {key: one for key, one in value.items() if one is not None}
    method = given.pop("method", None) or _method_of(given.get("model"))
    # by families of models
    method = "mtp" if isinstance(method, str) and method.endswith("_mtp") else method
    if method not in _DRAFTER_FIELDS or (
        method in ("ngram", "suffix") and given.pop("model", "ngram") not in _LOOKUP
    ):
        return None
    ours: dict[str, Any] = {}
    if (most := given.pop("num_speculative_tokens", None)) is not None:
        ours["max_drafts"] = most
    if method == "ngram" and (
        lookup := {"prompt_lookup_min", "prompt_lookup_max"} & set(given)
    ):  # of one, the other is the same
        given = {
            "prompt_lookup_min": given[min(lookup)],
            "prompt_lookup_max": given[max(lookup)],
        } | given
    if given.get("suffix_decoding_max_cached_requests", 0) != 0:
        raise ConfigError(
            f"{name}: suffix_decoding_max_cached_requests: set kept_tokens and kept_clients of "
            f"speculation.drafter"
        )
    options = {}
    for field, one in given.items():
        if field not in _DRAFTER_FIELDS[method]:
            raise ConfigError(
                f"{name}: {field!s:.80}: method {method} takes "
                f"{', '.join(['num_speculative_tokens', *_DRAFTER_FIELDS[method]])}"
            )
        options[_DRAFTER_FIELDS[method][field]] = one
    return {
        "speculation": {
            "drafter": {
                "name": f"dovetail:{'model' if method == 'draft_model' else method}",
                **options,
            },
            **ours,
        }
    }


def _method_of(model: Any) -> str | None:
    """Return the method that `model` implies."""
    if isinstance(model, str) and "eagle3" in model.lower():
        return "eagle3"
    if not isinstance(model, str) or any(
        head in model.lower()
        for head in ("eagle", "medusa", "mtp", "mlp_speculator", "mlp-speculator")
    ):
        return None
    return "ngram" if model in _LOOKUP else "draft_model"
