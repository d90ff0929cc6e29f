"""Time of one image in a tower: on the host, on the device, and how often the host waits.

    python -m bench.towers --side 1024

The shape of Qwen3-VL-8B's tower and random weights, in bfloat16. Lists the kernels that take the
most time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from bench.images import write_checkpoint
from dovetail.request.media import MediaItem
from dovetail_executors.runtime.towers import Tower, find_tower

RUNS = 20
KERNELS = 16  # that are listed


def item_of(directory: Path, side: int) -> MediaItem:
    """Return a picture of noise as the checkpoint's image processor prepares it."""
    import numpy as np
    from PIL import Image
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    tensors = dict(processor(Image.fromarray(noise), return_tensors="np"))
    rows = int(np.prod(tensors["image_grid_thw"])) // 4
    return MediaItem(kind="image", digest=b"", runs=((0, rows),), tensors=tensors)


def host_s(tower: Tower, item: MediaItem) -> float:
    """Return the seconds until everything of one item is enqueued, on an idle device."""
    seconds = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        tower.encode(item)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def each_s(tower: Tower, item: MediaItem) -> float:
    """Return the seconds of each item, one after the other."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(RUNS):
        tower.encode(item)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / RUNS


def waits(tower: Tower, item: MediaItem) -> int:
    """Return how often the host waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tower.encode(item)
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def kernels(tower: Tower, item: MediaItem) -> list[tuple[str, int, float]]:
    """Return the name, calls and seconds of each kernel of one item, those of most time first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        tower.encode(item)
        torch.cuda.synchronize()
    events: list[Any] = list(profiler.key_averages())
    found = [
        (event.key, event.count, event.self_device_time_total / 1e6)
        for event in events
        if event.device_type.name == "CUDA"
    ]
    return sorted(found, key=lambda kernel: -kernel[2])


def report(tower: Tower, item: MediaItem) -> None:
    for _ in range(3):
        tower.encode(item)
    found = kernels(tower, item)
    print(
        f"{item.rows} rows: {1e3 * host_s(tower, item):.1f} ms on the host, "
        f"{1e3 * sum(seconds for *_, seconds in found):.1f} ms of kernels, "
        f"{1e3 * each_s(tower, item):.1f} ms each, {waits(tower, item)} waits"
    )
    for name, count, seconds in found[:KERNELS]:
        print(f"  {1e3 * seconds:7.2f} ms {count:5} x {name[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side", type=int, nargs="+", default=[1024], help="pixels")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_checkpoint(directory)
        plan = find_tower(directory, dummy=True)
        assert plan is not None
        tower = plan.build(torch.bfloat16, torch.device("cuda"))
        for side in args.side:
            report(tower, item_of(directory, side))


if __name__ == "__main__":
    main()
