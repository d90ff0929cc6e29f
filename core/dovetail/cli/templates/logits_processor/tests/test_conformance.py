"""The conformance tests: they check that the component keeps the contract of its kind."""

from dovetail.testing import LogitsProcessorSuite


class TestAcmeLogitsProcessor(LogitsProcessorSuite):
    component = "acme"
    arguments = [{}, {"penalty": 0.5, "window": 8}, {"window": 64, "spared": [97, "b\n"]}]  # what requests may say
