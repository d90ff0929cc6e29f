"""Runs models without an engine: attention that stores each sequence's K and V, states of recurrent
layers in a pool, ranks as threads, and transformers' own model as the reference."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import partial
from threading import Barrier
from typing import Any, NamedTuple

import torch

from dovetail.api.attention import AttentionLayer, LayerCache, LayerSpec
from dovetail.api.model import ModelArch, ModelInputs, ParallelGroup
from dovetail.api.state import StateLayer, StateSpec
from dovetail.errors import DovetailError
from dovetail.nn.build import RuntimeContext
from dovetail.nn.format import Quantization
from dovetail.nn.parallel import SINGLE
from dovetail.nn.placed_weights import place_weights
from dovetail.nn.state.states import CheckedDrafts
from dovetail.testing.checks import fail
from dovetail.testing.memory import bind_states
from dovetail.testing.suites import model_configs as configs
from dovetail.testing.suites.attention_oracle import Rules, plain, selected

CPU = torch.device("cpu")
RANK_LIMIT_S = 30  # for a rank to reach a collective
ROWS = 40  # sequences whose states are kept
MOST_LINES = 16  # known tokens and drafts of a step with drafts

Tensors = dict[str, torch.Tensor]


class Chunk(NamedTuple):
    """Tokens of one sequence to compute in a step."""

    sequence: str
    token_ids: torch.Tensor  # [tokens] int64
    start: int  # position of the first
    # tokens of these after which the states are copied, for `Bench.fork`; 0: they aren't
    checkpoint: int = 0
    drafts: int = 0  # how many of these are drafts, after one known token; see `Bench.accept`


@dataclass
class Sequences:
    """K and V of all sequences in all layers; the sequences of a step's tokens."""

    step: list[tuple[str, int]] = field(default_factory=list)  # sequence, tokens
    layers: list[KeptAttention] = field(default_factory=list)
    # of sequences, the [start, stop) of tokens that attend in both directions in layers that do so
    spans: dict[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    # by sequence, what the last layer that selects tokens selected, [queries, tokens] bool
    selected: dict[str, torch.Tensor] = field(default_factory=dict)
    # result of the last `attend`, which the next one may overwrite
    latest: torch.Tensor | None = None

    def make_attention(self, spec: LayerSpec) -> KeptAttention:
        self.layers.append(KeptAttention(spec, self))
        return self.layers[-1]

    def fork(self, source: str, target: str, tokens: int) -> None:
        """Let `target` begin with K and V of the first tokens of `source`, like a prefix hit."""
        for layer in self.layers:  # those that share do so twice
            k, v = layer.kept[source]
            layer.kept[target] = (k[:tokens], v[:tokens])
            if source in layer.index_keys:
                layer.index_keys[target] = layer.index_keys[source][:tokens]

    def cut(self, name: str, tokens: int) -> None:
        """Drop K and V of all but the first tokens of a sequence."""
        self.fork(name, name, tokens)


class KeptAttention(AttentionLayer):
    """Attention of ragged batches by definition, over K and V that only grow."""

    def __init__(self, spec: LayerSpec, sequences: Sequences) -> None:
        self.spec = spec
        self._sequences = sequences
        shared = next(
            (layer for layer in sequences.layers if layer.spec.index == spec.shares), None
        )
        self.kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = (
            {} if shared is None else shared.kept
        )
        self.index_keys: dict[str, torch.Tensor] = {}

    def bind(self, cache: LayerCache) -> None:
        raise NotImplementedError("K and V are kept by sequence")

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        if self.spec.shares is not None:
            raise ValueError("a layer that shares another's K and V writes none")
        if self.spec.v_in_k != (v is None):
            raise ValueError("a layer with v_in_k gets only K, others K and V")
        v = k[..., : self.spec.out_size] if v is None else v
        counts = [tokens for _, tokens in self._sequences.step]
        for (name, _), new_k, new_v in zip(
            self._sequences.step, torch.split(k, counts), torch.split(v, counts), strict=True
        ):
            old = self.kept.get(name) if self.spec.causal else None
            self.kept[name] = (
                (torch.cat((old[0], new_k)), torch.cat((old[1], new_v)))
                if old
                else (new_k.clone(), new_v.clone())
            )

    def write_index(self, keys: torch.Tensor) -> None:
        for (name, _), new in zip(self._sequences.step, self._by_row(keys), strict=True):
            old = self.index_keys.get(name, new[:0])
            self.index_keys[name] = torch.cat((old, new))

    def select(self, q: torch.Tensor, weights: torch.Tensor) -> None:
        if self.spec.indexer is None or not self.spec.indexer.selects:
            raise ValueError("a layer whose spec has no indexer that selects can't select")
        rows = zip(self._sequences.step, self._by_row(q), self._by_row(weights), strict=True)
        for (name, _), own, of_heads in rows:
            self._sequences.selected[name] = selected(
                own, of_heads, self.index_keys[name], self.spec.indexer.top_k
            )

    def _by_row(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(values, [tokens for _, tokens in self._sequences.step])

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        rows = torch.split(q, [tokens for _, tokens in self._sequences.step])
        kept = [self.kept[name] for name, _ in self._sequences.step]
        rules = [self._rules(name) for name, _ in self._sequences.step]
        values = [
            plain(row, k, v, of_row, q.dtype)
            for row, (k, v), of_row in zip(rows, kept, rules, strict=True)
        ]
        if self._sequences.latest is not None:
            self._sequences.latest.fill_(torch.nan)
        self._sequences.latest = torch.cat(values).to(q.dtype)
        return self._sequences.latest

    def _rules(self, sequence: str) -> Rules:
        spec = self.spec
        spans = self._sequences.spans.get(sequence, ()) if spec.both_ways else ()
        rules = Rules(spec.scale, spec.window, spec.softcap, self.sinks, spec.causal, spans)
        if spec.indexer is None:
            return rules
        return rules._replace(selected=self._sequences.selected[sequence])


class Bench:
    """A model with its weights, and its computed sequences."""

    def __init__(
        self,
        arch: ModelArch,
        config: Any,
        tensors: Tensors | None,
        *,
        parallel: ParallelGroup = SINGLE,
        dtype: torch.dtype = torch.float32,
        before: float | None = None,
        max_len: int | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """`tensors`: a checkpoint's, None: none are loaded. `before`: what all memory of the
        parameters holds before. `quantization`: gives linear layers their formats."""
        self.sequences, self.made = Sequences(), list[StateSpec]()
        declared = arch.state_specs(config, parallel)
        self.checks_drafts = bool(declared) and all(spec.drafts for spec in declared)
        most_lines = MOST_LINES if self.checks_drafts else 0
        self.states = bind_states(declared, ROWS, dtype, max_lines=most_lines) if declared else None
        self._checked: CheckedDrafts | None = None  # of the last step
        self._parts: tuple[Chunk, ...] = ()  # of the last step
        self._rows: dict[str, int] = {}  # the least recently used first
        self._free_rows = [*range(ROWS)]  # the next one last
        # by sequence and tokens: the states in all layers
        self._checkpoints: dict[tuple[str, int], list[torch.Tensor]] = {}
        context = RuntimeContext(
            parallel=parallel,
            dtype=dtype,
            device=CPU,
            make_attention=self.sequences.make_attention,
            max_len=max_len,
            make_state=self._make_state,
            weights_later=quantization is not None,
        )
        self.model: Any = arch.build(config, context)
        _require_inputs(self.model)
        if quantization is not None:
            place_weights(self.model, quantization, CPU)
        if before is not None:
            for parameter in self.model.parameters():
                parameter.data.fill_(before)
        if tensors is not None:
            self.load(tensors)

    def _make_state(self, spec: StateSpec) -> StateLayer:
        self.made.append(spec)
        if self.states is None or spec.index not in self.states.layers:
            return StateLayer(spec, lambda: None)  # not declared: it has no memory
        return self.states.layers[spec.index]

    def load(self, tensors: Tensors) -> None:
        """Load by the model's own rules, without files."""
        for rule in self.model.weights():
            if rule.source in tensors and rule.parameter is not None:
                rule.parameter.load(tensors[rule.source], rule.shard_id, rule.transform)

    @torch.no_grad()
    def step(
        self,
        *parts: Chunk,
        wanted: torch.Tensor | None = None,
        **fields: torch.Tensor | None,
    ) -> torch.Tensor:
        """Hidden states [tokens, hidden] of a step that computes these parts; of those `wanted`
        alone [n, hidden]. `fields`: more of `ModelInputs`."""
        self.plan(*parts)
        positions = torch.cat(
            [torch.arange(part.start, part.start + len(part.token_ids)) for part in parts]
        )
        token_ids = torch.cat([part.token_ids for part in parts])
        hidden: torch.Tensor = self.model(
            ModelInputs(token_ids=token_ids, positions=positions, wanted=wanted, **fields)
        )
        if self.states is not None:
            for index, part in enumerate(parts):
                if part.checkpoint:
                    kept = self._read(self.states.checkpoint_place(index))
                    self._checkpoints[part.sequence, part.start + part.checkpoint] = kept
        return hidden

    @torch.no_grad()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.model.embed(token_ids)
        return embedded

    @torch.no_grad()
    def tapped(
        self, part: Chunk, taps: Sequence[int], wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Result of `forward_tapped` of a step that computes this part."""
        self.plan(part)
        positions = torch.arange(part.start, part.start + len(part.token_ids))
        inputs = ModelInputs(token_ids=part.token_ids, positions=positions, wanted=wanted)
        hidden, states = self.model.forward_tapped(inputs, taps)
        return hidden, states

    def plan(self, *parts: Chunk) -> None:
        """Prepare attention and states for a step that computes these parts."""
        self.sequences.step = [(part.sequence, len(part.token_ids)) for part in parts]
        if self.states is not None:
            rows = [self._row(part.sequence, new=part.start == 0) for part in parts]
            lengths = [len(part.token_ids) for part in parts]
            starts = [part.start for part in parts]
            self._parts = parts
            self._checked = None
            if any(part.drafts for part in parts):
                drafts = [part.drafts for part in parts]
                self._checked = self.states.plan_drafts(rows, lengths, starts, drafts)
            else:
                self.states.plan(rows, lengths, starts, [part.checkpoint for part in parts])

    def accept(self, right: Mapping[str, int]) -> None:
        """Let the first `right` drafts of each sequence of the last step count, and no others."""
        if self.states is None:
            raise DovetailError("a model without states has no drafts to accept")
        known = [0] * ROWS
        for part in self._parts:
            if part.sequence in right:
                computed = part.start + 1 + right[part.sequence]
                known[self._rows[part.sequence]] = computed + 1  # with the token that is sampled
                self.sequences.cut(part.sequence, computed)
        self.states.accept(self._checked, known)

    def fork(self, source: str, target: str, tokens: int) -> None:
        """Let `target` begin with K and V of the first tokens of `source`, and with its states
        after these, of which there is a checkpoint: like a prefix hit."""
        self.sequences.fork(source, target, tokens)
        if self.states is not None:
            place = torch.tensor([self._row(target, new=True)])
            kept = iter(self._checkpoints[source, tokens])
            for layer in self.states.layers.values():
                for tensor in range(len(layer.spec.tensors)):
                    layer.write(tensor, place, next(kept))

    def states_of(self, sequence: str) -> list[torch.Tensor]:
        """The states [rows, row_size] of a sequence, layer by layer."""
        return [values[0] for values in self._read(self._rows[sequence])]

    def _read(self, place: int) -> list[torch.Tensor]:
        layers = [] if self.states is None else self.states.layers.values()
        return [
            layer.read(tensor, torch.tensor([place]))
            for layer in layers
            for tensor in range(len(layer.spec.tensors))
        ]

    def _row(self, sequence: str, *, new: bool) -> int:
        if not new and sequence not in self._rows:
            raise DovetailError(f"the states of sequence {sequence!r} aren't kept any more")
        if sequence not in self._rows and not self._free_rows:
            self.forget(next(iter(self._rows)))
        self._rows[sequence] = (
            self._rows.pop(sequence) if sequence in self._rows else self._free_rows.pop()
        )
        return self._rows[sequence]

    def forget(self, sequence: str) -> None:
        """Drop a sequence; the next new one gets its row, with its states."""
        self._free_rows.append(self._rows.pop(sequence))
        for layer in self.sequences.layers:
            layer.kept.pop(sequence, None)
            layer.index_keys.pop(sequence, None)

    def run(
        self,
        token_ids: torch.Tensor,
        chunks: Sequence[int] = (),
        sequence: str = "a",
        start: int = 0,
        checkpoint: int = 0,
    ) -> torch.Tensor:
        """Logits [tokens, vocab] of a sequence's tokens from `start` on, computed whole or in
        chunks of these lengths (which add up). `checkpoint`: tokens of the first chunk after which
        the states are copied."""
        parts = []
        at = start
        for ids in torch.split(token_ids, list(chunks or (len(token_ids),))):
            parts.append(self.step(Chunk(sequence, ids, at, checkpoint if at == start else 0)))
            at += len(ids)
        return self.logits(torch.cat(parts))

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states; of an encoder, which has none, a copy of these."""
        logits: torch.Tensor = (
            self.model.logits(hidden) if hasattr(self.model, "logits") else hidden.clone()
        )
        return logits


def _require_inputs(model: Any) -> None:
    """Raise `CheckFailed` unless the model's forward methods can be called as the contract does."""
    for name, arguments in (("forward", "inputs"), ("forward_tapped", "inputs, taps")):
        method = getattr(model, name, None)
        if method is None:
            continue
        signature = inspect.signature(method)
        try:
            signature.bind(*arguments.split(", "))
        except TypeError as error:
            fail(
                f"{type(model).__name__}.{name}{signature} is called as {name}({arguments}), where "
                f"inputs is a dovetail.api.model.ModelInputs with the fields "
                f"{', '.join(field.name for field in fields(ModelInputs))}: {error}"
            )


class ThreadGroup:
    """One of `size` ranks, which are threads of one process."""

    def __init__(self, rank: int, shares: list[Any], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(shares)
        self._shares = shares
        self._barrier = barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=dim)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._shares[self.rank] = x.clone()
        self._barrier.wait(timeout=RANK_LIMIT_S)
        everyones = list(self._shares)
        self._barrier.wait(timeout=RANK_LIMIT_S)
        return everyones


def on_ranks(size: int, act: Callable[[ParallelGroup], Any]) -> list[Any]:
    """Return the result of `act(group)` on each rank."""
    shares, barrier = [None] * size, Barrier(size)

    def one(rank: int) -> Any:
        try:
            return act(ThreadGroup(rank, shares, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def _generator(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )


def _encoder(config: Any) -> Any:
    """Return transformers' model without the pooler, which is no part of the encoder."""
    from transformers import AutoModel

    model = AutoModel.from_config(config, attn_implementation="eager")
    if hasattr(model, "pooler"):
        model.pooler = None
    return model


def _plus(rows: torch.Tensor, layer: Any, arguments: Any, output: Any) -> Any:
    """Return a layer's output with rows [tokens, hidden] added to its stream."""
    if isinstance(output, tuple):
        return output[0] + rows, *output[1:]
    return output + rows


class Reference:
    """transformers' model of a config, with random weights and no parameter at a neutral value."""

    def __init__(self, config: Any, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.encodes = configs.encodes((config.architectures or [""])[0])
        self.model: Any = (_encoder if self.encodes else _generator)(config).eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                is_scale = "norm" in name.lower() and not name.endswith("bias")
                parameter.normal_(mean=1.0 if is_scale else 0.0, std=0.2, generator=generator)
            for name, buffer in self.model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.normal_(mean=1.0, std=0.2, generator=generator)
                if name.endswith("bias"):  # of experts
                    buffer.normal_(std=0.2, generator=generator)

    @torch.no_grad()
    def streams(self, token_ids: torch.Tensor) -> list[torch.Tensor]:
        """The residual stream [tokens, hidden] before each layer, and at last the final states."""
        return [
            states[0]
            for states in self.model(token_ids[None], output_hidden_states=True).hidden_states
        ]

    @torch.no_grad()
    def with_rows(self, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The final states [tokens, hidden] if rows [layers, tokens, hidden] are added to the
        residual stream, each after its layer."""
        layers = next(
            module
            for name, module in self.model.named_modules()
            if name.endswith("layers") and len(list(module.children())) == len(rows)
        )
        hooks = [
            layer.register_forward_hook(partial(_plus, own))
            for layer, own in zip(layers, rows, strict=True)
        ]
        try:
            return self.run(token_ids)[0]
        finally:
            for hook in hooks:
                hook.remove()

    def scale_matrices(self, factor: float, embedding: float | None = None) -> None:
        """Multiply the weights of all layers by `factor`, and those of the embedding by it or
        `embedding`; norms and an untied head stay."""
        embedded = self.model.get_input_embeddings().weight
        head = self.model.get_output_embeddings()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter is embedded:
                    parameter.mul_(factor if embedding is None else embedding)
                elif "norm" not in name.lower() and (head is None or parameter is not head.weight):
                    parameter.mul_(factor)

    def enlarge_what_norms_of_heads_get(self, factor: float) -> bool:
        """Multiply the weights of q and k by `factor` if they are normed, which changes next to
        nothing; return whether they are."""
        names = dict(self.model.named_parameters())
        if not any("q_norm" in name for name in names):
            return False
        with torch.no_grad():
            for name, parameter in names.items():
                if "q_proj" in name or "k_proj" in name:
                    parameter.mul_(factor)
        return True

    def held(self) -> Tensors:
        """The tensors of the model, under the names that a checkpoint has for them."""
        from transformers.core_model_loading import revert_weight_conversion

        held: Tensors = revert_weight_conversion(self.model, self.model.state_dict())
        return held

    def tensors(self) -> Tensors:
        """The tensors of a checkpoint: tied weights once, under the first of their names."""
        tied = self.tied()
        return {
            name: value.detach().clone() for name, value in self.held().items() if name not in tied
        }

    def tied(self) -> dict[str, str]:
        """Names that share their weights with a tensor before them, and that one's name."""
        first: dict[int, str] = {}
        held = self.model.state_dict().items()
        return {
            name: other
            for name, value in held
            if (other := first.setdefault(value.data_ptr(), name)) != name
        }

    @torch.no_grad()
    def encoded(self, token_ids: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        """Return an encoder's hidden states. `types` [tokens] int64: of its tokens."""
        of_types = {} if types is None else {"token_type_ids": types[None]}
        hidden: torch.Tensor = self.model(
            token_ids[None], attention_mask=torch.ones_like(token_ids[None]), **of_types
        ).last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def run(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states after the last norm, and logits; of an encoder the hidden states
        twice."""
        if self.encodes:
            hidden = self.encoded(token_ids)
            return hidden, hidden
        out = self.model(token_ids[None], output_hidden_states=True)
        return out.hidden_states[-1][0], out.logits[0]
