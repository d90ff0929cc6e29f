"""The HTTP server: `dovetail serve`, and `dovetail chat` for people in a terminal. It comes with the extra `server`."""

from __future__ import annotations

from dovetail.api.component import CommandSpec, hookimpl


@hookimpl
def dovetail_commands() -> list[CommandSpec]:
    return [
        CommandSpec("serve", "dovetail_server.command:serve", "Serve a model over HTTP, as OpenAI's and Anthropic's clients expect it"),
        CommandSpec("chat", "dovetail_server.chat_command:chat", "Talk to a model, here or on a server"),
    ]
