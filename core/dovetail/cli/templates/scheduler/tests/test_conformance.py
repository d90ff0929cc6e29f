"""Whether it keeps the contract of its kind."""

from dovetail.testing import SchedulerSuite


class TestAcmeScheduler(SchedulerSuite):
    component = "acme"
