"""The executor `local`: the whole model on one device, in the engine's own process.

On a CPU `submit` computes and `collect` hands over what came of it; steps in flight would only delay results there, so it declares one.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.api.attention import AttentionBackend, AttentionContext, LayerSpec
from dovetail.api.executor import Batch, Capacity, Executor, ExecutorContext, NewRow, Result, Target
from dovetail.api.kv_cache import KVLayout
from dovetail.api.sampler import RowSampling, SamplerContext
from dovetail.errors import ConfigError, DovetailError, UnsupportedError
from dovetail.runtime.loading import LoadedModel, load_model
from dovetail.runtime.memory import readable_bytes
from dovetail.runtime.mixed_graphs import Cuts
from dovetail.runtime.model_files import find_architecture, resolve_dtype, resolve_max_model_len
from dovetail.runtime.parallel import SINGLE
from dovetail.runtime.row_state import RowState
from dovetail.runtime.runner import PendingStep, Runner
from dovetail.runtime.step_graphs import StepGraphs
from dovetail_executors.options import LocalOptions
from dovetail_executors.pool import kv_layout, pool_blocks


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """A backend that can serve the model, and its qualified name."""

    name: str
    backend: AttentionBackend


class LocalExecutor(Executor):
    """One device. A step that fails ends it: what the device holds can't be trusted any more."""

    options: LocalOptions

    def __init__(self, options: LocalOptions, context: ExecutorContext) -> None:
        super().__init__(options, context)
        self._runner: Runner | None = None
        self._failure: DovetailError | None = None

    def start(self) -> Capacity:
        config, options = self.context.config, self.options
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        device = choose_device(options.device)
        arch, hf_config = find_architecture(config.model, self.context.models)
        dtype = str(resolve_dtype(config.dtype, hf_config, device)).removeprefix("torch.")
        specs = arch.layer_specs(hf_config, SINGLE)
        chosen = choose_attention(self.context.attention, specs, str(device), dtype, config.block_size)
        layout = kv_layout(chosen.backend, specs, chosen.backend.context.block_size, dtype)
        if device.type == "cpu":  # before the weights are read: what is too big is told at once
            self._pool_blocks(layout, resolve_max_model_len(config.max_model_len, hf_config), device)
        cuts = Cuts()
        make_layer = cuts.wrap(chosen.backend.make_layer)
        model = load_model(config.model, config, self.context.models, make_layer, SINGLE, device, self.context.progress)
        self._runner = self._make_runner(model, chosen.backend, layout, device)
        if device.type == "cuda":
            gc.collect()
            gc.freeze()  # what stands now stays: looking through it again and again would stall steps for some 20 ms
        graphs = self._step_graphs(model, chosen.backend, cuts, device)
        num_blocks = self._pool_blocks(layout, model.max_model_len, device)
        self._make_pool(chosen.backend, num_blocks, model.max_model_len)
        if graphs is not None:
            graphs.capture(self.context.progress)
        if device.type == "cuda":
            gc.freeze()  # and what compiling kernels and recording left
        return Capacity(
            num_blocks=num_blocks,
            max_in_flight=options.max_in_flight or (2 if device.type == "cuda" else 1),
            layout=layout,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            shared_prefix=chosen.backend.capabilities.shared_prefix,
            details={
                "device": describe_device(device),
                "dtype": dtype,
                "attention": chosen.name,
                "model": str(hf_config.architectures[0]),
                "parameters": f"{num_parameters(model) / 1e6:.1f}M",
                "cuda_graphs": "none" if graphs is None else str(graphs),
                "kv_pool": readable_bytes(num_blocks * layout.bytes_per_block),
            },
        )

    def submit(self, batch: Batch) -> PendingStep:
        self.check()
        try:
            return self._running().submit(batch)
        except Exception as error:
            names = self._runner.rows.request_ids if self._runner else []
            raise self._failed(batch.step, error, batch.rows.tolist(), names) from error

    def collect(self, handle: PendingStep) -> Result:
        self.check()
        try:
            return self._running().collect(handle)
        except Exception as error:
            raise self._failed(handle.step, error, handle.rows.tolist(), handle.request_ids) from error

    def check(self) -> None:
        if self._failure is not None:
            raise DovetailError(f"executor local stopped computing: {self._failure}") from self._failure

    def stop(self) -> None:
        had_cuda = self._runner is not None and self._runner.device.type == "cuda"
        self._runner = None
        if had_cuda:
            gc.unfreeze()
        gc.collect()  # module and layers refer to each other
        if had_cuda:
            torch.cuda.empty_cache()

    def _running(self) -> Runner:
        if self._runner is None:
            raise DovetailError("executor local isn't running: start() hasn't been called, or stop() has")
        if self._runner.device.type == "cuda":
            torch.cuda.set_device(self._runner.device)  # each thread has a current device, and steps may be another's than `start`
        return self._runner

    def _failed(self, step: int, error: Exception, rows: list[int], names: list[str]) -> DovetailError:
        requests = ", ".join(names[row] for row in rows if row < len(names))
        self._failure = DovetailError(f"step {step} failed: {type(error).__name__}: {error}; requests in it: {requests or 'none'}")
        return self._failure

    def _make_runner(self, model: LoadedModel, backend: AttentionBackend, layout: KVLayout, device: torch.device) -> Runner:
        if self.context.sampler is None:
            raise ConfigError("executor local needs a sampler, and was given none")
        rows = RowState(self.context.config.max_num_seqs, model.max_model_len, layout.block_size, device)
        sampler = self.context.sampler.make(SamplerContext(str(device), model.vocab_size, rows.history))
        sampler.prepare(rows.max_rows)
        return Runner(model.module, backend, sampler, rows, self.context.clock, model.vocab_size)

    def _make_pool(self, backend: AttentionBackend, num_blocks: int, max_model_len: int) -> None:
        config = self.context.config
        backend.allocate(num_blocks)
        backend.prepare(config.max_num_seqs, config.max_num_batched_tokens, max_model_len)

    def _step_graphs(self, model: LoadedModel, backend: AttentionBackend, cuts: Cuts, device: torch.device) -> StepGraphs | None:
        """What will be recorded, its kernels compiled."""
        config = self.context.config
        if device.type != "cuda" or not config.cuda_graphs or backend.capabilities.cuda_graph == "none":
            return None
        graphs = StepGraphs(self._running(), cuts, config.max_num_batched_tokens, num_parameters(model))
        graphs.compile_ahead(lambda: self._make_pool(backend, 1, model.max_model_len), self.context.progress)
        return graphs

    def _pool_blocks(self, layout: KVLayout, max_model_len: int, device: torch.device) -> int:
        return pool_blocks(self.context.config, layout, max_model_len, self.options.num_blocks, device, lambda: self._profile(device))

    def _profile(self, device: torch.device) -> int:
        """Run the biggest step there can be, in a pool of one block that every row writes to, and tell what GPU memory all but the pool takes at
        its peak, in bytes."""
        runner = self._running()
        self._make_pool(runner.backend, 1, runner.rows.max_len)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        biggest = biggest_batch(runner.rows, self.context.config.max_num_batched_tokens)
        runner.collect(runner.submit(biggest))
        runner.rows.update(empty_batch(removed=biggest.rows))
        runner.sampler.update(biggest.rows.tolist(), [])
        free, total = torch.cuda.mem_get_info(device)
        outside_torch = total - free - torch.cuda.memory_reserved(device)
        return outside_torch + torch.cuda.max_memory_allocated(device)


def num_parameters(model: LoadedModel) -> int:
    return sum(parameter.numel() for parameter in model.module.parameters())


def choose_device(name: str) -> torch.device:
    """The device that an option means. Raises `ConfigError` for no device's name, `UnsupportedError` for one that isn't there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"executor.device: {name!r} is no device; expected auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = device.index or 0
        if index >= count:
            raise UnsupportedError(f"executor.device: {name} isn't there; torch {torch.__version__} sees {count} CUDA devices")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise UnsupportedError(f"executor.device: {name} is neither the CPU nor a CUDA device")
    return device


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)"


def choose_attention(candidates: tuple[Target, ...], specs: list[LayerSpec], device: str, dtype: str, block_size: int | None) -> ChosenAttention:
    """The first of `candidates` with no reason against serving these layers. Raises `UnsupportedError` with every reason of each.

    `block_size` None: as each candidate likes it.
    """
    refused = []
    for target in candidates:
        try:
            backend: type[AttentionBackend] = target.load()
        except ImportError as error:
            refused.append(f"{target.name}: it can't be imported: {error}")
            continue
        context = AttentionContext(device, dtype, block_size or backend.capabilities.default_block_size())
        reasons = backend.reasons_against(context, specs)
        if not reasons:
            return ChosenAttention(target.name, target.make(context))
        refused += [f"{target.name}: {reason}" for reason in reasons]
    asked = f"on {device} in {dtype}" + ("" if block_size is None else f" with block_size: {block_size}")
    listed = "".join(f"\n  - {reason}" for reason in refused) or " none was offered"
    raise UnsupportedError(f"no attention backend can serve this model {asked}:{listed}")


def biggest_batch(rows: RowState, max_tokens: int) -> Batch:
    """As many rows, and as many tokens, as one step may have: all new, all sampling."""
    num_rows = min(rows.max_rows, max_tokens)
    count = min(max_tokens // num_rows, rows.max_len)
    tokens, blocks = np.zeros(count, np.int32), np.zeros(-(-count // rows.block_size), np.int32)
    added = tuple(NewRow(row, "profile", tokens, count, 0, blocks, RowSampling()) for row in range(num_rows))
    index = np.arange(num_rows, dtype=np.int32)
    return empty_batch(added=added, rows=index, num_tokens=np.full(num_rows, count, np.int32), samples=np.ones(num_rows, np.bool_))


def empty_batch(**changes: object) -> Batch:
    nothing = np.zeros(0, np.int32)
    fields: dict[str, object] = {
        "step": -1,
        "removed": nothing,
        "added": (),
        "new_block_rows": nothing,
        "new_blocks": nothing,
        "copies": (),
        "rows": nothing,
        "num_tokens": nothing,
        "samples": nothing.astype(np.bool_),
    }
    return Batch(**{**fields, **changes})  # type: ignore[arg-type]
