"""The HTTP server, `dovetail serve`, and `dovetail chat` for the terminal. It comes with the extra `server`."""

from __future__ import annotations

from dovetail.api.component import CommandSpec, ComponentSpec, hookimpl


@hookimpl
def dovetail_commands() -> list[CommandSpec]:
    return [
        CommandSpec("serve", "dovetail_server.command:app", "Serve a model over HTTP, with OpenAI's and Anthropic's APIs"),
        CommandSpec("chat", "dovetail_server.chat_command:chat", "Talk to a local model or a server"),
    ]


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec("parser", name, f"dovetail_server.parsers.{name}:{target}", summary=summary)
        for name, target, summary in (
            ("hermes", "HermesCalls", "Tool calls of Hermes, Qwen2.5 and Qwen3: JSON between marks"),
            ("llama3_json", "Llama3JsonCalls", "Tool calls of Llama 3: the answer is JSON"),
            ("mistral", "MistralCalls", "Tool calls of Mistral's models: JSON after a mark"),
            ("qwen3_coder", "Qwen3CoderCalls", "Tool calls of Qwen3-Coder and Qwen3.5: tags with parameters"),
            ("glm45", "Glm45Calls", "Tool calls of GLM-4.5 to 4.7: tags with keys and values"),
            ("think", "ThinkReasoning", "Reasoning between <think> and </think>"),
        )
    ]
