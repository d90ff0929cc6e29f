"""Model architectures with one thing wrong each."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from dovetail.api.attention import LayerSpec
from dovetail.api.model import BuildContext, ModelInputs, ParallelGroup, WeightRule
from dovetail.api.state import Changes, StateBatch, StateLayer, StateSpec
from dovetail.nn.attention import Attention
from dovetail.nn.rotary import Rope
from dovetail_models.bert import Bert, XLMRoberta
from dovetail_models.llama import Llama
from dovetail_models.modernbert import ModernBert
from dovetail_models.qwen3 import Qwen3
from dovetail_models.qwen3_next import Qwen35
from tests.conformance.mutants import mutant


def changed(config: Any, **fields: Any) -> Any:
    """Return a copy of a config with other values of some fields."""
    other = copy(config)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


class Altered(Qwen3):
    """Changes the decoder that it built: what it is called with, and what it says of its
    weights."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward, weights = model.forward, model.weights
        model.forward = lambda inputs: forward(
            replace(inputs, positions=self.positions(model, inputs.positions))
        )
        model.weights = lambda: self.rules(model, list(weights()))
        return model  # type: ignore[no-any-return]

    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        return positions

    def rules(self, model: Any, rules: list[WeightRule]) -> list[WeightRule]:
        return rules


# ---- numbers


@mutant(caught_by="model.transformers")
class CountsPaddingWithinAPrompt(XLMRoberta):
    """Positions begin after padding's, but every token takes one."""

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> torch.nn.Module:
        model: Any = super().encoder(config, specs, context, prefix)
        forward, first, model.padding = model.forward, config.pad_token_id + 1, None
        model.forward = lambda inputs: forward(replace(inputs, positions=inputs.positions + first))
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.config_fields")
class TakesTheWindowForOneSide(ModernBert):
    """The window of an encoder's layer is that many tokens together, on both sides."""

    def window(self, config: Any, index: int) -> int | None:
        return config.local_attention if super().window(config, index) else None


@mutant(caught_by="model.ragged")
class AddsTheMeanOfTheStep(Bert):
    """As if a step were one text."""

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> torch.nn.Module:
        model: Any = super().encoder(config, specs, context, prefix)
        forward = model.norm.forward
        model.norm.forward = lambda x: forward(x + x.mean(0))
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.transformers")
class RotatesALittleFaster(Qwen3):
    def rope(self, config: Any, index: int) -> Rope:
        rope = super().rope(config, index)
        return replace(rope, theta=rope.theta * 0.9)


@mutant(caught_by="model.transformers")
class UsualEps(Qwen3):
    """Passes over the config's eps."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        return super().build(changed(config, rms_norm_eps=1e-6), context)


@mutant(caught_by="model.transformers")
class NoNormOfHeads(Qwen3):
    def attention(
        self, config: Any, spec: LayerSpec, context: BuildContext, inputs: int | None = None
    ) -> Attention:
        attention = super().attention(config, spec, context, inputs)
        attention.qk_norm = None
        return attention


@mutant(caught_by="model.transformers")
class DropsTheResidual(Qwen3):
    """The embedding isn't part of the stream that reaches the last norm."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        embed = model.embedding.forward
        streams: list[torch.Tensor] = []

        def embedded(token_ids: torch.Tensor) -> torch.Tensor:
            streams[:] = [embed(token_ids)]
            return streams[0].clone()

        norm = model.norm.forward
        model.embedding.forward = embedded
        model.norm.forward = lambda x: norm(x - streams[0])
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.config_fields")
class TakesEveryActivationForSilu(Qwen3):
    def reasons_against_fields(self, config: Any) -> list[str]:
        return [
            reason
            for reason in super().reasons_against_fields(config)
            if "hidden_act" not in reason
        ]


@mutant(caught_by="model.config_fields")
class ForgetsBiases(Llama):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        return super().build(changed(config, mlp_bias=False), context)


@mutant(caught_by="model.config_fields")
class WindowOneTooWide(Qwen3):
    def window(self, config: Any, index: int) -> int | None:
        window = super().window(config, index)
        return window and window + 1


@mutant(caught_by="model.config_fields")
class RefusesInGeneralities(Qwen3):
    def reasons_against(self, config: Any) -> list[str]:
        return ["this config is not supported"] if super().reasons_against(config) else []


@mutant(caught_by="model.unknown_fields")
class PassesOverUnknownFields(Qwen3):
    def _unknown(self, config: Any) -> list[str]:
        return []


@mutant(caught_by="model.types")
class ReadsNoTypes(Bert):
    """Takes all tokens of a pair for those of its first text."""

    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> torch.nn.Module:
        model: Any = super().encoder(config, specs, context, prefix)
        forward = model.forward
        model.forward = lambda inputs: forward(replace(inputs, types=None))
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.types")
class TakesNoneForTheSecondText(Bert):
    def encoder(
        self, config: Any, specs: list[LayerSpec], context: BuildContext, prefix: str
    ) -> torch.nn.Module:
        model: Any = super().encoder(config, specs, context, prefix)
        forward = model.forward
        model.forward = lambda inputs: forward(
            replace(inputs, types=torch.ones_like(inputs.token_ids))
            if inputs.types is None
            else inputs
        )
        return model  # type: ignore[no-any-return]


# ---- steps


@mutant(caught_by="model.inputs")
class TakesItsInputsOneByOne(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward = model.forward
        model.forward = lambda token_ids, positions, wanted=None: forward(
            ModelInputs(token_ids=token_ids, positions=positions, wanted=wanted)
        )
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.chunks")
class PositionsRestartWithEachChunk(Altered):
    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(positions))


@mutant(caught_by="model.decode")
class DecodesOnePositionTooFar(Altered):
    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        return positions + 1 if len(positions) == 1 else positions


@mutant(caught_by="model.prefix")
class CountsPositionsItself(Altered):
    """Right as long as each sequence is computed from its beginning, and alone."""

    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        first = 0 if positions[0] == 0 else model.count
        model.count = first + len(positions)
        return torch.arange(first, model.count)


@mutant(caught_by="model.ragged")
class TakesAStepForOneSequence(Altered):
    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        return (torch.arange(len(positions)) + positions[0]) % 64


@mutant(caught_by="model.wanted")
class ReturnsAllStates(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward = model.forward
        model.forward = lambda inputs: forward(replace(inputs, wanted=None))
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.wanted")
class ReturnsTheFirstStates(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward = model.forward
        model.forward = lambda inputs: forward(replace(inputs, wanted=None))[
            : None if inputs.wanted is None else len(inputs.wanted)
        ]
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.wanted")
class SortsWhatIsWanted(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward = model.forward
        model.forward = lambda inputs: forward(
            inputs if inputs.wanted is None else replace(inputs, wanted=inputs.wanted.sort().values)
        )
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.wanted")
class WritesOfTheLastLayerWhatIsWanted(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward, layer = model.forward, model.blocks[-1].attention.attn
        write = layer.write

        def write_wanted(inputs: ModelInputs) -> torch.Tensor:
            if inputs.wanted is None:
                return forward(inputs)  # type: ignore[no-any-return]
            kept = torch.zeros(len(inputs.token_ids), 1, 1).index_fill_(0, inputs.wanted, 1.0)
            layer.write = lambda k, v: write(k * kept, v * kept)
            try:
                return forward(inputs)  # type: ignore[no-any-return]
            finally:
                layer.write = write

        model.forward = write_wanted
        return model  # type: ignore[no-any-return]


class Taps(Qwen3):
    """Returns other states from `forward_tapped` than the built decoder."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        tapped = model.forward_tapped
        model.forward = lambda inputs: tapped(inputs, ())[0]
        model.forward_tapped = lambda inputs, taps: self.altered(tapped, inputs, taps)
        return model  # type: ignore[no-any-return]

    def altered(self, tapped: Any, inputs: ModelInputs, taps: Any) -> Any:
        raise NotImplementedError


@mutant(caught_by="model.taps")
class TapsALayerLater(Taps):
    def altered(self, tapped: Any, inputs: ModelInputs, taps: Any) -> Any:
        return tapped(inputs, [min(tap + 1, 2) for tap in taps])


@mutant(caught_by="model.taps")
class TapsInAscendingOrder(Taps):
    def altered(self, tapped: Any, inputs: ModelInputs, taps: Any) -> Any:
        return tapped(inputs, sorted(taps))


@mutant(caught_by="model.taps")
class TapsWhatIsWanted(Taps):
    def altered(self, tapped: Any, inputs: ModelInputs, taps: Any) -> Any:
        hidden, states = tapped(inputs, taps)
        return hidden, states if inputs.wanted is None else states[inputs.wanted]


@mutant(caught_by="model.taps")
class TapsIntoTheSameMemory(Taps):
    memory = torch.empty(0)

    def altered(self, tapped: Any, inputs: ModelInputs, taps: Any) -> Any:
        hidden, states = tapped(inputs, taps)
        if self.memory.numel() < states.numel():
            self.memory = torch.empty(1 << 14)
        kept = self.memory[: states.numel()].view(states.shape)
        return hidden, kept.copy_(states)


@mutant(caught_by="model.side_by_side")
class KeepsTheLatestModelForAll(Qwen3):
    latest: ClassVar[Any] = None

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        type(self).latest = model.embedding
        model.embedding.forward = lambda token_ids: torch.nn.functional.embedding(
            token_ids, type(self).latest.weight
        )
        return model  # type: ignore[no-any-return]


# ---- weights


@mutant(caught_by="model.weight_names")
class RulesForTensorsOfOtherModels(Altered):
    def rules(self, model: Any, rules: list[WeightRule]) -> list[WeightRule]:
        return [*rules, WeightRule("model.norm.bias", rules[2].parameter, optional=True)]


@mutant(caught_by="model.weight_names")
class EverythingIsOptional(Altered):
    def rules(self, model: Any, rules: list[WeightRule]) -> list[WeightRule]:
        return [replace(rule, optional=True) for rule in rules]


@mutant(caught_by="model.weight_use")
class ReadsANormWithoutUsingIt(Altered):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model = super().build(config, context)
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
        return model

    def rules(self, model: Any, rules: list[WeightRule]) -> list[WeightRule]:
        return [
            replace(rule, parameter=Elsewhere()) if "q_norm" in rule.source else rule
            for rule in rules
        ]


class Elsewhere:
    """Takes what is loaded, and keeps it from the model."""

    def load(self, source: Any, shard_id: str | None = None, transform: Any = None) -> None:
        pass


@mutant(caught_by="model.weight_complete")
class ForgetsAPartOfAWeight(Altered):
    def rules(self, model: Any, rules: list[WeightRule]) -> list[WeightRule]:
        return [
            rule for rule in rules if not rule.source.endswith("layers.1.self_attn.v_proj.weight")
        ]


@mutant(caught_by="model.checkpoint")
class LoadsTensorsAlone(Altered):
    """Its parameters can't take a slice of a file."""

    def rules(self, model: Any, rules: list[WeightRule]) -> list[WeightRule]:
        for parameter in {id(rule.parameter): rule.parameter for rule in rules}.values():
            load = type(parameter).load
            parameter.load = (
                lambda source, shard_id=None, transform=None, load=load, own=parameter: load(
                    own, source.clone(), shard_id, transform
                )
            )
        return rules


@mutant(caught_by="model.checkpoint")
class RefusesWhatEveryConfigFileHas(Qwen3):
    """Fields of a config that are only there when it was read from a file."""

    def reasons_against_fields(self, config: Any) -> list[str]:
        made = vars(type(config)())
        return [
            f"{name} is not implemented"
            for name in vars(config)
            if name == "model_type" and name not in made
        ]


@mutant(caught_by="model.tied")
class NeverTied(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        return super().build(changed(config, tie_word_embeddings=False), context)


# ---- ranks, specs and dtypes


@dataclass(frozen=True)
class NeverSums:
    """A group that forgets to add up."""

    group: ParallelGroup

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.group.all_gather(x, dim)


@mutant(caught_by="model.shards")
class KeepsPartialSums(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        return super().build(config, replace(context, parallel=NeverSums(context.parallel)))


@mutant(caught_by="model.shards")
class LogitsOfOneRankAlone(Qwen3):
    """Each rank fills in minus infinity for the tokens that are another's."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        logits, rank, size = model.logits, context.parallel.rank, context.parallel.size

        def own(hidden: torch.Tensor) -> torch.Tensor:
            of_all = logits(hidden)
            others = torch.arange(of_all.shape[1]) * size // of_all.shape[1] != rank
            return of_all.masked_fill(others, -torch.inf)

        model.logits = own
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.layer_specs")
class SpecsOfTheWholeModel(Qwen3):
    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        return [
            replace(spec, heads=heads, kv_heads=kv_heads)
            for spec in super().layer_specs(config, parallel)
        ]


@mutant(caught_by="model.layer_specs")
class SpecsInReverse(Qwen3):
    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        return super().layer_specs(config, parallel)[::-1]


@mutant(caught_by="model.dtype")
class AlwaysFloat32(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        return super().build(config, replace(context, dtype=torch.float32))


@mutant(caught_by="model.dtype")
class RotatesInHalfPrecision(Qwen3):
    """Positions are rounded to bfloat16's eight bits: whole numbers up to 256, and none of the
    angles."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        if context.dtype != torch.float32:
            table = model.rotaries[0].table
            table.copy_(table.acos().nan_to_num().to(torch.float8_e4m3fn).float().cos())
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.decode")
class NeedsTwoTokensToBegin(Altered):
    """A prompt of one token is taken for a decode."""

    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        return positions + 1 if positions.tolist() == [0] else positions


@mutant(caught_by="model.ragged")
class TurnsTheFirst64TokensOfAStep(Altered):
    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        return torch.cat((positions[:64], torch.zeros_like(positions[64:])))


# ---- what a config and a dtype may bring


@mutant(caught_by="model.rope_types")
class TakesAnyRopeForThePlainOne(Qwen3):
    """Those that the suite's changes name are refused; others aren't looked at."""

    def reasons_against_fields(self, config: Any) -> list[str]:
        rope = config.rope_parameters
        if rope["rope_type"] not in ("linear", "dynamic", "yarn", "llama3"):
            config.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        reasons = super().reasons_against_fields(config)
        config.rope_parameters = rope
        return [
            *reasons,
            *(f"{key} isn't implemented" for key in rope if key == "partial_rotary_factor"),
        ]


class TakesOneRopeForThePlainOne(Qwen3):
    taken: ClassVar[str]

    def reasons_against_fields(self, config: Any) -> list[str]:
        plain = self.plain(config)
        return super().reasons_against_fields(plain)

    def rope(self, config: Any, index: int) -> Rope:
        return super().rope(self.plain(config), index)

    def plain(self, config: Any) -> Any:
        rope = config.rope_parameters
        if rope["rope_type"] != self.taken:
            return config
        changed = deepcopy(config)
        changed.rope_parameters = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        return changed


@mutant(caught_by="model.config_fields")
class TakesALongRopeForThePlainOne(TakesOneRopeForThePlainOne):
    taken = "longrope"


@mutant(caught_by="model.rope_types", soon=True)
class TakesAnUnknownRopeForThePlainOne(TakesOneRopeForThePlainOne):
    taken = "su"


@mutant(caught_by="model.rope_types")
class PassesOverParametersOfTheRope(Qwen3):
    def reasons_against_fields(self, config: Any) -> list[str]:
        return [
            reason
            for reason in super().reasons_against_fields(config)
            if "is not implemented for rope_type" not in reason
        ]


@mutant(caught_by="model.positions")
class KeepsTheRotationOfASimilarStep(Altered):
    """One of as many tokens that begins at the same position."""

    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        looks = len(positions), int(positions[0])
        if getattr(model, "looks", None) == looks:
            return model.kept  # type: ignore[no-any-return]
        model.looks, model.kept = looks, positions
        return positions


class KeepsAnInput(Qwen3):
    """Takes an input of the step before, if the new one has as many rows, and the same first and
    last one."""

    field: ClassVar[str]

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward = model.forward
        kept: dict[tuple[int, int, int], torch.Tensor] = {}

        def similar(inputs: ModelInputs) -> torch.Tensor:
            given = getattr(inputs, self.field)
            if given is None:
                return forward(inputs)  # type: ignore[no-any-return]
            looks = (len(given), int(given[0]), int(given[-1]))
            used = kept.get(looks, given.clone())
            kept.clear()
            kept[looks] = used
            return forward(replace(inputs, **{self.field: used}))  # type: ignore[no-any-return]

        model.forward = similar
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.alike_steps")
class KeepsTheRotationOfTheSameEnds(KeepsAnInput):
    field = "positions"


@mutant(caught_by="model.alike_steps")
class KeepsTheTokensOfTheSameEnds(KeepsAnInput):
    field = "token_ids"


@mutant(caught_by="model.alike_steps")
class KeepsTheWantedOfTheSameEnds(KeepsAnInput):
    field = "wanted"


@mutant(caught_by="model.owns_nothing")
class CountsPositionsInPlace(Altered):
    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        used = positions.clone()
        positions += 1
        return used


@mutant(caught_by="model.owns_nothing")
class KeepsLogitsOfEqualStates(Altered):
    """Gives out the same logits twice, which a sampler may have overwritten."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        logits, kept = model.logits, {}

        def from_memory(hidden: torch.Tensor) -> torch.Tensor:
            key = hidden.numpy().tobytes()
            return kept.setdefault(key, logits(hidden))

        model.logits = from_memory
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.dtype")
class PositionsInHalfPrecision(Altered):
    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        dtype = next(iter(model.parameters())).dtype
        return positions.to(dtype).long()


@mutant(caught_by="model.dtype")
class NormsTwiceRounded(Qwen3):
    """Divides by the root of a mean that was rounded to half precision."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        norm = model.norm.forward
        model.norm.forward = lambda x: (
            norm(x) * (1 + 3 * torch.finfo(context.dtype).eps * (context.dtype != torch.float32))
        )
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.max_len")
class TableOfOnePositionLess(Altered):
    """Where a length is asked for."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model = super().build(config, context)
        self.last = (context.max_len or 2**20) - 2
        return model

    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        return positions.clamp(max=self.last)


@mutant(caught_by="model.layer_specs")
class SpecsOfTwoRanksAtMost(Qwen3):
    def layer_specs(self, config: Any, parallel: ParallelGroup) -> list[LayerSpec]:
        specs = super().layer_specs(config, parallel)
        return (
            specs if parallel.size <= 2 else [replace(spec, heads=spec.heads + 1) for spec in specs]
        )


@mutant(caught_by="model.wanted")
class TakesAllForNone(Qwen3):
    """Where as many states are wanted as there are tokens, it returns them in the step's order."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward = model.forward
        model.forward = lambda inputs: forward(
            replace(inputs, wanted=None)
            if inputs.wanted is not None and len(inputs.wanted) == len(inputs.token_ids)
            else inputs
        )
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.transformers")
class AnotherHeadForOneRow(Altered):
    """A kernel for a single row is off by a hundredth."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        logits = model.logits
        model.logits = lambda hidden: logits(hidden) * (1.01 if len(hidden) == 1 else 1.0)
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.ragged")
class RoomForFourSequences(Altered):
    """Positions of a step with more of them are twice what they should be."""

    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        sequences = 1 + int((positions[1:] != positions[:-1] + 1).sum())
        return positions if sequences <= 4 else positions * 2


@mutant(caught_by="model.unknown_fields")
class PassesOverSwitches(Qwen3):
    def _unknown(self, config: Any) -> list[str]:
        return [reason for reason in super()._unknown(config) if "= True" not in reason]


# ---- right in the common case, wrong at an edge


@mutant(caught_by="model.dtype")
class LastNormInItsDtype(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        model.norm.forward = lambda x: self.normed(x, model.norm.weight, config.rms_norm_eps)
        return model  # type: ignore[no-any-return]

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@mutant(caught_by="model.dtype")
class NormsHeadsInItsDtype(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        for block in model.blocks:
            norm = block.attention.qk_norm
            weight = norm.weight.view(norm.heads)
            norm.forward = lambda x, weight=weight: (
                weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps))
            )
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.dtype")
class RoundsTheMeanOfSquares(LastNormInItsDtype):
    """What is squared is in float32, so that nothing overflows."""

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        mean = x.float().pow(2).mean(-1, keepdim=True)
        kept = mean.bfloat16().float() if x.dtype != torch.float32 else mean
        return weight * (x.float() * torch.rsqrt(kept + eps)).to(x.dtype)


@mutant(caught_by="model.dtype")
class SquaresInItsDtype(LastNormInItsDtype):
    """Right but for what is so large that its square overflows."""

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        mean = x.pow(2).float().mean(-1, keepdim=True)
        return weight * (x.float() * torch.rsqrt(mean + eps)).to(x.dtype)


class Wrapped(Qwen3):
    """Stands between the caller and the built model."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward, logits = model.forward, model.logits
        model.forward = lambda inputs: self.states(forward, inputs)
        model.logits = lambda hidden: self.logits(logits, hidden)
        return model  # type: ignore[no-any-return]

    def states(self, forward: Any, inputs: ModelInputs) -> torch.Tensor:
        return forward(inputs)  # type: ignore[no-any-return]

    def logits(self, logits: Any, hidden: torch.Tensor) -> torch.Tensor:
        return logits(hidden)  # type: ignore[no-any-return]


@mutant(caught_by="model.wanted")
class TakesOneWantedForTheLast(Wrapped):
    def states(self, forward: Any, inputs: ModelInputs) -> torch.Tensor:
        if inputs.wanted is not None and len(inputs.wanted) == 1:
            inputs = replace(inputs, wanted=torch.tensor([len(inputs.token_ids) - 1]))
        return forward(inputs)  # type: ignore[no-any-return]


@mutant(caught_by="model.wanted")
class WritesUpToTheLastWanted(Qwen3):
    """K and V of what comes after it stay zeros, in the last layer."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        forward, layer = model.forward, model.blocks[-1].attention.attn
        write = layer.write

        def write_some(inputs: ModelInputs) -> torch.Tensor:
            count = len(inputs.token_ids)
            last = count if inputs.wanted is None else inputs.wanted.max()
            some = (torch.arange(count) <= last)[:, None, None]
            layer.write = lambda k, v: write(k * some, v * some)
            return forward(inputs)  # type: ignore[no-any-return]

        model.forward = write_some
        return model  # type: ignore[no-any-return]


@mutant(caught_by="model.owns_nothing")
class SortsManyWantedInPlace(Wrapped):
    def states(self, forward: Any, inputs: ModelInputs) -> torch.Tensor:
        states: torch.Tensor = forward(inputs)
        if inputs.wanted is not None and len(inputs.wanted) > 2:
            inputs.wanted.copy_(inputs.wanted.sort().values)
        return states


@mutant(caught_by="model.owns_nothing")
class UsesOneRowOfStatesAgain(Wrapped):
    def logits(self, logits: Any, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = logits(hidden)
        if len(hidden) == 1:
            hidden.mul_(0.5)
        return found


@mutant(caught_by="model.owns_nothing")
class KeepsLogitsOfTheSameStates(Wrapped):
    """As long as it is asked for those of one tensor, one call after the other."""

    last: ClassVar[Any] = (None, None)

    def logits(self, logits: Any, hidden: torch.Tensor) -> torch.Tensor:
        if self.last[0] is not hidden:
            self.last = hidden, logits(hidden)  # type: ignore[misc]
        return self.last[1]  # type: ignore[no-any-return]


@mutant(caught_by="model.ragged")
class TakesTheLastPositionForTheLargest(Altered):
    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        return positions.clamp(max=int(positions[-1]))


@mutant(caught_by="model.ragged")
class TakesFallingPositionsForRising(Altered):
    """A step of one token a sequence has them sorted."""

    def positions(self, model: Any, positions: torch.Tensor) -> torch.Tensor:
        return positions.sort().values if (positions[1:] < positions[:-1]).all() else positions


@mutant(caught_by="model.config_fields")
class HasALeastEps(Qwen3):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        return super().build(changed(config, rms_norm_eps=max(config.rms_norm_eps, 1e-6)), context)


@mutant(caught_by="model.config_fields")
class TakesAWindowOfOneForNone(Qwen3):
    def window(self, config: Any, index: int) -> int | None:
        window = super().window(config, index)
        return None if window == 1 else window


@mutant(caught_by="model.config_fields")
class HasALeastWindow(Qwen3):
    def window(self, config: Any, index: int) -> int | None:
        window = super().window(config, index)
        return window and max(window, 2)


@mutant(caught_by="model.config_fields")
class TakesNoUnwindowedLayersForAll(Qwen3):
    """`max_window_layers` of 0 is taken for a field that isn't set."""

    def window(self, config: Any, index: int) -> int | None:
        return super().window(config, index) if config.max_window_layers else None


@mutant(caught_by="model.config_fields")
class HasALargestTheta(Qwen3):
    def rope(self, config: Any, index: int) -> Rope:
        rope = super().rope(config, index)
        return replace(rope, theta=min(rope.theta, 1e6))


# ---- states


class Planned:
    """A layer's states, as a step that was altered names them."""

    def __init__(self, layer: StateLayer, alter: Callable[[StateBatch], StateBatch]) -> None:
        self._layer, self._alter = layer, alter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    @property
    def batch(self) -> StateBatch:
        return self._alter(self._layer.batch)


class AltersSteps(Qwen35):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        make: Any = lambda spec: Planned(context.make_state(spec), self.altered)  # noqa: E731
        return super().build(config, replace(context, make_state=make))

    def altered(self, batch: StateBatch) -> StateBatch:
        return batch


@mutant(caught_by="model.chunks")
class StartsEachChunkFromZero(AltersSteps):
    def altered(self, batch: StateBatch) -> StateBatch:
        return replace(batch, kv_lens=batch.query_starts.diff())


@mutant(caught_by="model.prefix")
class KeepsNoCheckpoints(AltersSteps):
    def altered(self, batch: StateBatch) -> StateBatch:
        return (
            batch
            if batch.checkpoint_at is None
            else replace(batch, checkpoint_at=torch.zeros_like(batch.checkpoint_at))
        )


@mutant(caught_by="model.states")
class KeepsAnEarlierCheckpoint(AltersSteps):
    """The checkpoint is the state that the row had before the step."""

    def altered(self, batch: StateBatch) -> StateBatch:
        return (
            batch
            if batch.host_checkpoint_at is None
            else replace(batch, host_checkpoint_at=batch.host_checkpoint_at.clip(max=1))
        )


@mutant(caught_by="model.states")
class SortsTheRows(AltersSteps):
    def altered(self, batch: StateBatch) -> StateBatch:
        return replace(batch, places=batch.places.sort().values)


@mutant(caught_by="model.drafts")
class TakesDraftsForOtherRows(AltersSteps):
    def altered(self, batch: StateBatch) -> StateBatch:
        return replace(batch, ahead=None)


@mutant(caught_by="model.drafts")
class LeavesDraftsOutBesideAChunk(AltersSteps):
    def altered(self, batch: StateBatch) -> StateBatch:
        return replace(batch, drafted=None)


class NotesNothing(Planned):
    @property
    def changes(self) -> tuple[torch.Tensor | Changes, ...]:
        return tuple(
            each.take(torch.arange(len(each.decay))) if isinstance(each, Changes) else each.clone()
            for each in self._layer.changes
        )


@mutant(caught_by="model.drafts")
class ForgetsAcceptedDrafts(Qwen35):
    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        make: Any = lambda spec: NotesNothing(context.make_state(spec), lambda batch: batch)  # noqa: E731
        return super().build(config, replace(context, make_state=make))


@mutant(caught_by="model.state_specs")
class StatesOfTwoRanksAtMost(Qwen35):
    def state_specs(self, config: Any, parallel: ParallelGroup) -> list[StateSpec]:
        specs = super().state_specs(config, parallel)
        return (
            specs
            if parallel.size <= 2
            else [replace(spec, tensors=spec.tensors[:1]) for spec in specs]
        )


@mutant(caught_by="model.state_specs")
class ForgetsTheLastState(Qwen35):
    def state_specs(self, config: Any, parallel: ParallelGroup) -> list[StateSpec]:
        return super().state_specs(config, parallel)[:-1]


# ---- images


class ReadsImages(Qwen3):
    """Changes the rows and axes that the decoder gets."""

    def build(self, config: Any, context: BuildContext) -> torch.nn.Module:
        model: Any = super().build(config, context)
        tapped = model.forward_tapped

        def altered(inputs: ModelInputs, taps: Any) -> Any:
            is_media = inputs.rows is not None or inputs.axes is not None
            return tapped(self.altered(model, inputs) if is_media else inputs, taps)

        model.forward_tapped = altered
        return model  # type: ignore[no-any-return]

    def altered(self, model: Any, inputs: ModelInputs) -> ModelInputs:
        if inputs.rows is None or inputs.is_row is None:
            return inputs
        return self.with_rows(model, inputs, inputs.rows, inputs.is_row)

    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        return inputs


@mutant(caught_by="model.media_rows")
class AddsRowsToEmbeddings(ReadsImages):
    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        own = torch.cat(((rows[0] + model.embed(inputs.token_ids))[None], rows[1:]))
        return replace(inputs, rows=own)


@mutant(caught_by="model.media_rows")
class GivesAllPlaceholdersTheFirstRow(ReadsImages):
    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        if not is_row.any():
            return inputs
        first = rows[:, is_row.long().argmax()][:, None]
        return replace(inputs, rows=first.expand_as(rows))


@mutant(caught_by="model.media_rows")
class TakesRowsInTheirOrder(ReadsImages):
    """Reads the first rows, as if only placeholders had any."""

    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        return replace(inputs, rows=rows[:, (is_row.long().cumsum(0) - 1).clamp(min=0)])


@mutant(caught_by="model.media_rows")
class TakesAllCopiesOfAPlaceholderForRows(ReadsImages):
    """Replaces by the id, so that text that has it is an image, too."""

    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        return replace(inputs, is_row=torch.isin(inputs.token_ids, inputs.token_ids[is_row]))


@mutant(caught_by="model.media_rows")
class ReadsRowsOfText(ReadsImages):
    """Multiplies instead of choosing, which NaN outlives."""

    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        chosen = rows[:1] * is_row[:, None]
        text = model.embed(inputs.token_ids) * ~is_row[:, None]
        own = torch.cat((chosen + text, rows[1:]))
        return replace(inputs, rows=own, is_row=torch.ones_like(is_row))


@mutant(caught_by="model.media_rows")
class WritesEmbeddingsIntoRows(ReadsImages):
    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        rows[0, ~is_row] = model.embed(inputs.token_ids[~is_row])
        return inputs


@mutant(caught_by="model.media_rows")
class IgnoresRowsOfWantedSteps(ReadsImages):
    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        return inputs if inputs.wanted is None else replace(inputs, rows=None, is_row=None)


@mutant(caught_by="model.media_levels")
class AddsLevelsALayerLate(ReadsImages):
    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        late = torch.cat((rows[:1], torch.zeros_like(rows[:1]), rows[1:-1]))
        return inputs if len(rows) == 1 else replace(inputs, rows=late)


@mutant(caught_by="model.media_levels")
class ReadsOneLevel(ReadsImages):
    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        return replace(inputs, rows=rows[:1])


@mutant(caught_by="model.media_levels")
class DropsTheLevelAfterTheLastLayerOfWantedTokens(ReadsImages):
    def with_rows(
        self, model: Any, inputs: ModelInputs, rows: torch.Tensor, is_row: torch.Tensor
    ) -> ModelInputs:
        is_last = len(rows) > len(model.blocks)
        return replace(inputs, rows=rows[:-1]) if is_last and inputs.wanted is not None else inputs


@mutant(caught_by="model.media_axes")
class AddsUpAxes(ReadsImages):
    def altered(self, model: Any, inputs: ModelInputs) -> ModelInputs:
        assert inputs.axes is not None
        return replace(inputs, positions=inputs.axes.sum(0))


@mutant(caught_by="model.media_axes")
class CountsAxesFromOne(ReadsImages):
    def altered(self, model: Any, inputs: ModelInputs) -> ModelInputs:
        assert inputs.axes is not None
        inputs.axes.add_(1)
        return inputs
