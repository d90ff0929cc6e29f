"""`check_contract`: a test of a package that needs neither torch nor the package's imports.

from dovetail.testing import check_contract

def test_contract() -> None:
    check_contract("dovetail-mine")
"""

from __future__ import annotations

from packaging.utils import canonicalize_name

from dovetail.registry.contract.document import shipped
from dovetail.registry.contract.faults import faults_of
from dovetail.registry.registry import Registry
from dovetail.testing.checks import fail


def check_contract(distribution: str) -> None:
    """Compare the classes of a distribution's components with the contract of their kinds, from
    their sources. Raises `CheckFailed`, an `AssertionError`, with a line for each difference, or if
    the distribution offers no component."""
    name = canonicalize_name(distribution)
    components = [one for one in Registry.discover().components() if one.distribution == name]
    if not components:
        fail(f"no component of {distribution} is installed")
    faults = [
        f"{one}: {fault}"
        for one in components
        for fault in faults_of(shipped(), one.spec.kind, one.spec.target)
    ]
    faults += [problem for one in components if (problem := one.api_problem()) is not None]
    if faults:
        fail("\n".join(faults))
