"""`CommandSuite`: checks of a subcommand that a plugin adds to `dovetail`.

class TestReport(CommandSuite):
    name = "fair-report"
    examples = (("trace.jsonl", "--top", "3"),)
    refused = (("no-such-file.jsonl",), ("trace.jsonl", "--top", "-1"))
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from dovetail.errors import DovetailError, describe, exit_code
from dovetail.registry.registry import Registry
from dovetail.registry.resolved import ResolvedCommand
from dovetail.testing.checks import require
from dovetail.testing.extensions.base import ExtensionSuite

ODD_WORD = "no such é"
UNKNOWN = "--no-command-has-this-option"


class CommandSuite(ExtensionSuite):
    """Checks of a command. It runs in this process."""

    # arguments of calls that succeed
    examples: ClassVar[Sequence[Sequence[str]]] = ()
    # arguments of calls with a mistake of the user; see `test_mistakes_are_refused`
    refused: ClassVar[Sequence[Sequence[str]]] = ()

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
        """`--help` failed, or the command, or a subcommand of it, has no docstring."""
        for words in _commands(self._command()):
            ran = self._call(*words, "--help")
            called = " ".join((*words, "--help"))
            require(ran.exit_code == 0, f"{called} ended with {ran.exit_code}: {ran.output}")
            text = re.split("Arguments|Options|Commands", ran.output)[0].splitlines()
            described = [line for line in text if re.search(r"\w", line) and "Usage" not in line]
            require(described, f"{called} says nothing: give the function a docstring")

    def test_it_is_run(self) -> None:
        """The command, or a subcommand of it, is an `async def`, which Typer calls without running
        it. Call `asyncio.run` in it."""
        command = self._command()
        for words in _commands(command):
            found = _below(command, words).callback
            require(
                not inspect.iscoroutinefunction(inspect.unwrap(found) if found else None),
                f"{' '.join((self.name, *words))} is an async function",
            )

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

    def test_a_wrong_argument_is_no_fault_of_the_plugin(self) -> None:
        """An example with another word for an argument raised an error other than Dovetail's, so
        that the user is told of a fault in the plugin. Raise `ConfigError`, or let Typer check
        the type."""
        for words in self.examples:
            for index in [index for index, word in enumerate(words) if not word.startswith("-")]:
                odd = [*words[:index], ODD_WORD, *words[index + 1 :]]
                raised = self._call(*odd).exception
                require(
                    raised is None or isinstance(raised, SystemExit | DovetailError),
                    f"{' '.join(odd)!r} raised {describe(raised) if raised else None}",
                )

    def test_mistakes_are_refused(self) -> None:
        """A call of `refused` didn't end with exit code 2, or said nothing on stderr. Raise
        `ConfigError`, which `dovetail` prints."""
        for words in self.refused:
            ran = self._call(*words)
            code, told = _ending(ran)
            called = " ".join((self.name, *words))
            require(code == 2, f"{called} ended with {code}, expected 2: {ran.output}{told}")
            require(told.strip(), f"{called} ended with 2, and says nothing on stderr")

    def test_it_leaves_nothing_running(self) -> None:
        """After an example a thread still runs that isn't a daemon, so that `dovetail` doesn't
        end. Join it."""
        before = set(threading.enumerate())
        for words in self.examples:
            self._call(*words)
        left = [one for one in set(threading.enumerate()) - before if not one.daemon]
        require(not left, f"threads still run: {', '.join(one.name for one in left)}")

    def _command(self) -> Any:
        from typer.main import get_command

        return get_command(self.offer.typer_app(self.name))

    def _call(self, *words: str) -> Any:
        from typer.testing import CliRunner

        return CliRunner().invoke(self.offer.typer_app(self.name), list(words))


def _ending(ran: Any) -> tuple[int, str]:
    """Return the exit code and the text on stderr that a call has under `dovetail`."""
    raised = ran.exception
    if isinstance(raised, DovetailError):
        return exit_code(raised), ran.stderr + str(raised)
    return ran.exit_code, ran.stderr


def _commands(command: Any) -> Iterator[tuple[str, ...]]:
    """Yield the words of a command and of all its subcommands: (), ("sub",)."""
    yield ()
    for name, below in getattr(command, "commands", {}).items():
        yield from ((name, *words) for words in _commands(below))


def _below(command: Any, words: Sequence[str]) -> Any:
    for word in words:
        command = command.commands[word]
    return command
