"""Error messages for names and modules that vLLM has and `dovetail.compat.vllm` lacks. Each says what to use instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from dovetail.base.checks import did_you_mean
from dovetail.front.vllm_args import SOFT_PROMPTS
from dovetail.front.vllm_groups import TEXT_ONLY

PACKAGE = "dovetail.compat.vllm"
_PLUGIN = "write a plugin instead: see docs/plugins"
_OBSERVER = "write an observer plugin, and name it: observers; LLM.get_metrics() returns counters and gauges"
_CONFIG = "arguments of LLM() say what there is to configure"
INSTEAD = {  # the beginning of a module or name -> what to do instead
    "multimodal": TEXT_ONLY,
    "assets": TEXT_ONLY,
    "PoolerConfig": "leave it out: encode(…, pooling_task=…) names the task, and pooling={'method': …} of LLM() the method",
    "ProfilerConfig": "observers=['perfetto'] writes a trace",
    "config.kv_transfer": "an engine keeps its K and V to itself",
    "KVTransferConfig": "an engine keeps its K and V to itself",
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
    "distributed.kv_transfer": "an engine keeps its K and V to itself",
    "distributed": "`close()` ends an engine with all its processes: leave it out",
    "v1.metrics": "LLM.get_metrics() returns counters and gauges",
    "renderers": "`generate` takes the text, or its token ids",
    "LateChunkingParams": "encode(…, pooling_task='token_embed') returns a vector for each token: take the mean of each chunk's",
    "benchmarks": "`python -m bench` and `dovetail lab` measure",
    "platforms": "the executor chooses the device: leave it out",
    "transformers_utils": "transformers reads configs and tokenizers",
    "entrypoints": "`dovetail serve` is the server",
    "utils.network_utils": "there are no ports to open: leave it out",
    "utils.mem_utils": "`close()` gives the device's memory back",
    "usage": "no usage is reported: leave it out",
    "logger": "Python's logging: the logger `dovetail`",
    "plugins": _PLUGIN,
    "tokenizers": "LLM.get_tokenizer() is transformers' tokenizer",
    "envs": "no environment variables of vLLM's are read",
    "PromptType": "a prompt is a text, a list of token ids, TextPrompt or TokensPrompt",
}


def sentence(fullname: str) -> str:
    """Return what to say of a module or name that this package lacks."""
    module, _, name = fullname.rpartition(".")
    asked = (fullname.removeprefix(f"{PACKAGE}."), name)
    why = next(
        (why for prefix, why in INSTEAD.items() if any(one.startswith(prefix) for one in asked)),
        None,
    )
    names = getattr(sys.modules.get(module), "__all__", ())
    return f"{fullname}: {why or f'Dovetail has nothing of that name{did_you_mean(name, names)}'}"


def missing(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module: it raises `AttributeError` with a sentence, so that `hasattr` is false. `from module import name` would
    replace that by a sentence of Python's, but asks the finders of submodules before, and thus `MissingModules`, if the module has a `__path__`."""

    def look_up(name: str) -> Any:
        if name == "__path__":  # of a module that is no package
            return []
        raise AttributeError(sentence(f"{module}.{name}"))

    return look_up


class MissingModules(MetaPathFinder):
    """Last finder: explains which of vLLM's modules and names aren't here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raise `ModuleNotFoundError` for a module or name of this package; return None for any other."""
        if fullname.startswith(f"{PACKAGE}."):
            # `from … import` drops errors whose name is that of the missing submodule, and says less itself
            raise ModuleNotFoundError(sentence(fullname), name=fullname.rpartition(".")[0])
