"""Whether it keeps the contract of its kind."""

from dovetail.testing import ExecutorSuite


class TestAcmeExecutor(ExecutorSuite):
    component = "acme"
