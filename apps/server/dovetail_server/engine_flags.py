"""Flags of `dovetail serve` that set keys of `engine.yaml`: each argument of `LLM()` is one, vLLM's included, with dashes.

They are translated by the table of `dovetail.front.vllm_args`. vLLM's flags for its server are rewritten here to ours, or refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
import yaml
from typer.core import TyperCommand

from dovetail.config import EngineConfig
from dovetail.errors import ConfigError
from dovetail.front.engine_args import flag_of, flag_value
from dovetail.front.vllm_args import ARGUMENTS, is_given, translated
from dovetail_server.settings import ServerSettings

logger = logging.getLogger("dovetail")

RENAMED = {  # flags of vLLM's server -> ours
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--api-server-count": "--front-ends",
    "--tool-call-parser": "--tool-parser",
    "--enable-log-requests": "--log-requests",
    "--no-enable-log-requests": "--no-log-requests",
    "--disable-log-requests": "--no-log-requests",
    "--disable-frontend-multiprocessing": "--in-process",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
}
LEFT_OUT = {  # flags of vLLM's server that ask for what is so anyway
    "--enable-auto-tool-choice": "the chat template selects the parser of tool calls",
    "--enable-server-load-tracking": "/load is always served",
    "--enable-tokenizer-info-endpoint": "/tokenizer_info is always served",
    "--enable-prompt-tokens-details": "usage always counts cached tokens",
    "--trust-request-chat-template": "requests may bring a chat template",
}
REFUSED = {  # flags of vLLM's server -> what does the same here
    "--model": "the model is the argument itself: dovetail serve MODEL",
    "--config": "name the file instead of the model: dovetail serve engine.yaml",
    "--allowed-origins": "--cors-origin, once for each origin",
    "--ssl-ca-certs": "let a proxy check the certificates of clients",
}


class ServeCommand(TyperCommand):
    """The command, which also understands vLLM's flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # completion
            return super().parse_args(ctx, args)
        args = list(_rewritten(args))
        seen: set[str] = set()
        for parameter in self.make_parser(ctx).parse_args(list(args))[2]:
            if parameter.name in ENGINE_FLAGS and parameter.name in seen:
                raise ConfigError(f"{flag_of(parameter.name)}: it is given twice")
            seen.add(str(parameter.name))
        return super().parse_args(ctx, args)


def _rewritten(args: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with vLLM's flags as ours. Raises `ConfigError` for those that are refused."""
    for index, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if arg == "--":
            yield from args[index:]
            return
        dashed = name.replace("_", "-") if name.startswith("--") else name
        if dashed in REFUSED:
            raise ConfigError(f"{dashed}: {REFUSED[dashed]}")
        if dashed in LEFT_OUT:
            if equals:
                raise ConfigError(f"{dashed}: it takes no value")
            logger.warning("%s: left out, %s", dashed, LEFT_OUT[dashed])
        elif dashed in RENAMED:
            logger.warning("%s: here %s", dashed, RENAMED[dashed])
            yield RENAMED[dashed] + equals + value
        else:
            yield (dashed if _name_of(dashed) in ENGINE_FLAGS else name) + equals + value


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


_OTHERS = {"model", *ServerSettings.model_fields, *map(_name_of, RENAMED)}
ENGINE_FLAGS = {name: is_switch for name, is_switch in ARGUMENTS.items() if name not in _OTHERS}  # True: a switch, without a value


def flag_parameters() -> list[tuple[str, Any, Any]]:
    """Return name, annotation and default of each flag for Typer. They aren't in the help, which would be twice as long."""
    listed: list[tuple[str, Any, Any]] = []
    for name, is_switch in ENGINE_FLAGS.items():
        flag = flag_of(name)
        names = f"{flag}/--no-{flag[2:]}" if is_switch else flag
        listed.append((name, Annotated[(bool if is_switch else str) | None, typer.Option(names, hidden=True)], None))
    return listed


def with_flags(settings: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    """Return `--set`s that include the flags given on the command line, a text or a bool each. Raises `ConfigError` for a value that is refused, and
    for a key that is set twice."""
    given = {name: value if isinstance(value, bool) else flag_value(name, value) for name, value in flags.items()}
    sets = EngineConfig.read_settings(settings)
    for name, value in given.items():
        keys = translated({name: value})
        for key in keys:
            if is_given(key, sets):
                raise ConfigError(f"{flag_of(name)} sets {key}, which --set gives as well: leave one of them out")
        EngineConfig.load_with({}, keys, origin=flag_of(name))  # an early check, with the flag's name
    texts = {
        key: f"{key}={yaml.safe_dump([value], default_flow_style=True, width=float('inf')).strip()[1:-1]}" for key, value in translated(given).items()
    }
    components = [text for key, text in texts.items() if "." not in key]  # first, or they would replace options of `settings`
    return [*components, *settings, *(text for key, text in texts.items() if "." in key)]
