"""The conformance tests: they check that the component keeps the contract of its kind."""

from dovetail.testing import ParserSuite


class TestAcmeParser(ParserSuite):
    component = "acme"
