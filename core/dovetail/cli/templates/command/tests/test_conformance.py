"""The conformance tests: they call the command."""

from dovetail.testing import CommandSuite


class TestAcme(CommandSuite):
    name = "acme"
    examples = (("demo", "To be"), ("demo", "To be", "--ids"))
