"""`check_seats`: whether engines have room in a Ray cluster, since Ray would wait for ever for what never comes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dovetail.errors import ConfigError


def check_seats(nodes: Iterable[Mapping[str, Any]], engines: int, gpus: int) -> None:
    """Raise `ConfigError` unless the machines, as `ray.nodes()` lists them, have a CPU and `gpus` GPUs of one machine for each engine."""
    found = [(int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))) for node in nodes if node["Alive"]]
    seats = sum(min(cpus, there // gpus) if gpus else cpus for cpus, there in found)
    if seats < engines:
        needs = f"a CPU and {gpus} GPU{'' if gpus == 1 else 's'} of one machine" if gpus else "a CPU"
        told = "; ".join(f"{cpus} CPUs, {there} GPUs" for cpus, there in found)
        raise ConfigError(f"engines: {engines} don't fit: each takes {needs}, and Ray has room for {seats}. Its machines have: {told}")
