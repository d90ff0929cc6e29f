"""`ExtensionSuite`: what the suites of all extensions check: that the package is sound, and the
offer found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from dovetail.registry.doctor.examine import examine
from dovetail.registry.registry import Registry
from dovetail.testing.checks import fail, require


class ExtensionSuite:
    """Checks of one offer of an installed plugin. pytest creates an instance for each check."""

    # the declared name, "haiku" or "dovetail-haiku:haiku"
    name: ClassVar[str]

    @classmethod
    def offers(cls, registry: Registry) -> Sequence[Any]:
        """Return the installed offers of this sort."""
        raise NotImplementedError

    @property
    def offer(self) -> Any:
        """The offer of that name. Raises `CheckFailed` unless there is exactly one."""
        found = [
            one
            for one in self.offers(Registry.discover(enforce_require=False))
            if self.name in (one.spec.name, one.qualified_name)
        ]
        if len(found) != 1:
            fail(f"{len(found)} installed offers are called {self.name!r}, expected one")
        return found[0]

    def test_the_doctor_finds_nothing_wrong_with_its_package(self) -> None:
        """`dovetail plugins doctor` finds an error: the package can't be imported, declares
        something that doesn't exist, or imports torch while it declares."""
        origin = self.offer.origin
        errors = [
            f"{finding.problem}: {finding.what}; {finding.remedy}"
            for finding in examine(origin.distribution).findings
            if finding.severity == "error"
        ]
        require(not errors, "\n".join(errors))

    def test_it_says_in_one_line_what_it_is(self) -> None:
        """The declaration has no `summary`, which `dovetail plugins list` shows."""
        require(self.offer.spec.summary.strip(), f"{self.offer}: summary is empty")
