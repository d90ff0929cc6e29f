"""Names of planned features that other engines have; errors about such a name point to the
roadmap."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PAGE = "docs/roadmap.md"

_NAMES = {  # heading of the roadmap -> commands, keys and parameters that belong to it
    "Models that draft": "eagle medusa",
    "Mixture of experts": "enable_expert_parallel expert_parallel_size moe",
    "Several machines": "pipeline_parallel_size data_parallel_size pp dp "
    "distributed_executor_backend num_nodes",
}

HEADINGS: Mapping[str, str] = MappingProxyType(
    {name: heading for heading, names in _NAMES.items() for name in names.split()}
)


def not_yet(name: str) -> str | None:
    """Return a sentence for a name that the roadmap knows, or None."""
    heading = HEADINGS.get(name.replace("-", "_"))
    return heading and f'not there yet; "{heading}" is on the roadmap, {PAGE}'


def planned(section: str) -> str:
    """Return a sentence that points to a section of the roadmap."""
    return f'Dovetail can\'t do that yet: see "{section}" in the roadmap, {PAGE}'
