"""Flags of `vllm serve` that have another spelling here, or none. `engine_flags` rewrites the command line by them."""

from __future__ import annotations

from typing import Any

from dovetail.errors import ConfigError
from dovetail.serving import TEXT_ONLY, Group, among, parse_yaml

_PROXY = "let a proxy check and renew certificates"
_REPLICAS = "`dovetail cluster up` starts replicas, and replaces those that fail"
_TEXTS = "texts of requests and answers are never logged"
_PLUGIN = "write a plugin, and name it: see docs/plugins"

RENAMED = {  # flags of vLLM's server -> ours
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--api-server-count": "--front-ends",
    "--tool-call-parser": "--tool-parser",
    "--enable-log-requests": "--log-requests",
    "--no-enable-log-requests": "--no-log-requests",
    "--disable-log-requests": "--no-log-requests",
    "--disable-uvicorn-access-log": "--no-log-requests",
    "--disable-frontend-multiprocessing": "--in-process",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "-ac": "--attention-config",
    "-asc": "--front-ends",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-O": "--optimization-level",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
}
GROUPS = (  # flags that are accepted with vLLM's default only; those whose default is a bool take no value
    Group(
        "the model is the argument itself: dovetail serve MODEL",
        {"--model": None},
    ),
    Group("name the file instead of the model: dovetail serve engine.yaml", {"--config": None}),
    Group("--cors-origin, once for each origin", {"--allowed-origins": []}),
    Group(
        "--cors-origin names the origins; they may use all methods and headers, but no credentials",
        {"--allowed-methods": ["*"], "--allowed-headers": ["*"], "--allow-credentials": False},
    ),
    Group(
        "the chat template selects the parser of tool calls",
        {"--enable-auto-tool-choice": False},
        advisory=True,
    ),
    Group("/load is always served", {"--enable-server-load-tracking": False}, advisory=True),
    Group(
        "/tokenizer_info is always served",
        {"--enable-tokenizer-info-endpoint": False},
        advisory=True,
    ),
    Group(
        "usage always counts cached tokens",
        {"--enable-prompt-tokens-details": False},
        advisory=True,
    ),
    Group(
        "requests may bring a chat template",
        {"--trust-request-chat-template": False},
        advisory=True,
    ),
    Group(
        "answers always have the header x-request-id",
        {"--enable-request-id-headers": False},
        advisory=True,
    ),
    Group(
        "tool_choice none always leaves tools out",
        {"--exclude-tools-when-tool-choice-none": False},
        advisory=True,
    ),
    Group("errors are logged with their stack", {"--log-error-stack": False}, advisory=True),
    Group("no pages of documentation are served", {"--disable-fastapi-docs": False}, advisory=True),
    Group(
        "each front end computes late interaction as asked",
        {"--enable-flash-late-interaction": True},
        advisory=True,
    ),
    Group(_TEXTS, {"--max-log-len": None, "--enable-log-deltas": True}, advisory=True),
    Group(_TEXTS, {"--enable-log-outputs": False}),
    Group(
        "it is found out from the template: leave it out",
        {"--chat-template-content-format": "auto"},
    ),
    Group(
        "requests say it: chat_template_kwargs, reasoning_effort or thinking",
        {
            "--default-chat-template-kwargs": None,
            "--reasoning-effort-map": None,
            "--anthropic-disabled-thinking-effort": "auto",
        },
    ),
    Group("answers have the role assistant", {"--response-role": "assistant"}),
    Group(
        "Cohere's chat API isn't served",
        {"--cohere-format": "cmd4", "--cohere-is-reasoning-model": True},
    ),
    Group(
        "requests ask for it: stream_options.include_usage", {"--enable-force-include-usage": False}
    ),
    Group(
        "/metrics and spans (--otlp-traces-endpoint) tell it",
        {"--enable-per-request-metrics": False},
    ),
    Group("requests ask for it: return_token_ids", {"--return-tokens-as-token-ids": False}),
    Group(
        "a stream is silent while nothing is generated: leave it out",
        {"--sse-keep-alive-interval": 0},
    ),
    Group(
        "answers have no fingerprint", {"--fingerprint-mode": "full", "--fingerprint-value": None}
    ),
    Group(
        "--no-log-requests leaves out the lines of all endpoints",
        {"--disable-access-log-for-endpoints": None},
    ),
    Group("set the environment variable DOVETAIL_LOG", {"--uvicorn-log-level": "info"}),
    Group(_PLUGIN, {"--middleware": [], "--tool-parser-plugin": ""}),
    Group("a client runs the tools that it sends", {"--tool-server": None}),
    Group("strict tools are: each tool says it", {"--tool-strict-level": None}),
    Group(TEXT_ONLY, {"--trust-request-mm-kwargs": False}),
    Group("no pages of documentation are served", {"--enable-offline-docs": False}),
    Group(
        _PROXY,
        {
            "--ssl-ca-certs": None,
            "--ssl-cert-reqs": 0,
            "--ssl-ciphers": None,
            "--enable-ssl-refresh": False,
        },
    ),
    Group(
        "--max-received-bytes and --max-body-bytes bound what is read",
        {"--h11-max-incomplete-event-size": 4194304, "--h11-max-header-count": 256},
    ),
    Group(
        _REPLICAS,
        {
            "--headless": False,
            "--enable-scale-out": False,
            "--data-parallel-supervisor-port": 9256,
            "--dp-supervisor-probe-interval-s": 5.0,
            "--dp-supervisor-probe-timeout-s": 5.0,
            "--dp-supervisor-probe-failure-threshold": 3,
        },
    ),
    Group("HTTP is what is served", {"--grpc": False, "--grpc-port": None}),
)
_GROUP_OF = {flag: group for group in GROUPS for flag in group.defaults}


def switch_of(flag: str) -> str:
    """Return the flag of which `--no-…` is the opposite, if it is; any other flag as it is."""
    opposite = "--" + flag.removeprefix("--no-")
    is_switch = opposite in _GROUP_OF and isinstance(_GROUP_OF[opposite].defaults[opposite], bool)
    return opposite if flag.startswith("--no-") and is_switch else flag


def is_known(flag: str) -> bool:
    """Return True for a flag of the groups."""
    return switch_of(flag) in _GROUP_OF


def takes_value(flag: str) -> bool:
    """Return True for a flag of the groups that isn't a switch."""
    return not isinstance(_GROUP_OF[switch_of(flag)].defaults[switch_of(flag)], bool)


def reason_to_ignore(flag: str, text: str) -> str:
    """Return why a flag of the groups has no effect; "" for vLLM's default. `text`: its value.

    Raises `ConfigError` for a value that would have one.
    """
    name = switch_of(flag)
    group = _GROUP_OF[name]
    value = _read(text) if takes_value(flag) else name == flag
    if among(value, (group.defaults[name],)):
        return ""
    if group.advisory:
        return group.reason
    raise ConfigError(f"{flag}: {group.reason}")


def _read(text: str) -> Any:
    try:
        value = parse_yaml(text, "").value
    except ConfigError:
        return text
    return text if value is None and text == "" else value
