"""Flags of `dovetail serve` that set keys of `engine.yaml`: every argument of `LLM()`, vLLM's
included.

`dovetail.front.vllm_args` translates them. vLLM's server flags are renamed or refused by
`vllm_flags`.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
import yaml
from typer.core import TyperCommand

from dovetail import EngineConfig
from dovetail.errors import ConfigError
from dovetail.serving import ARGUMENTS, flag_of, flag_value, is_given, translated
from dovetail_server.settings import ServerSettings
from dovetail_server.vllm_flags import RENAMED, is_known, reason_to_ignore, takes_value

logger = logging.getLogger("dovetail")


class ServeCommand(TyperCommand):
    """The command, which also understands vLLM's flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # completion
            return super().parse_args(ctx, args)
        args = list(rewritten(args))
        seen: set[str] = set()
        for parameter in self.make_parser(ctx).parse_args(list(args))[2]:
            if parameter.name in ENGINE_FLAGS and parameter.name in seen:
                raise ConfigError(f"{flag_of(parameter.name)}: given twice")
            seen.add(str(parameter.name))
        return super().parse_args(ctx, args)


def rewritten(args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with vLLM's flags renamed. Raises `ConfigError` for unsupported ones."""
    rest = deque(args)
    while rest:
        arg = rest.popleft()
        if arg == "--":
            yield arg
            yield from rest
            return
        name, equals, value = _parted(arg)
        if name in RENAMED:
            logger.warning("%s: here %s", name, RENAMED[name])
            name = RENAMED[name]
        if ENGINE_FLAGS.get(_name_of(name)) and rest and rest[0] in ("true", "false"):
            raise ConfigError(f"{name}: takes no value, got {rest[0]}")
        if not is_known(name):
            yield name + equals + value
            continue
        if equals and not takes_value(name):
            raise ConfigError(f"{name}: takes no value")
        if takes_value(name) and not equals:
            if not rest:
                raise ConfigError(f"{name}: needs a value")
            value = rest.popleft()
        if why := reason_to_ignore(name, value):
            logger.warning("%s: ignored, %s", name, why)


def _parted(arg: str) -> tuple[str, str, str]:
    """Return name, "=" and value of an argument. Names of known flags are returned with dashes.

    Raises `ConfigError` for a flag that sets one key of a mapping (`--flag.key`).
    """
    name, equals, value = arg.partition("=")
    if re.fullmatch(r"-O[a-z0-9]+", name):  # vLLM's short form of levels
        return "-O", "=", name[2:]
    dashed = name.replace("_", "-") if name.startswith("--") else name
    flag, dot, key = dashed.partition(".")
    if name.startswith("-") and dot and (_name_of(flag) in ENGINE_FLAGS or flag in RENAMED):
        whole = RENAMED.get(flag, flag)
        raise ConfigError(
            f"{dashed}: give the mapping in one flag: {whole} '{{{key.replace('-', '_')}: …}}'"
        )
    known = _name_of(dashed) in ENGINE_FLAGS or dashed in RENAMED or is_known(dashed)
    return dashed if known else name, equals, value


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


_OTHERS = {"model", *ServerSettings.model_fields, *map(_name_of, RENAMED)}
ENGINE_FLAGS = {
    name: is_switch for name, is_switch in ARGUMENTS.items() if name not in _OTHERS
}  # True: a switch, without a value


def flag_parameters() -> list[tuple[str, Any, Any]]:
    """Return name, annotation and default of each flag for Typer. They aren't in the help, which
    would be twice as long."""
    listed: list[tuple[str, Any, Any]] = []
    for name, is_switch in ENGINE_FLAGS.items():
        flag = flag_of(name)
        names = f"{flag}/--no-{flag[2:]}" if is_switch else flag
        listed.append(
            (
                name,
                Annotated[(bool if is_switch else str) | None, typer.Option(names, hidden=True)],
                None,
            )
        )
    return listed


def with_flags(settings: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    """Return `--set`s that include the flags given on the command line, a text or a bool each.
    Raises `ConfigError` for a value that is refused, and for a key that is set twice."""
    given = {
        name: value if isinstance(value, bool) else flag_value(name, value)
        for name, value in flags.items()
    }
    sets = EngineConfig.read_settings(settings)
    for name, value in given.items():
        keys = translated({name: value})
        for key in keys:
            if is_given(key, sets):
                raise ConfigError(
                    f"{flag_of(name)} sets {key}, which --set also sets: leave one of them out"
                )
        # an early check, with the flag's name
        EngineConfig.load_with({}, keys, origin=flag_of(name))
    texts = {
        key: f"{key}={yaml.safe_dump([value], default_flow_style=True, width=float('inf')).strip()[1:-1]}"
        for key, value in translated(given).items()
    }
    # first, or they would replace options of `settings`
    components = [text for key, text in texts.items() if "." not in key]
    return [*components, *settings, *(text for key, text in texts.items() if "." in key)]
