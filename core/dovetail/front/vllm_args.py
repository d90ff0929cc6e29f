"""Translation of vLLM's and nano-vllm's engine arguments to keys of `engine.yaml`.

One table serves `LLM(...)`, `EngineArgs`, the flags of `dovetail serve` and the documentation. An
argument that requests the default behaviour is ignored, and one with another name is renamed; both
are logged once. Any other value is rejected with the equivalent, or the section of the roadmap.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from dovetail.base.checks import among, as_number, did_you_mean, is_integer
from dovetail.base.roadmap import planned
from dovetail.config.engine import EngineConfig
from dovetail.errors import ConfigError, shown
from dovetail.front.vllm_groups import GROUPS, MACHINES, OLDER, Group
from dovetail.front.vllm_speculation import speculation_of

logger = logging.getLogger("dovetail")


class _Unset(Enum):
    """The value of an argument that isn't given."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return self.value


UNSET = _Unset.UNSET


@dataclass(frozen=True, slots=True)
class Argument:
    """Translation of one argument of another engine."""

    name: str
    key: str | None  # of `engine.yaml`; None: the argument is ignored
    translate: Callable[[Any], Mapping[str, Any] | None]  # value -> keys to set; None: rejected
    meaning: str  # how values are translated, or why the argument is ignored
    advice: str  # the error for other values; empty: the key's own check reports them
    accepted: tuple[Any, ...]  # examples
    rejected: tuple[Any, ...]  # examples
    default: Any = None  # vLLM's, accepted without a log line; None: the engine decides

    @property
    def is_switch(self) -> bool:
        """True for a boolean argument: its command-line flag takes no value."""
        examples = (self.default, *self.accepted, *self.rejected)
        return any(type(value) is bool for value in examples)

    def keys_for(self, value: Any) -> Mapping[str, Any] | None:
        """Return the keys to set, or None if the value is rejected. None sets no key."""
        keys = self.translate(value)
        return {} if keys is None and value is None else keys


def translated(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides of `EngineConfig`. Names that aren't in the table are returned unchanged.

    `UNSET` is ignored, and another argument for the same key takes precedence over vLLM's default.
    Raises `ConfigError` for a rejected value, for two arguments that set the same key, and for a
    name that looks like a misspelt one of the table.
    """
    arguments = {name: value for name, value in arguments.items() if value is not UNSET}
    for name in arguments:
        check_spelling(name)
    overrides = {name: value for name, value in arguments.items() if name not in TABLE}
    for name, value in arguments.items():
        if name not in TABLE:
            continue
        row = TABLE[name]
        keys = row.keys_for(value)
        if keys is None:
            raise ConfigError(f"{_shown(name, value)}: {row.advice}")
        is_default = among(value, (row.default,))
        given = [key for key in keys if is_given(key, overrides)]
        if given and is_default:
            continue
        if given:
            raise ConfigError(f"{name} sets {given[0]}, which is also given: leave one of them out")
        overrides |= keys
        if keys != {name: value} and not is_default:
            _log_once(row, value, keys)
    disabled = tuple(f"{section}." for section, value in overrides.items() if value is None)
    active = {key: value for key, value in overrides.items() if not key.startswith(disabled)}
    by_depth = sorted(active.items(), key=lambda item: item[0].count("."))
    return dict(by_depth)  # a section before its keys


def check_spelling(name: str) -> None:
    """Raise `ConfigError` if `name` is nearer to a name of the table than to a key of
    `engine.yaml`.

    Misspelt keys of `engine.yaml` are reported by its own check.
    """
    if name in TABLE or name.partition(".")[0] in EngineConfig.model_fields:
        return
    stem = _VERB.sub("", name)  # a shared verb alone is no similarity
    alike = [
        known
        for known in (*EngineConfig.model_fields, *TABLE)
        if did_you_mean(stem, [_VERB.sub("", known)])
    ]
    if near := did_you_mean(name, alike):
        raise ConfigError(f"{name}: unknown key{near}")


_VERB = re.compile(r"^(enable|disable|use|max|num|no)_")


def is_given(key: str, overrides: Mapping[str, Any]) -> bool:
    """Return True if an override sets this dotted key. A component's key also sets its name."""
    outer, _, option = key.partition(".")
    if key in overrides or (not option and f"{key}.name" in overrides):
        return True
    around = overrides.get(outer)
    return (
        option in around if isinstance(around, Mapping) else option == "name" and around is not None
    )


SECRETS = {"hf_token"}  # arguments whose values are never shown
_logged: set[str] = set()  # arguments whose translation was logged


def _log_once(row: Argument, value: Any, keys: Mapping[str, Any]) -> None:
    if row.name in _logged:
        return
    _logged.add(row.name)
    if keys:
        here = "here " + ", ".join(f"{key}={shown(new)}" for key, new in keys.items())
    elif row.key is None:
        here = f"ignored, {row.meaning}"
    else:
        here = f"ignored, {row.key} keeps its default"
    logger.warning("%s: %s", _shown(row.name, value), here)


def _shown(name: str, value: Any) -> str:
    return name if name in SECRETS else f"{name}={shown(value)}"


# Rows


def _fixed(name: str, *values: Any, why: str, advice: str, rejected: Any) -> Argument:
    """Row for an argument without a key: `values` request the default behaviour."""
    translate = partial(_nothing_if_among, values)
    return Argument(name, None, translate, why, advice, values, (rejected,), values[0])


def _nothing_if_among(values: tuple[Any, ...], value: Any) -> Mapping[str, Any] | None:
    return {} if among(value, values) else None


def _rows_of(group: Group) -> Iterator[Argument]:
    for name, default in group.defaults.items():
        if group.advisory:
            yield _ignored(name, default, group.reason, default)
        else:
            other = (not default) if isinstance(default, bool) else "another"
            defaults = (default, OLDER.get(name, default))
            yield _fixed(name, *defaults, why=group.reason, advice=group.reason, rejected=other)


def _ignored(name: str, example: Any, why: str, default: Any = None) -> Argument:
    """Row for an argument of which every value is ignored."""
    return Argument(name, None, lambda value: {}, why, "", (example,), (), default)


def _renamed(
    name: str,
    key: str,
    values: Mapping[Any, Any],
    advice: str,
    rejected: Any,
    default: Any = None,
) -> Argument:
    """Row for a key with another name: vLLM's value -> ours. None keeps the key's default."""
    keys = {value: {} if new is None else {key: new} for value, new in values.items()}
    meaning = (
        ", ".join(
            f"`{value!r}` is `{new!r}`"
            for value, new in values.items()
            if new is not None and new != value
        )
        or "the same"
    )
    return Argument(
        name,
        key,
        lambda value: _lookup(keys, value),
        meaning,
        advice,
        tuple(values),
        (rejected,),
        default,
    )


def _section_switch(name: str, key: str) -> Argument:
    """Row for a switch: True enables a section with its defaults, False disables it."""
    keys: Mapping[Any, Mapping[str, Any]] = {None: {}, True: {key: {}}, False: {key: None}}
    meaning = (
        "`True` is an empty section; `False` is `null`, and overrides other arguments of the "
        "section"
    )
    return Argument(
        name,
        key,
        lambda value: _lookup(keys, value),
        meaning,
        f"{name} is true or false",
        tuple(keys),
        ("yes",),
    )


def _number(name: str, key: str, example: int, automatic: Any = None) -> Argument:
    """Row for a number. None and `automatic` let the engine choose."""

    def translate(value: Any) -> Mapping[str, Any] | None:
        if value is None or among(value, (automatic,)):
            return {}
        return {key: value} if as_number(value) is not None else None

    meaning = (
        "`None` " + ("" if automatic is None else f"or `{automatic}` ") + "lets the engine choose"
    )
    return Argument(
        name,
        key,
        translate,
        meaning,
        f"{key} must be a number",
        (example, None) if automatic is None else (example, None, automatic),
        ("many",),
    )


def _ranks(name: str) -> Argument:
    """Row for the tensor parallel size: two or more ranks also select the executor."""

    def translate(value: Any) -> Mapping[str, Any] | None:
        if type(value) is not int or value < 1:
            return None
        return {} if value == 1 else {"executor.name": "dovetail:tensor", "executor.size": value}

    meaning = "`1` is the default executor, `local`; more is the executor `tensor` with this `size`"
    return Argument(
        name,
        "executor.size",
        translate,
        meaning,
        "executor.size must be a whole number, 1 or more",
        (1, 2),
        (0, "many"),
        1,
    )


def _image_limit(value: Any) -> Mapping[str, Any] | None:
    if value is None or value == {}:
        return {}
    if not isinstance(value, Mapping) or any(value.get(kind) for kind in ("audio", "video")):
        return None
    images = value.get("image")
    if images is None or not value.keys() <= {"image", "audio", "video"}:
        return None
    return {"limits.max_images": images} if is_integer(images) else None


def _same_key(
    name: str,
    values: Mapping[Any, Any],
    accepted: Any,
    meaning: str,
    rejected: tuple[Any, ...] = (),
    advice: str = "",
    default: Any = None,
) -> Argument:
    """Row for a key with the same name: vLLM's value -> ours, where they differ.

    The key's own check validates values that are neither in `values` nor in `rejected`.
    """

    def translate(value: Any) -> Mapping[str, Any] | None:
        value = _dtype_name(value)
        if among(value, rejected):
            return None
        keys = _lookup(
            {old: {} if new is None else {name: new} for old, new in values.items()}, value
        )
        return {name: value} if keys is None else keys

    return Argument(name, name, translate, meaning, advice, (*values, accepted), rejected, default)


def _dtype_name(value: Any) -> Any:
    """Return the name of a torch dtype, and any other value unchanged."""
    return str(value).removeprefix("torch.") if str(value).startswith("torch.") else value


def _lookup(values: Mapping[Any, Mapping[str, Any]], value: Any) -> Mapping[str, Any] | None:
    return next((new for old, new in values.items() if among(value, (old,))), None)


def _speculation(name: str) -> Argument:
    """Row for vLLM's settings of speculative decoding."""
    meaning = (
        "methods `ngram`, `suffix`, `mtp`, `eagle3` and `draft_model` (`model`) are drafters, "
        "`num_speculative_tokens` is `max_drafts`, other fields "
        "are options"
    )
    accepted = (
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "suffix"},
        {"model": "demo-draft", "num_speculative_tokens": 4},
        None,
    )
    rejected = (
        "small",
        *({"method": method, "model": "m"} for method in ("eagle", "medusa")),
        {"model": "some/EAGLE-head"},
    )
    return Argument(
        name, "speculation", partial(speculation_of, name), meaning, _DRAFTERS, accepted, rejected
    )


def _processors(name: str) -> Argument:
    """Row for logits processors: names of plugins are accepted, vLLM's classes rejected."""

    def translate(value: Any) -> Mapping[str, Any] | None:
        given = list(value) if isinstance(value, list | tuple) else [value]
        if any(
            callable(one) or (isinstance(one, str) and _PATH_OF_CLASS.fullmatch(one))
            for one in given
        ):
            return None
        return {} if value is None else {name: value}

    rejected = (["my.processors:MyProcessor"], ["my.processors.MyProcessor"])
    return Argument(
        name, name, translate, "names of plugins are the same", _PROCESSORS, (None, []), rejected
    )


def _pooler(name: str) -> Argument:
    """Row for vLLM's settings of pooling, as a mapping or an object of its class."""

    def translate(value: Any) -> Mapping[str, Any] | None:
        given = {} if value is None else value
        if not isinstance(given, Mapping):
            given = getattr(given, "__dict__", None)
        if given is None:
            return None
        keys: dict[str, Any] = {}
        for field, wanted in given.items():
            if wanted is None or (wanted is False and field == "enable_chunked_processing"):
                continue
            if field in ("pooling_type", "seq_pooling_type") and wanted in ("LAST", "MEAN", "CLS"):
                keys["pooling.method"] = wanted.lower()
            elif field in ("normalize", "use_activation") and type(wanted) is bool:
                keys["pooling.normalize"] = wanted
            else:
                return None
        return keys

    meaning = "`pooling_type` is `pooling.method`, `normalize` is `pooling.normalize`"
    accepted = (None, {"pooling_type": "MEAN", "normalize": False})
    return Argument(
        name,
        "pooling",
        translate,
        meaning,
        _POOLERS,
        accepted,
        ({"pooling_type": "STEP"}, {"step_tag_id": 3}, "CLS"),
    )


_DRAFTERS = (
    f"choose a drafter: speculation={{'drafter': 'suffix'}}, ngram, model, mtp, or eagle3. "
    f"For others, {planned('Models that draft')}"
)
_POOLERS = "set the engine's pooling: pooling={'method': …, 'normalize': …}"
_PROCESSORS = (
    "vLLM's classes aren't supported: a logits processor is a plugin "
    "(docs/plugins/logits_processor.md). Name it here, "
    "logits_processors=['dry'], and in requests: SamplingParams(logits_processors={'dry': {…}})"
)
# "package.module:Class" or "package.module.Class"
_PATH_OF_CLASS = re.compile(r"[\w.]+:[A-Z]\w*|\w+(\.\w+)+")
_DECIDES = "the checkpoint determines the supported tasks, and the method called selects one"
_EXPERTS = planned("Mixture of experts")
_SERVER = "set it as an option of `dovetail serve`"
_ONE_DEVICE = "one device computes"
_REVISION = "write it after the name: model='organisation/name@revision'"
_SCHEDULERS = "the scheduler decides this: choose or write one (scheduler)"
_MODEL_IMPL = "choose the component: model={'path': …, 'component': 'transformers'}"
_EDIT_CONFIG = "edit the config.json of a local copy"
SOFT_PROMPTS = (
    "prompt adapters (soft prompts) aren't supported, and vLLM has removed them, too: put the "
    "instruction into the prompt; the prefix cache "
    "keeps its K and V"
)
_OUTPUTS = "outputs contain tokens and log-probabilities"
_PROMPTS = "prompts are texts or token ids"
_TRANSFER = "K and V can't be transferred between engines"
_OFF = (False, None)

_ROWS = (
    # Devices
    _ranks("tensor_parallel_size"),
    _fixed("pipeline_parallel_size", 1, why=_ONE_DEVICE, advice=MACHINES, rejected=2),
    _fixed(
        "data_parallel_size",
        1,
        why=_ONE_DEVICE,
        advice=f"start an engine for each device (executor.device). {MACHINES}",
        rejected=2,
    ),
    _fixed(
        "distributed_executor_backend",
        None,
        "uni",
        "mp",
        why="ranks run as processes",
        advice=MACHINES,
        rejected="ray",
    ),
    _fixed("enable_expert_parallel", *_OFF, why=_ONE_DEVICE, advice=_EXPERTS, rejected=True),
    _fixed(
        "disable_custom_all_reduce",
        *_OFF,
        why="executor.all_reduce selects the method",
        advice="set executor.all_reduce=nccl for several ranks",
        rejected=True,
    ),
    _renamed(
        "device",
        "executor.device",
        {"auto": None, "cpu": "cpu", "cuda": "cuda"},
        "executor.device names a device",
        "tpu",
    ),
    _fixed("worker_use_ray", *_OFF, why=_ONE_DEVICE, advice=MACHINES, rejected=True),
    # Memory
    _ignored("swap_space", 4, "preempted requests are recomputed, not swapped"),
    _fixed(
        "cpu_offload_gb",
        0,
        why="all weights are on the device",
        advice="weights can't be offloaded: choose a smaller model or dtype",
        rejected=4,
    ),
    _fixed(
        "enable_sleep_mode",
        *_OFF,
        why="engines don't sleep",
        advice="`LLM.close()` releases the device's memory; then create a new LLM",
        rejected=True,
    ),
    _same_key("gpu_memory_utilization", {None: None}, 0.8, "`None` lets the engine choose"),
    _number("kv_cache_memory_bytes", "kv_cache_memory", 2**30),
    _number("num_gpu_blocks_override", "executor.num_pages", 512),
    _number("num_kvcache_blocks", "executor.num_pages", 512, -1),
    _number("kvcache_block_size", "block_size", 256),
    _same_key("max_num_seqs", {None: None}, 8, "`None` lets the engine choose"),
    _same_key("max_num_batched_tokens", {None: None}, 2048, "`None` lets the engine choose"),
    _same_key("max_model_len", {-1: None}, 512, "`-1` and `None` are the model's length"),
    _same_key("block_size", {None: None}, 16, "`None` is `auto`"),
    _same_key(
        "kv_cache_dtype",
        {None: None},
        "fp8",
        "`fp8` is e4m3",
        ("fp8_e5m2",),
        "K and V are stored in e4m3: fp8",
        "auto",
    ),
    _renamed(
        "calculate_kv_scales",
        "kv_cache_scales",
        {True: "calibrate", False: None},
        "kv_cache_scales is auto or calibrate",
        "yes",
        False,
    ),
    _renamed(
        "mamba_ssm_cache_dtype",
        "state_dtype",
        {"auto": None, "float32": "float32"},
        "state_dtype is float32 or bfloat16",
        "float16",
        "auto",
    ),
    # The prefix cache
    _renamed(
        "enable_prefix_caching",
        "kv_cache.reuse",
        {None: None, True: True, False: False},
        "kv_cache.reuse is true or false",
        "lru",
    ),
    _renamed(
        "prefix_caching_hash_algo",
        "kv_cache.hash",
        {"sha256": "sha256", "xxhash": "xxh3"},
        "kv_cache.hash is xxh3 or sha256",
        "builtin",
        None,
    ),
    # Steps
    _renamed(
        "enforce_eager",
        "cuda_graphs",
        {True: False, False: True},
        "cuda_graphs is true or false",
        "yes",
        False,
    ),
    _renamed(
        "async_scheduling",
        "overlap",
        {None: None, True: True, False: False},
        "overlap is true or false",
        "yes",
    ),
    _renamed(
        "scheduling_policy",
        "scheduler",
        {name: f"dovetail:{name}" for name in ("fcfs", "priority")},
        "scheduler names a policy",
        "random",
        "fcfs",
    ),
    _fixed(
        "scheduler_cls",
        None,
        why="`scheduler` selects one",
        advice="write a scheduler plugin, and set scheduler to its name",
        rejected="my.Scheduler",
    ),
    _fixed(
        "enable_chunked_prefill",
        None,
        True,
        why="prompts are always computed in chunks",
        advice="scheduler=prefill_first separates prefills from decodes",
        rejected=False,
    ),
    _fixed(
        "max_num_partial_prefills", 1, why="the scheduler decides", advice=_SCHEDULERS, rejected=2
    ),
    _fixed(
        "max_long_partial_prefills",
        1,
        why="the scheduler decides",
        advice=_SCHEDULERS,
        rejected=2,
    ),
    _fixed(
        "long_prefill_token_threshold",
        0,
        why="the scheduler decides",
        advice=_SCHEDULERS,
        rejected=1024,
    ),
    _fixed(
        "preemption_mode",
        None,
        "recompute",
        why="preempted requests are recomputed",
        advice="only recompute is supported",
        rejected="swap",
    ),
    _fixed(
        "num_scheduler_steps",
        1,
        why="every step is planned",
        advice="planning overlaps with the device (overlap): leave it out",
        rejected=8,
    ),
    _ignored("use_v2_block_manager", True, "`kv_cache` selects the manager"),
    _ignored("max_seq_len_to_capture", 8192, "CUDA graphs serve every length"),
    _fixed(
        "additional_config",
        None,
        {},
        why="components have their own options",
        advice="set the options of components: see docs/configuration.md",
        rejected={"x": 1},
    ),
    _fixed(
        "compilation_config",
        None,
        {},
        0,
        why="CUDA graphs are recorded at start-up, or at first use",
        advice="cuda_graphs is the only switch",
        rejected=3,
    ),
    _renamed(
        "attention_backend",
        "attention",
        {None: None, "TRITON_ATTN": "triton", "FLASH_ATTN": "flash_attn", "TORCH_SDPA": "torch"},
        "attention names a backend: auto, triton, flash_attn or torch",
        "FLASHINFER",
    ),
    # Model and tokenizer
    _same_key(
        "dtype",
        {"half": "float16", "float": "float32"},
        "auto",
        "`half` is `float16`, `float` is `float32`; torch dtypes are accepted",
        default="auto",
    ),
    _same_key("seed", {None: None}, 7, "`None` is 0", default=0),
    _same_key("generation_config", {"vllm": "none"}, "auto", "`vllm` is `none`", default="auto"),
    _same_key("tokenizer", {None: None}, "demo", "`None` is the model's"),
    _same_key(
        "load_format",
        {None: None, "hf": None},
        "dummy",
        "`None` and `hf` are `auto`",
        default="auto",
    ),
    _same_key("quantization", {None: None}, "fp8", "`None` is the checkpoint's format"),
    _ignored(
        "trust_remote_code",
        True,
        "code in checkpoints never runs: a model type that needs it is refused",
        False,
    ),
    _fixed(
        "model_loader_extra_config",
        None,
        {},
        why="there is one loader",
        advice="there is one loader, without options",
        rejected={"x": 1},
    ),
    _fixed(
        "worker_extension_cls",
        None,
        "",
        why="plugins extend the engine",
        advice="write a plugin: a model, sampler or executor",
        rejected="my.Worker",
    ),
    _fixed(
        "profiler_config",
        None,
        {},
        why="observers record profiles",
        advice="observers=['perfetto'] writes a trace",
        rejected={"profiler": "torch"},
    ),
    _fixed(
        "tokenizer_mode",
        "auto",
        "hf",
        why="the tokenizer is transformers'",
        advice="only auto is supported; `tokenizer` names others",
        rejected="mistral",
    ),
    _ignored(
        "skip_tokenizer_init",
        True,
        "the tokenizer is loaded on first use: token ids with detokenize=False need none",
    ),
    _fixed("revision", None, why="the newest revision is used", advice=_REVISION, rejected="v1"),
    _fixed(
        "tokenizer_revision",
        None,
        why="the newest revision is used",
        advice="write it after the name: tokenizer='organisation/name@revision'",
        rejected="v1",
    ),
    _fixed(
        "code_revision",
        None,
        why="code in checkpoints never runs",
        advice="code in checkpoints never runs: leave it out",
        rejected="v1",
    ),
    _fixed(
        "download_dir",
        None,
        why="models are in the hub's cache",
        advice="set the environment variable HF_HOME",
        rejected="/models",
    ),
    _fixed(
        "hf_token",
        None,
        why="the stored login is used",
        advice="set the environment variable HF_TOKEN, or log in: hf auth login",
        rejected="hf_x",
    ),
    _fixed(
        "hf_overrides",
        None,
        {},
        why="config.json applies",
        advice=f"{_EDIT_CONFIG}; pooling={{'score_tokens': ['yes', 'no']}} makes a generator score",
        rejected={"rope_theta": 1e6},
    ),
    _fixed(
        "hf_config",
        None,
        why="config.json applies",
        advice=_EDIT_CONFIG,
        rejected={"rope_theta": 1e6},
    ),
    _fixed(
        "eos",
        None,
        -1,
        why="the checkpoint defines its EOS",
        advice="set stop_token_ids in SamplingParams",
        rejected=2,
    ),
    _fixed(
        "rope_scaling",
        None,
        why="config.json applies",
        advice=_EDIT_CONFIG,
        rejected={"factor": 2.0},
    ),
    _fixed(
        "disable_sliding_window",
        False,
        why="config.json applies",
        advice="lower max_model_len to the window keys",
        rejected=True,
    ),
    _fixed(
        "model_impl",
        "auto",
        why="native models take precedence",
        advice=_MODEL_IMPL,
        rejected="transformers",
    ),
    _fixed(
        "config_format",
        "auto",
        "hf",
        why="config.json is read",
        advice="convert the checkpoint to transformers' layout",
        rejected="mistral",
    ),
    _fixed(
        "override_generation_config",
        None,
        {},
        why="generation_config.json applies",
        advice="set it in SamplingParams",
        rejected={"top_k": 5},
    ),
    Argument(
        "limit_mm_per_prompt",
        "limits.max_images",
        _image_limit,
        "the number of `image`; audio and video may only be 0",
        f"must be {{'image': number}}; of audio and video: {planned('Audio and video')}",
        ({"image": 4}, {"image": 2, "video": 0}, {}, None),
        ({"video": 1}, {"image": "many"}, 3),
    ),
    Argument(
        "mm_processor_kwargs",
        "media.processor",
        lambda value: {"media.processor": value} if value else {},
        "arguments of the checkpoint's image processor",
        "",
        ({"max_pixels": 1_000_000}, {}, None),
        (),
    ),
    Argument(
        "allowed_media_domains",
        "media.hosts",
        lambda value: {"media.hosts": value} if value else {},
        "hosts from which images may be fetched",
        "",
        (["images.example.com"], [], None),
        (),
    ),
    _renamed(
        "language_model_only",
        "media.images",
        {True: False, False: None},
        "must be True or False",
        "no",
        False,
    ),
    _fixed(
        "task",
        "auto",
        "generate",
        "embed",
        "embedding",
        "classify",
        "score",
        "reward",
        why=_DECIDES,
        advice=_DECIDES,
        rejected="transcribe",
    ),
    _fixed(
        "runner", "auto", "generate", "pooling", why=_DECIDES, advice=_DECIDES, rejected="draft"
    ),
    _fixed(
        "convert",
        "auto",
        "none",
        "embed",
        why=_DECIDES,
        advice=f"{_DECIDES}; {_POOLERS}",
        rejected="classify",
    ),
    # What requests ask for
    _section_switch("enable_lora", "adapters"),
    _number("max_loras", "adapters.slots", 8),
    _number("max_lora_rank", "adapters.max_rank", 64),
    _number("max_cpu_loras", "adapters.host_copies", 64),
    _fixed(
        "lora_dtype",
        None,
        "auto",
        why="adapters use the model's dtype",
        advice="adapters use the model's dtype",
        rejected="float16",
    ),
    _fixed(
        "fully_sharded_loras",
        *_OFF,
        why="adapters are split over ranks like weights",
        advice="adapters are always split over ranks",
        rejected=True,
    ),
    _fixed(
        "lora_target_modules",
        None,
        why="adapters define their modules",
        advice="each adapter defines its modules: leave it out",
        rejected=["q_proj"],
    ),
    _ignored("lora_extra_vocab_size", 256, "adapters with embeddings are refused"),
    _fixed(
        "enable_lora_bias",
        *_OFF,
        why="adapters have no biases",
        advice="adapters with biases aren't supported: merge them",
        rejected=True,
    ),
    _fixed(
        "enable_prompt_adapter",
        *_OFF,
        why="soft prompts aren't supported",
        advice=SOFT_PROMPTS,
        rejected=True,
    ),
    *(
        _fixed(name, None, 0, why="soft prompts aren't supported", advice=SOFT_PROMPTS, rejected=8)
        for name in ("max_prompt_adapters", "max_prompt_adapter_token")
    ),
    _speculation("speculative_config"),
    _fixed(
        "speculative_model",
        None,
        why="`speculation` selects the drafter",
        advice=_DRAFTERS,
        rejected="small",
    ),
    _fixed(
        "num_speculative_tokens",
        None,
        why="`speculation` sets it",
        advice="set speculation.max_drafts",
        rejected=3,
    ),
    _fixed(
        "structured_outputs_config",
        None,
        {},
        why="`grammar` selects the backend",
        advice="set grammar to the name of a backend",
        rejected={"backend": "xgrammar"},
    ),
    _renamed(
        "guided_decoding_backend",
        "grammar",
        {None: None, "auto": None, "xgrammar": "xgrammar", "guidance": "llguidance"},
        "set grammar to the name of an installed backend",
        "outlines",
    ),
    _fixed("enable_prompt_embeds", *_OFF, why=_PROMPTS, advice=_PROMPTS, rejected=True),
    _fixed(
        "enable_return_routed_experts",
        *_OFF,
        why="outputs contain tokens",
        advice="outputs contain tokens and their log-probabilities",
        rejected=True,
    ),
    *(_pooler(name) for name in ("pooler_config", "override_pooler_config")),
    *(
        _fixed(
            name,
            None,
            why="each engine computes its own K and V",
            advice=_TRANSFER,
            rejected={"kv_role": "kv_both"},
        )
        for name in ("kv_transfer_config", "kv_events_config", "ec_transfer_config")
    ),
    _fixed(
        "reasoning_parser",
        None,
        "",
        why="only the server parses text",
        advice=_SERVER,
        rejected="qwen3",
    ),
    _processors("logits_processors"),
    _fixed(
        "logprobs_mode",
        "raw_logprobs",
        why="log-probabilities are of the raw distribution",
        advice="only raw_logprobs is supported",
        rejected="raw_logits",
    ),
    _number("max_logprobs", "limits.max_logprobs", 20),
    # What it tells
    _renamed(
        "disable_log_stats",
        "observers",
        {True: None, False: ["log"]},
        "observers=['log'] logs",
        "no",
        True,
    ),
    _fixed(
        "disable_log_requests",
        None,
        True,
        why="requests aren't logged",
        advice="use an observer, which gets an event for each request",
        rejected=False,
    ),
    _fixed(
        "enable_log_requests",
        *_OFF,
        why="requests aren't logged",
        advice="use an observer, which gets an event for each request",
        rejected=True,
    ),
    _ignored("use_tqdm_on_load", True, "`LLM` shows no progress bar while it loads"),
    _fixed(
        "served_model_name", None, why="`LLM` isn't a server", advice=_SERVER, rejected="my-model"
    ),
    *(row for group in GROUPS for row in _rows_of(group)),
    Argument(
        "otlp_traces_endpoint",
        "observers",
        lambda value: (
            {"observers": [{"name": "dovetail:otlp", "endpoint": value}]}
            if isinstance(value, str)
            else None
        ),
        "the observer `otlp` with this `endpoint`",
        "must be a URL; the observer otlp sends spans to it",
        ("http://localhost:4318/v1/traces", None),
        (4318,),
    ),
)

TABLE: dict[str, Argument] = {row.name: row for row in _ROWS}

ARGUMENTS: Mapping[str, bool] = {
    name: field.annotation is bool
    for name, field in EngineConfig.model_fields.items()
    if name != "model"
} | {
    row.name: row.is_switch for row in TABLE.values()
}  # of `LLM()`, except the model; True: a switch, whose flag takes no value
