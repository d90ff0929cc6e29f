"""Endpoints that change which LoRA adapters are served: /v1/load_lora_adapter and
/v1/unload_lora_adapter, in vLLM's form."""

from __future__ import annotations

from pathlib import Path

from starlette.routing import Route

from dovetail_server.errors import HttpError
from dovetail_server.exchange import Endpoint, Exchange
from dovetail_server.protocol.adapters import LoadBody, UnloadBody


async def load(exchange: Exchange) -> None:
    """Serve an adapter, whose name requests then give as their model; answered once it is
    loaded."""
    folder = _folder(exchange)
    body = await exchange.body(LoadBody)
    if not body.lora_name:
        raise HttpError(400, "lora_name must not be empty", param="lora_name")
    models = exchange.server.models
    if body.model is None:
        exchange.served = models.adapted
    if body.lora_name in models.names:
        raise HttpError(
            400, f"lora_name: {body.lora_name[:200]!r} is the model's own name", param="lora_name"
        )
    serving = models.with_adapter(body.lora_name)
    if serving is not None and not (body.load_inplace and serving is exchange.served):
        message = (
            f"the adapter {body.lora_name[:200]!r} is served already: unload it first, or "
            f"set load_inplace"
        )
        raise HttpError(400, message, param="lora_name", code="adapter_exists")
    await exchange.engine.load_adapter(body.lora_name, str(Path(folder) / body.lora_path), folder)
    await exchange.reply({"status": "ok", "lora_name": body.lora_name})


async def unload(exchange: Exchange) -> None:
    """Serve an adapter no longer; running requests keep theirs."""
    _folder(exchange)
    body = await exchange.body(UnloadBody)
    serving = exchange.server.models.with_adapter(body.lora_name)
    if serving is None:
        raise HttpError(
            404,
            f"the adapter {body.lora_name[:200]!r} isn't served here",
            param="lora_name",
            code="adapter_not_found",
        )
    await serving.engine.load_adapter(body.lora_name, None)
    await exchange.reply({"status": "ok", "lora_name": body.lora_name})


def _folder(exchange: Exchange) -> str:
    if (folder := exchange.server.settings.adapter_directory) is None:
        message = (
            "clients may not load adapters on this server: it needs the option "
            "--adapter-directory, a folder in which they are"
        )
        raise HttpError(403, message, code="not_allowed")
    return str(Path(folder).resolve())


ROUTES = [
    Route("/v1/load_lora_adapter", Endpoint(load), methods=["POST"]),
    Route("/v1/unload_lora_adapter", Endpoint(unload), methods=["POST"]),
]
