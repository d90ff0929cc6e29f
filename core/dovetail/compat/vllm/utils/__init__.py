"""vLLM's utilities."""

from __future__ import annotations

from dovetail.compat.vllm.gaps import missing
from dovetail.compat.vllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
__getattr__ = missing(__name__)
