"""Assembles an engine from the components named in `engine.yaml`: resolves them, checks that they
fit, starts the executor and makes the rest.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dovetail.api.clock import Clock, VirtualClock, WallClock
from dovetail.api.drafter import Drafter, DrafterContext, ModelDrafter
from dovetail.api.executor import Capacity, ComponentRef, Executor, ExecutorContext
from dovetail.api.json_files import read_json_object
from dovetail.api.kv_cache import KVCacheManager, KVContext
from dovetail.api.media_types import media_type_of
from dovetail.api.observer import EngineStarted, ObserverContext
from dovetail.api.sampler import SamplerCapabilities
from dovetail.api.scheduler import SchedulerContext
from dovetail.api.start_phases import measuring_start
from dovetail.base.kept_configs import begin_reading
from dovetail.config.engine import EngineConfig
from dovetail.config.parts import Parts, read_parts
from dovetail.engine.core import CoreSettings, EngineCore
from dovetail.engine.features import features_of
from dovetail.engine.speculation import Speculation
from dovetail.engine.stats import ObserverHub
from dovetail.engine.step_times import PlanTiming, StepTimeFit
from dovetail.errors import (
    ConfigError,
    DovetailError,
    ModelLoadError,
    UnsupportedError,
)
from dovetail.front.adapters import AdapterStore, RequestedAdapter
from dovetail.front.answer_rules import AnswerRules
from dovetail.front.assembly_checks import (
    check_deterministic,
    check_groups,
    check_pool,
    check_processors,
    check_sampler,
    refuse_encoder_decoder,
)
from dovetail.front.component_tokenizer import ComponentTokenizer
from dovetail.front.component_values import ComponentValues
from dovetail.front.generation_config import GenerationDefaults
from dovetail.front.intake_facts import IntakeFacts
from dovetail.front.media.facts import MediaFacts
from dovetail.front.media.layouts import check_options
from dovetail.front.media.processes import check_pillow
from dovetail.front.pooling import PoolingFacts
from dovetail.front.tiers import make_tier_feature
from dovetail.registry.models import resolve_model
from dovetail.registry.registry import Registry

if TYPE_CHECKING:
    from dovetail.front.tokenizer import Tokenizer
    from dovetail.request.lora import LoRARequest


logger = logging.getLogger("dovetail")

LONG_START_S = 5.0  # a start that took as long is explained in the log


@dataclass
class Assembly:
    """An engine's parts, made; and what the front end asks about the model."""

    config: EngineConfig
    core: EngineCore
    capacity: Capacity
    model_dir: Path
    tokenizer_dir: Path
    defaults: GenerationDefaults
    values: ComponentValues  # what requests carry for components
    tokenizer: Callable[[], Tokenizer]  # loads it once; raises `ModelLoadError` if there is none
    rules: AnswerRules
    has_logprobs: bool = True  # of the executor
    samples_logprobs: bool = True  # of the sampler
    # kind -> "distribution:name" of the component in use, without attention
    parts: Mapping[str, str] = field(default_factory=dict)
    pooling: PoolingFacts | None = None  # None: it can't pool
    has_masks: bool = False  # the executor can mask tokens, as grammars need it
    adapters: AdapterStore | None = None
    own_tokenizer: ComponentTokenizer | None = None  # None: that of `tokenizer_dir`
    media: MediaFacts | None = None  # None: the model is given no images

    def adapter(self, request: LoRARequest) -> RequestedAdapter:
        """Return a request's adapter, which is being looked for. There must be `adapters`."""
        assert self.adapters is not None
        return self.adapters.get(request)

    def prepare_grammars(self) -> None:
        """Make the grammar backend in a thread, if it can be used."""
        if self.has_masks:
            self.rules.prepare()

    def close(self) -> None:
        """End the threads that compile rules and load adapters. The core has its own end."""
        if self.adapters is not None:
            self.adapters.close()
        self.rules.close()

    @property
    def intake_facts(self) -> IntakeFacts:
        """The facts by which requests are checked."""
        return IntakeFacts(
            limits=self.config.limits,
            max_model_len=self.capacity.max_model_len,
            vocab_size=self.capacity.vocab_size,
            defaults=self.defaults,
            executor=self.config.executor.label,
            sampler=self.config.sampler.label,
            has_logprobs=self.has_logprobs,
            samples_logprobs=self.samples_logprobs,
            extra_args=self.values.extra_args,
            logits_processors=tuple(self.values.arguments),
            has_masks=self.has_masks,
            pooling=self.pooling,
            has_adapters=self.adapters is not None,
            media=self.media,
            not_deterministic=self.capacity.not_deterministic,
            always_deterministic=self.config.deterministic == "always",
        )


def assemble(
    config: str | Path | Mapping[str, Any] | EngineConfig,
    overrides: Mapping[str, Any],
    *,
    registry: Registry | None = None,
    clock: Clock | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Assembly:
    """Assemble an engine, and log its start by phase, which `capacity.details["start"]` has, too.

    Raises `ConfigError`, `PluginError`, `UnsupportedError` or `ModelLoadError`; nothing stays
    behind then. What can be found wrong without the model's weights is found before they are
    read.
    """
    with measuring_start() as phases:
        assembly = _assemble(config, overrides, registry, clock, progress)
    took = str(phases)
    level = logging.INFO if phases.total_s >= LONG_START_S else logging.DEBUG
    if not assembly.core.executor.capabilities.virtual_clock:
        logger.log(level, "ready after %s", took)
    details = {**assembly.capacity.details, "start": took}
    assembly.capacity = replace(assembly.capacity, details=details)
    return assembly


def _assemble(
    config: str | Path | Mapping[str, Any] | EngineConfig,
    overrides: Mapping[str, Any],
    registry: Registry | None,
    clock: Clock | None,
    progress: Callable[[str, int, int], None] | None,
) -> Assembly:
    # made after the model
    config, registry, parts = read_parts(
        config,
        overrides,
        registry,
        imports=("scheduler", "kv_cache", "kv_tier", "observer", "drafter", "tokenizer"),
    )
    model_dir = resolve_model(config.model.path, registry)
    own_tokenizer = (
        None if parts.tokenizer is None else ComponentTokenizer(parts.tokenizer.ref(), model_dir)
    )
    named = config.tokenizer if own_tokenizer is None else None
    tokenizer_dir = _find("tokenizer", named, registry) if isinstance(named, str) else model_dir
    refuse_encoder_decoder(model_dir)
    if any(each.startswith("transformers") for each in parts.executor.spec.requires):
        begin_reading(model_dir)  # before the executor is imported, which takes as long
    defaults = GenerationDefaults.read(model_dir, sampling=config.generation_config == "auto")
    if own_tokenizer is not None:
        defaults = replace(
            defaults,
            eos_token_ids=tuple(dict.fromkeys((*defaults.eos_token_ids, *own_tokenizer.eos_ids))),
        )
    clock = clock or (
        VirtualClock() if parts.executor.load().capabilities.virtual_clock else WallClock()
    )
    check_sampler(config, parts)
    check_processors(parts)
    frozen = gc.get_freeze_count()
    tokenizer = cache(partial(_load_tokenizer, own_tokenizer, tokenizer_dir, frozen))
    drafter_context = DrafterContext(
        max_drafts=0 if config.speculation is None else config.speculation.max_drafts,
        vocab_size=None,
        max_model_len=None,
        encode=lambda text: tokenizer().encode(text, special_tokens=False),
        eos_ids=tuple(defaults.eos_token_ids),
    )
    model_drafter = _make_model_drafter(config, parts, drafter_context)
    executor = _make_executor(config, parts, registry, model_dir, model_drafter, clock, progress)
    try:
        capacity = _start(executor, parts.executor.qualified_name)
        if own_tokenizer is not None:
            own_tokenizer.check_fits(capacity.vocab_size)
        check_deterministic(config, capacity)
        drafter_context = replace(
            drafter_context, vocab_size=capacity.vocab_size, max_model_len=capacity.max_model_len
        )
        timing = _make_timing(capacity, config, parts, model_drafter, drafter_context)
        core = _make_core(executor, capacity, config, parts, clock, timing)
        # If the executor froze what lasts, so that the garbage collector doesn't go through it
        # while a step waits: now the books, later the tokenizer.
        if gc.get_freeze_count() > frozen:
            gc.freeze()
        return Assembly(
            config=config,
            core=core,
            capacity=capacity,
            model_dir=model_dir,
            tokenizer_dir=tokenizer_dir,
            defaults=defaults,
            has_logprobs=executor.capabilities.logprobs,
            samples_logprobs=_samples_logprobs(executor, parts),
            values=_component_values(executor, parts, capacity, tokenizer),
            tokenizer=tokenizer,
            parts={
                "scheduler": parts.scheduler.qualified_name,
                "kv_cache": parts.kv_cache.qualified_name,
                "sampler": parts.sampler.qualified_name,
                "executor": parts.executor.qualified_name,
                **{
                    part.spec.kind: part.qualified_name
                    for part in (parts.grammar, parts.drafter, parts.tokenizer)
                    if part is not None
                },
            },
            pooling=_pooling_facts(config, capacity, model_dir),
            has_masks=executor.capabilities.masks,
            rules=AnswerRules(
                parts.grammar,
                tokenizer,
                capacity.vocab_size,
                defaults.eos_token_ids,
                config.limits,
            ),
            adapters=_make_adapters(config, capacity, parts),
            own_tokenizer=own_tokenizer,
            media=_media_facts(config, capacity, model_dir),
        )
    except BaseException:
        executor.stop()
        raise


def _load_tokenizer(own: ComponentTokenizer | None, directory: Path, frozen: int) -> Tokenizer:
    """Load the tokenizer. If more than `frozen` objects are frozen, since the executor froze what
    lasts, it is frozen too."""
    from dovetail.front.detokenizer import byte_pieces
    from dovetail.front.tokenizer import Tokenizer  # transformers, only if there is text

    tokenizer = own or Tokenizer.load(directory)
    if gc.get_freeze_count() > frozen:
        byte_pieces(tokenizer, True)  # as is usual: made now, for it will hold the vocabulary
        gc.freeze()
    return tokenizer


def _samples_logprobs(executor: Executor, parts: Parts) -> bool:
    """Return True unless the sampler draws the tokens and has no log-probabilities of them."""
    can = executor.capabilities
    uses_sampler = can.samples and not can.virtual_clock
    return not uses_sampler or parts.sampler.load().capabilities.logprobs


def _component_values(
    executor: Executor, parts: Parts, capacity: Capacity, tokenizer: Callable[[], Tokenizer]
) -> ComponentValues:
    simulates = executor.capabilities.virtual_clock  # then nothing is sampled
    sampler = SamplerCapabilities() if simulates else parts.sampler.load().capabilities
    readers = (parts.scheduler, parts.kv_cache, parts.executor, *parts.observers)
    return ComponentValues(
        capacity,
        tokenizer,
        extra_models={
            part.distribution: model
            for part in readers
            if (model := part.request_extra()) is not None
        },
        extra_args=frozenset(sampler.extra_args),
        extra_args_model=sampler.extra_args_model,
        arguments={
            part.qualified_name: None if simulates else part.load().Arguments
            for part in parts.logits_processors
        },
    )


def _pooling_facts(
    config: EngineConfig, capacity: Capacity, model_dir: Path
) -> PoolingFacts | None:
    """Return how the engine pools, if it can. Raises `UnsupportedError` if it can't and the config
    says how."""
    if capacity.pooling is not None:
        lengths = capacity.max_model_len, config.max_num_batched_tokens
        own = config.pooling
        return PoolingFacts.of(
            capacity.pooling, model_dir, own.template, *lengths, similarity=own.similarity
        )
    if wrong := config.pooling.model_dump(exclude_defaults=True):
        raise UnsupportedError(
            f"pooling.{min(wrong)}: executor {config.executor.label} can't pool: leave it out, or "
            f"use `local` or `tensor`"
        )
    return None


def _media_facts(config: EngineConfig, capacity: Capacity, model_dir: Path) -> MediaFacts | None:
    """Return how the model reads images, if it does and the executor computes them. Raises
    `MissingExtraError` without what decodes them, and `ConfigError` for options that its image
    processor hasn't."""
    if capacity.media is None:
        return None
    model = read_json_object(model_dir / "config.json")
    if media_type_of(model) is None:  # a simulation computes images of any model
        return None
    check_pillow()
    check_options(config.media.processor, model)
    return MediaFacts(
        model_dir=str(model_dir),
        config=model,
        cache_rows=capacity.media.cache_rows,
        step_tokens=config.max_num_batched_tokens,
        kept_bytes=config.media.kept_bytes,
        hosts=config.media.hosts,
        options=config.media.processor,
    )


def _find(key: str, name: str, registry: Registry) -> Path:
    """Return the directory of the model that `key` names. Raises as `resolve_model`."""
    try:
        return resolve_model(name, registry)
    except (ConfigError, ModelLoadError) as error:
        raise type(error)(f"{key}: sought where models are: {error}") from error


def _draft_dir(drafter: ModelDrafter, model_dir: Path, registry: Registry) -> Path:
    """Return the directory of what drafts. Raises as `_find`."""
    return (
        model_dir
        if drafter.model is None
        else _find("speculation.drafter", drafter.model, registry)
    )


def _start(executor: Executor, name: str) -> Capacity:
    try:
        return executor.start()
    except DovetailError:
        raise
    except Exception as error:  # of the device, usually
        what = (
            f"executor {name} can't start: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}"
        )
        if isinstance(error, ImportError):  # of a package that a library needs
            raise UnsupportedError(what) from error
        if not _is_of_memory(error):
            raise UnsupportedError(what) from error
        remedy = (
            "memory is short: lower max_num_seqs, max_model_len, gpu_memory_utilization, "
            "kv_cache_memory or max_num_batched_tokens"
        )
        raise UnsupportedError(f"{what}; {remedy}") from error


def _is_of_memory(error: Exception) -> bool:
    """True for Python's own, torch's of either device, and CUDA's."""
    return isinstance(error, MemoryError) or any(
        word in str(error).lower() for word in ("memory", "alloc")
    )


def _draft_head(drafter: ModelDrafter, parts: Parts) -> ComponentRef | None:
    """Return the reference to the drafter's head, which has the drafter's options."""
    if drafter.head is None or parts.drafter is None:
        return None
    return replace(parts.drafter.ref(), path=drafter.head)


def _make_executor(
    config: EngineConfig,
    parts: Parts,
    registry: Registry,
    model_dir: Path,
    drafter: ModelDrafter | None,
    clock: Clock,
    progress: Callable[[str, int, int], None] | None,
) -> Executor:
    draft_dir = draft_head = None
    if drafter is not None:
        draft_dir = _draft_dir(drafter, model_dir, registry)
        draft_head = _draft_head(drafter, parts)
    if (
        not parts.executor.load().capabilities.virtual_clock
    ):  # a simulation computes nothing, and needs no packages for it
        for part in (*parts.attention, parts.sampler, *parts.logits_processors):
            part.check_requires()
    context = executor_context(config, parts, registry, model_dir, clock)
    own = config.executor_config(model_dir, draft_dir, draft_head)
    executor: Executor = parts.executor.make(replace(context, config=own, progress=progress))
    return executor


def executor_context(
    config: EngineConfig, parts: Parts, registry: Registry, model_dir: Path, clock: Clock
) -> ExecutorContext:
    """Return the context of an executor for the model at `model_dir`, without one that drafts."""
    return ExecutorContext(
        config=config.executor_config(model_dir),
        clock=clock,
        models=tuple(model.ref() for model in parts.models),
        attention=tuple(backend.ref() for backend in parts.attention),
        sampler=parts.sampler.ref(),
        quantizations=tuple(known.ref() for known in registry.quantizations()),
        logits_processors=tuple(part.ref() for part in parts.logits_processors),
    )


def _make_core(
    executor: Executor,
    capacity: Capacity,
    config: EngineConfig,
    parts: Parts,
    clock: Clock,
    timing: Callable[[Clock, StepTimeFit, Capacity, int], PlanTiming],
) -> EngineCore:
    layout = capacity.layout
    num_pages = capacity.num_pages
    kv: KVCacheManager = parts.kv_cache.make(KVContext(layout, num_pages, config.seed))
    check_groups(layout, kv, parts.kv_cache.qualified_name)
    check_pool(capacity, config.max_num_batched_tokens, trims=kv.capabilities.trim)
    scheduler = parts.scheduler.make(
        SchedulerContext(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            num_pages,
            layout.block_size,
            config.seed,
        )
    )
    observer_context = ObserverContext(config.max_num_seqs, num_pages)
    observers = ObserverHub(
        [(observer.qualified_name, observer.make(observer_context)) for observer in parts.observers]
    )
    if observers.listens:
        observers.start(_started(parts, capacity, clock))
    settings = CoreSettings(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.overlap,
        parts.scheduler.qualified_name,
        config.prefill_limit,
    )
    tiers = make_tier_feature(config, parts, executor, capacity, kv, clock)
    features = features_of(
        capacity,
        0.0 if config.adapters is None else config.adapters.slot_wait_s,
        [] if tiers is None else [tiers],
    )
    core = EngineCore(
        scheduler, kv, executor, capacity, clock, settings, observers, features, timing
    )
    if tiers is not None:
        tiers.measure(core.books.fit)
        core.stats.tiers = tiers.stats
    return core


def _make_adapters(config: EngineConfig, capacity: Capacity, parts: Parts) -> AdapterStore | None:
    """Make the store of adapters, if there are to be any. Raises `UnsupportedError` if the executor
    can't use them."""
    if config.adapters is None:
        return None
    if capacity.adapters is None:
        raise UnsupportedError(
            f"adapters: executor {parts.executor.qualified_name} can't use LoRA adapters: leave "
            f"`adapters` out, or use `local`"
        )
    return AdapterStore(capacity.adapters, config.adapters.copies)


def _make_model_drafter(
    config: EngineConfig, parts: Parts, context: DrafterContext
) -> ModelDrafter | None:
    """Make the drafter if it drafts with a model, which the executor has to load; a simulation
    doesn't. Raises `UnsupportedError` if it can't."""
    if (
        config.speculation is None
        or parts.drafter is None
        or not issubclass(parts.drafter.load(), ModelDrafter)
    ):
        return None
    if parts.executor.load().capabilities.virtual_clock:
        return None
    can = parts.executor.load().capabilities
    with_head = parts.drafter.load().head is not None
    if not (can.draft_head if with_head else can.draft_model):
        raise UnsupportedError(
            f"speculation.drafter: {parts.drafter.qualified_name} drafts with a "
            f"{'head' if with_head else 'model'}, which executor "
            f"{parts.executor.qualified_name} can't run: use another drafter, such as `suffix`, or "
            f"the executor `local`"
        )
    drafter: ModelDrafter = parts.drafter.make(context)
    return drafter


def _make_timing(
    capacity: Capacity,
    config: EngineConfig,
    parts: Parts,
    model_drafter: ModelDrafter | None,
    context: DrafterContext,
) -> Callable[[Clock, StepTimeFit, Capacity, int], PlanTiming]:
    """Return what makes the engine's strategy. Makes the drafter, unless it is `model_drafter`.

    Raises `UnsupportedError` if the engine can't check its drafts.
    """
    chosen = config.speculation
    if chosen is None or parts.drafter is None:
        return PlanTiming
    if capacity.max_lines == 0:
        raise UnsupportedError(
            f"speculation: executor {parts.executor.qualified_name} can't check drafts: leave "
            f"`speculation` out, or use `local`"
        )
    if capacity.max_lines == 1:
        raise UnsupportedError(
            f"speculation: a step of executor {parts.executor.qualified_name} has room for one "
            f"token, and none for drafts: raise max_num_batched_tokens"
        )
    if chosen.max_drafts >= capacity.max_lines:
        raise UnsupportedError(
            f"speculation.max_drafts is {chosen.max_drafts}, but a step of executor "
            f"{parts.executor.qualified_name} can check "
            f"{capacity.max_lines - 1} drafts at most: lower it"
        )
    drafter: Drafter = parts.drafter.make(context) if model_drafter is None else model_drafter
    limits = chosen.max_drafts, chosen.timeout_s
    return partial(Speculation, drafter, parts.drafter.qualified_name, *limits)


def _started(parts: Parts, capacity: Capacity, clock: Clock) -> EngineStarted:
    return EngineStarted(
        time=clock.now(),
        scheduler=parts.scheduler.qualified_name,
        kv_cache=parts.kv_cache.qualified_name,
        executor=parts.executor.qualified_name,
        total_pages=capacity.num_pages,
        block_size=capacity.layout.block_size,
        max_in_flight=capacity.max_in_flight,
        details=MappingProxyType(dict(capacity.details)),
        cache_groups=capacity.layout.groups,
    )
