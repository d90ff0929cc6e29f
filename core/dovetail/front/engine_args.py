"""`EngineArgs`: the arguments of an engine as an object, and as flags of a command line."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from dovetail.checks import shown
from dovetail.config import EngineConfig
from dovetail.errors import ConfigError
from dovetail.front.vllm_args import ARGUMENTS, SECRETS, translated
from dovetail.yaml_source import parse_yaml


class EngineArgs:
    """The arguments of an engine, as vLLM or as `engine.yaml` names them, for `LLMEngine.from_engine_args`."""

    def __init__(self, model: str | Path = "demo", **arguments: Any) -> None:
        """Raises `ConfigError` for what can't be honoured, naming what would be right."""
        self._config = EngineConfig.load({"model": str(model) if isinstance(model, Path) else model}, **translated(arguments))

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Add a flag for each argument, with dashes, to an argument parser, and return it. Values are YAML. Flags that aren't given are no attributes
        of the namespace, so that `LLM(**vars(args))` takes the defaults."""
        parser.add_argument("--model", default=SUPPRESS, help="a directory, a hub id, or demo")
        for name, is_switch in ARGUMENTS.items():
            if is_switch:
                parser.add_argument(flag_of(name), action=BooleanOptionalAction, default=SUPPRESS)
            elif name != "model":
                parser.add_argument(flag_of(name), type=_read_flag(name), default=SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> EngineArgs:
        """Make it of a namespace that `add_cli_args` has filled; other attributes are ignored. Raises `ConfigError`."""
        return cls(**{name: value for name, value in vars(args).items() if name in ARGUMENTS or name == "model"})

    def create_engine_config(self) -> EngineConfig:
        """The same in Dovetail's words."""
        return self._config

    def __repr__(self) -> str:
        given = {key: getattr(self._config, key) for key in sorted(self._config.model_fields_set)}
        return f"EngineArgs({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def engine_config_of(arguments: EngineArgs | EngineConfig) -> EngineConfig:
    """Raises `ConfigError` for anything else, a vLLM object of that name too."""
    if isinstance(arguments, EngineArgs):
        return arguments.create_engine_config()
    if isinstance(arguments, EngineConfig):
        return arguments
    raise ConfigError(f"engine_args must be dovetail.EngineArgs or an EngineConfig, got {shown(arguments)}")


def flag_of(name: str) -> str:
    """Return the flag of an argument."""
    return "--" + name.replace("_", "-")


def flag_value(name: str, text: str) -> Any:
    """Return a flag's value, which is YAML; vLLM's short forms of counts (32k, 1.5M) are read, too. Raises `ConfigError`."""
    if not text.strip():
        raise ConfigError(f"{flag_of(name)}: it needs a value")
    if name in _COUNTS and (short := _SHORT.fullmatch(text)):
        number, unit = short.groups()
        count = Decimal(number) * (1000 if unit.islower() else 1024) ** ("kmgt".index(unit.lower()) + 1)
        if count != int(count):
            raise ConfigError(f"{flag_of(name)}: {text} isn't a whole number")
        return int(count)
    return text if name in SECRETS else parse_yaml(text, flag_of(name)).value


def _read_flag(name: str) -> Callable[[str], Any]:
    """Return `flag_value` of an argument with the errors that argparse shows."""

    def read(text: str) -> Any:
        try:
            return flag_value(name, text)
        except ConfigError as error:
            raise ArgumentTypeError(str(error)) from None

    return read


_COUNTS = {"max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"}
_SHORT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([kmgtKMGT])")  # small letters: powers of 1000; capital ones: of 1024
