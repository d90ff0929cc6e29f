"""Triton's cache of compiled kernels, and folders of kernels that a wheel or an image brings along.

Triton keeps a kernel by its content: source, constants, options, GPU and the version of Triton. Its
folder (`TRITON_CACHE_DIR`) can't be moved, because it holds absolute paths. `DOVETAIL_KERNELS`
names copies of such folders at any place, separated as in `PATH`. They are only read: missing
kernels are compiled and kept in Triton's folder.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

VARIABLE = "DOVETAIL_KERNELS"


def brought_folders() -> tuple[Path, ...]:
    """Return the folders that `DOVETAIL_KERNELS` names."""
    return tuple(Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name)


@cache
def prepare_cache() -> None:
    """Make Triton use the folders that are brought along, unless the program has chosen another
    cache. Compute the version of Triton in a thread: it is a hash of the library, takes up to a
    second, and the first kernel waits for it. A no-op without Triton."""
    with suppress(ImportError):
        from triton import knobs

        if brought_folders() and knobs.cache.manager_class is None:
            knobs.cache.manager_class = kernel_cache()
        thread = threading.Thread(target=_hash_triton, name="dovetail-triton-key", daemon=True)
        thread.start()


def _hash_triton() -> None:
    with suppress(Exception):  # in other versions it may be elsewhere
        from triton.runtime.cache import triton_key

        triton_key()


@cache
def kernel_cache() -> type[Any]:
    """Return a class of Triton's cache managers that also looks into the folders brought along."""
    from triton.runtime.cache import FileCacheManager

    class KernelCache(FileCacheManager):  # type: ignore[misc]
        """Cache of one kernel, whose files are in a folder named after its content."""

        def get_file(self, filename: str) -> str | None:
            own: str | None = super().get_file(filename)
            return own or next(_existing(self.key, filename), None)

        def get_group(self, filename: str) -> dict[str, str] | None:
            if own := super().get_group(filename):
                return dict(own)
            for path in _existing(self.key, f"__grp__{filename}"):
                with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                    names = [*json.loads(Path(path).read_bytes())["child_paths"]]
                    paths = {name: os.path.join(os.path.dirname(path), name) for name in names}
                    # an empty file is what an interrupted copy leaves
                    if all(Path(name).name == name for name in names) and all(
                        os.path.isfile(path) and os.path.getsize(path) for path in paths.values()
                    ):
                        return paths
            return None

    return KernelCache


def _existing(key: str, filename: str) -> Iterator[str]:
    """Yield the paths of a kernel's file in the folders brought along."""
    for folder in brought_folders():
        path = os.path.join(folder, key, filename)
        if os.path.isfile(path):  # no error for a folder that can't be read
            yield path
