"""`EngineArgs`: the arguments of an engine as an object, and as flags of a command line."""

from __future__ import annotations

import re
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields
from decimal import Decimal
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dovetail.base.checks import among, did_you_mean
from dovetail.base.yaml_source import parse_yaml
from dovetail.config.engine import EngineConfig
from dovetail.errors import ConfigError, shown
from dovetail.front.vllm_args import ARGUMENTS, SECRETS, TABLE, UNSET, check_spelling, translated

T = TypeVar("T")


class UnknownArgumentError(ConfigError, AttributeError):
    """An unknown argument or attribute of `EngineArgs`."""


def _as_dataclass(cls: type[T]) -> type[T]:
    """Make a dataclass of a class, with a field for each argument.

    The default of a field is vLLM's, or `UNSET` for a key of `engine.yaml` that vLLM lacks.
    """
    made: Any = cls
    for name in ARGUMENTS:
        default = TABLE[name].default if name in TABLE else UNSET
        if isinstance(default, dict | list):
            setattr(cls, name, field(default_factory=partial(copy, default), kw_only=True))
        else:
            setattr(cls, name, field(default=default, kw_only=True))
    made.model = "demo"
    made.__annotations__ = {"model": Any, **dict.fromkeys(ARGUMENTS, Any)}
    dataclass(repr=False)(cls)
    init = made.__init__

    @wraps(init)
    def checked(self: T, model: Any = "demo", **arguments: Any) -> None:
        for name in [name for name in arguments if name not in ARGUMENTS]:
            check_spelling(name)
            raise UnknownArgumentError(_unknown(name))
        init(self, model, **arguments)

    made.__init__ = checked
    return cls


@_as_dataclass
class EngineArgs:
    """Arguments of an engine by vLLM's or `engine.yaml`'s names, for `LLMEngine.from_engine_args`.

    A dataclass: fields are read and set, and `dataclasses.asdict` and `replace` work. A field has
    vLLM's default, and None or `UNSET` where the engine decides. An unknown name raises
    `ConfigError`, which is an `AttributeError` when it is read or set.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
        model: Any

        def __init__(self, model: Any = "demo", **arguments: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...
    else:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):  # special methods that `copy` and others probe for
                raise AttributeError(name)
            raise UnknownArgumentError(_unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise UnknownArgumentError(_unknown(name))
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        """Validate. Raises `ConfigError` for unsupported values, with a supported alternative."""
        self.create_engine_config()

    @staticmethod
    def add_cli_args(parser: ArgumentParser, async_args_only: bool = False) -> ArgumentParser:
        """Add a flag for each argument to `parser`, and return it. Values are YAML.

        Flags that aren't given are missing from the namespace, so that `LLM(**vars(args))` uses
        the defaults. With `async_args_only` no flag is added: no argument is specific to asyncio.
        """
        if async_args_only:
            return parser
        parser.add_argument("--model", default=SUPPRESS, help="a directory, a hub id, or demo")
        for name, is_switch in ARGUMENTS.items():
            if is_switch:
                parser.add_argument(flag_of(name), action=BooleanOptionalAction, default=SUPPRESS)
            elif name != "model":
                parser.add_argument(flag_of(name), type=_read_flag(name), default=SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> EngineArgs:
        """Create it from a namespace filled by `add_cli_args`; other attributes are ignored.

        Raises `ConfigError`.
        """
        return cls(
            **{
                name: value
                for name, value in vars(args).items()
                if name in ARGUMENTS or name == "model"
            }
        )

    def create_engine_config(
        self, usage_context: Any = None, headless: bool = False
    ) -> EngineConfig:
        """Return the `EngineConfig`. vLLM's parameters have no effect. Raises `ConfigError`."""
        given = self._given()
        model = given.pop("model", self.model)
        named = {"model": str(model) if isinstance(model, Path) else model}
        return EngineConfig.load(named, **translated(given))

    def _given(self) -> dict[str, Any]:
        """Return the fields whose values differ from their defaults."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            one.name: values[one.name]
            for one in fields(self)
            if not among(values[one.name], (_default_of(one),))
        }

    def __repr__(self) -> str:
        shown_fields = [
            f"{name}={'…' if name in SECRETS else repr(value)}"
            for name, value in self._given().items()
        ]
        return f"EngineArgs({', '.join(shown_fields)})"


def _default_of(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def _unknown(name: str) -> str:
    hint = did_you_mean(name, (*EngineArgs.__dataclass_fields__, *vars(EngineArgs)))
    return f"EngineArgs: {name[:80]}: unknown argument{hint}"


def engine_config_of(arguments: EngineArgs | EngineConfig) -> EngineConfig:
    """Return the `EngineConfig` of either type. Raises `ConfigError` for anything else, such as
    vLLM's."""
    if isinstance(arguments, EngineArgs):
        return arguments.create_engine_config()
    if isinstance(arguments, EngineConfig):
        return arguments
    raise ConfigError(
        f"engine_args must be dovetail.EngineArgs or an EngineConfig, got {shown(arguments)}"
    )


def flag_of(name: str) -> str:
    """Return the flag of an argument."""
    return "--" + name.replace("_", "-")


def flag_value(name: str, text: str) -> Any:
    """Parse a flag's value as YAML, or as one of vLLM's short counts (32k, 1.5M). Raises
    `ConfigError`."""
    if not text.strip():
        raise ConfigError(f"{flag_of(name)}: needs a value")
    if name in _COUNTS and (short := _SHORT.fullmatch(text)):
        number, unit = short.groups()
        count = Decimal(number) * (1000 if unit.islower() else 1024) ** (
            "kmgt".index(unit.lower()) + 1
        )
        if count != int(count):
            raise ConfigError(f"{flag_of(name)}: {text} isn't a whole number")
        return int(count)
    return text if name in SECRETS else parse_yaml(text, flag_of(name)).value


def _read_flag(name: str) -> Callable[[str], Any]:
    """Return `flag_value` of an argument, with argparse's errors."""

    def read(text: str) -> Any:
        try:
            return flag_value(name, text)
        except ConfigError as error:
            raise ArgumentTypeError(str(error)) from None

    return read


_COUNTS = {"max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"}
# small letters: powers of 1000; capital ones: of 1024
_SHORT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([kmgtKMGT])")
