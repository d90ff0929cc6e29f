"""vLLM's printing helper for its examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dovetail.compat.vllm.gaps import missing

SHOWN_AT_MOST = 16  # numbers


def print_embeddings(embeds: Sequence[Any], prefix: str = "Embeddings") -> None:
    """Print the beginning of a vector, or of a list of vectors, and its length."""
    more = ", ..." if len(embeds) > SHOWN_AT_MOST else ""
    print(f"{prefix}: [{', '.join(map(str, embeds[:SHOWN_AT_MOST]))}{more}] (size={len(embeds)})")


__all__ = ["print_embeddings"]
__getattr__ = missing(__name__)
