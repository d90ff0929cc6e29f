"""Serves any architecture of transformers: its own module code, with attention from Dovetail's
backends (`transformers_attention`).

Native models are preferred. Models that can't be verified as exact are rejected
(`transformers_check`).
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from dovetail.api.attention import LayerSpec
from dovetail.api.component import NoOptions
from dovetail.api.model import (
    BuildContext,
    ModelArch,
    ModelCapabilities,
    ModelContext,
    ModelInputs,
    ParallelGroup,
    TrialRun,
    WeightRule,
)
from dovetail.api.state import StateSpec
from dovetail.errors import UnsupportedError
from dovetail.nn.attention import spec_of_rank
from dovetail.nn.build import of_runtime
from dovetail.nn.format.stored import StoredWeight
from dovetail.nn.model_files import model_length
from dovetail.nn.parallel import shares_of
from dovetail.nn.skeletons import ONE_AT_A_TIME, skeleton
from dovetail.nn.weights import (
    dummy_weights,
    load_weights,
    random_numbers,
)
from dovetail_models.transformers_attention import (
    NAME,
    NOT_THROUGH,
    AttentionCall,
    bind,
    one_line,
    positions_of_step,
    specs_of,
    trace,
)
from dovetail_models.transformers_check import check, check_logprobs, trial_tokens, whole_logprobs
from dovetail_models.transformers_layers import (
    Layers,
    OwnExperts,
    OwnHead,
    find_layers,
    reasons_against_split,
)
from dovetail_models.transformers_lengths import check_lengths, check_rope, longest_needed
from dovetail_models.transformers_loading import (
    Elsewhere,
    Rules,
    is_stored,
    loaded,
    parameter_of,
    place_in,
    published_names,
    ready,
    refuse_others_stored,
    tensors_of,
)
from dovetail_models.transformers_older import attend_by
from dovetail_models.transformers_states import (
    StateCall,
    attends,
    bind_states,
    recording_states,
    state_specs_of,
)
from dovetail_models.transformers_verdicts import Verdict

log = logging.getLogger("dovetail")

# attributes of a model's class that name them
_IN_FLOAT32 = (
    "_keep_in_fp32_modules",
    "_keep_in_fp32_modules_strict",
)
_HIDING = {  # kinds of layers that compute something that attention backends don't see
    "chunked_attention": "which ends at a chunk's border, hidden from attention backends; a "
    "max_model_len of one chunk avoids it",
    "conv": "a convolution, whose state of earlier inputs only native models can keep",
    "linear_attention": "whose recurrent state only native models can keep",
}
_OTHER_STATE = "{} keeps a recurrent state apart from transformers' cache"
# of transformers' code
_FAILURES = (
    AttributeError,
    IndexError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Transformers(ModelArch):
    """Serves all causal language models of transformers that pass the check."""

    capabilities = ModelCapabilities(tensor_parallel=True, media=True)

    def __init__(self, options: NoOptions, context: ModelContext) -> None:
        super().__init__(options, context)
        self._traced: tuple[Any, Traced] | None = None

    def reasons_against(self, config: Any) -> list[str]:
        serves = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if getattr(config, "is_encoder_decoder", False):
            return ["is_encoder_decoder: a model with an encoder isn't served"]
        names = config.architectures or ()
        if serves is None or not any(_is_called(name, serves, config.model_type) for name in names):
            return [_why_not_causal(config, serves)]
        if getattr(config, "index_topk", None):
            return [
                f"index_topk = {config.index_topk}: transformers' code for attention to the tokens "
                f"that an indexer selects isn't served"
            ]
        is_stateful = getattr(getattr(transformers, serves), "_is_stateful", False)
        try:
            traced = self._trace(config)
        except UnsupportedError as error:
            return [_OTHER_STATE.format(serves) if is_stateful else str(error)]
        if is_stateful and not traced.states:
            return [_OTHER_STATE.format(serves)]
        return sorted({problem for call in traced.calls for problem in call.problems})

    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        return [spec_of_rank(spec, parallel) for spec in specs_of(self._trace(config).calls)]

    def state_specs(self, config: Any, parallel: ParallelGroup) -> list[StateSpec]:
        traced = self._trace(config)
        return state_specs_of(traced.states, len(traced.calls))

    def build(self, config: Any, context: BuildContext) -> nn.Module:
        traced = self._trace(config)
        max_len = context.max_len or model_length(config)
        check_rope(config, max_len)
        check_lengths(config, traced.calls, max_len)
        published = published_names(traced.model) if of_runtime(context).weights_stored else {}
        layers = find_layers(
            traced.base,
            traced.calls,
            max_len,
            context.device,
            traced.keeps,
            lambda name: f"{traced.prefix}{name}.0.down_proj.weight" in published,
        )
        if of_runtime(context).weights_later:
            _warn_of_plain_experts(traced, layers, context.dtype)
        if context.parallel.size > 1 and (
            reasons := [
                *(["recurrent layers aren't split"] if traced.states else []),
                *reasons_against_split(
                    traced.base, traced.calls, layers, config.base_model_tp_plan
                ),
            ]
        ):
            raise UnsupportedError(
                f"{type(traced.model).__name__} can't be split over ranks through transformers: "
                f"{'; '.join(reasons)}"
            )
        return TransformersModel(config, traced, layers, context, max_len, published)

    def _trace(self, config: Any) -> Traced:
        """Trace the model on the meta device. Raises `UnsupportedError`."""
        if self._traced is None or self._traced[0] is not config:
            self._traced = config, traced_model(config)
        return self._traced[1]


def _is_called(name: str, serves: str, model_type: str) -> bool:
    """Return True if `name` is that of `serves`, transformers' class for a type, as it or
    published checkpoints spell it. A type that another one's class serves is published with a
    class of its own (`InternLM3ForCausalLM`, which is Llama's in transformers)."""
    return _folded(name) in (_folded(serves), _folded(f"{model_type}ForCausalLM"))


def _folded(name: str) -> str:
    return re.sub("[-_]", "", name).lower()


def _why_not_causal(config: Any, serves: str | None) -> str:
    """Return why the architectures of a config can't be served."""
    names = ", ".join(config.architectures or ())
    kind = config.model_type
    known = [name for name in config.architectures or () if hasattr(transformers, name)]
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        if any(name.endswith("ForMaskedLM") for name in known):
            return f"architectures: {names} predicts masked tokens, which isn't served"
        why = f"only native models serve those: there is none for {kind}"
        return f"architectures: {names} is an encoder, and {why}"
    if serves is None:
        return f"architectures: {names}: transformers has no causal language model for {kind}"
    if not known:
        return (
            f"architectures: {names} is no class of transformers, and code in a checkpoint is "
            f"never run; for {kind} it has {serves}"
        )
    return f"architectures: {names} isn't a causal language model; for {kind} that is {serves}"


@dataclass(frozen=True, slots=True)
class Traced:
    """A model on the meta device, and the attention calls and recurrent modules of its forward
    pass."""

    model: PreTrainedModel
    base: nn.Module  # the model without its head
    calls: list[AttentionCall]
    states: list[StateCall]
    called: frozenset[str]  # names of the base's modules that are called

    @property
    def prefix(self) -> str:
        """Prefix of the names of the base's parameters in the model."""
        return "".join(
            f"{name}." for name, module in self.model.named_children() if module is self.base
        )

    def keeps(self, name: str) -> bool:
        """Return True for modules of the base that must stay as they are: those with parameters
        that stay in float32 for any model dtype, and those that text doesn't go through."""
        return name not in self.called or any(
            pattern in name
            for attribute in _IN_FLOAT32
            for pattern in getattr(self.model, attribute, None) or ()
        )


def traced_model(config: Any) -> Traced:
    try:
        with torch.device("meta"):
            model = _of_config(config)
    except Exception as error:
        raise UnsupportedError(
            f"transformers can't build it as a causal language model: {one_line(error)}"
        ) from error
    base = _base_of(model)
    called = set[str]()
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name, module in base.named_modules()
    ]
    with recording_states(base) as states:
        calls = trace(base)
    for hook in hooks:
        hook.remove()
    if not calls and not states:
        raise UnsupportedError(NOT_THROUGH.format(type(base).__name__))
    if any(attends(base.get_submodule(state.module)) for state in states):
        raise UnsupportedError("its attention keeps a state beside K and V")
    return Traced(model, base, calls, states, frozenset(called))


class TransformersModel(nn.Module):
    """A `dovetail.api.model.CausalLM` around a model of transformers, created by `load_checkpoint`.
    Some of its modules are replaced by `layers`."""

    def __init__(
        self,
        config: Any,
        traced: Traced,
        layers: Layers,
        context: BuildContext,
        max_len: int,
        published: Mapping[str, str],
    ) -> None:
        """`published`: see `published_names`; empty unless the checkpoint is quantized."""
        super().__init__()
        self.config = config
        self._layers = layers
        self._context = of_runtime(context)
        self._max_len = max_len
        self._prefix = traced.prefix
        self._published = published
        self._their_names = frozenset(name for name, _ in traced.model.named_parameters())
        self._calls = traced.calls
        self._states = traced.states
        self._shortened = _shortened(config, traced)
        self._attention = [
            context.make_attention(spec_of_rank(spec, context.parallel))
            for spec in specs_of(traced.calls)
        ]
        self._state_layers = [
            context.make_state(spec) for spec in state_specs_of(traced.states, len(traced.calls))
        ]
        self._own = {found.name: found.make(context) for found in layers.found}
        self.own = nn.ModuleList(self._own.values())
        of_rank = (context.parallel.rank, context.parallel.size)
        self._verdict = Verdict(
            config,
            {
                "in": self._context.environment,
                "dtype": str(context.dtype),
                "max_len": max_len,
                "rank": of_rank,
            },
        )
        self._to_verify = False
        self._expected: torch.Tensor | None = None  # log-probabilities of `trial_tokens`

    def load_checkpoint(self, directory: Path | None, seed: int) -> None:
        """Load the weights from `directory`; None: random ones. Raises `ModelLoadError` if the
        checkpoint doesn't match, and `UnsupportedError` if the model computes other states in
        ragged batches than by itself."""
        device = self._context.device
        if directory is None:
            dummy_weights(self, seed)
            self.model = _skeleton(self.config, self._context.dtype)
        else:
            self._load_from(directory)
        self._base = _base_of(self.model)
        _replace(self._base, self._own)
        del self.own  # now in the model
        for name, module in self.model.named_children():
            if type(module) is nn.Linear:
                setattr(self.model, name, OwnHead(module))
        if directory is None:
            _fill(self.model, seed, device)
        self.model.to(device)
        bind(self._base, self._calls, self._attention)
        bind_states(self._base, self._states, self._state_layers)
        self._head = head_of(self.model)

    def _load_from(self, directory: Path) -> None:
        """Load the weights, and check the layers unless a verdict is kept."""
        if self._context.parallel.size > 1 and not self._is_plain():
            raise UnsupportedError(
                "a quantized model through transformers runs on one GPU: set "
                "tensor_parallel_size to 1"
            )
        ours = [rule for rule in self.weights() if self._is_ours(rule)]
        if ours:
            refuse_others_stored(directory, ours)
            load_weights(Rules(ours), directory, partly=True)
        elsewhere = self._elsewhere(ours)
        verdict = self._verdict.read()
        self._to_verify = self._on_any_rank(verdict is None)
        if self._to_verify:
            self._prove(directory, elsewhere)
        elif verdict is False:
            self._leave_layers()
        self.model = loaded(self.config, directory, self._context.dtype, elsewhere)
        if self._to_verify and self._is_plain():
            self._expected = self._logprobs_of_transformers()
        for rule in self.weights():
            if not self._is_ours(rule):
                rule.parameter.load(self.model.get_parameter(rule.source).data, rule.shard_id)

    def _is_ours(self, rule: WeightRule) -> bool:
        """Return True if Dovetail reads a weight from the checkpoint, not transformers."""
        return is_stored(rule) or rule.source not in self._their_names

    def _elsewhere(self, ours: Sequence[WeightRule]) -> Elsewhere:
        """Return what transformers needn't load, for `ours` are loaded already."""
        named = {rule.source for rule in ours}
        parameters = {
            parameter_of(rule.source)
            for rule in self._own_rules()
            if self._published.get(rule.source, rule.source) in named
        }
        return Elsewhere(frozenset(parameters), tensors_of(ours))

    def _logprobs_of_transformers(self) -> torch.Tensor:
        """Return those of `trial_tokens`, with transformers' own attention."""
        tokens = trial_tokens(self.config.vocab_size, self._max_len)
        attend_by(self.model, "eager")
        try:
            logprobs = whole_logprobs(self.model, tokens, self._context.device)
        except _FAILURES as error:
            raise UnsupportedError(
                f"{type(self.model).__name__}: its code fails in transformers: {one_line(error)}"
            ) from error
        attend_by(self.model, NAME)
        return logprobs

    def verify(self, run: TrialRun) -> None:
        """Compare the whole model, in its dtype, with transformers; if quantized, or with a smaller
        cache dtype, with itself without graphs. Then store the verdict of all checks."""
        if run.rounds_kv and any(call.has_positions for call in self._calls):
            raise UnsupportedError(
                "kv_cache_dtype: its keys hold positions, for ALiBi, which 8 bits can't"
            )
        if not self._to_verify:
            return
        tokens = trial_tokens(self.config.vocab_size, self._max_len)
        difference = check_logprobs(run, tokens, None if run.rounds_kv else self._expected)
        self._expected = None
        if self._on_any_rank(difference is not None):
            raise UnsupportedError(
                f"{type(self.model).__name__} can't be served through transformers: "
                f"{difference or 'another rank refuses it'}"
            )
        self._to_verify = False
        self._verdict.write(replaced=bool(self._layers.found))

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        parallel = self._context.parallel
        # Ranks that share memory begin each forward with a collective, as a split embedding is one.
        if shares_of(parallel) is not None:
            parallel.all_reduce(torch.zeros(1, device=self._context.device))
        given = {"input_ids": inputs.token_ids[None]}
        if inputs.rows is not None and inputs.is_row is not None:  # as the whole model does
            text = self.model.get_input_embeddings()(inputs.token_ids)
            given = {
                "inputs_embeds": torch.where(inputs.is_row[:, None], inputs.rows[0], text)[None]
            }
        hidden = _states_of(self._base, self._layers, given, inputs.positions)
        return hidden if inputs.wanted is None else hidden.index_select(0, inputs.wanted)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def weights(self) -> Iterator[WeightRule]:
        """Yield the rules for parameters of replaced modules; transformers loads the others."""
        for rule in self._own_rules():
            yield replace(rule, source=self._published.get(rule.source, rule.source))

    def _own_rules(self) -> Iterator[WeightRule]:
        """Yield the rules with the names that weights have in transformers' model."""
        for name, own in self._own.items():
            yield from own.rules(self._prefix + name)

    def _prove(self, directory: Path, elsewhere: Elsewhere) -> None:
        """Run the first layers, with at least one of each kind, in float32, by themselves and in
        ragged batches. `elsewhere`: weights that are already loaded."""
        short = self._shortened
        config, calls = short.config, short.calls
        alone = loaded(config, directory, torch.float32, elsewhere, whole=False).to(
            self._context.device
        )
        parameters = {name: one.data for name, one in alone.named_parameters()}
        for rule in self._own_rules():
            place = place_in(parameters, rule.source)
            if place is not None and parameter_of(rule.source) in elsewhere.parameters:
                place.copy_(_values(rule))
        attend_by(alone, "eager")
        specs = [spec_of_rank(spec, self._context.parallel) for spec in specs_of(calls)]
        lengths = sorted(
            {1, min(33, self._max_len), min(longest_needed(self.config, calls), self._max_len)}
        )
        difference = self._difference(alone, self._layers, short, specs, lengths)
        may_leave = self._is_plain() and self._layers.found and self._context.parallel.size == 1
        if (
            difference is not None
            and may_leave
            and self._difference(alone, Layers(), short, specs, lengths) is None
        ):
            log.warning(
                "%s: none of its layers is replaced by a faster one, with which %s",
                type(alone).__name__,
                difference,
            )
            self._leave_layers()
        elif self._on_any_rank(difference is not None):
            seen = difference or "another rank refuses it"
            what = f"{type(alone).__name__} can't be served through transformers"
            raise UnsupportedError(f"{what}: {_hidden_by(self.config)}: {seen}")

    def _is_plain(self) -> bool:
        """Return False if a weight of the replaced layers isn't plain."""
        return not any(isinstance(rule.parameter, StoredWeight) for rule in self.weights())

    def _leave_layers(self) -> None:
        self._layers, self._own, self.own = Layers(), {}, nn.ModuleList()

    def _on_any_rank(self, said: bool) -> bool:
        """Return True on all ranks if `said` is True on any of them."""
        group = self._context.parallel
        if group.size == 1:
            return said
        return bool(
            group.all_reduce(torch.tensor([float(said)], device=self._context.device)).item()
        )

    def _difference(
        self,
        alone: PreTrainedModel,
        layers: Layers,
        short: _Short,
        specs: Sequence[LayerSpec],
        lengths: list[int],
    ) -> str | None:
        """Return how the states of `alone` differ from those of the same model in ragged batches,
        with `layers`; None if they agree."""
        batched = copy.deepcopy(
            alone, {id(one): one for one in (*alone.parameters(), *alone.buffers())}
        )
        attend_by(batched, NAME)
        base = _base_of(batched)
        base_alone = _base_of(alone)
        context = replace(
            self._context, dtype=torch.float32, weights_later=False, weights_stored=False
        )
        own = {found.name: found.make(context) for found in layers.found if _has(base, found.name)}
        for name, layer in own.items():
            for rule in layer.rules(self._prefix + name):
                rule.parameter.load(batched.get_parameter(rule.source).data, rule.shard_id)
        _replace(base, own)
        with torch.no_grad(), full_float32():
            try:
                return check(
                    base,
                    short.calls,
                    specs,
                    short.states,
                    partial(_states, base_alone, Layers()),
                    partial(_states, base, layers),
                    lengths,
                    self.config.vocab_size,
                )
            except _FAILURES as error:
                return f"its code fails in ragged batches: {one_line(error)}"


def _hidden_by(config: Any) -> str:
    """Return what makes a model compute other numbers in ragged batches."""
    kinds = getattr(config, "layer_types", None) or ()
    told = [f"layer_types has {kind}, {why}" for kind, why in _HIDING.items() if kind in kinds]
    return "; ".join(told) or (
        "its code keeps a state beside attention's K and V, or hides a mask from attention backends"
    )


def _values(rule: WeightRule) -> torch.Tensor:
    """Return the numbers that a rule has loaded."""
    weight = rule.parameter
    is_stored = isinstance(weight, StoredWeight)
    values = weight.format.dequantized(weight) if is_stored else weight.data
    found: torch.Tensor = weight.parts[rule.shard_id].place(values)
    return found


def _warn_of_plain_experts(traced: Traced, layers: Layers, dtype: torch.dtype) -> None:
    """Log the share of a quantized model's parameters that are stacked experts whose code isn't
    replaced: they have no format but the model's dtype."""
    replaced = {found.name for found in layers.found if found.kind is OwnExperts}
    stacked = {
        parameter: type(module).__name__
        for name, module in traced.base.named_modules()
        for parameter in module.parameters(False)
        if parameter.ndim == 3 and name not in replaced
    }
    if stacked:
        kept, total = (
            sum(parameter.numel() for parameter in some)
            for some in (stacked, traced.model.parameters())
        )
        names = ", ".join(sorted(set(stacked.values())))
        told = str(dtype).removeprefix("torch.")
        log.warning(
            "%s aren't quantized through transformers: %.0f %% of the model's parameters stay in %s",
            names,
            100 * kept / total,
            told,
        )


def _base_of(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head. Raises `UnsupportedError` if they can't be separated."""
    base = model.base_model if model.base_model is not model else getattr(model, "model", None)
    if not isinstance(base, nn.Module) or not any(module is base for module in model.children()):
        raise UnsupportedError(f"{type(model).__name__} has no base model apart from its head")
    return base


def _replace(base: nn.Module, own: Mapping[str, nn.Module]) -> None:
    for name, layer in own.items():
        base.set_submodule(name, layer)


def _has(base: nn.Module, name: str) -> bool:
    return any(name == other for other, _ in base.named_modules())


def _states(
    base: nn.Module, layers: Layers, token_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    return _states_of(base, layers, {"input_ids": token_ids[None]}, positions)


def _states_of(
    base: nn.Module, layers: Layers, given: Mapping[str, torch.Tensor], positions: torch.Tensor
) -> torch.Tensor:
    """Return the states of tokens or embeddings, as arguments of transformers' model."""
    positions_of_step.set(positions)
    for rotary in layers.rotaries:
        rotary.begin(positions)
    states: torch.Tensor = base(
        **given, position_ids=positions[None], use_cache=False
    ).last_hidden_state[0]
    return states


def _of_config(text: Any, dtype: torch.dtype | None = None) -> PreTrainedModel:
    with ONE_AT_A_TIME:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(text),
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation=NAME,
        )
        return ready(model)


def _skeleton(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with buffers and vectors created by transformers, and with matrices on the
    meta device."""
    return skeleton(partial(_of_config, config, dtype), least_dims=2)


def _fill(model: PreTrainedModel, seed: int, device: torch.device) -> None:
    """Allocate parameters on the meta device on `device`, with random values like
    `dummy_weights`."""
    made: dict[int, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                if id(parameter) not in made:
                    numbers = random_numbers(parameter.shape, f"{prefix}.{name}", seed, device).to(
                        parameter.dtype
                    )
                    made[id(parameter)] = nn.Parameter(numbers, requires_grad=False)
                setattr(module, name, made[id(parameter)])


class _GivenStates:
    """Output of a base model with only states, under any name that its head reads."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return self.last_hidden_state if index == 0 else ()


class _Given(nn.Module):
    """Replaces the base model to compute only the head, which may read numbers of the base."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        for name, value in vars(base).items():
            if isinstance(value, int | float) and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _GivenStates:
        return _GivenStates(inputs_embeds)

    @property
    def decoder(self) -> _Given:
        """Return itself, for heads that call `self.model.decoder`."""
        return self


def head_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a module that computes logits from hidden states: the model's own code, including
    scaling and soft caps, without its base."""
    head = copy.copy(model)
    base = _base_of(model)
    vars(head)["_modules"] = {
        name: _Given(module) if module is base else module
        for name, module in model.named_children()
    }
    return head


class _Short(NamedTuple):
    """The config of a model with the first layers of another one, and their calls."""

    config: Any
    calls: list[AttentionCall]
    states: list[StateCall]


def _shortened(config: Any, traced: Traced) -> _Short:
    """Return a model with the first layers of `traced`, at least one of each kind."""
    base = traced.base
    calls = traced.calls
    whole = _Short(config, calls, traced.states)
    count = int(config.num_hidden_layers)
    lists = [
        (name, module)
        for name, module in base.named_modules()
        if _holds(name, module, count, [*calls, *traced.states])
    ]
    if not lists:
        return whole
    prefix, layers = lists[0]
    kinds: dict[str, int] = {}
    for index, layer in enumerate(layers):
        classes = [(name, type(module).__name__) for name, module in layer.named_modules()]
        shapes = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
        own = [
            replace(call, module="")
            for call in calls
            if call.module.startswith(f"{prefix}.{index}.")
        ]
        kinds.setdefault(repr((classes, shapes, own)), index)
    kept = max(kinds.values()) + 1
    if kept == count:
        return whole
    short = copy.deepcopy(config)

    def stays(name: str) -> bool:
        return (
            not name.startswith(f"{prefix}.") or int(name[len(prefix) + 1 :].split(".")[0]) < kept
        )

    try:
        for name, value in vars(config).items():
            if isinstance(value, list) and len(value) == count:
                setattr(short, name, value[:kept])
        short.num_hidden_layers = kept
        with torch.device("meta"):
            parameters = {
                name: one.shape for name, one in _base_of(_of_config(short)).named_parameters()
            }
    except (*_FAILURES, StrictDataclassError):
        return whole
    if parameters != {name: one.shape for name, one in base.named_parameters() if stays(name)}:
        # layers depend on their number: those that share K and V, or embeddings for each
        return whole
    return _Short(
        short,
        [call for call in calls if stays(call.module)],
        [state for state in traced.states if stays(state.module)],
    )


def _holds(
    name: str, module: nn.Module, count: int, calls: Sequence[AttentionCall | StateCall]
) -> bool:
    """Return True for the list of a model's `count` layers, which contain the calls."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) == count
        and any(call.module.startswith(f"{name}.") for call in calls)
    )


@contextmanager
def full_float32() -> Iterator[None]:
    """Context without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
