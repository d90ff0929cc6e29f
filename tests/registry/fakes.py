"""Third-party distributions made up on disk: a dist-info folder and a module each, as pip would
leave them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dovetail.api.component import API_VERSIONS

SCHEDULER = """
from dovetail.api import Scheduler
from pydantic import BaseModel, ConfigDict, Field

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    aging_s: float = Field(default=1.0, ge=0, description="Seconds until it counts double.")

class Fair(Scheduler):
    def schedule(self, step):
        step.grant_each(step.running)
"""

HOOK = """
from dovetail.api import BundledModel, CommandSpec, ComponentSpec, hookimpl

@hookimpl
def dovetail_components():
    return [{specs}]
"""


def components(*specs: str) -> str:
    """The source of a plugin that offers these: the arguments of a `ComponentSpec` each, of the
    present version unless they say another."""
    return HOOK.format(specs=", ".join(f"ComponentSpec({_with_version(spec)})" for spec in specs))


def _with_version(spec: str) -> str:
    kind = re.search(r"kind=(['\"])(\w+)\1", spec)
    if "api=" in spec or kind is None:
        return spec
    versions: dict[str, str] = {str(known): api for known, api in API_VERSIONS.items()}
    return f"{spec}, api={versions.get(kind[2], '1.0')!r}"


def scheduler(name: str = "fair", package: str = "fair_plugin", **fields: object) -> str:
    """The arguments of a scheduler's spec, whose classes are in `<package>_policy`."""
    more = "".join(
        f", {key}={value!r}"
        for key, value in ({"api": API_VERSIONS["scheduler"]} | fields).items()
        if key != "target"
    )
    target = fields.get("target", f"{package}_policy:Fair")
    return (
        f'kind="scheduler", name={name!r}, target={target!r}, '
        f'options="{package}_policy:Options"{more}'
    )


class Site:
    """A folder on `sys.path` that distributions are installed into."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def install(
        self,
        distribution: str,
        version: str = "1.0",
        *,
        modules: Mapping[str, str],
        entry_points: Mapping[str, str] | None = None,
        metadata: str = "",
        raw_entry_points: str | None = None,
    ) -> None:
        """`entry_points` default to one, named "main", of the first module."""
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{metadata}"
        )
        points = entry_points if entry_points is not None else {"main": next(iter(modules))}
        text = "[dovetail.plugins]\n" + "".join(
            f"{name} = {value}\n" for name, value in points.items()
        )
        (info / "entry_points.txt").write_text(
            text if raw_entry_points is None else raw_entry_points
        )
        for module, source in modules.items():
            (self.path / f"{module}.py").write_text(source)
            sys.modules.pop(module, None)  # another site's, of a test before
        importlib.invalidate_caches()

    def install_scheduler(
        self,
        distribution: str = "dovetail-fair",
        name: str = "fair",
        version: str = "1.0",
        **fields: object,
    ) -> None:
        """A good one. Its modules are called after the distribution."""
        package = distribution.replace("-", "_") + "_plugin"
        spec = scheduler(name, package, **fields)
        self.install(
            distribution,
            version,
            modules={package: components(spec), f"{package}_policy": SCHEDULER},
        )


@contextmanager
def modules_forgotten(path: Path) -> Iterator[None]:
    """Forget modules imported from a folder in the block, so that another test can import its own
    of that name."""
    before = dict(sys.modules)
    try:
        yield
    finally:
        for name, module in list(sys.modules.items()):
            if before.get(name) is module:
                continue
            if str(getattr(module, "__file__", None) or "").startswith(str(path)):
                del sys.modules[name]
