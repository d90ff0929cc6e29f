"""Measures how fast and how evenly the host runs Python. Other load on its cores affects all
figures that involve the host.

python -m bench.host
"""

from __future__ import annotations

import argparse
import time

import numpy as np

ITERATIONS = 20_000  # of one loop: about a millisecond
WARM_UPS = 50
LOOPS = 200


def work() -> int:
    """Run a typical interpreter load: additions, and writing to a dictionary."""
    total = 0
    seen = {}
    for index in range(ITERATIONS):
        seen[index & 255] = total
        total += index
    return total


def loop_ms() -> float:
    begun = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begun)


def told() -> str:
    """Takes some 0.2 s."""
    times = [loop_ms() for _ in range(WARM_UPS + LOOPS)][WARM_UPS:]
    p50, p90, p99 = np.percentile(times, [50, 90, 99])
    return f"host: a loop in Python takes {p50:.2f} ms (p90 {p90:.2f}, p99 {p99:.2f})"


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(told())
