"""Arguments as vLLM and nano-vllm name them, in Dovetail's words: one table, which `LLM(...)`, `EngineArgs` and the documentation use.

An argument that means what is so anyway is left out, one that has another name here is renamed; both with one line of notice. Any other value is
refused, naming what does the same here, or the section of the roadmap that plans it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from dovetail.base.checks import among, as_number, did_you_mean
from dovetail.base.roadmap import planned
from dovetail.config.engine import EngineConfig
from dovetail.errors import ConfigError, shown
from dovetail.front.vllm_groups import GROUPS, MACHINES, OLDER, TEXT_ONLY, Group
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
    """How an argument of another engine is translated."""

    name: str
    key: str | None  # of `engine.yaml`; None: it is left out
    becomes: Callable[
        [Any], Mapping[str, Any] | None
    ]  # the keys to set instead of it; None: this value is refused
    says: str  # how values are translated, or why it can be left out
    otherwise: str  # what is said of any other value; empty: the key's own check says it
    taken: tuple[Any, ...]  # examples
    refused: tuple[Any, ...]
    default: Any = None  # vLLM's, which is accepted without a word; None: the engine decides

    @property
    def is_switch(self) -> bool:
        """True if it is on or off: as a flag of a command line it takes no value."""
        return any(type(value) is bool for value in (self.default, *self.taken, *self.refused))

    def instead_of(self, value: Any) -> Mapping[str, Any] | None:
        """Return the keys to set; None if the value is refused. A value of None asks for nothing."""
        instead = self.becomes(value)
        return {} if instead is None and value is None else instead


def translated(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return overrides of `EngineConfig`: keys that aren't in the table stay as they are. Raises `ConfigError` for a value that is refused, for two
    arguments that set the same key, and for a name that seems to be a misspelt one of the table.

    `UNSET` is left out, and vLLM's default gives way to another argument for the same key."""
    arguments = {name: value for name, value in arguments.items() if value is not UNSET}
    for name in arguments:
        check_spelling(name)
    overrides = {name: value for name, value in arguments.items() if name not in TABLE}
    for name, value in arguments.items():
        if name not in TABLE:
            continue
        row = TABLE[name]
        instead = row.instead_of(value)
        if instead is None:
            raise ConfigError(f"{_shown(name, value)}: {row.otherwise}")
        is_default = among(value, (row.default,))
        given = [key for key in instead if is_given(key, overrides)]
        if given and is_default:
            continue
        if given:
            raise ConfigError(
                f"{name} sets {given[0]}, which is given as well: leave one of them out"
            )
        overrides |= instead
        if instead != {name: value} and not is_default:
            _tell(row, value, instead)
    off = [section for section, value in overrides.items() if value is None]
    kept = {
        key: value
        for key, value in overrides.items()
        if not any(key.startswith(f"{section}.") for section in off)
    }
    return dict(
        sorted(kept.items(), key=lambda item: item[0].count("."))
    )  # a section before its keys


def check_spelling(name: str) -> None:
    """Raises `ConfigError` if `name` is nearer to one of the table than to any key of `engine.yaml`, whose check knows only those keys."""
    if name in TABLE or name.partition(".")[0] in EngineConfig.model_fields:
        return
    stem = _VERB.sub("", name)  # what it is about: names that only share a verb are no hint
    alike = [
        known
        for known in (*EngineConfig.model_fields, *TABLE)
        if did_you_mean(stem, [_VERB.sub("", known)])
    ]
    if near := did_you_mean(name, alike):
        raise ConfigError(f"{name}: unknown key{near}")


_VERB = re.compile(r"^(enable|disable|use|max|num|no)_")


def is_given(key: str, overrides: Mapping[str, Any]) -> bool:
    """True if an override sets this dotted key already. A component's key sets its name, too."""
    outer, _, option = key.partition(".")
    if key in overrides or (not option and f"{key}.name" in overrides):
        return True
    around = overrides.get(outer)
    return (
        option in around if isinstance(around, Mapping) else option == "name" and around is not None
    )


SECRETS = {"hf_token"}  # arguments whose values are never shown
_told: set[str] = set()  # names of arguments: one line each is enough


def _tell(row: Argument, value: Any, instead: Mapping[str, Any]) -> None:
    if row.name in _told:
        return
    _told.add(row.name)
    if instead:
        here = "here " + ", ".join(f"{key}={shown(new)}" for key, new in instead.items())
    else:
        here = (
            f"left out, {row.says}" if row.key is None else f"left out, {row.key} has its default"
        )
    logger.warning("%s: %s", _shown(row.name, value), here)


def _shown(name: str, value: Any) -> str:
    return name if name in SECRETS else f"{name}={shown(value)}"  # which is nobody else's business


# Rows


def _anyway(name: str, *values: Any, why: str, otherwise: str, refused: Any) -> Argument:
    """These values mean what is so anyway."""
    becomes = partial(_nothing_if_among, values)
    return Argument(name, None, becomes, why, otherwise, values, (refused,), values[0])


def _nothing_if_among(values: tuple[Any, ...], value: Any) -> Mapping[str, Any] | None:
    return {} if among(value, values) else None


def _rows_of(group: Group) -> Iterator[Argument]:
    for name, default in group.defaults.items():
        if group.advisory:
            yield _never_matters(name, default, group.reason, default)
        else:
            other = (not default) if isinstance(default, bool) else "another"
            defaults = (default, OLDER.get(name, default))
            yield _anyway(name, *defaults, why=group.reason, otherwise=group.reason, refused=other)


def _never_matters(name: str, example: Any, why: str, default: Any = None) -> Argument:
    """No value changes anything."""
    return Argument(name, None, lambda value: {}, why, "", (example,), (), default)


def _renamed(
    name: str,
    key: str,
    values: Mapping[Any, Any],
    otherwise: str,
    refused: Any,
    default: Any = None,
) -> Argument:
    """These values have others here; a value of None leaves the key to its default."""
    instead = {value: {} if new is None else {key: new} for value, new in values.items()}
    says = (
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
        lambda value: _look_up(instead, value),
        says,
        otherwise,
        tuple(values),
        (refused,),
        default,
    )


def _switch_of_section(name: str, key: str) -> Argument:
    """True gives a section its defaults, False takes it away, with what other arguments set of it."""
    instead: Mapping[Any, Mapping[str, Any]] = {None: {}, True: {key: {}}, False: {key: None}}
    says = "`True` is an empty section, `False` is `null`, whatever other arguments say of it"
    return Argument(
        name,
        key,
        lambda value: _look_up(instead, value),
        says,
        f"{name} is true or false",
        tuple(instead),
        ("yes",),
    )


def _number(name: str, key: str, example: int, automatic: Any = None) -> Argument:
    """A number, as here; `automatic` leaves it to the engine."""

    def becomes(value: Any) -> Mapping[str, Any] | None:
        if value is None or among(value, (automatic,)):
            return {}
        return {key: value} if as_number(value) is not None else None

    says = (
        "`None` " + ("" if automatic is None else f"or `{automatic}` ") + "leaves it to the engine"
    )
    return Argument(
        name,
        key,
        becomes,
        says,
        f"{key} must be a number",
        (example, None) if automatic is None else (example, None, automatic),
        ("many",),
    )


def _ranks(name: str) -> Argument:
    """The number of ranks over which a model is split: two or more name the executor, too."""

    def becomes(value: Any) -> Mapping[str, Any] | None:
        if type(value) is not int or value < 1:
            return None
        return {} if value == 1 else {"executor.name": "dovetail:tensor", "executor.size": value}

    says = (
        "`1` is the executor `local`, as by default; more is the executor `tensor` with this `size`"
    )
    return Argument(
        name,
        "executor.size",
        becomes,
        says,
        "executor.size must be a whole number, 1 or more",
        (1, 2),
        (0, "many"),
        1,
    )


def _same_key(
    name: str,
    values: Mapping[Any, Any],
    taken: Any,
    says: str,
    refused: tuple[Any, ...] = (),
    otherwise: str = "",
    default: Any = None,
) -> Argument:
    """A key of `engine.yaml` too: some values have other names here, None for the default, some are refused; the rest is the key's own business."""

    def becomes(value: Any) -> Mapping[str, Any] | None:
        value = _plain(value)
        if among(value, refused):
            return None
        instead = _look_up(
            {old: {} if new is None else {name: new} for old, new in values.items()}, value
        )
        return {name: value} if instead is None else instead

    return Argument(name, name, becomes, says, otherwise, (*values, taken), refused, default)


def _plain(value: Any) -> Any:
    """A dtype of torch as its name."""
    return str(value).removeprefix("torch.") if str(value).startswith("torch.") else value


def _look_up(values: Mapping[Any, Mapping[str, Any]], value: Any) -> Mapping[str, Any] | None:
    return next((new for old, new in values.items() if among(value, (old,))), None)


def _speculation(name: str) -> Argument:
    """vLLM's settings of speculative decoding."""
    says = (
        "methods `ngram`, `suffix`, `mtp`, `eagle3` and `draft_model` (`model`) are drafters, `num_speculative_tokens` is `max_drafts`, other fields "
        "are options"
    )
    taken = (
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "suffix"},
        {"model": "demo-draft", "num_speculative_tokens": 4},
        None,
    )
    refused = (
        "small",
        *({"method": method, "model": "m"} for method in ("eagle", "medusa")),
        {"model": "some/EAGLE-head"},
    )
    return Argument(
        name, "speculation", partial(speculation_of, name), says, _DRAFTERS, taken, refused
    )


def _processors(name: str) -> Argument:
    """Accept names of plugins; reject vLLM's classes and their paths."""

    def becomes(value: Any) -> Mapping[str, Any] | None:
        given = list(value) if isinstance(value, list | tuple) else [value]
        if any(
            callable(one) or (isinstance(one, str) and _PATH_OF_CLASS.fullmatch(one))
            for one in given
        ):
            return None
        return {} if value is None else {name: value}

    refused = (["my.processors:MyProcessor"], ["my.processors.MyProcessor"])
    return Argument(
        name, name, becomes, "names of plugins are the same", _PROCESSORS, (None, []), refused
    )


def _pooler(name: str) -> Argument:
    """vLLM's settings of pooling, as a mapping or an object of its class."""

    def becomes(value: Any) -> Mapping[str, Any] | None:
        given = (
            value
            if isinstance(value, Mapping)
            else getattr(value, "__dict__", None)
            if value is not None
            else {}
        )
        if given is None:
            return None
        instead: dict[str, Any] = {}
        for field, wanted in given.items():
            if wanted is None or (wanted is False and field == "enable_chunked_processing"):
                continue
            if field in ("pooling_type", "seq_pooling_type") and wanted in ("LAST", "MEAN", "CLS"):
                instead["pooling.method"] = wanted.lower()
            elif field in ("normalize", "use_activation") and type(wanted) is bool:
                instead["pooling.normalize"] = wanted
            else:
                return None
        return instead

    says = "`pooling_type` is `pooling.method`, `normalize` is `pooling.normalize`"
    taken = (None, {"pooling_type": "MEAN", "normalize": False})
    return Argument(
        name,
        "pooling",
        becomes,
        says,
        _POOLERS,
        taken,
        ({"pooling_type": "STEP"}, {"step_tag_id": 3}, "CLS"),
    )


_DRAFTERS = f"choose a drafter: speculation={{'drafter': 'suffix'}}, ngram, model, mtp, or eagle3. For others, {planned('Models that draft')}"
_POOLERS = "say it of this engine's pooling: pooling={'method': …, 'normalize': …}"
_PROCESSORS = (
    "vLLM's classes don't run here: a logits processor is a plugin (docs/plugins/logits_processor.md), which is named here, "
    "logits_processors=['dry'], and by requests: SamplingParams(logits_processors={'dry': {…}})"
)
_PATH_OF_CLASS = re.compile(
    r"[\w.]+:[A-Z]\w*|\w+(\.\w+)+"
)  # "package.module:Class" or "package.module.Class"
_DECIDES = "the checkpoint decides what it can do, and each call says what to compute"
_EXPERTS = planned("Mixture of experts")
_SERVER = "that is the server's business: an option of `dovetail serve`"
_ONE_DEVICE = "one device computes"
_DOWNLOAD = "name a local directory as the model: `hf download` fetches any revision to one"
_SCHEDULERS = "a scheduler decides that: choose or write one (scheduler)"
_MODEL_IMPL = "name the component: model={'path': …, 'component': 'transformers'}"
_EDIT_CONFIG = "edit the config.json of a local copy"
SOFT_PROMPTS = (
    "prompt adapters (soft prompts) aren't served, and vLLM has dropped them, too: hardly any model comes with one; write the instruction into the "
    "prompt, whose K and V the prefix cache keeps"
)
_OUTPUTS = "outputs have tokens and log-probabilities"
_PROMPTS = "prompts are texts or token ids"
_TRANSFER = "an engine keeps its K and V to itself"
_OFF = (False, None)

_ROWS = (
    # Devices
    _ranks("tensor_parallel_size"),
    _anyway("pipeline_parallel_size", 1, why=_ONE_DEVICE, otherwise=MACHINES, refused=2),
    _anyway(
        "data_parallel_size",
        1,
        why=_ONE_DEVICE,
        otherwise=f"start an engine for each device (executor.device). {MACHINES}",
        refused=2,
    ),
    _anyway(
        "distributed_executor_backend",
        None,
        "uni",
        "mp",
        why="ranks are processes of this host",
        otherwise=MACHINES,
        refused="ray",
    ),
    _anyway("enable_expert_parallel", *_OFF, why=_ONE_DEVICE, otherwise=_EXPERTS, refused=True),
    _anyway(
        "disable_custom_all_reduce",
        *_OFF,
        why="executor.all_reduce decides",
        otherwise="set executor.all_reduce=nccl for several ranks; one has nothing to reduce",
        refused=True,
    ),
    _renamed(
        "device",
        "executor.device",
        {"auto": None, "cpu": "cpu", "cuda": "cuda"},
        "executor.device names a device",
        "tpu",
    ),
    _anyway("worker_use_ray", *_OFF, why=_ONE_DEVICE, otherwise=MACHINES, refused=True),
    # Memory
    _never_matters(
        "swap_space", 4, "a request that is preempted is computed again, nothing is swapped"
    ),
    _anyway(
        "cpu_offload_gb",
        0,
        why="all weights are on the device",
        otherwise="weights can't be offloaded: choose a smaller model or dtype",
        refused=4,
    ),
    _anyway(
        "enable_sleep_mode",
        *_OFF,
        why="nothing sleeps",
        otherwise="`LLM.close()` gives the device's memory back; make a new LLM then",
        refused=True,
    ),
    _same_key("gpu_memory_utilization", {None: None}, 0.8, "`None` leaves it to the engine"),
    _number("kv_cache_memory_bytes", "kv_cache_memory", 2**30),
    _number("num_gpu_blocks_override", "executor.num_blocks", 512),
    _number("num_kvcache_blocks", "executor.num_blocks", 512, -1),
    _number("kvcache_block_size", "block_size", 256),
    _same_key("max_num_seqs", {None: None}, 8, "`None` leaves it to the engine"),
    _same_key("max_num_batched_tokens", {None: None}, 2048, "`None` leaves it to the engine"),
    _same_key("max_model_len", {-1: None}, 512, "`-1` is the model's own length, as `None`"),
    _same_key("block_size", {None: None}, 16, "`None` is `auto`"),
    _same_key(
        "kv_cache_dtype",
        {None: None},
        "fp8",
        "`fp8` is e4m3",
        ("fp8_e5m2",),
        "K and V are kept in e4m3: fp8",
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
    _anyway(
        "scheduler_cls",
        None,
        why="`scheduler` chooses one",
        otherwise="write a scheduler plugin, and name it: scheduler",
        refused="my.Scheduler",
    ),
    _anyway(
        "enable_chunked_prefill",
        None,
        True,
        why="prompts are always computed in chunks",
        otherwise="scheduler=prefill_first keeps them apart",
        refused=False,
    ),
    _anyway(
        "max_num_partial_prefills", 1, why="the scheduler decides", otherwise=_SCHEDULERS, refused=2
    ),
    _anyway(
        "max_long_partial_prefills",
        1,
        why="the scheduler decides",
        otherwise=_SCHEDULERS,
        refused=2,
    ),
    _anyway(
        "long_prefill_token_threshold",
        0,
        why="the scheduler decides",
        otherwise=_SCHEDULERS,
        refused=1024,
    ),
    _anyway(
        "preemption_mode",
        None,
        "recompute",
        why="preemption is by computing again",
        otherwise="only recompute is there",
        refused="swap",
    ),
    _anyway(
        "num_scheduler_steps",
        1,
        why="each step is planned",
        otherwise="overlap hides the time of planning; leave it out",
        refused=8,
    ),
    _never_matters("use_v2_block_manager", True, "there is one: `kv_cache` chooses it"),
    _never_matters("max_seq_len_to_capture", 8192, "CUDA graphs serve every length"),
    _anyway(
        "additional_config",
        None,
        {},
        why="there is nothing to add to",
        otherwise="options belong to components: see configuration",
        refused={"x": 1},
    ),
    _anyway(
        "compilation_config",
        None,
        {},
        0,
        why="CUDA graphs are recorded at the start",
        otherwise="cuda_graphs is the only switch",
        refused=3,
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
        "`half` is `float16`, `float` is `float32`; torch's dtypes are understood",
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
    _same_key("quantization", {None: None}, "fp8", "`None` is as the checkpoint says"),
    _never_matters(
        "trust_remote_code",
        True,
        "a checkpoint's code never runs: a model type that is defined only there is refused",
        False,
    ),
    _anyway(
        "model_loader_extra_config",
        None,
        {},
        why="there is one loader",
        otherwise="there is one loader, without options",
        refused={"x": 1},
    ),
    _anyway(
        "worker_extension_cls",
        None,
        "",
        why="a plugin extends the engine",
        otherwise="write a plugin: a model, sampler or executor",
        refused="my.Worker",
    ),
    _anyway(
        "profiler_config",
        None,
        {},
        why="observers tell",
        otherwise="observers=['perfetto'] writes a trace",
        refused={"profiler": "torch"},
    ),
    _anyway(
        "tokenizer_mode",
        "auto",
        "hf",
        why="the tokenizer is transformers'",
        otherwise="only auto is supported; `tokenizer` names others",
        refused="mistral",
    ),
    _never_matters(
        "skip_tokenizer_init",
        True,
        "the tokenizer is loaded when a text needs it: give token ids and detokenize=False to do without",
    ),
    _anyway("revision", None, why="the newest is taken", otherwise=_DOWNLOAD, refused="v1"),
    _anyway(
        "tokenizer_revision", None, why="the newest is taken", otherwise=_DOWNLOAD, refused="v1"
    ),
    _anyway(
        "code_revision",
        None,
        why="a checkpoint's code never runs",
        otherwise="a checkpoint's code never runs: leave it out",
        refused="v1",
    ),
    _anyway(
        "download_dir",
        None,
        why="models are where the hub's cache is",
        otherwise="set the environment variable HF_HOME",
        refused="/models",
    ),
    _anyway(
        "hf_token",
        None,
        why="the hub's own login is used",
        otherwise="set the environment variable HF_TOKEN, or log in: hf auth login",
        refused="hf_x",
    ),
    _anyway(
        "hf_overrides",
        None,
        {},
        why="config.json holds",
        otherwise=f"{_EDIT_CONFIG}; pooling={{'score_tokens': ['yes', 'no']}} makes a generator score",
        refused={"rope_theta": 1e6},
    ),
    _anyway(
        "hf_config",
        None,
        why="config.json holds",
        otherwise=_EDIT_CONFIG,
        refused={"rope_theta": 1e6},
    ),
    _anyway(
        "eos",
        None,
        -1,
        why="the checkpoint names its EOS",
        otherwise="say it in SamplingParams: stop_token_ids",
        refused=2,
    ),
    _anyway(
        "rope_scaling",
        None,
        why="config.json holds",
        otherwise=_EDIT_CONFIG,
        refused={"factor": 2.0},
    ),
    _anyway(
        "disable_sliding_window",
        False,
        why="config.json holds",
        otherwise="lower max_model_len to the window instead",
        refused=True,
    ),
    _anyway(
        "model_impl",
        "auto",
        why="native models come first",
        otherwise=_MODEL_IMPL,
        refused="transformers",
    ),
    _anyway(
        "config_format",
        "auto",
        "hf",
        why="config.json is read",
        otherwise="convert the checkpoint to transformers' layout",
        refused="mistral",
    ),
    _anyway(
        "override_generation_config",
        None,
        {},
        why="generation_config.json holds",
        otherwise="say it in SamplingParams",
        refused={"top_k": 5},
    ),
    _anyway(
        "limit_mm_per_prompt", None, {}, why=TEXT_ONLY, otherwise=TEXT_ONLY, refused={"image": 1}
    ),
    _anyway(
        "mm_processor_kwargs", None, {}, why=TEXT_ONLY, otherwise=TEXT_ONLY, refused={"size": 1}
    ),
    _anyway(
        "task",
        "auto",
        "generate",
        "embed",
        "embedding",
        "classify",
        "score",
        "reward",
        why=_DECIDES,
        otherwise=_DECIDES,
        refused="transcribe",
    ),
    _anyway(
        "runner", "auto", "generate", "pooling", why=_DECIDES, otherwise=_DECIDES, refused="draft"
    ),
    _anyway(
        "convert",
        "auto",
        "none",
        "embed",
        why=_DECIDES,
        otherwise=f"{_DECIDES}; {_POOLERS}",
        refused="classify",
    ),
    # What requests ask for
    _switch_of_section("enable_lora", "adapters"),
    _number("max_loras", "adapters.slots", 8),
    _number("max_lora_rank", "adapters.max_rank", 64),
    _number("max_cpu_loras", "adapters.host_copies", 64),
    _anyway(
        "lora_dtype",
        None,
        "auto",
        why="adapters have the model's type",
        otherwise="adapters have the model's type",
        refused="float16",
    ),
    _anyway(
        "fully_sharded_loras",
        *_OFF,
        why="ranks share adapters as they do weights",
        otherwise="ranks share them already",
        refused=True,
    ),
    _anyway(
        "lora_target_modules",
        None,
        why="adapters name modules",
        otherwise="each adapter names its modules: leave it out",
        refused=["q_proj"],
    ),
    _never_matters("lora_extra_vocab_size", 256, "adapters of embeddings are refused"),
    _anyway(
        "enable_lora_bias",
        *_OFF,
        why="adapters have no biases",
        otherwise="adapters with biases aren't served: merge them",
        refused=True,
    ),
    _anyway(
        "enable_prompt_adapter",
        *_OFF,
        why="there are no soft prompts",
        otherwise=SOFT_PROMPTS,
        refused=True,
    ),
    *(
        _anyway(name, None, 0, why="there are no soft prompts", otherwise=SOFT_PROMPTS, refused=8)
        for name in ("max_prompt_adapters", "max_prompt_adapter_token")
    ),
    _speculation("speculative_config"),
    _anyway(
        "speculative_model", None, why="`speculation` chooses", otherwise=_DRAFTERS, refused="small"
    ),
    _anyway(
        "num_speculative_tokens",
        None,
        why="`speculation` says it",
        otherwise="set speculation.max_drafts",
        refused=3,
    ),
    _anyway(
        "structured_outputs_config",
        None,
        {},
        why="grammar decides",
        otherwise="name the backend: grammar",
        refused={"backend": "xgrammar"},
    ),
    _renamed(
        "guided_decoding_backend",
        "grammar",
        {None: None, "auto": None, "xgrammar": "xgrammar", "guidance": "llguidance"},
        "name a backend that is installed: grammar",
        "outlines",
    ),
    _anyway("enable_prompt_embeds", *_OFF, why=_PROMPTS, otherwise=_PROMPTS, refused=True),
    _anyway(
        "enable_return_routed_experts",
        *_OFF,
        why="outputs have tokens",
        otherwise="outputs have tokens and their log-probabilities",
        refused=True,
    ),
    *(_pooler(name) for name in ("pooler_config", "override_pooler_config")),
    *(
        _anyway(
            name,
            None,
            why="one engine computes all",
            otherwise=_TRANSFER,
            refused={"kv_role": "kv_both"},
        )
        for name in ("kv_transfer_config", "kv_events_config", "ec_transfer_config")
    ),
    _anyway(
        "reasoning_parser",
        None,
        "",
        why="text is parsed by the server alone",
        otherwise=_SERVER,
        refused="qwen3",
    ),
    _processors("logits_processors"),
    _anyway(
        "logprobs_mode",
        "raw_logprobs",
        why="they are those of the raw distribution",
        otherwise="only raw_logprobs is there",
        refused="raw_logits",
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
    _anyway(
        "disable_log_requests",
        None,
        True,
        why="no request is logged",
        otherwise="an observer receives an event for each request, and can log it",
        refused=False,
    ),
    _anyway(
        "enable_log_requests",
        *_OFF,
        why="no request is logged",
        otherwise="an observer receives an event for each request, and can log it",
        refused=True,
    ),
    _never_matters("use_tqdm_on_load", True, "`LLM` shows no bar while it loads"),
    _anyway(
        "served_model_name", None, why="`LLM` serves nothing", otherwise=_SERVER, refused="my-model"
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
        "it must be a URL, to which the observer otlp sends spans",
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
}  # those of `LLM()` besides the model; True: a switch, without a value on a command line
