"""Whether it keeps the contract of its kind."""

from dovetail.testing import ModelSuite


class TestAcmeModelArch(ModelSuite):
    component = "acme"
