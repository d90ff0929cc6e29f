"""The machine's memory: what is available for weights, K and V, and the refusal of weights that
don't fit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dovetail.errors import ConfigError

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_UNLIMITED = 1 << 62


class _Group(NamedTuple):
    """A cgroup's memory, in bytes. `used` doesn't count cached files, which the kernel drops
    first."""

    limit: int
    used: int


def available_ram_bytes() -> int:
    """Return the memory that this process can still allocate without swapping: the machine's, or
    that of its container or service if that is less."""
    return min(
        [_meminfo("MemAvailable"), *(max(0, group.limit - group.used) for group in _groups())]
    )


def total_ram_bytes() -> int:
    """Return the memory of the machine, or of the container or service if it may use less."""
    return min([_meminfo("MemTotal"), *(group.limit for group in _groups())])


def require_ram(needed: int, what: str, ranks: int = 1) -> None:
    """Raise `ConfigError` if each of `ranks` processes of this machine can't hold `needed` bytes
    for `what`. Several ranks allocate at the same time, so that what is available says little; they
    are held against all of the machine's memory."""
    has, which = (
        (available_ram_bytes(), "available") if ranks == 1 else (total_ram_bytes(), "there")
    )
    if needed * ranks > has:
        each = "" if ranks == 1 else f" ({readable_bytes(needed)} in each of {ranks} ranks)"
        raise ConfigError(
            f"{what} need {readable_bytes(needed * ranks)} of memory{each}, and "
            f"{readable_bytes(has)} are {which}: "
            "take a smaller or a quantized model, a smaller dtype, or a machine or container with "
            "more memory"
        )


def readable_bytes(count: float) -> str:
    """403.1 MiB"""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def _meminfo(name: str) -> int:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # no such file: another Unix, without this information
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _groups() -> Iterator[_Group]:
    """Yield the limited cgroups around this process. Within a container the mounted root is the
    container's own."""
    for folder in _folders():
        for limit, used, stat, cached in (
            (
                "memory.max",
                "memory.current",
                "memory.stat",
                ("active_file", "inactive_file"),
            ),  # version 2
            (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "memory.stat",
                ("total_active_file", "total_inactive_file"),
            ),  # version 1
        ):
            try:
                most = int((folder / limit).read_text())
                counts = dict(line.split() for line in (folder / stat).read_text().splitlines())
                files = sum(int(counts.get(name, 0)) for name in cached)
                yield _Group(
                    min(most, _UNLIMITED), max(0, int((folder / used).read_text()) - files)
                )
            except (OSError, ValueError):  # no such version here, or no limit: "max"
                continue


def _folders() -> Iterator[Path]:
    """Yield the folders of this process's cgroup and those around it, of both versions."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        own = root / path.lstrip("/")
        yield from (
            folder for folder in (own, *own.parents) if folder == root or root in folder.parents
        )
