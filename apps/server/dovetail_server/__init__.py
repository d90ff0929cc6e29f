"""The HTTP server, `dovetail serve`, and `dovetail chat` for the terminal. It comes with the extra `server`."""

from __future__ import annotations

from dovetail.api.component import CommandSpec, hookimpl


@hookimpl
def dovetail_commands() -> list[CommandSpec]:
    return [
        CommandSpec("serve", "dovetail_server.command:app", "Serve a model over HTTP, with OpenAI's and Anthropic's APIs"),
        CommandSpec("chat", "dovetail_server.chat_command:chat", "Talk to a local model or a server"),
    ]
