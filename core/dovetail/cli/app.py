"""The `dovetail` command: subcommands, those of plugins included, and error reporting."""

from __future__ import annotations

import io
import os
import sys
import traceback
from contextlib import redirect_stdout
from functools import cached_property
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup

from dovetail import __version__
from dovetail.base.roadmap import not_yet
from dovetail.cli import config, determinism, generate, models, plugins, pull
from dovetail.cli.completion import join_words
from dovetail.cli.streams import OutputError, make_any_text_printable, tell
from dovetail.errors import (
    ConfigError,
    DovetailError,
    PluginError,
    describe,
    exit_code,
    shown,
)
from dovetail.registry.registry import Registry, built_ins_first
from dovetail.registry.resolved import ResolvedCommand


class PluginCommand(TyperCommand):
    """Placeholder for a plugin's command in `--help`; imported when it runs."""

    def __init__(self, name: str, command: ResolvedCommand) -> None:
        super().__init__(name, help=command.spec.summary, short_help=command.spec.summary)
        self.command = command

    def load(self) -> Any:
        """Import and return the real command. Raises `PluginError` with the plugin's name."""
        return typer.main.get_command(self.command.typer_app(self.name))


class DovetailGroup(TyperGroup):
    """The group of all commands: the core's first, then plugins', each always as
    "distribution:name", and by its short name if that is unique or the command is built in."""

    show_traceback = False

    @cached_property
    def registry(self) -> Registry:
        return Registry.discover(enforce_require=False)

    @cached_property
    def plugin_commands(self) -> dict[str, list[ResolvedCommand]]:
        """Plugins' commands by each name that they have; using a name of more than one command is
        an error. A short name means the built-in."""
        names: dict[str, list[ResolvedCommand]] = {}
        for command in self.registry.commands():
            names.setdefault(command.spec.name, []).append(command)
            names.setdefault(command.qualified_name, []).append(command)
        return {
            name: built_ins_first(commands)
            for name, commands in names.items()
            if name not in self.commands
        }

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        def shortest(command: ResolvedCommand) -> str:
            return (
                command.spec.name
                if self.plugin_commands.get(command.spec.name) == [command]
                else command.qualified_name
            )

        return [*self.commands, *sorted(map(shortest, self.registry.commands()))]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        offers = self.plugin_commands.get(cmd_name, [])
        if len(offers) > 1:
            names = " and ".join(command.qualified_name for command in offers)
            raise PluginError(
                f"command {cmd_name!r} is offered more than once, by {names}: write the one you "
                f"mean in full"
            )
        return PluginCommand(cmd_name, offers[0]) if offers else None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        if self.get_command(ctx, args[0]) is None:
            if planned := not_yet(args[0]):
                raise ConfigError(f"dovetail {args[0]}: {planned}")
            for trouble in (*self.registry.failures, *self.registry.denied):
                typer.echo(f"note: {trouble}", err=True)
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, PluginCommand) else command, rest

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        self.show_traceback = ctx.params["traceback"]
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            if isinstance(error.__cause__, ValidationError):  # Typer shows its text alone
                error.message += f", got {shown(error.__cause__.errors()[0]['input'])}"
            raise

    def _main_shell_completion(self, *args: Any, **kwargs: Any) -> None:
        """Answer a shell's completion request, if this call is one, and exit."""
        had = join_words()
        printed = io.StringIO()
        try:
            with redirect_stdout(printed):
                super()._main_shell_completion(*args, **kwargs)
        finally:
            if text := printed.getvalue():
                typer.echo("\n".join(line.removeprefix(had) for line in text.splitlines()))

    def main(self, *args: Any, **kwargs: Any) -> Any:
        make_any_text_printable()
        try:
            return super().main(*args, **kwargs)
        except DovetailError as error:
            self._tell(str(error))
            sys.exit(1 if isinstance(error, OutputError) else exit_code(error))
        except Exception as error:
            self._tell(
                f"{describe(error)}\nThis is a fault in Dovetail or in a plugin. `dovetail "
                f"--traceback`, before the subcommand, shows where."
            )
            sys.exit(1)

    def _tell(self, text: str) -> None:
        if self.show_traceback or os.environ.get("DOVETAIL_TRACEBACK", "") not in ("", "0"):
            tell(traceback.format_exc())
        else:
            tell(f"error: {text}")


app = typer.Typer(
    name="dovetail",
    cls=DovetailGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(plugins.app, name="plugins")
app.add_typer(config.app, name="config")
app.command(name="generate")(generate.generate)
app.command(name="pull")(pull.pull)
app.command(name="models")(models.models)
app.add_typer(determinism.app, name="doctor")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dovetail {__version__}")
        raise typer.Exit


@app.callback()
def root(
    traceback: Annotated[
        bool,
        typer.Option(
            "--traceback", help="Show where an error was raised (or set DOVETAIL_TRACEBACK=1)."
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """A pluggable LLM inference engine."""
