"""The command `dovetail serve`. Its options are the fields of `ServerSettings`, and the arguments
of `LLM()`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from dovetail import EngineConfig
from dovetail.api.spans import check_installed
from dovetail.errors import ConfigError, MissingExtraError, shown
from dovetail.serving import Registry, RequiredSources, Settings
from dovetail_server.engine_flags import ENGINE_FLAGS, ServeCommand, flag_parameters, with_flags
from dovetail_server.settings import ServerSettings

NULL = "null"  # option value for "no limit"
EXTRA = "server"
EPILOG = (
    "Arguments of LLM() are flags, too, vLLM's included: --max-model-len 4096, "
    "--enforce-eager, --no-enable-prefix-caching."
)
MODULES = {  # modules that the server's processes import, and their packages
    "zmq": "pyzmq",
    "msgspec": "msgspec",
    "orjson": "orjson",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "httptools": "httptools",
    "prometheus_client": "prometheus-client",
    "python_multipart": "python-multipart",
    **({} if sys.platform == "win32" else {"uvloop": "uvloop"}),
}


def serve(sources: list[str], settings: list[str], in_process: bool, **options: Any) -> None:
    """Serve models over HTTP with OpenAI's and Anthropic's APIs, until SIGTERM or Ctrl-C."""
    flags = {name: options.pop(name) for name in ENGINE_FLAGS if name in options}
    settings = with_flags(
        settings, {name: value for name, value in flags.items() if value is not None}
    )
    server = _read(options)
    _check_packages()
    if server.batch_directory is not None:
        from dovetail_server.batches.store import BatchStore

        # report an unusable folder early
        BatchStore(Path(server.batch_directory), server.max_stored_bytes)
    if server.otlp_traces_endpoint is not None:
        check_installed()  # report it early
    for source in sources:
        _check_plugins(server, source, settings)
    if in_process:
        from dovetail_server.one_process import serve_in_one_process

        if len(sources) > 1:
            raise ConfigError(f"--in-process: it serves one model, got {len(sources)}")
        code = serve_in_one_process(sources[0], settings, server)
    else:
        from dovetail_server.engine_sources import sources_of
        from dovetail_server.supervisor import Supervisor

        code = Supervisor(sources_of(sources, settings, server), server).run()
    raise typer.Exit(code)


def _check_plugins(server: ServerSettings, source: str, settings: Sequence[str]) -> None:
    """Raise `ConfigError` or `PluginError` for parsers and routes that no plugin has which the
    engine's config admits, and for routes that can't be made. What else is wrong with the config is
    left to the engine."""
    if not (server.routes or server.named_parsers):
        return
    # these import what the server does, which takes as long as all the rest
    from dovetail_server.parsers.registry import check_names

    config, _ = EngineConfig.load_what_is_right(
        source, EngineConfig.read_settings(settings), origin="--set"
    )
    if config is not None:
        registry = Registry.discover(config.plugins, enforce_require=False)
        check_names(server, registry)
        for name in server.routes:
            registry.routes_named(name)
        if server.routes:
            from dovetail_server.route_trial import try_routes

            try_routes(server, config.plugins)


def _check_packages() -> None:
    """Raise `MissingExtraError` for missing packages before any process starts."""
    if missing := [package for module, package in MODULES.items() if not _is_there(module)]:
        raise MissingExtraError.naming(EXTRA, f"dovetail serve needs {', '.join(missing)}")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # raised for partially removed packages
        return False


def _read(options: dict[str, Any]) -> ServerSettings:
    """Return the settings with the given options. Raises `ConfigError` naming all invalid ones."""
    given = {
        name: None if value == NULL and _is_nullable(name) else value
        for name, value in options.items()
        if value not in (None, [])
    }
    try:
        return ServerSettings.model_validate(given)
    except ValidationError as error:
        raise ConfigError("\n".join(map(_told, error.errors()))) from None


def _told(detail: Any) -> str:
    """Convert an error of pydantic to a message for the command line."""
    if not detail["loc"]:
        return str(detail["msg"]).removeprefix("Value error, ")
    return f"{option_name(str(detail['loc'][0]))}: {detail['msg']}, got {shown(detail['input'])}"


def option_name(name: str) -> str:
    """Return a field's option name: without its unit, which the help states, and in the singular
    for lists, which are given one by one."""
    is_list = get_origin(ServerSettings.model_fields[name].annotation) is tuple
    return "--" + name.removesuffix("s" if is_list else "_s").replace("_", "-")


def _is_nullable(name: str) -> bool:
    return type(None) in get_args(ServerSettings.model_fields[name].annotation)


def _parameters() -> list[inspect.Parameter]:
    """Return the command's parameters for Typer."""
    in_process = Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Run the engine in a thread of the server's process, for debugging.",
        ),
    ]
    listed: list[tuple[str, Any, Any]] = [
        ("sources", RequiredSources, inspect.Parameter.empty),
        ("settings", Settings, []),
    ]
    listed += [_parameter(name, field) for name, field in ServerSettings.model_fields.items()]
    listed.append(("in_process", in_process, False))
    listed += flag_parameters()
    return [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind, default=default
        )
        for name, kind, default in listed
    ]


def _parameter(name: str, field: FieldInfo) -> tuple[str, Any, Any]:
    """Return name, annotation and default of a field's option. The field's own default is only
    shown in the help: options that aren't given are left to the model, which may read the
    environment."""
    kind = _plain(field.annotation)
    text = " ".join((field.description or "").replace("`", "").split())
    if kind is list:
        # vLLM's, too
        spellings = [
            option_name(name),
            *(["--lora-modules"] if name == "lora_modules" else []),
        ]
        return (
            name,
            Annotated[
                list[str],
                typer.Option(*spellings, help=f"{text} May be repeated.", show_default=False),
            ],
            [],
        )
    text += f"  [default: {NULL if field.default is None else field.default}]"
    names = (
        f"{option_name(name)}/--no-{option_name(name)[2:]}" if kind is bool else option_name(name)
    )
    return name, Annotated[kind | None, typer.Option(names, help=text, show_default=False)], None


def _plain(annotation: Any) -> Any:
    """Return the command-line type of a field: bool, int, float, list, or str, which also serves
    nullable numbers."""
    if annotation in (bool, int, float):
        return annotation
    return list if get_origin(annotation) is tuple else str


serve.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters()}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command(name="serve", cls=ServeCommand, epilog=EPILOG)(serve)
