"""`EngineConfig`: all settings of `engine.yaml`, including the names of components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    InstanceOf,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from dovetail.api.component import Kind
from dovetail.base.where import KeyPath, Where, explain, unknown_key
from dovetail.base.yaml_source import parse_yaml, read_yaml
from dovetail.config.limits import Limits
from dovetail.errors import ConfigError, shown
from dovetail.registry.models import tokenizer_named
from dovetail.registry.plugin import NAMESPACE
from dovetail.registry.registry import Registry, attention_candidates, chosen_grammar
from dovetail.registry.resolved import ResolvedComponent
from dovetail.registry.selection import PluginSelection

if TYPE_CHECKING:
    from dovetail.api.executor import ComponentRef, ExecutorConfig

YAML_SUFFIXES = (".yaml", ".yml")

MAX_COUNT = 2**31 - 1  # tokens, rows or blocks: devices count in 32 bits
# of adapters
MAX_SLOTS = 4096
MAX_RANK = 512
MAX_DRAFTS = 64  # a step of so many lines a row takes longer than drafts of that length ever save

TIERS_HOST_MEMORY = 4 * 2**30  # bytes of the host pool that tiers get by default

COMPONENT_KEYS: dict[str, Kind] = {  # key of the config -> kind of component
    "tokenizer": "tokenizer",  # or a model's name
    "scheduler": "scheduler",
    "kv_cache": "kv_cache",
    "attention": "attention",
    "sampler": "sampler",
    "logits_processors": "logits_processor",
    "grammar": "grammar",
    "executor": "executor",
    "kv_tiers": "kv_tier",
    "observers": "observer",
    "speculation.drafter": "drafter",
}
LISTS = ("observers", "logits_processors", "kv_tiers")  # those keys that hold several components


@dataclass(frozen=True, slots=True)
class ComponentChoice:
    """A component and its options: `fcfs`, or `{name: vtc, input_weight: 2}`. Errors say `where` it
    was chosen."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    where: Where | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """The name as people know it: that of a built-in without "dovetail:"."""
        return self.name.removeprefix(f"{NAMESPACE}:")

    def plain(self) -> str | dict[str, Any]:
        """Return the choice as plain values for YAML."""
        return {"name": self.name, **self.options} if self.options else self.name


def _as_model_choice(value: Any) -> Any:
    if isinstance(value, str):
        return {"path": value}
    if not isinstance(value, Mapping | ModelChoice):
        raise ValueError(
            f"expected a model's name, or a mapping with 'path' and 'component', got {shown(value)}"
        )
    return value


def _built_in(name: str) -> ComponentChoice:
    """Return a default by its full name, so that installing a component with the same short name
    doesn't change it."""
    return ComponentChoice(f"{NAMESPACE}:{name}")


def _as_choice(value: Any) -> Any:
    """Make a `ComponentChoice` from a name, or from a mapping with a name. Raises `ValueError`, as
    pydantic expects."""
    if isinstance(value, ComponentChoice):
        return value
    if isinstance(value, str):
        return ComponentChoice(value)
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError(
            f"expected a component's name, or a mapping with 'name' and its options, got "
            f"{shown(value)}"
        )
    return ComponentChoice(
        value["name"], {key: option for key, option in value.items() if key != "name"}
    )


def _as_tokenizer(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else _as_choice(value)


def _as_choices(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list of components, got {shown(value)}")
    return tuple(value)  # strict mode expects one


def _as_block_size(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or not 1 <= value <= MAX_COUNT):
        raise ValueError(
            f"expected auto or an integer of 1 or more, up to {MAX_COUNT}, got {shown(value)}"
        )
    return value


_BYTE_SIZE = TypeAdapter(ByteSize)


def _as_bytes(value: Any) -> Any:
    if value is None or type(value) is int:
        return value
    try:
        return int(_BYTE_SIZE.validate_python(value, strict=False))
    except ValidationError:
        raise ValueError(
            f"expected a size like 4GiB, or a number of bytes, got {shown(value)}"
        ) from None


_Bytes = Annotated[int, Field(gt=0, lt=2**63)]
_Memory = Annotated[
    _Bytes | None, BeforeValidator(_as_bytes, json_schema_input_type=int | str | None)
]
Choice = Annotated[
    InstanceOf[ComponentChoice], BeforeValidator(_as_choice), PlainSerializer(ComponentChoice.plain)
]


class ModelChoice(BaseModel):
    """A model's path and, optionally, the component that serves it. A string is the path."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    path: Annotated[str, Field(min_length=1)]
    """A bundled model, a local directory, or a Hugging Face hub id."""

    component: Choice | None = None
    """The component of kind model that serves it, such as "distribution:name". null: selected by
    the `architectures` of its config.json; the built-in one takes precedence."""

    def __str__(self) -> str:
        return self.path

    def plain(self) -> str | dict[str, Any]:
        """Return the choice as plain values for YAML."""
        return (
            self.path
            if self.component is None
            else {"path": self.path, "component": self.component.plain()}
        )


class Speculation(BaseModel):
    """Speculative decoding: steps that check several guessed tokens at once. It changes no
    token."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    drafter: Choice = _built_in("suffix")
    """The drafter, which proposes the next tokens of requests."""

    max_drafts: Annotated[int, Field(ge=1, le=MAX_DRAFTS)] = 8
    """Maximum number of drafts that a request checks in a step. The engine checks fewer where more
    don't pay; `SamplingParams.max_drafts` lowers it for a request."""

    timeout_s: Annotated[float, Field(gt=0, le=60, allow_inf_nan=False)] = 0.05
    """Timeout of the drafter in a step, in seconds. A drafter that exceeds it is logged, and isn't
    called for a while."""


def _as_score_tokens(value: Any) -> Any:
    if value is None:
        return None
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if is_pair and all(type(one) in (str, int) for one in value):
        return tuple(value)
    raise ValueError(
        f'expected two tokens as texts in quotes, or their ids, like ["yes", "no"], got '
        f"{shown(value)}"
    )


class Pooling(BaseModel):
    """Embeddings and scores, where they should differ from the checkpoint's settings."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    method: Literal["last", "mean", "cls", "max", "weighted"] | None = None
    """The pooled state of a prompt: of its last token, the mean of all, of its first token, the
    largest numbers of all, or the mean weighted by place: 1 for the first token, n for the n-th.
    null: the checkpoint's method, `last` for a generator."""

    normalize: bool | None = None
    """Normalize embeddings to length 1. null: the checkpoint's setting, or true without one."""

    score_tokens: Annotated[
        tuple[str | int, str | int] | None, BeforeValidator(_as_score_tokens)
    ] = None
    """Two tokens, as texts or ids, such as `["yes", "no"]`: a generator then scores a prompt by the
    probability of the first relative to the second. null: the checkpoint's setting."""

    template: Annotated[str, Field(min_length=1)] | None = None
    """Template of the prompt for a pair of texts, with `{query}` and, after it, `{document}`. null:
    that of Qwen3-Reranker for a Qwen3 with score tokens, and the tokenizer's pair encoding for a
    classifier."""

    similarity: (
        Literal["cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim"] | None
    ) = None
    """Function of two texts' embeddings that `score` computes if the model doesn't score pairs:
    `maxsim` compares a vector for each token (late interaction), and `meanmaxsim` divides it by the
    tokens of the query. null: the checkpoint's setting, or `cosine` without one."""

    @field_validator("template")
    @classmethod
    def _both_once(cls, value: str | None) -> str | None:
        if value is not None and [value.count(name) for name in ("{query}", "{document}")] != [
            1,
            1,
        ]:
            raise ValueError(f"expected {{query}} and {{document}}, each once, got {shown(value)}")
        if value is not None and value.index("{document}") < value.index("{query}"):
            raise ValueError(
                "expected {query} before {document}, of which a part is cut off if the prompt is "
                "too long"
            )
        return value


class Adapters(BaseModel):
    """LoRA adapters: each request may name one, and several share a step."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    slots: Annotated[int, Field(ge=1, le=MAX_SLOTS)] = 8
    """Maximum number of adapters in use by running requests. Each takes device memory for
    `max_rank`."""

    max_rank: Annotated[int, Field(ge=1, le=MAX_RANK)] = 16
    """Maximum rank of an adapter."""

    host_copies: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Maximum number of adapters cached on the host, in the system's folder for temporary files.
    null: twice `slots`."""

    slot_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Seconds that requests wait while other adapters use all slots. After that, the adapter that
    has held its slot longest gets no new requests until a slot is free."""

    @property
    def copies(self) -> int:
        """`host_copies` with null resolved."""
        return 2 * self.slots if self.host_copies is None else self.host_copies


class Media(BaseModel):
    """Images in prompts, of models that read them."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    images: bool = True
    """Load the model's image encoder, if it has one. false: serve its text only, in less memory."""

    cache_rows: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 16384
    """Rows of encoded images that stay on the device; a row is one token of an image. An image with
    more is refused."""

    step_rows: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 4096
    """Rows of images that a step encodes; an image with more is encoded in a step of its own."""

    kept_bytes: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 256 * 2**20
    """Memory for prepared images that may come again, as in each message of a conversation, in
    bytes: of the engine's process, and of each front end of a server. 0: none are kept."""

    hosts: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=253)], ...], Field(strict=False)
    ] = ()
    """Hosts from which images may be fetched by URL (https, or http). Empty: images come in the
    request only. Private addresses are never fetched."""

    processor: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the checkpoint's image processor, such as `{max_pixels: 1000000}`; which ones
    there are depends on the type of the model."""


class EngineConfig(BaseModel):
    """Settings of an engine: the keys and defaults of `engine.yaml`. Frozen; unknown keys are
    errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )

    model: Annotated[
        ModelChoice,
        BeforeValidator(
            _as_model_choice,
            json_schema_input_type=Annotated[str, Field(min_length=1)] | ModelChoice,
        ),
        PlainSerializer(ModelChoice.plain),
        Field(json_schema_extra={"default": "demo"}),
    ] = ModelChoice(path="demo")
    """A bundled model ("demo"), a local directory, or a Hugging Face hub id. Relative directories
    are resolved from the working directory. A mapping `{path: …, component: distribution:name}`
    also selects the component that serves it."""

    tokenizer: Annotated[
        str | InstanceOf[ComponentChoice] | None,
        BeforeValidator(_as_tokenizer),
        PlainSerializer(
            lambda value: (
                {"name": value.name, **value.options}
                if isinstance(value, ComponentChoice)
                else value
            )
        ),
    ] = None
    """A tokenizer instead of the model's: that of another model, named like `model`, or an
    installed component, by name or as a mapping with its options."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Dtype of weights and activations. auto: float32 on a CPU, otherwise the checkpoint's, if it
    has 16 bits, otherwise bfloat16."""

    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Source of the weights. auto: safetensors, or the GGUF file. dummy: random weights, for
    benchmarks."""

    quantization: Annotated[str, Field(min_length=1)] | None = None
    """Format of the weights of linear layers. null: by the checkpoint's quantization_config. fp8,
    or a plugin's format that quantizes: a plain checkpoint is quantized while it loads. Any other
    value must match the checkpoint."""

    max_model_len: Annotated[int, Field(gt=0, le=MAX_COUNT)] | None = None
    """Maximum tokens of a sequence, prompt and output together. null: the model's length."""

    max_num_seqs: Annotated[int, Field(gt=0, le=MAX_COUNT)] = 256
    """Maximum number of requests in a step."""

    max_num_batched_tokens: Annotated[int, Field(gt=0, le=MAX_COUNT)] = 8192
    """Maximum number of tokens in a step: the token budget."""

    prefill_limit: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = 2.0
    """Limits prefills while answers are streamed: a step may take at most `prefill_limit` times the
    estimated time of its decodes. Applies under any scheduler, except those that declare
    `prefill_limited=False`. null: prompts may fill the token budget."""

    deterministic: Literal["on_request", "always"] = "on_request"
    """Which requests get the same bits in any company. on_request: those with
    `SamplingParams.deterministic`. always: all."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory that the engine uses: weights and buffers, and K and V in the
    rest."""

    cpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Share of the free RAM that K and V may use on a CPU; twice that if a single sequence needs
    it."""

    kv_cache_memory: _Memory = None
    """Memory for K and V, such as 4GiB, per rank. null: what `gpu_memory_utilization` or
    `cpu_memory_utilization` leaves."""

    kv_host_memory: _Memory = None
    """Memory of the host, such as 16GiB, for K and V that the device's cache evicts: the host pool,
    for all ranks together. null: 4GiB if there are `kv_tiers`, otherwise none."""

    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3"] = "auto"
    """Dtype of K and V in the cache. auto: that of the activations. fp8 (also fp8_e4m3): half the
    memory of 16 bits, so twice the tokens."""

    kv_cache_scales: Literal["auto", "calibrate"] = "auto"
    """Scales of K and V of each layer in fp8. auto: the checkpoint's k_scale and v_scale, otherwise
    1. calibrate: fitted to the prompts of the first step."""

    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the states of recurrent layers. bfloat16: half the memory and read time, less
    exact."""

    block_size: Annotated[Literal["auto"] | int, BeforeValidator(_as_block_size)] = "auto"
    """Tokens in a block of K and V. auto: the smallest size from 16 on that the attention backend
    supports."""

    generation_config: Literal["auto", "none"] = "auto"
    """Use of the model's generation_config.json. auto: it sets EOS ids and defaults of requests,
    and unsupported keys are rejected. none: it isn't read."""

    overlap: bool = True
    """Plan the next step while the device computes this one. This changes no token."""

    cuda_graphs: bool = True
    """Record steps in CUDA graphs, where attention and sampler support it: some at the start,
    others just before the first step that needs them, and by a server while it has no request."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] = 0
    """Seed of the generator that draws seeds for requests without one, and of all other random
    numbers."""

    pooling: Annotated[Pooling, Field(strict=False)] = Pooling()
    """Overrides of the checkpoint's settings for embeddings and scores."""

    limits: Limits = Limits()
    """Limits of one request."""

    scheduler: Choice = _built_in("fcfs")
    """The scheduling policy, which selects the requests of each step."""

    kv_cache: Choice = _built_in("prefix")
    """The KV-cache manager, which allocates blocks to requests and shares them."""

    attention: Choice = ComponentChoice("auto")
    """The attention backend. auto: the first built-in one that supports the model: triton on a GPU,
    otherwise torch; packed for encoders."""

    sampler: Choice = _built_in("default")
    """The sampler, which draws tokens from the logits."""

    logits_processors: Annotated[tuple[Choice, ...], BeforeValidator(_as_choices)] = ()
    """The logits processors that requests may use, in the order of application."""

    grammar: Choice = ComponentChoice("auto")
    """The grammar backend, which constrains answers to a schema, a regular expression or a grammar.
    It is created on the first request with structured output. auto: llguidance."""

    executor: Choice = _built_in("local")
    """The executor, which computes the steps."""

    kv_tiers: Annotated[tuple[Choice, ...], BeforeValidator(_as_choices)] = ()
    """The KV tiers, places beyond the host pool where K and V are kept, such as `disk`. They are
    searched in this order."""

    observers: Annotated[tuple[Choice, ...], BeforeValidator(_as_choices)] = ()
    """The observers, which receive the engine's events. Installing an observer doesn't enable
    it."""

    speculation: Speculation | None = None
    """Speculative decoding: a drafter proposes tokens, and a step checks several. It changes no
    token. null: off."""

    adapters: Adapters | None = None
    """LoRA adapters. null: disabled."""

    media: Annotated[Media, Field(strict=False)] = Media()
    """Images in prompts."""

    plugins: Annotated[PluginSelection, Field(strict=False)] = PluginSelection()
    """Distributions whose plugins are used; the environment variable
    DOVETAIL_PLUGINS="allow=a,b;deny=c" overrides it."""

    @classmethod
    def load(
        cls, source: str | Path | Mapping[str, Any] | EngineConfig = "demo", **overrides: Any
    ) -> EngineConfig:
        """Load the config from `source`, with `overrides` on top, whose keys may be dotted
        (`**{"scheduler.aging_s": 5}`).

        A mapping has the keys of the YAML. A path that ends in .yaml or .yml is read; any other
        string names the model, as in `LLM(model)`. Raises `ConfigError`: one line for each wrong
        key, with its file and line.
        """
        return cls.load_with(source, overrides)

    @classmethod
    def load_with(
        cls,
        source: str | Path | Mapping[str, Any] | EngineConfig,
        overrides: Mapping[str, Any],
        origin: str = "override",
    ) -> EngineConfig:
        """Load as `load` does, with errors in overrides naming their `origin` ("--set")."""
        config, wrong = cls.load_what_is_right(source, overrides, origin)
        if wrong is not None:
            raise wrong
        return config  # type: ignore[return-value]  # there is one where nothing is wrong

    @classmethod
    def load_what_is_right(
        cls,
        source: str | Path | Mapping[str, Any] | EngineConfig,
        overrides: Mapping[str, Any],
        origin: str = "override",
    ) -> tuple[EngineConfig | None, ConfigError | None]:
        """Load as `load_with` does, but leave out wrong settings and return their error beside the
        config, so that the rest can be checked too. The config is None if `plugins` is wrong: then
        it is unknown whose code may be imported. Raises `ConfigError` if the source can't be
        read."""
        values, origins = _read(source)
        for key, value in overrides.items():
            _put(values, origins, key, value, origin)
        return cls._checked(values, origins)

    @staticmethod
    def read_settings(texts: Sequence[str]) -> dict[str, Any]:
        """Return the `--set KEY=VALUE`s of a command line as overrides for `load_with`: each value
        is YAML. Raises `ConfigError`."""
        values = {}
        for text in texts:
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                raise ConfigError(f"--set: expected key=value, got {shown(text)}")
            values[key.strip()] = parse_yaml(value, "--set").value
        return values

    @classmethod
    def _checked(
        cls, values: dict[str, Any], origins: dict[KeyPath, str]
    ) -> tuple[EngineConfig | None, ConfigError | None]:
        where = Where(origins=origins)
        given = {
            key: _with_place(value, where.at(key)) if key in COMPONENT_KEYS else value
            for key, value in values.items()
        }
        if isinstance(values.get("tokenizer"), str):  # which may be a model's name
            given["tokenizer"] = values["tokenizer"]
        if isinstance(model := given.get("model"), Mapping) and "component" in model:
            given["model"] = {
                **model,
                "component": _with_place(model["component"], where.at("model", "component")),
            }
        if isinstance(section := given.get("speculation"), Mapping) and "drafter" in section:
            given["speculation"] = {
                **section,
                "drafter": _with_place(section["drafter"], where.at("speculation", "drafter")),
            }
        try:
            return cls.model_validate(given), None
        except ValidationError as error:
            told = explain(error, cls, values, where, "key")
            wrong = {detail["loc"][0] for detail in error.errors(include_url=False)}
        if "plugins" in wrong:
            return None, told
        return cls.model_validate(
            {
                key: value
                for key, value in given.items()
                if isinstance(key, str) and key not in wrong
            }
        ), told

    def choices(self, key: str) -> tuple[ComponentChoice, ...]:
        """Return the components chosen at one of `COMPONENT_KEYS`; none for a drafter without
        speculation, and for a tokenizer given as text, which `chosen_tokenizer` finds."""
        if key == "speculation.drafter":
            return () if self.speculation is None else (self.speculation.drafter,)
        if key == "tokenizer":
            return (self.tokenizer,) if isinstance(self.tokenizer, ComponentChoice) else ()
        chosen: ComponentChoice | tuple[ComponentChoice, ...] = getattr(self, key)
        return chosen if isinstance(chosen, tuple) else (chosen,)

    @property
    def host_pool_bytes(self) -> int:
        """`kv_host_memory` with null resolved; 0: there is no host pool."""
        if self.kv_host_memory is not None:
            return self.kv_host_memory
        return TIERS_HOST_MEMORY if self.kv_tiers else 0

    def model_candidates(self, registry: Registry) -> tuple[ResolvedComponent, ...]:
        """Return the models that may serve the config's: the one that it names, or all that can be
        used. Raises `PluginError` if the one that it names isn't available."""
        if self.model.component is not None:
            chosen = self.model.component
            return (
                registry.resolve(
                    "model",
                    chosen.name,
                    chosen.options,
                    chosen.where or Where(("model", "component")),
                ),
            )
        return tuple(model for model in registry.components("model") if model.api_problem() is None)

    def attention_candidates(self, registry: Registry) -> tuple[ResolvedComponent, ...]:
        """Return the backends that the executor should consider, best first: see
        `dovetail.registry.registry`."""
        return attention_candidates(
            registry, self.attention.name, self.attention.options, self.attention.where
        )

    def chosen_grammar(self, registry: Registry) -> ResolvedComponent | None:
        """Return the grammar backend that requests may ask for, if there is one: see
        `dovetail.registry.registry`."""
        return chosen_grammar(registry, self.grammar.name, self.grammar.options, self.grammar.where)

    @property
    def tokenizer_name(self) -> str:
        """The name of the component or model whose tokenizer is used."""
        return (
            self.tokenizer.label
            if isinstance(self.tokenizer, ComponentChoice)
            else self.tokenizer or self.model.path
        )

    def chosen_tokenizer(self, registry: Registry) -> ResolvedComponent | None:
        """Return the tokenizer component; None if the tokenizer is a model's. Raises `PluginError`
        if the component isn't available, and `ConfigError` for a text that names both a component
        and a model that is here."""
        chosen = self.tokenizer
        if isinstance(chosen, ComponentChoice):
            return registry.resolve("tokenizer", chosen.name, chosen.options, chosen.where)
        return None if chosen is None else tokenizer_named(chosen, registry)

    def in_full(self, registry: Registry) -> dict[str, Any]:
        """Return every key as plain values for YAML: components by qualified name, with all their
        options, defaults included. `auto` stays where the engine has more than one to choose from,
        or none. Raises what finding a component and validating its options does."""

        def resolved(key: str) -> list[Any]:
            return [
                registry.resolve(
                    COMPONENT_KEYS[key], choice.name, choice.options, choice.where
                ).in_full()
                for choice in self.choices(key)
            ]

        attention = self.attention_candidates(registry)
        grammar = self.chosen_grammar(registry)
        tokenizer = self.chosen_tokenizer(registry)
        named = (
            None if self.model.component is None else self.model_candidates(registry)[0].in_full()
        )
        return {
            **self.model_dump(mode="json"),
            "model": self.model.path
            if named is None
            else {"path": self.model.path, "component": named},
            **{key: resolved(key)[0] for key in ("scheduler", "kv_cache", "sampler", "executor")},
            "attention": attention[0].in_full() if len(attention) == 1 else "auto",
            "grammar": "auto" if grammar is None else grammar.in_full(),
            **{key: resolved(key) for key in LISTS},
            "tokenizer": self.tokenizer if tokenizer is None else tokenizer.in_full(),
            "speculation": self.speculation
            and {
                **self.speculation.model_dump(mode="json"),
                "drafter": resolved("speculation.drafter")[0],
            },
        }

    def executor_config(
        self, model_dir: Path, draft_dir: Path | None = None, draft_head: ComponentRef | None = None
    ) -> ExecutorConfig:
        """Return the settings that concern an executor, for a model whose directory was found, and
        for that which drafts, if one does. `draft_head`: see `ExecutorConfig`."""
        from dovetail.api.executor import (
            ExecutorConfig,
        )  # here, since it imports numpy, which `dovetail config` doesn't need

        return ExecutorConfig(
            model=str(model_dir),
            dtype=self.dtype,
            load_format=self.load_format,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            gpu_memory_utilization=self.gpu_memory_utilization,
            cpu_memory_utilization=self.cpu_memory_utilization,
            kv_cache_memory=self.kv_cache_memory,
            block_size=None if self.block_size == "auto" else self.block_size,
            cuda_graphs=self.cuda_graphs,
            overlap=self.overlap,
            seed=self.seed,
            kv_cache_dtype="float8_e4m3fn"
            if self.kv_cache_dtype.startswith("fp8")
            else self.kv_cache_dtype,
            kv_cache_scales=self.kv_cache_scales,
            quantization=self.quantization,
            state_dtype=self.state_dtype,
            max_drafts=0 if self.speculation is None else self.speculation.max_drafts,
            draft_model=None if draft_dir is None else str(draft_dir),
            draft_head=draft_head,
            pooling=self.pooling.model_dump(exclude_none=True, exclude={"template", "similarity"}),
            max_adapters=0 if self.adapters is None else self.adapters.slots,
            max_adapter_rank=Adapters().max_rank
            if self.adapters is None
            else self.adapters.max_rank,
            media_cache_rows=self.media.cache_rows if self.media.images else 0,
            media_step_rows=self.media.step_rows,
            kv_transfers=self.host_pool_bytes > 0,
        )


def _read(source: Any) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Return plain values, which may be changed, and where each was written."""
    if isinstance(source, EngineConfig):
        return {key: getattr(source, key) for key in source.model_fields_set}, {}
    if isinstance(source, Mapping):
        return dict(source), {}
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"a config is a YAML file, a model's name, a mapping or an EngineConfig, got "
            f"{shown(source)}"
        )
    if Path(source).suffix not in YAML_SUFFIXES:
        return {"model": str(source)}, {}
    value, origins = read_yaml(str(source))
    if not isinstance(value, dict | None):
        raise ConfigError(
            f"{source}:1: expected keys and values, like `model: demo`, got {shown(value)}"
        )
    return value or {}, origins


def _put(
    values: dict[str, Any], origins: dict[KeyPath, str], key: str, value: Any, origin: str
) -> None:
    """Set a dotted key. Above it, a component's name becomes a mapping, and a missing value its
    default."""
    holder: Any = values
    path: KeyPath = ()
    for part in key.split("."):
        if path:
            holder = _descend(values, path, Where(path, {path: origin}))
        path = (*path, _index(part, holder, Where((*path, part), {(): origin})))
    holder[path[-1]] = value
    for below in [other for other in origins if other[: len(path)] == path]:
        del origins[below]
    origins[path] = origin


def _descend(values: dict[str, Any], path: KeyPath, where: Where) -> Any:
    """Return the value at a path, after replacing it by a copy in which keys can be set."""
    holder: Any = values
    for part in path[:-1]:
        holder = holder[part]
    if len(path) == 1 and path[0] not in values:
        key = str(path[0])
        if key not in EngineConfig.model_fields:
            raise ConfigError(where.says(unknown_key(key, list(EngineConfig.model_fields), "key")))
        values[key] = EngineConfig.model_fields[key].default
    opened = _open(holder.get(path[-1]) if isinstance(holder, dict) else holder[path[-1]], where)
    holder[path[-1]] = opened
    return opened


def _index(part: str, holder: Any, where: Where) -> str | int:
    """Return the key of a mapping, or the index of an existing item of a list."""
    if isinstance(holder, dict):
        return part
    if not part.isdecimal() or int(part) >= len(holder):
        raise ConfigError(where.says(f"there is no such item; the list has {len(holder)}"))
    return int(part)


def _open(value: Any, where: Where) -> Any:
    """Return a copy of a value in which keys can be set."""
    if isinstance(value, ComponentChoice):
        return {"name": value.name, **value.options}
    if where.path == ("model",) and isinstance(value, str | ModelChoice):
        return {"path": value} if isinstance(value, str) else value.model_dump(exclude_none=True)
    if isinstance(value, Limits | Media | Pooling | PluginSelection | Adapters):
        return value.model_dump(exclude_unset=True)
    if where.path == ("adapters",) and value is None:
        return {}
    if where.path == ("speculation",) and isinstance(value, Speculation | Mapping | None):
        given = (
            {key: getattr(value, key) for key in value.model_fields_set}
            if isinstance(value, Speculation)
            else value or {}
        )
        return {"drafter": Speculation().drafter, **given}
    if isinstance(value, str) and (
        where.path[0] in COMPONENT_KEYS or where.path == ("speculation", "drafter")
    ):
        return {"name": value}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return list(value)
    raise ConfigError(
        where.says(
            "there is nothing below this key"
            if value is None
            else f"{shown(value)} has nothing below it"
        )
    )


def _with_place(value: Any, where: Where) -> Any:
    """Return choices that know where they were made; malformed ones stay as they are, for the model
    to refuse."""
    if len(where.path) == 1 and where.path[0] in LISTS:
        if not isinstance(value, list | tuple):
            return value
        return [_with_place(item, where.at(index)) for index, item in enumerate(value)]
    try:
        choice = _as_choice(value)
    except ValueError:
        return value
    known = isinstance(value, ComponentChoice) and where.origin is None and value.where
    return choice if known else ComponentChoice(choice.name, choice.options, where)
