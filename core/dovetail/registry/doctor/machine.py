"""`look_at_machine`: one sentence on the devices available to the ranks of the executor `tensor`."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from tempfile import TemporaryFile

from dovetail.registry.doctor.process import event, run_within

ASKS = "dovetail.runtime.machine"


def look_at_machine(time_limit_s: float) -> str | None:
    """Return the sentence; None if torch isn't installed. A separate process queries the devices, since that imports torch and starts the driver."""
    if find_spec("torch") is None:
        return None
    with TemporaryFile() as told:
        run_within([sys.executable, "-P", "-m", ASKS], time_limit_s, stdout=told, stderr=subprocess.DEVNULL)
        told.seek(0)
        offers = event(told.read().decode(errors="replace").strip().rpartition("\n")[2])
    if not offers:
        return f"torch can't say what devices there are: python -m {ASKS} shows why"
    return in_words(offers["gpus"], offers["peers"], offers["backends"])


def in_words(gpus: list[str], peers: bool, backends: list[str]) -> str:
    """Return the sentence for CUDA devices with these names, with or without peer access, and these torch.distributed backends."""
    if not gpus:
        return f"no CUDA device; ranks of the executor tensor are processes on the CPU, {_sums('gloo', backends)}"
    names = ", ".join(dict.fromkeys(gpus))
    if len(gpus) == 1:
        return f"1 CUDA device ({names}): one rank, so the executor tensor has nothing to split"
    reach = "which can read each other's memory" if peers else "which can't read each other's memory"
    return f"{len(gpus)} CUDA devices ({names}), {reach}; as many ranks of the executor tensor, {_sums('nccl', backends)}"


def _sums(backend: str, backends: list[str]) -> str:
    return f"which sum through {backend}" if backend in backends else f"which can't sum: this torch was built without {backend}"
