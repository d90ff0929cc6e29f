"""The HTTP server, `dovetail serve`, and `dovetail chat` for the terminal. It comes with the extra
`server`."""

from __future__ import annotations

from dovetail.api.component import CommandSpec, ComponentSpec, hookimpl


@hookimpl
def dovetail_commands() -> list[CommandSpec]:
    return [
        CommandSpec(
            "serve",
            "dovetail_server.command:app",
            "Serve a model over HTTP, with OpenAI's and Anthropic's APIs",
        ),
        CommandSpec(
            "chat", "dovetail_server.chat_command:chat", "Talk to a local model or a server"
        ),
    ]


@hookimpl
def dovetail_components() -> list[ComponentSpec]:
    return [
        ComponentSpec(
            "parser", name, f"dovetail_server.parsers.{name}:{target}", "1.0", summary=summary
        )
        for name, target, summary in (
            (
                "hermes",
                "HermesCalls",
                "Tool calls of Hermes, Qwen2.5 and Qwen3: JSON between marks",
            ),
            ("llama3_json", "Llama3JsonCalls", "Tool calls of Llama 3: the answer is JSON"),
            ("mistral", "MistralCalls", "Tool calls of Mistral's models: JSON after a mark"),
            (
                "qwen3_coder",
                "Qwen3CoderCalls",
                "Tool calls of Qwen3-Coder and Qwen3.5: tags with parameters",
            ),
            ("glm45", "Glm45Calls", "Tool calls of GLM-4.5 to 4.7: tags with keys and values"),
            ("minimax_m2", "MinimaxM2Calls", "Tool calls of MiniMax-M2: tags with parameters"),
            (
                "deepseek_v3",
                "DeepseekV3Calls",
                "Tool calls of DeepSeek-V3, R1 and V3.1: JSON between marks",
            ),
            ("kimi_k2", "KimiK2Calls", "Tool calls of Kimi K2: JSON between marks"),
            (
                "nemotron_h",
                "NemotronHCalls",
                "Tool calls of Nemotron-H and Nemotron Nano 2: an array between marks",
            ),
            ("gemma4", "Gemma4Calls", "Tool calls of Gemma 4: objects without quotes"),
            (
                "functiongemma",
                "FunctiongemmaCalls",
                "Tool calls of FunctionGemma: objects without quotes",
            ),
            (
                "harmony",
                "HarmonyAnswer",
                "Tool calls and reasoning of gpt-oss: messages on channels",
            ),
            ("gemma4_thought", "Gemma4Reasoning", "Reasoning of Gemma 4: on the channel `thought`"),
            ("think", "ThinkReasoning", "Reasoning between <think> and </think>"),
        )
    ]
