"""One rank: a model with its attention, sampler, rows and KV pool, on one device.

Executors consist of workers: `local` is one, in the engine's own process.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.api.attention import AttentionBackend, LayerSpec
from dovetail.api.executor import Batch, Capacity, ExecutorContext, Masks, Result
from dovetail.api.graphs import GraphSupport
from dovetail.api.kv_cache import KVLayout
from dovetail.api.kv_transfers import WORD
from dovetail.api.model import ParallelGroup, VerifiesItself
from dovetail.api.process_watch import PULSE
from dovetail.api.sampler import Capture, SamplerContext
from dovetail.api.start_phases import phase
from dovetail.api.token_sizes import most_lines
from dovetail.errors import ConfigError, DovetailError, UnsupportedError
from dovetail.nn.kernels.available import OF_BFLOAT16, OF_FLOAT8, begin_checks, runs_kernels
from dovetail.nn.kernels.cache import prepare_cache
from dovetail.nn.state.states import States, cached_state
from dovetail_executors.runtime.attention_choice import ChosenAttention, choose_attention
from dovetail_executors.runtime.device_choice import describe_device
from dovetail_executors.runtime.feature_plans import feature_plans
from dovetail_executors.runtime.features import FeaturePlan, Loaded, Proposer
from dovetail_executors.runtime.graphs import Agree, Graphs
from dovetail_executors.runtime.kv_pool import KVPool, kv_layout, pool_pages
from dovetail_executors.runtime.kv_scales import CacheScales
from dovetail_executors.runtime.line_costs import draft_costs, line_costs
from dovetail_executors.runtime.loading import (
    ModelPlan,
    ReadingWeights,
    load_model,
    num_parameters,
    parameters_of_a_token,
)
from dovetail_executors.runtime.logits import LogitsProcessors
from dovetail_executors.runtime.memory import readable_bytes
from dovetail_executors.runtime.profiling import peak_bytes
from dovetail_executors.runtime.recorded_steps import Builder
from dovetail_executors.runtime.recording import LayerSplitter
from dovetail_executors.runtime.row_state import RowState
from dovetail_executors.runtime.runner import Runner
from dovetail_executors.runtime.sampling import Sampling
from dovetail_executors.runtime.slab_steps import RecordedLines, RecordedSlabs
from dovetail_executors.runtime.slabs import SLAB, rounded_up, sizes_of_forwards, why_not
from dovetail_executors.runtime.step import Step
from dovetail_executors.runtime.transfers import PageCopies, device_bytes, name_of_bytes
from dovetail_executors.runtime.trial import TrialRun

# Floating-point operations per second that any core reaches: a guess until a step is measured
SLOW_CPU_FLOPS = 2e10


class Worker:
    """Computes the steps of one rank: `load`, then `allocate`, then `submit`, `sample` of late
    steps and `collect` in turn, `stop` at the end. Call it from one thread at a time; the thread
    may change between calls.

    A failed step ends it: the device's state can no longer be trusted.
    """

    def __init__(
        self,
        context: ExecutorContext,
        group: ParallelGroup,
        executor: str,
        agree: Agree | None = None,
    ) -> None:
        """`group`: ranks that share the model's weights; `dovetail.nn.parallel.SINGLE` if this one
        has the whole model. `executor`: the executor's name in errors. `agree`: of several ranks.
        Loads nothing yet."""
        self.context = context
        self.group = group
        self.executor = executor
        self._agree = agree
        self.runner: Runner | None = None  # None unless the model is loaded
        self._graphs: Graphs | None = None  # the runner's, once captured
        self._scales: CacheScales | None = None  # of a cache of a smaller dtype
        self._attention = ""  # name of the backend, once chosen
        self._copies: PageCopies | None = None
        self._failure: DovetailError | None = None
        self._generates = True
        # see `Capacity`; measured by `allocate`
        self.line_costs: tuple[tuple[int, float], ...] = ()
        self.draft_costs: tuple[tuple[int, float], ...] = ()

    def load(self, device: torch.device, num_pages: int | None = None) -> Capacity:
        """Choose dtype and attention, load the model, compile its kernels, and return what fits on
        `device` (see `choose_device`).

        `num_pages`: as requested or, if None, as many as fit into memory. Cooperating ranks
        allocate the smallest number of them. `max_in_flight` suits the device. Raises
        `ModelLoadError` if the model's files can't be used, `UnsupportedError` if no architecture
        or attention backend can serve it here, and `ConfigError` if there is no sampler, or if the
        pool can't hold one sequence of `max_model_len` tokens.
        """
        context = self.context
        config = self.context.config
        if device.type == "cuda":
            prepare_cache()
        checks = begin_checks(device, OF_BFLOAT16)
        with phase("config"):
            plan = ModelPlan.of(config, context.models, self.group, device, context.quantizations)
            plans = feature_plans(context, plan, self.group, device)
        more_checks = begin_checks(device, () if plan.quantization is None else OF_FLOAT8)
        specs = [*plan.specs, *(spec for each in plans for spec in each.layers)]
        chosen = choose_attention(
            context.attention,
            specs,
            str(device),
            plan.dtype_name,
            config.block_size,
            plan.cache_dtype,
        )
        self._attention = chosen.name
        plans = [each for each in plans if each.is_served_by(chosen)]
        pool = self._make_kv_pool(plan, plans, specs, chosen.backend, device)
        layout = pool.planned.layout
        if device.type == "cpu":  # before reading weights, so that errors surface at once
            self._pool_pages(layout, plan.max_model_len, num_pages, device)
        with ReadingWeights() as reading:
            loaded = self._load_model(plan, plans, chosen, pool, device, reading)
            self._make_runner(loaded, plans, pool)
            if loaded.splitter is not None:
                self._graphs = self._make_graphs(loaded, loaded.splitter)
            checks.wait()
            more_checks.wait()
            with phase("weights"):
                reading.wait()
        pages = self._pool_pages(layout, plan.max_model_len, num_pages, device)
        return self._capacity(loaded, chosen.name, pool, pages)

    def _make_runner(self, loaded: Loaded, plans: Sequence[FeaturePlan], pool: KVPool) -> None:
        features = [each.build(loaded) for each in plans]
        self._generates = loaded.plan.pooling.capacity.generates
        self.runner = Runner(
            loaded.model,
            loaded.backend,
            pool,
            loaded.sampling,
            self.context.clock,
            features,
            generates=self._generates,
            max_tokens=loaded.config.max_num_batched_tokens,
        )
        if loaded.device.type == "cpu":
            _show_progress(loaded.model)
        if loaded.device.type == "cuda":
            gc.collect()
            # Permanent objects: scanning them repeatedly would stall steps for some 20 ms.
            gc.freeze()

    def _load_model(
        self,
        plan: ModelPlan,
        plans: Sequence[FeaturePlan],
        chosen: ChosenAttention,
        pool: KVPool,
        device: torch.device,
        reading: ReadingWeights,
    ) -> Loaded:
        """Load the model, with attention that is bound to the pool, and make what samples it. If
        its steps are recorded, `reading` may still read weights then."""
        config = self.context.config
        progress = self.context.progress
        bound = make_layer = pool.wrap(chosen.backend.make_layer)
        if plan.cache_dtype is not None:
            self._scales = CacheScales(device, calibrate=config.kv_cache_scales == "calibrate")
            make_layer = self._scales.wrap(make_layer)
        splitter = LayerSplitter() if self._records(chosen.backend, pool, device) else None
        if splitter is not None:
            make_layer = splitter.wrap(make_layer)
        graphs = "graphs" if config.cuda_graphs else "no graphs"
        environment = (
            f"{describe_device(device)}, {chosen.name}, K and V in {pool.planned.layout.dtype}, "
            f"{graphs}"
        )
        make_state = None if pool.states is None else pool.states.make_layer
        with phase("weights"):
            model = load_model(
                plan,
                config,
                make_layer,
                self.group,
                device,
                progress,
                environment,
                make_state,
                None if splitter is None else reading,
            )
        if self._scales is not None and config.load_format != "dummy":
            self._scales.read(config.model)
        sampling = self._make_sampling(plan, plans, pool, device)
        return Loaded(
            plan,
            config,
            model,
            chosen.backend,
            sampling,
            sampling.rows,
            bound,
            splitter,
            self.group,
            device,
            progress,
            environment,
        )

    def _capacity(self, loaded: Loaded, attention: str, pool: KVPool, pages: int) -> Capacity:
        """Return what the rank can do with `pages` pages, with what its features add to that."""
        plan = loaded.plan
        device = loaded.device
        layout = pool.planned.layout
        details = {
            "device": describe_device(device),
            "dtype": plan.dtype_name,
            "quantization": plan.quantization_name,
            "attention": attention,
            "model": str(plan.config.architectures[0]),
            "parameters": f"{num_parameters(loaded.model) / 1e6:.1f}M",
            "cuda_graphs": "none" if self._graphs is None else str(self._graphs),
            "kv_pool": readable_bytes(pages * layout.page_bytes),
        }
        if self._scales is not None:
            details["kv_cache"] = f"{layout.dtype}, scales {self._scales.source}"
        if len(layout.groups) > 1:
            details["kv_groups"] = pool.planned.describe()
        if layout.recurrent:
            details["states"] = _states_in_words(layout, pages)
        prompt_rate = SLOW_CPU_FLOPS / (2 * parameters_of_a_token(loaded.model))
        not_deterministic = why_not(
            device.type,
            self.group.size,
            self.context.config.max_num_batched_tokens,
            attention,
            recurrent=layout.recurrent,
            fixed_shapes=loaded.backend.capabilities.fixed_shapes,
            calibrates=self._scales is not None
            and self.context.config.kv_cache_scales == "calibrate",
        )
        checks_drafts = loaded.sampling.sampler.capabilities.drafts
        capacity = Capacity(
            num_pages=pages,
            max_in_flight=2 if device.type == "cuda" else 1,
            layout=layout,
            vocab_size=plan.vocab_size,
            max_model_len=plan.max_model_len,
            shared_prefix=loaded.backend.capabilities.shared_prefix,
            max_lines=loaded.rows.max_lines if loaded.config.max_drafts else 0,
            prompt_rate=prompt_rate if device.type == "cpu" else None,
            not_deterministic=not_deterministic,
            deterministic_window=SLAB if checks_drafts and not not_deterministic else 0,
            # what proposes drafts keeps places of its own, which only a new row resets
            changes_rows=not any(isinstance(each, Proposer) for each in self._running().features),
            details=details,
        )
        for feature in self._running().features:
            details.update(feature.details)
            fields = feature.capacity
            parts = (*capacity.parts, *fields.get("parts", ()))
            capacity = replace(capacity, **{**fields, "parts": parts})
        return capacity

    def allocate(self, num_pages: int) -> None:
        """Allocate the KV pool with `num_pages` pages, record the CUDA graphs, measure `line_costs`
        for speculation, and let a model with a self-check run it. Raises `DovetailError` if `load`
        hasn't been called, and `UnsupportedError` if such a model computes wrong numbers."""
        runner = self._running()
        self._make_pool(num_pages)
        if self._graphs is not None:
            with phase("recording graphs"):
                # What drafts cost is measured with all sizes.
                all_sizes = self.context.config.max_drafts > 0
                self._graphs.capture(self.context.progress, all_sizes=all_sizes)
            runner.graphs = self._graphs
            if self.context.config.max_drafts:
                self.line_costs = line_costs(runner, self._graphs)
        for feature in runner.features:
            if isinstance(feature, Proposer):
                config = self.context.config
                self.draft_costs = draft_costs(
                    runner, feature, config.max_drafts, config.max_num_batched_tokens
                )
        if isinstance(runner.model, VerifiesItself):
            runner.model.verify(
                TrialRun(
                    runner,
                    num_pages,
                    self.context.config.max_num_batched_tokens,
                    rounds_kv=self._scales is not None,
                )
            )
        if runner.device.type == "cuda":
            gc.freeze()  # also objects from compilation and recording

    def submit(self, batch: Batch) -> Step:
        """Enqueue a step and return its handle; on a CPU, compute it.

        Raises `DovetailError` with the step and its requests if it fails, and for each step after
        that.
        """
        self.check()
        try:
            runner = self._running()
            if not self._generates and any(new.sampling is not None for new in batch.added):
                raise DovetailError("this model generates nothing, and a request wants tokens")
            if self._scales is not None and self._scales.to_calibrate and len(batch.rows):
                with self._scales.calibrating(), runner.without_graphs():
                    return runner.submit(batch)
            return runner.submit(batch)
        except Exception as error:
            names = self.runner.rows.request_ids if self.runner else []
            raise self._failed(batch.step, error, batch.rows.tolist(), names) from error

    def mask_words(self, count: int) -> NDArray[np.uint32]:
        """Return pinned memory for the words of `count` masks."""
        return self._running().sampling.masks.to_fill(count)

    def sample(self, handle: Step, masks: Masks) -> None:
        """Enqueue the sampling of a late step; on a CPU, compute it. Raises like `submit`."""
        self.check()
        try:
            self._running().sample(handle, masks)
        except Exception as error:
            raise self._failed(
                handle.number, error, handle.rows.tolist(), handle.request_ids
            ) from error

    def collect(self, handle: Step) -> Result:
        """Wait for `handle`, the oldest uncollected step. Raises like `submit`."""
        self.check()
        try:
            return self._running().collect(handle)
        except Exception as error:
            raise self._failed(
                handle.number, error, handle.rows.tolist(), handle.request_ids
            ) from error

    def check(self) -> None:
        """Raise `DovetailError` if a step has failed."""
        if self._failure is not None:
            raise DovetailError(
                f"executor {self.executor} stopped computing: {self._failure}"
            ) from self._failure

    @property
    def has_finished_start(self) -> bool:
        """True if `finish_start` has nothing to do, on any rank."""
        return self._graphs is None or self._graphs.is_complete

    def finish_start(self) -> bool:
        """Record a graph that `allocate` has left for later, while no step is in flight. Returns
        True if more are left. All ranks do so at once. Raises like `submit`."""
        self.check()
        self._running()
        return self._graphs is not None and self._graphs.record_next()

    def page_copies(self) -> PageCopies | None:
        """Make the copies of the pool's pages to host memory, after `allocate`; None if its pages
        have no bytes, or not a whole number of words."""
        pool = self._running().pool
        if pool.page_bytes and pool.page_bytes % WORD == 0:
            self._copies = PageCopies(pool, 1, 1) if pool.device.type == "cpu" else PageCopies(pool)
        return self._copies

    def name_of_bytes(self) -> str:
        """Return the name of what decides the meaning of a page's bytes: `KVTransfers.name`."""
        scales = "none" if self._scales is None else self._scales.name
        pool = self._running().pool
        return name_of_bytes(self._attention, pool.planned, self.group.size, scales, pool.device)

    def stop(self) -> None:
        """Release all resources.

        Idempotent; may be called before, or after a failed, `load` or `allocate`.
        """
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        had_cuda = self.runner is not None and self.runner.device.type == "cuda"
        self.runner = self._graphs = self._scales = None
        if had_cuda:
            gc.unfreeze()
        gc.collect()  # module and layers refer to each other
        if had_cuda:
            torch.cuda.empty_cache()

    def _running(self) -> Runner:
        if self.runner is None:
            raise DovetailError(
                f"executor {self.executor} isn't running: start() hasn't been called, or stop() has"
            )
        if self.runner.device.type == "cuda":
            # the current device is per thread, and steps may run in another thread than `load`
            torch.cuda.set_device(self.runner.device)
        return self.runner

    def _failed(
        self, step: int, error: Exception, rows: list[int], names: list[str]
    ) -> DovetailError:
        requests = ", ".join(names[row] for row in rows if row < len(names))
        self._failure = DovetailError(
            f"step {step} failed: {type(error).__name__}: {error}; requests in it: "
            f"{requests or 'none'}"
        )
        return self._failure

    def _make_kv_pool(
        self,
        plan: ModelPlan,
        plans: Sequence[FeaturePlan],
        specs: list[LayerSpec],
        backend: AttentionBackend,
        device: torch.device,
    ) -> KVPool:
        """Lay the cache out for these layers, and for the model's states."""
        config = self.context.config
        states = None
        sizes = [cached_state(spec, plan.dtype, plan.state_dtype) for spec in plan.states]
        planned = kv_layout(
            backend, specs, plan.cache_dtype or plan.dtype_name, sizes, plan.max_model_len
        )
        if any(each.reads_next for each in plans):
            planned = replace(planned, layout=replace(planned.layout, reads_next=True))
        if sizes:
            lines = self._most_lines() if config.max_drafts else 0
            states = States(
                planned, config.max_num_seqs, plan.dtype, plan.state_dtype, device, lines
            )
        return KVPool(planned, device, states)

    def _most_lines(self) -> int:
        config = self.context.config
        return most_lines(config.max_num_seqs, config.max_drafts, config.max_num_batched_tokens)

    def _make_sampling(
        self, plan: ModelPlan, plans: Sequence[FeaturePlan], pool: KVPool, device: torch.device
    ) -> Sampling:
        """Make the rows, and what samples them."""
        if self.context.sampler is None:
            raise ConfigError(f"executor {self.executor} needs a sampler, and was given none")
        config = self.context.config
        name = self.context.sampler.name
        rows = RowState(
            config.max_num_seqs,
            plan.max_model_len,
            pool.planned.layout,
            device,
            pool.states,
            self._most_lines(),
            {name: values for each in plans for name, values in each.columns.items()},
        )
        most_drafts = max(config.max_drafts, SLAB - 1)  # those of deterministic rows fill a slab
        sampler = self.context.sampler.make(
            SamplerContext(str(device), plan.vocab_size, rows.history, most_drafts)
        )
        if config.max_drafts and not sampler.capabilities.drafts:
            raise UnsupportedError(
                f"speculation: sampler {name} can't check drafts (SamplerCapabilities.drafts)"
            )
        sampler.prepare(rows.max_rows)
        refs = self.context.logits_processors
        if refs and not sampler.capabilities.processors:
            raise UnsupportedError(
                f"logits_processors: sampler {name} can't apply them "
                "(SamplerCapabilities.processors)"
            )
        processors = LogitsProcessors(
            refs, plan.vocab_size, rows, most_drafts, config.max_num_batched_tokens
        )
        return Sampling(sampler, rows, plan.vocab_size, processors)

    def _make_pool(self, num_pages: int) -> None:
        config = self.context.config
        runner = self._running()
        runner.pool.allocate(num_pages)
        runner.rows.pool_allocated(num_pages)
        max_rows = runner.rows.max_lines + sum(each.more_rows for each in runner.features)
        # slabs are rows that end at the end of a slab
        places = max(
            sizes_of_forwards(runner.device.type, config.max_num_batched_tokens), default=1
        )
        runner.backend.prepare(
            max(max_rows, places), config.max_num_batched_tokens, rounded_up(runner.rows.max_len)
        )

    def _records(self, backend: AttentionBackend, pool: KVPool, device: torch.device) -> bool:
        """Return True if steps are recorded as CUDA graphs."""
        config = self.context.config
        if device.type != "cuda" or not config.cuda_graphs:
            return False
        # torch's operations on states with drafts ask the device how many there are.
        asks = config.max_drafts and pool.states is not None and not runs_kernels(device)
        return not asks and bool(backend.capabilities.cuda_graph)

    def _make_graphs(self, loaded: Loaded, splitter: LayerSplitter) -> Graphs:
        """Return the graphs to record, with compiled kernels."""
        runner = self._running()
        graphs = Graphs.of(
            runner.parts,
            splitter,
            loaded.config.max_num_batched_tokens,
            parameters_of_a_token(loaded.model),
            [feature.recordings for feature in runner.features],
            self._slab_builders(loaded),
            self._agree,
        )
        with phase("compiling kernels"):
            graphs.compile_ahead(lambda: self._make_pool(1), self.context.progress)
        return graphs

    def _slab_builders(self, loaded: Loaded) -> list[Builder]:
        """Return those of deterministic rows, if they can be recorded."""
        can = loaded.backend.capabilities
        all_recorded = can.cuda_graph is GraphSupport.ALL and can.fixed_shapes
        if not all_recorded or loaded.rows.states:
            return []
        runner = self._running()
        builders: list[Builder] = [
            RecordedSlabs(runner.parts, loaded.config.max_num_batched_tokens)
        ]
        if loaded.sampling.sampler.capabilities.cuda_graph:
            builders += [RecordedLines(runner.parts, each, runner.slabs) for each in Capture]
        return builders

    def _pool_pages(
        self, layout: KVLayout, max_model_len: int, asked: int | None, device: torch.device
    ) -> int:
        return pool_pages(
            self.context.config,
            layout,
            max_model_len,
            asked,
            device,
            self._profile,
            self.group.size,
        )

    def _profile(self) -> int:
        """Return the peak GPU memory without the KV pool, in bytes, with that of transfers, which
        are made later. Leaves a pool of one page."""
        with phase("measuring memory"):
            self._make_pool(1)
            runner = self._running()
            peak = peak_bytes(runner, self.context.config.max_num_batched_tokens)
        if not self.context.config.kv_transfers:
            return peak
        return peak + device_bytes(runner.pool.planned.layout, self.group.size)


def _show_progress(model: torch.nn.Module) -> None:
    """Let each matrix product show that a step, however slow, isn't stuck."""
    for module in model.modules():
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(PULSE.beat)


def _states_in_words(layout: KVLayout, pages: int) -> str:
    size = readable_bytes(layout.state_pages * layout.page_bytes)
    return f"{size} a request, at most {pages // layout.pages(1)} requests at a time"
