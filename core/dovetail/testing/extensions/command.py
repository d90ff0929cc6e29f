"""`CommandSuite`: checks of a subcommand that a plugin adds to `dovetail`.

class TestReport(CommandSuite):
    name = "fair-report"
    examples = (("trace.jsonl", "--top", "3"),)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

from dovetail.registry.registry import Registry
from dovetail.registry.resolved import ResolvedCommand
from dovetail.testing.checks import require
from dovetail.testing.extensions.base import ExtensionSuite

UNKNOWN = "--no-command-has-this-option"


class CommandSuite(ExtensionSuite):
    """Checks of a command. It runs in this process."""

    # arguments of calls that succeed
    examples: ClassVar[Sequence[Sequence[str]]] = ()

    @classmethod
    def offers(cls, registry: Registry) -> Sequence[ResolvedCommand]:
        return registry.commands()

    def test_no_other_command_has_its_name(self) -> None:
        """Another installed package has a command of that name, so that it is reached only by its
        full name."""
        known = Registry.discover(enforce_require=False)
        require(
            not known.needs_full_name(self.offer),
            f"another command is called {self.offer.spec.name!r}",
        )

    def test_it_has_a_help_text(self) -> None:
        """`--help` failed, or the command has no docstring."""
        ran = self._call("--help")
        require(ran.exit_code == 0, f"--help ended with {ran.exit_code}: {ran.output}")
        text = re.split("Arguments|Options", ran.output)[0].splitlines()
        described = [line for line in text if line.strip() and "Usage" not in line]
        require(described, "--help says nothing: give the function a docstring")

    def test_an_unknown_option_is_refused(self) -> None:
        """An option that doesn't exist was accepted, so that a misspelt one would have no
        effect."""
        ran = self._call(UNKNOWN)
        require(ran.exit_code == 2, f"{UNKNOWN} ended with {ran.exit_code}, expected 2")

    def test_examples_succeed(self) -> None:
        """A call of `examples` failed, or the class has none."""
        require(self.examples, f"set {type(self).__name__}.examples: arguments of calls")
        for words in self.examples:
            ran = self._call(*words)
            raised = f" {ran.exception!r}" if ran.exception is not None else ""
            require(
                ran.exit_code == 0,
                f"{' '.join(words)!r} ended with {ran.exit_code}{raised}: {ran.output}",
            )

    def _call(self, *words: str) -> Any:
        from typer.testing import CliRunner

        return CliRunner().invoke(self.offer.typer_app(self.name), list(words))
