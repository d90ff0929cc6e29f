"""`Suite`: base of the suites of all kinds. Plugin authors subclass the suite of their kind:

    class TestMine(SchedulerSuite):
        component = "mine"
        options = {"quantum": 8}

and pytest runs its checks; the verdict is in the terminal's summary. Nothing else of a suite may be
overridden: see `dovetail.testing.ledger`.
"""

from __future__ import annotations

from typing import ClassVar

from dovetail.testing.hygiene import Hygiene


class Suite(Hygiene):
    """Checks that components of one kind must pass. pytest creates an instance for each check."""

    # the pytest plugin recognises suites by it, without importing this module
    __dovetail_suite__: ClassVar[bool] = True
