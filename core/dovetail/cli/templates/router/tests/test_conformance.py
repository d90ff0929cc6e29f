"""The conformance tests: choices are valid, and the same in every run."""

from dovetail_lab.testing import RouterSuite


class TestAcme(RouterSuite):
    name = "acme"


class TestWithOneReplica(RouterSuite):
    name = "acme"
    arguments = "replicas_per_client=1"
