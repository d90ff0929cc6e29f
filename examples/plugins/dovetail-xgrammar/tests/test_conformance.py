"""Whether it keeps the contract of its kind."""

from dovetail.testing import GrammarSuite


class TestXGrammar(GrammarSuite):
    component = "xgrammar"
