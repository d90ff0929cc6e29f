"""Errors for vLLM's names and modules that `dovetail.compat.vllm` lacks, with alternatives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from dovetail.base.checks import did_you_mean
from dovetail.front.vllm_args import SOFT_PROMPTS

PACKAGE = "dovetail.compat.vllm"
_PLUGIN = "write a plugin instead: see docs/plugins"
_OBSERVER = (
    "write an observer plugin, and add its name to observers; LLM.get_metrics() returns "
    "counters and gauges"
)
_IMAGES = "pass images of Pillow, paths or bytes: see docs/images.md"
_CONFIG = "configure the engine by the arguments of LLM()"
INSTEAD = {  # the beginning of a module or name -> what to do instead
    "multimodal": _IMAGES,
    "assets": _IMAGES,
    "PoolerConfig": "leave it out: set the task by encode(…, pooling_task=…), and the method by "
    "LLM(pooling={'method': …})",
    "ProfilerConfig": "observers=['perfetto'] writes a trace",
    "config.kv_transfer": "K and V can't be transferred between engines",
    "KVTransferConfig": "K and V can't be transferred between engines",
    "config": _CONFIG,
    "VllmConfig": _CONFIG,
    "model_executor": "models and weight formats are plugins: see docs/plugins",
    "ModelRegistry": "models are plugins: see docs/plugins",
    "v1.sample": "samplers and logits processors are plugins: see docs/plugins/logits_processor.md",
    "logits_process": "logits processors are plugins: see docs/plugins/logits_processor.md",
    "StatLoggerBase": _OBSERVER,
    "v1.metrics.loggers": _OBSERVER,
    "engine.metrics": _OBSERVER,
    "PromptAdapterRequest": SOFT_PROMPTS,
    "prompt_adapter": SOFT_PROMPTS,
    "distributed.kv_transfer": "K and V can't be transferred between engines",
    "distributed": "`close()` ends an engine and all its processes: leave it out",
    "v1.metrics": "LLM.get_metrics() returns counters and gauges",
    "renderers": "`generate` takes the text, or its token ids",
    "LateChunkingParams": "encode(…, pooling_task='token_embed') returns a vector per token: "
    "average those of each chunk",
    "benchmarks": "use `python -m bench` or `dovetail lab`",
    "platforms": "the executor chooses the device: leave it out",
    "transformers_utils": "transformers reads configs and tokenizers",
    "entrypoints": "`dovetail serve` is the server",
    "utils.network_utils": "the engine opens no ports: leave it out",
    "utils.mem_utils": "`close()` releases the device's memory",
    "usage": "usage isn't reported: leave it out",
    "logger": "use Python's logger `dovetail`",
    "plugins": _PLUGIN,
    "tokenizers": "LLM.get_tokenizer() is transformers' tokenizer",
    "envs": "vLLM's environment variables aren't read",
    "PromptType": "a prompt is a string, a list of token ids, TextPrompt or TokensPrompt",
}


def sentence(fullname: str) -> str:
    """Return the error message for a module or name that this package lacks."""
    module, _, name = fullname.rpartition(".")
    asked = (fullname.removeprefix(f"{PACKAGE}."), name)
    why = next(
        (why for prefix, why in INSTEAD.items() if any(one.startswith(prefix) for one in asked)),
        None,
    )
    names = getattr(sys.modules.get(module), "__all__", ())
    return f"{fullname}: {why or f'Dovetail has no such name{did_you_mean(name, names)}'}"


def missing(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which raises `AttributeError`, so that `hasattr` is false.

    `from module import name` would replace its message by Python's. If the module has a `__path__`,
    the import system first tries the finders of submodules, and so `MissingModules`.
    """

    def look_up(name: str) -> Any:
        if name == "__path__":  # the module isn't a package
            return []
        raise AttributeError(sentence(f"{module}.{name}"))

    return look_up


class MissingModules(MetaPathFinder):
    """Last finder: explains which of vLLM's modules and names aren't here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raise `ModuleNotFoundError` for a module or name of this package; return None for any
        other."""
        if fullname.startswith(f"{PACKAGE}."):
            # `from … import` discards errors whose name is that of the missing submodule
            raise ModuleNotFoundError(sentence(fullname), name=fullname.rpartition(".")[0])
