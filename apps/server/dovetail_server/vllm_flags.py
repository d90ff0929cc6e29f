"""Flags of `vllm serve` that are renamed or unsupported here; `engine_flags` applies these
tables."""

from __future__ import annotations

from typing import Any

from dovetail.errors import ConfigError
from dovetail.serving import IMAGES, Group, among, parse_yaml

_PROXY = "use a proxy to verify and renew certificates"
_REPLICAS = "use `dovetail cluster up`, which starts replicas and replaces failed ones"
_TEXTS = "texts of requests and responses are never logged"
_PLUGIN = "write a plugin: see docs/plugins"

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
# flags that are accepted with vLLM's default only; those whose default is a bool take no value
GROUPS = (
    Group(
        "pass the model as an argument: dovetail serve MODEL",
        {"--model": None},
    ),
    Group("pass the file instead of the model: dovetail serve engine.yaml", {"--config": None}),
    Group("use --cors-origin, once per origin", {"--allowed-origins": []}),
    Group(
        "use --cors-origin; all methods and headers are allowed, credentials are not",
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
        "requests may contain a chat template",
        {"--trust-request-chat-template": False},
        advisory=True,
    ),
    Group(
        "responses always have the header x-request-id",
        {"--enable-request-id-headers": False},
        advisory=True,
    ),
    Group(
        "tool_choice none always omits tools",
        {"--exclude-tools-when-tool-choice-none": False},
        advisory=True,
    ),
    Group("errors are logged with their stack", {"--log-error-stack": False}, advisory=True),
    Group("no pages of documentation are served", {"--disable-fastapi-docs": False}, advisory=True),
    Group(
        "late interaction is computed by each front end",
        {"--enable-flash-late-interaction": True},
        advisory=True,
    ),
    Group(_TEXTS, {"--max-log-len": None, "--enable-log-deltas": True}, advisory=True),
    Group(_TEXTS, {"--enable-log-outputs": False}),
    Group(
        "it is detected from the template: leave it out",
        {"--chat-template-content-format": "auto"},
    ),
    Group(
        "set it per request: chat_template_kwargs, reasoning_effort or thinking",
        {
            "--default-chat-template-kwargs": None,
            "--reasoning-effort-map": None,
            "--anthropic-disabled-thinking-effort": "auto",
        },
    ),
    Group("responses have the role assistant", {"--response-role": "assistant"}),
    Group(
        "Cohere's chat API isn't supported",
        {"--cohere-format": "cmd4", "--cohere-is-reasoning-model": True},
    ),
    Group(
        "set it per request: stream_options.include_usage", {"--enable-force-include-usage": False}
    ),
    Group(
        "use /metrics and spans (--otlp-traces-endpoint)",
        {"--enable-per-request-metrics": False},
    ),
    Group("set it per request: return_token_ids", {"--return-tokens-as-token-ids": False}),
    Group(
        "streams send no keep-alive events: leave it out",
        {"--sse-keep-alive-interval": 0},
    ),
    Group(
        "responses have no fingerprint", {"--fingerprint-mode": "full", "--fingerprint-value": None}
    ),
    Group(
        "--no-log-requests disables the access log of all endpoints",
        {"--disable-access-log-for-endpoints": None},
    ),
    Group("set the environment variable DOVETAIL_LOG", {"--uvicorn-log-level": "info"}),
    Group(_PLUGIN, {"--middleware": [], "--tool-parser-plugin": ""}),
    Group("tools are run by the client", {"--tool-server": None}),
    Group("set strict in each tool", {"--tool-strict-level": None}),
    Group(IMAGES, {"--trust-request-mm-kwargs": False}),
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
        "use --max-received-bytes and --max-body-bytes",
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
    Group("only HTTP is supported", {"--grpc": False, "--grpc-port": None}),
)
_GROUP_OF = {flag: group for group in GROUPS for flag in group.defaults}


def switch_of(flag: str) -> str:
    """Return `--flag` for `--no-flag` of a switch, and any other flag unchanged."""
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
    """Return why `flag` with the value `text` has no effect; "" for vLLM's default.

    Raises `ConfigError` for an unsupported value.
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
