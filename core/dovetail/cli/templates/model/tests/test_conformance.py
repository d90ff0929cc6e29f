"""The conformance tests: they check that the component keeps the contract of its kind."""

from dovetail.testing import ModelSuite


class TestAcmeModelArch(ModelSuite):
    component = "acme"
