"""A suite of three checks, for tests of the suite framework, and components for it."""

from __future__ import annotations

from contextlib import suppress
from threading import Event

from dovetail.testing.checks import check, require
from dovetail.testing.suite import Suite
from dovetail_schedulers.fcfs import FCFS


class TinySuite(Suite):
    """A suite that looks like one of Dovetail's own."""

    __module__ = "dovetail.testing.suites.tiny"
    kind = "scheduler"
    component = None
    test_spawn = None  # type: ignore[assignment]  # it takes a process each time

    @check("tiny.first", since="1.0")
    def test_first(self) -> None:
        """Never fails."""

    @check("tiny.second", since="1.0")
    def test_second(self) -> None:
        """The component is called Broken. Give it another name."""
        require(self.component_class is not Broken, "it is called Broken")
        if self.component_class is Hanging:
            Hanging.wait()

    @check("tiny.third", since="1.0", capability="order")
    def test_third(self) -> None:
        """Never fails."""

    @property
    def capabilities(self) -> object:
        return self.component_class.capabilities


class Good(FCFS): ...


class Broken(FCFS): ...


class Hanging(FCFS):
    @staticmethod
    def wait() -> None:
        """For ever; an error that it doesn't expect changes nothing."""
        with suppress(Exception):
            Event().wait()


class Unordered(FCFS):
    capabilities = type(FCFS.capabilities)()
