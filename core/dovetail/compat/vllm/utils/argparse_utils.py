"""vLLM's argument parser."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from dovetail.compat.vllm.gaps import missing


class FlexibleArgumentParser(ArgumentParser):
    """An argument parser whose flags may be written with underscores, too: `--max_model_len`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Namespace, list[str]]:
        """Parse with dashes in the names of flags that have them; values, and what follows `--`,
        stay as they are."""
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        return super().parse_known_args([*map(self._dashed, given[:end]), *given[end:]], namespace)

    def _dashed(self, arg: str) -> str:
        name, equals, value = arg.partition("=")
        dashed = name.replace("_", "-")
        return (
            dashed + equals + value
            if name not in self._option_string_actions and dashed in self._option_string_actions
            else arg
        )


__all__ = ["FlexibleArgumentParser"]
__getattr__ = missing(__name__)
