"""Memory available for K and V."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def available_ram_bytes() -> int:
    """Return the memory that this process can still allocate without swapping: the machine's, or its container's if that is less."""
    return min(_machine_available(), _cgroup_available())


def _machine_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2  # no such file: another Unix, without this information


def _cgroup_available() -> int:
    """Return the free memory of a container with a limit (cgroup v2); without a limit, a huge value."""
    try:
        limit, used = (_CGROUP / "memory.max").read_text().strip(), (_CGROUP / "memory.current").read_text()
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return 1 << 62


def readable_bytes(count: float) -> str:
    """403.1 MiB"""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"
