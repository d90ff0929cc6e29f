"""The clock and the power of the GPU while work runs. At its power limit a GPU lowers its clock:
then work that fits better takes no less time, and only less work does.

python -m bench.throughput tells of it in each result.
"""

from __future__ import annotations

import statistics
import subprocess
from threading import Thread
from types import TracebackType

import torch

EVERY_MS = 100
FIELDS = "clocks.sm,power.draw.instant,clocks_event_reasons.sw_power_cap"


class PowerWatch:
    """Polls `nvidia-smi` within its context."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> PowerWatch:
        which = (
            ["--id", f"GPU-{torch.cuda.get_device_properties().uuid}"]
            if torch.cuda.is_available()
            else []
        )
        command = [
            "nvidia-smi",
            f"--query-gpu={FIELDS}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={EVERY_MS}",
            *which,
        ]
        try:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:  # there is none
            return self
        assert self.process.stdout is not None
        self._reader = Thread(target=self.lines.extend, args=(self.process.stdout,), daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None:
            self.process.terminate()
            self._reader.join()
            self.process.wait()

    def summary(self) -> dict[str, float]:
        """Medians, and the share of the time at the power limit; nothing, where `nvidia-smi` told
        nothing."""
        samples = [sample for line in self.lines if (sample := _read(line)) is not None]
        if not samples:
            return {}
        clocks, watts, limited = zip(*samples, strict=True)
        return {
            "sm_mhz": statistics.median(clocks),
            "power_w": statistics.median(watts),
            "power_limited_share": statistics.fmean(limited),
        }


def _read(line: str) -> tuple[float, float, bool] | None:
    """Parse a line; None if it is truncated or has missing values."""
    try:
        clock, watts, limited = line.split(", ")
        return float(clock), float(watts), {"Active": True, "Not Active": False}[limited.strip()]
    except (ValueError, KeyError):
        return None
