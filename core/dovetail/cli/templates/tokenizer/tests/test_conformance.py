"""The conformance tests: they check that the component keeps the contract of its kind."""

from dovetail.testing import TokenizerSuite


class TestAcmeTokenizer(TokenizerSuite):
    component = "acme"
