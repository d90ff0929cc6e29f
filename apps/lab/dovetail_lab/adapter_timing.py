"""Times of an engine's LoRA adapters, for `calibrate`.

A step that loads an adapter to a slot takes longer than one whose adapter is there already, and a
step of decodes with an adapter longer than one without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from dovetail.api.executor import AdapterCapacity
from dovetail.request.lora import LoRARequest
from dovetail_lab.rig import Rig, TimeIsUpError

ADAPTERS = 4  # the first only warms up
ROWS = (1, 8, 32)
QUICK_ROWS = (1, 4)
STEPS = 24  # of decodes that are timed as one
CONTEXT = 64


class AdapterTimes(NamedTuple):
    """Times, in seconds, by which adapters prolong steps."""

    load_s: float
    step_s: float
    token_s: float


def adapter_times(rig: Rig, *, quick: bool = False) -> AdapterTimes | None:
    """Measure adapters of the engine's highest rank; None if it has no slots, or time ran out. With
    room for a single row, all of what a step takes counts as `step_s`."""
    capacity = rig.engine.capacity.adapters
    if capacity is None:
        return None
    most = rig.engine.config.max_num_seqs
    rows = [count for count in (QUICK_ROWS if quick else ROWS) if count <= most]
    with suppress(TimeIsUpError), written_adapters(capacity, ADAPTERS) as adapters:
        load_s = _load_seconds(rig, adapters)
        more = [_decode_seconds(rig, count, adapters[-1]) for count in rows]
        token_s, step_s = np.polyfit(rows, more, 1) if len(rows) > 1 else (0.0, more[0])
        return AdapterTimes(load_s, max(float(step_s), 0.0), max(float(token_s), 0.0))
    return None


@contextmanager
def written_adapters(capacity: AdapterCapacity, count: int) -> Iterator[list[LoRARequest]]:
    """Write adapters of random numbers that change every module, in PEFT's format, to a folder that
    is removed at the end."""
    from safetensors.numpy import save_file

    rank = capacity.max_rank
    random = np.random.default_rng(0)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in capacity.modules}),
    }
    with TemporaryDirectory(prefix="dovetail-calibration-") as directory:
        adapters = []
        for number in range(count):
            folder = Path(directory) / str(number)
            folder.mkdir()
            weights = {}
            for name, (size_in, size_out) in capacity.modules.items():
                for matrix, shape in (("A", (rank, size_in)), ("B", (size_out, rank))):
                    values = random.standard_normal(shape, np.float32) / 1024
                    weights[f"base_model.model.{name}.lora_{matrix}.weight"] = values
            save_file(weights, folder / "adapter_model.safetensors")
            (folder / "adapter_config.json").write_text(json.dumps(config))
            adapters.append(LoRARequest(f"calibration-{number}", number + 1, str(folder)))
        yield adapters


def _load_seconds(rig: Rig, adapters: list[LoRARequest]) -> float:
    """Return by how long a load prolongs a step: the median over all adapters but the first."""
    prompt = list(range(1, 17))
    differences = []
    for adapter in adapters:
        first = rig.time_of(prompt, adapter)  # it is in no slot yet
        again = rig.time_of([token + 16 for token in prompt], adapter)
        differences.append(first - again)
    return max(median(differences[1:]), 0.0)


def _decode_seconds(rig: Rig, rows: int, adapter: LoRARequest) -> float:
    """Return by how long an adapter of all rows prolongs a step of decodes."""
    seconds = []
    for one in (None, adapter):
        rig.adapter = one
        rig.grow(rows, CONTEXT)
        rig.decode(STEPS)
        steps = rig.sightings[-STEPS:]
        seconds.append((steps[-1].ended - steps[0].ended) / (STEPS - 1))
        rig.clear()
    rig.adapter = None
    rig.sightings.clear()
    return seconds[1] - seconds[0]
