"""Settings of engines for a report: in full, and where they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MISSING = "–"


def in_full(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)


def differences(settings: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return each dotted key whose value isn't the same for all engines, with the value of each, in their order."""
    flat = [dict(_flat("", one)) for one in settings.values()]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [(key, [one.get(key, MISSING) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value if isinstance(value, str) else json.dumps(value)
    else:
        for key, one in items:
            yield from _flat(f"{path}.{key}" if path else str(key), one)
