"""`ModelSuite`: checks that a model architecture conforms to the contract of `dovetail.api.model`,
and computes the same as transformers.

Models are tiny and random, built from transformers' own config classes (`model_configs`). They run
on the CPU in float32, with the suite's own attention (`model_bench`), so that differences are due
to the model.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from dovetail.api.model import ModelArch, ModelContext, ModelInputs, ParallelGroup
from dovetail.errors import describe
from dovetail.nn.model_files import model_length, read_config
from dovetail.nn.parallel import SINGLE
from dovetail.nn.weights import load_weights, place_of
from dovetail.testing.checks import check, fail, require
from dovetail.testing.suite import Suite
from dovetail.testing.suites import model_configs as configs
from dovetail.testing.suites.model_bench import CPU, Bench, Chunk, Reference, Tensors, on_ranks
from dovetail.testing.suites.model_drafts import LENGTH, PROMPT, Drafting

MANY = 12  # sequences per step
SHORT = 17  # tokens
LENGTH_OF_IMAGES = 13  # tokens of a sequence with images
# tokens of sequences in two steps, of as many tokens that begin and end at the same positions
ALIKE_LENGTHS = (3, 2, 5)
OTHER_LENGTHS = (1, 4, 5)
FAR = 600  # a position that bfloat16 can't hold
# relative to the largest number, and to each: allows another order of sums, but not another formula
TOLERANCE = 1e-4

# ends of the names of tensors that affect only which experts or tokens are chosen
OF_CHOICES = ("correction_bias", "expert_bias", "indexer.weights_proj.weight")
OF_KEYS = (".key.bias", ".k.bias", ".k_lin.bias")  # of encoders without rotary positions


class ModelSuite(Suite):
    """`architectures`: to build; default: those declared by the component's plugin, for a class
    those in its attribute of that name, or those declared for its nearest base class. `variants`:
    fields of additional configs to compare numbers for."""

    kind = "model"
    settings = Suite.settings | {"architectures", "variants"}

    architectures: ClassVar[tuple[str, ...]] = ()
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    @cached_property
    def arch(self) -> ModelArch:
        arch: ModelArch = self.make(ModelContext())
        return arch

    @cached_property
    def served(self) -> tuple[str, ...]:
        """Architectures to test: those without a head for labels, which the executor computes, and
        none that transformers hasn't beside others that it has. Raises `CheckFailed` if none is
        known."""
        if self.architectures or isinstance(self.component, str):
            found = self.architectures or self.resolved.spec.architectures
        else:
            found = getattr(self.component_class, "architectures", ()) or _declared_for(
                self.component_class
            )
        require(
            found,
            "no architectures are declared: name them in the ComponentSpec, or set `architectures` "
            "on the suite",
        )
        found = tuple(name for name in found if not configs.has_label_head(name)) or found
        return tuple(filter(configs.is_of_transformers, found)) or found

    def declares(self, capability: str) -> bool:
        """`causal` is declared by a first architecture whose layers are; it generates, and has a
        head over the vocabulary. `drafts` is declared by a config with recurrent layers all of
        which do (`StateSpec.drafts`)."""
        if capability == "causal":
            return not self.encodes
        if capability == "drafts":
            return any(map(self.checks_drafts, self.configs()))
        return super().declares(capability)

    def checks_drafts(self, config: Any) -> bool:
        specs = self.arch.state_specs(config, SINGLE)
        return bool(specs) and all(spec.drafts for spec in specs)

    @cached_property
    def encodes(self) -> bool:
        """True if the architectures are encoders: each row of a step is a whole prompt, and there
        are no logits. What checks compare as such are hidden states."""
        return not all(
            spec.causal for spec in self.arch.layer_specs(configs.tiny(self.served[0]), SINGLE)
        )

    def configs(self) -> Iterator[Any]:
        for architecture in self.served:
            yield from configs.variants(architecture, self.variants)

    def pairs(self) -> Iterator[tuple[Any, Reference, Bench]]:
        """Yield each config, with transformers' model and ours of the same weights."""
        for config in self.configs():
            reference = Reference(config)
            yield config, reference, self.bench(config, reference.tensors())

    def bench(self, config: Any, tensors: Tensors | None, **fields: Any) -> Bench:
        reasons = self.arch.reasons_against(config)
        require(not reasons, f"the config {_told(config)} is refused: {list(reasons)}")
        return Bench(self.arch, config, tensors, **fields)

    # ---- numbers

    @check("model.transformers", since="1.0")
    def test_transformers(self) -> None:
        """Hidden states (after the last norm) or logits differ from transformers' in float32.
        Compare layer by layer, starting at the embedding: norms and their eps, rotary embedding,
        additions to the residual stream, biases, tied weights. Sequences are as long as the model
        allows."""
        for config, reference, bench in self.pairs():
            tokens = some_tokens(config, model_length(config))
            hidden = bench.step(Chunk("a", tokens, 0))
            for what, ours, theirs in zip(
                ("hidden states", "logits"),
                (hidden, bench.logits(hidden)),
                reference.run(tokens),
                strict=True,
            ):
                assert_close(ours, theirs, f"{what} of {_told(config)} differ from transformers'")
            for some in (torch.tensor([7, 0, len(tokens) - 1]), torch.tensor([3])):
                assert_close(
                    bench.logits(hidden[some]),
                    bench.logits(hidden)[some],
                    "logits() of some rows differ from those rows of all logits",
                )

    @check("model.config_fields", since="1.0")
    def test_config_fields(self) -> None:
        """A config field that changes the numbers was accepted, and the numbers differ from
        transformers'. Implement it, or name it in `reasons_against`. Extreme values count, too: an
        eps of 1e-12, a window of one token, no layer without a window."""
        for architecture in self.served:
            for change in configs.changes(architecture):
                config = configs.tiny(architecture, **change.fields)
                reasons = self.arch.reasons_against(config)
                if reasons:
                    named = any(change.field in reason for reason in reasons)
                    require(
                        named,
                        f"{change.fields} is refused without naming {change.field}: "
                        f"{list(reasons)}",
                    )
                    continue
                reference = Reference(config)
                tokens = some_tokens(config, 40)
                if change.tiny_weights:
                    reference.scale_matrices(change.tiny_weights)
                bench = Bench(self.arch, config, reference.tensors())
                hidden = bench.step(Chunk("a", tokens, 0))
                for what, ours, theirs in zip(
                    ("hidden states", "logits"),
                    (hidden, bench.logits(hidden)),
                    reference.run(tokens),
                    strict=True,
                ):
                    assert_close(
                        ours,
                        theirs,
                        f"{architecture} takes {change.fields}, but its {what} differ from "
                        f"transformers'",
                    )

    @check("model.unknown_fields", since="1.0")
    def test_unknown_fields(self) -> None:
        """A field unknown to the architecture was ignored, although it may change the numbers (a
        softcap, a scale, a weight format). Reject fields by name unless they are known to be
        harmless."""
        for architecture in self.served:
            known = configs.plain(architecture)
            for field, value in configs.UNHEARD_OF.items():
                if field in known:
                    continue  # of this architecture
                config = configs.tiny(architecture)
                setattr(config, field, value)
                reasons = list(self.arch.reasons_against(config))
                require(
                    any(field in reason for reason in reasons),
                    f"a config with {field} = {value} isn't refused by that name: {reasons}",
                )

    @check("model.rope_types", since="1.0")
    def test_unknown_ropes(self) -> None:
        """An unknown rope type, or an unknown parameter of a rope type, was ignored: positions
        would be those of another model. Reject it by name."""
        for architecture in self.served:
            for rope in configs.UNHEARD_OF_ROPES:
                config = configs.tiny(architecture)
                if not getattr(config, "rope_parameters", None):
                    continue
                plain = (
                    next(iter(config.rope_parameters.values()))
                    if configs.has_ropes(config.rope_parameters)
                    else config.rope_parameters
                )
                config.rope_parameters = configs.with_rope(
                    config.rope_parameters, {**plain, **rope}
                )
                reasons = list(self.arch.reasons_against(config))
                named = any(
                    str(word) in reason for reason in reasons for word in ("rope_type", *rope)
                )
                require(
                    named,
                    f"a config whose rope_parameters have {rope} isn't refused by that name: "
                    f"{reasons}",
                )

    # ---- steps

    @check("model.positions", since="1.0", capability="causal")
    def test_positions(self) -> None:
        """Two steps with the same number of tokens and the same first position had the same
        rotation, although other positions differ. Key anything cached between steps by all
        positions, or cache nothing."""
        for config, reference, bench in self.pairs():
            tokens = {name: some_tokens(config, 20, seed=ord(name)) for name in "abc"}
            before = [
                Chunk(name, tokens[name][:start], 0)
                for name, start in (("a", 4), ("b", 4), ("c", 9))
            ]
            steps = (
                [Chunk("a", tokens["a"][4:12], 4)],
                [Chunk("b", tokens["b"][4:7], 4), Chunk("c", tokens["c"][9:14], 9)],
            )
            fresh = Bench(self.arch, config, reference.tensors())
            for part in before:
                bench.step(part)
                fresh.step(part)
            bench.step(*steps[0])
            found = bench.logits(bench.step(*steps[1]))
            expected = torch.cat([fresh.logits(fresh.step(part)) for part in steps[1]])
            assert_close(
                found,
                expected,
                f"logits of {_told(config)} after a step of as many tokens that began at the same "
                f"position",
            )

    @check("model.alike_steps", since="1.1")
    def test_steps_that_are_nearly_alike(self) -> None:
        """A step differed from the same step of a new model after one alike in its number of
        tokens, its first and last token, position and wanted token, but not in those between. Key
        anything cached between steps by all of its inputs, or cache nothing."""
        for config, reference, bench in self.pairs():
            tokens = some_tokens(config, sum(ALIKE_LENGTHS))
            others = some_tokens(config, len(tokens), seed=1)
            others[[0, -1]] = tokens[[0, -1]]
            steps = (
                (ALIKE_LENGTHS, tokens, [0, 2, 4, 9]),
                (OTHER_LENGTHS, tokens, [0, 2, 4, 9]),
                (OTHER_LENGTHS, others, [0, 2, 4, 9]),
                (OTHER_LENGTHS, others, [0, 7, 3, 9]),
            )
            for index, (lengths, ids, places) in enumerate(steps):
                parts = [
                    Chunk(f"{index}, {place}", part, 0)
                    for place, part in enumerate(torch.split(ids, list(lengths)))
                ]
                found = bench.step(*parts, wanted=torch.tensor(places))
                fresh = Bench(self.arch, config, reference.tensors())
                assert_close(
                    found,
                    fresh.step(*parts)[places],
                    f"states of {_told(config)} in step {index + 1} of {len(steps)} that have the "
                    f"same number of tokens and the same ends, compared with a new model's",
                )

    @check("model.owns_nothing", since="1.0")
    def test_inputs_and_results_are_the_callers(self) -> None:
        """`forward` or `logits` modified its input; or its result is something that it reads again,
        so that a caller that overwrites it (a sampler may overwrite logits) changes later ones; or
        an attention result was used after the next layer had attended."""
        config = next(self.configs())
        bench = self.bench(config, Reference(config).tensors())
        tokens = some_tokens(config, 12)
        expected = bench.run(tokens, sequence="first")
        for wanted in (torch.tensor([11, 3, 7, 0]), torch.tensor([5])):
            given = ModelInputs(
                token_ids=tokens.clone(), positions=torch.arange(12), wanted=wanted.clone()
            )
            sequence = f"with {len(wanted)} wanted"
            bench.plan(Chunk(sequence, tokens, 0))
            with torch.no_grad():
                hidden = bench.model(given)
                for name, value in (
                    ("token_ids", tokens),
                    ("positions", torch.arange(12)),
                    ("wanted", wanted),
                ):
                    require(torch.equal(getattr(given, name), value), f"forward() changed {name}")
                states = hidden.clone()
                bench.logits(hidden).fill_(torch.nan)
                require(
                    torch.equal(hidden, states), f"logits() changed {len(wanted)} hidden states"
                )
                again = bench.logits(hidden)
                assert_close(
                    again,
                    expected[wanted],
                    "logits of the same states, after the caller has overwritten those of the "
                    "first call",
                )
                hidden.fill_(torch.nan)
            again = bench.logits(bench.step(Chunk(f"again {sequence}", tokens, 0), wanted=wanted))
            assert_close(
                again, expected[wanted], "logits after the caller has overwritten earlier results"
            )

    @check("model.chunks", since="1.0", capability="causal")
    def test_chunks(self) -> None:
        """A prompt computed in chunks gives other logits than at once. Use the given positions
        instead of counting, and keep nothing between calls."""
        for config, reference, bench in self.pairs():
            tokens = some_tokens(config, 30)
            whole = bench.run(tokens)
            chunked = Bench(self.arch, config, reference.tensors()).run(tokens, (7, 1, 13, 9))
            assert_close(
                chunked,
                whole,
                f"logits of {_told(config)} in chunks of 7, 1, 13 and 9 differ from those of the "
                f"whole",
            )

    @check("model.decode", since="1.0", capability="causal")
    def test_decode(self) -> None:
        """Tokens computed one by one give other logits than in one forward pass."""
        for config, reference, bench in self.pairs():
            tokens = some_tokens(config, 20)
            whole = bench.run(tokens)
            for first in (4, 1):
                decoded = Bench(self.arch, config, reference.tensors()).run(
                    tokens, (first, *(1,) * (20 - first))
                )
                assert_close(
                    decoded,
                    whole,
                    f"logits of {_told(config)}, decoded token by token after {first}, differ from "
                    f"those of the whole",
                )

    @check("model.prefix", since="1.0", capability="causal")
    def test_prefix(self) -> None:
        """A sequence whose first K and V come from another one (a prefix hit) gives other logits
        than if computed. A hit starts at a position that the model has never seen in this
        sequence."""
        for config, reference, bench in self.pairs():
            tokens = some_tokens(config, 30)
            others = some_tokens(config, 12, seed=1)
            bench.run(torch.cat((tokens[:17], others)), sequence="first", checkpoint=17)
            bench.fork("first", "hit", 17)
            hit = bench.run(tokens[17:], sequence="hit", start=17)
            whole = Bench(self.arch, config, reference.tensors()).run(tokens)[17:]
            assert_close(
                hit,
                whole,
                f"logits of {_told(config)} after a prefix hit of 17 tokens differ from those that "
                f"are recomputed",
            )

    @check("model.ragged", since="1.0")
    def test_ragged(self) -> None:
        """Sequences that share a step give other logits than by themselves. A step is a flat list
        of tokens of several sequences, each with its position; only attention knows which belong
        together."""
        for config, reference, bench in self.pairs():
            tokens = {
                name: some_tokens(config, n, seed=n)
                for name, n in (("a", 50), ("b", 40), ("c", 14))
            }
            if not self.encodes:
                bench.step(Chunk("a", tokens["a"][:12], 0), Chunk("c", tokens["c"][:13], 0))
            starts = {"c": 0, "b": 0, "a": 0} if self.encodes else {"c": 13, "b": 0, "a": 12}
            hidden = bench.step(
                *(Chunk(name, tokens[name][start:], start) for name, start in starts.items())
            )
            alone = Bench(self.arch, config, reference.tensors())
            expected = [
                alone.run(tokens[name], sequence=name)[start:] for name, start in starts.items()
            ]
            assert_close(
                bench.logits(hidden),
                torch.cat(expected),
                f"logits of {_told(config)} in a shared step differ from those of separate steps",
            )
            many = {
                f"one of {MANY}, {n}": some_tokens(config, 2 + n % 3, seed=n) for n in range(MANY)
            }
            hidden = bench.step(*(Chunk(name, ids, 0) for name, ids in many.items()))
            expected = [alone.run(ids, sequence=name) for name, ids in many.items()]
            assert_close(
                bench.logits(hidden),
                torch.cat(expected),
                f"logits of {_told(config)} in a step of {MANY} sequences differ from those of "
                f"separate steps",
            )
            if self.encodes:
                continue
            falling = [
                Chunk(name, tokens[name][:1], start)
                for name, start in (("a", 50), ("b", 40), ("c", 14))
            ]
            expected = [
                alone.run(part.token_ids, sequence=part.sequence, start=part.start)
                for part in falling
            ]
            told = (
                f"logits of {_told(config)} in a step whose positions decrease from row to row "
                f"differ from those of separate steps"
            )
            assert_close(bench.logits(bench.step(*falling)), torch.cat(expected), told)

    @check("model.states", since="1.0")
    def test_states(self) -> None:
        """The states of recurrent layers after the same tokens differ with the steps that computed
        these: whole, in chunks of 1, 7 and the rest, over the states of an earlier request, beside
        other rows in any order; or those of a row changed in a step of others; or a checkpoint
        isn't the state after exactly its tokens. Every layer uses the rows of `StateLayer.batch`,
        in all of which it replaces the states."""
        for config in self.configs():
            bench = self.bench(config, Reference(config).tensors())
            if bench.states is None:
                continue
            tokens = some_tokens(config, 30)
            others = {name: some_tokens(config, 30, seed=ord(name)) for name in "xy"}
            bench.run(tokens)
            bench.run(others["x"][:9], sequence="earlier")
            bench.forget("earlier")
            bench.run(tokens, (1, 7, 22), sequence="chunks")
            bench.step(
                Chunk("x", others["x"][:5], 0),
                Chunk("beside", tokens[:8], 0),
                Chunk("y", others["y"][:9], 0),
            )
            before = bench.states_of("beside")
            bench.step(Chunk("y", others["y"][9:], 9), Chunk("x", others["x"][5:20], 5))
            same = f"the states of {_told(config)} change in a step of other rows"
            require(all(map(torch.equal, bench.states_of("beside"), before)), same)
            bench.step(
                Chunk("x", others["x"][20:], 20), Chunk("beside", tokens[8:], 8, checkpoint=6)
            )
            bench.run(tokens[:14], sequence="shorter")
            bench.fork("beside", "kept", 14)
            for one, other, what in (
                ("chunks", "a", "in chunks of 1, 7 and 22"),
                ("beside", "a", "beside other rows"),
                ("kept", "shorter", "in a checkpoint after 14 of them"),
            ):
                for ours, expected in zip(
                    bench.states_of(one), bench.states_of(other), strict=True
                ):
                    assert_close(
                        ours, expected, f"states of {_told(config)} after the same tokens, {what}"
                    )

    @check("model.drafts", since="1.0", capability="drafts")
    def test_drafts(self) -> None:
        """Recurrent layers that declare `StateSpec.drafts` give a known token and its right drafts
        other logits than in one step; or what a rejected draft changed is kept, or what an accepted
        one changed is lost: of one sequence, of samples of one prompt, beside a chunk, and after a
        preemption. Read `StateBatch.ahead` and `StateBatch.drafted`, leave the live state as it is
        after the known token, and note the changes of drafts in `StateLayer.changes`."""
        for config, reference, bench in self.pairs():
            if not self.checks_drafts(config):
                continue
            texts = {name: some_tokens(config, LENGTH, seed=ord(name)) for name in "abcde"}
            for sibling in "de":
                texts[sibling][:PROMPT] = texts["c"][:PROMPT]
            whole = Bench(self.arch, config, reference.tensors())
            expected = {name: whole.run(text, sequence=name) for name, text in texts.items()}
            drafting = Drafting(bench, texts, expected, config.vocab_size)
            drafting.run()
            drafting.compare_states(Bench(self.arch, config, reference.tensors()))
            for one in drafting.compared:
                told = f"{one.what}, of {_told(config)}, differ from those of one step"
                assert_close(one.found, one.expected, told)

    @check("model.wanted", since="1.0")
    def test_wanted(self) -> None:
        """With `wanted`, `forward` doesn't return the states of those tokens, in that order, equal
        to those without it; or a later step misses K and V of the others: these must be written in
        every layer. Simplest solution: `return hidden if wanted is None else hidden[wanted]`."""
        for config, reference, bench in self.pairs():
            tokens = some_tokens(config, 30)
            others = some_tokens(config, 9, seed=1)
            steps: tuple[tuple[tuple[Chunk, ...], list[int]], ...] = (
                (
                    (Chunk("a", tokens[:14], 0), Chunk("b", others[:5], 0)),
                    [3],
                ),  # what comes after it is read by later steps
                ((Chunk("a", tokens[14:20], 14), Chunk("b", others[5:], 5)), [8, 2, 5]),
                ((Chunk("a", tokens[20:], 20), Chunk("b", others[:1], 9)), [*range(10, -1, -1)]),
            )
            if self.encodes:
                steps = (
                    ((Chunk("a", tokens, 0), Chunk("b", others, 0)), [38, 0, 7]),
                    ((Chunk("b", others, 0),), [*range(8, -1, -1)]),
                )
            whole = Bench(self.arch, config, reference.tensors())
            for parts, places in steps:
                alone = bench.step(*parts, wanted=torch.tensor(places))
                expected = whole.step(*parts)[places]
                assert_close(
                    alone,
                    expected,
                    f"states of {_told(config)} at places {places} of a step differ if only these "
                    f"are wanted",
                )

    @check("model.inputs", since="1.0")
    def test_inputs(self) -> None:
        """`forward` of what `build` returns takes one argument, a `ModelInputs`; `forward_tapped`
        takes it and the taps. Read what you need from its fields. An unknown field may be added
        later: its default changes nothing."""
        for config in self.configs():
            self.bench(config, None)

    @check("model.types", since="1.0", capability="types")
    def test_types(self) -> None:
        """`ModelInputs.types` doesn't do what transformers' `token_type_ids` do; or None isn't the
        same as zeros; or a type beyond those that the checkpoint has isn't taken for the last one;
        or `forward` changed the types."""
        for config, reference, bench in self.pairs():
            tokens = some_tokens(config, 12)
            types = (torch.arange(12) >= 7).long()
            last = int(getattr(config, "type_vocab_size", 2)) - 1
            expected = reference.encoded(tokens, types.clamp(max=last))
            given = types.clone()
            found = bench.step(Chunk("types", tokens, 0), types=given)
            assert_close(
                found, expected, f"hidden states of {_told(config)} with types 0 and then 1"
            )
            require(torch.equal(given, types), "forward() changed types")
            zeros = bench.step(Chunk("zeros", tokens, 0), types=torch.zeros_like(types))
            none = bench.step(Chunk("none", tokens, 0))
            assert_close(none, zeros, f"hidden states of {_told(config)} with types None and all 0")

    @check("model.media_rows", since="1.1", capability="media")
    def test_media_rows(self) -> None:
        """`ModelInputs.rows[0]` doesn't replace the embeddings of exactly the tokens where `is_row`
        is set, after their scale: rows that are the embeddings of other tokens give other states
        than these tokens, also in chunks, beside other sequences and with `wanted`. Or `forward`
        changed `rows` or `is_row`, or read rows of tokens that aren't placeholders."""
        for config, reference, bench in self.pairs():
            images = Images(config, reference)
            expected = reference.run(images.stand_ins)[0]
            text = some_tokens(config, 9, seed=2)
            of_text = bench.step(Chunk("text", text, 0))
            told = f"states of {_told(config)} with rows of images"
            assert_close(
                bench.step(Chunk("whole", images.tokens, 0), **images.part()), expected, told
            )
            images.check_kept()
            found = []
            for start, stop in ((0, 7), (7, 8), (8, LENGTH_OF_IMAGES)):
                name = f"text beside {start}"
                parts = (Chunk("cut", images.tokens[start:stop], start), Chunk(name, text, 0))
                states = bench.step(*parts, **images.part(start, stop, more=len(text)))
                found.append(states[: stop - start])
                told_text = f"states of {_told(config)} of text beside rows of images"
                assert_close(states[stop - start :], of_text, told_text)
            assert_close(torch.cat(found), expected, f"{told}, in chunks")
            wanted = torch.tensor([11, 3, 0])
            some = bench.step(Chunk("some", images.tokens, 0), wanted=wanted, **images.part())
            assert_close(some, expected[wanted], f"{told}, of wanted tokens")

    @check("model.media_levels", since="1.1", capability="levels")
    def test_media_levels(self) -> None:
        """`ModelInputs.rows[i]` isn't added to the residual stream after layer i - 1, of exactly
        the tokens where `is_row` is set; or not to those that are `wanted`."""
        for config, reference, bench in self.pairs():
            layers = int(config.num_hidden_layers)
            images = Images(config, reference, deeper=layers)
            added = images.rows[1:].masked_fill(~images.is_row[:, None], 0)
            expected = reference.with_rows(images.stand_ins, added)
            told = f"states of {_told(config)} with rows for each of {layers} layers"
            assert_close(bench.step(Chunk("a", images.tokens, 0), **images.part()), expected, told)
            wanted = torch.tensor([11, 3, 0])
            some = bench.step(Chunk("b", images.tokens, 0), wanted=wanted, **images.part())
            assert_close(some, expected[wanted], f"{told}, of wanted tokens")

    @check("model.media_axes", since="1.1", capability="axes")
    def test_media_axes(self) -> None:
        """`ModelInputs.axes` that are the positions on each axis aren't the same as None; or
        `forward` changed them."""
        for config, _, bench in self.pairs():
            tokens = some_tokens(config, 12)
            axes = torch.arange(12).repeat(3, 1)
            found = bench.step(Chunk("axes", tokens, 0), axes=axes)
            require(torch.equal(axes, torch.arange(12).repeat(3, 1)), "forward() changed axes")
            none = bench.step(Chunk("none", tokens, 0))
            assert_close(found, none, f"states of {_told(config)} with equal axes and with None")

    @check("model.taps", since="1.0", capability="taps")
    def test_taps(self) -> None:
        """`forward_tapped` doesn't return the residual stream of all tokens after the first t
        layers for a tap t, and the final states for the number of layers, one after the other, as
        transformers computes them; or what `forward` returns, also with `wanted`. Or `embed`
        doesn't return what the first layer reads, or a later step changes a result."""
        for config, reference, bench in self.pairs():
            tokens = some_tokens(config, 20)
            layers = int(config.num_hidden_layers)
            streams = reference.streams(tokens)
            told = _told(config)
            assert_close(
                bench.embed(tokens), streams[0], f"embeddings of {told} differ from transformers'"
            )
            whole = self.bench(config, reference.tensors()).step(Chunk("a", tokens, 0))
            kept = list[tuple[torch.Tensor, torch.Tensor]]()
            for index, taps in enumerate(((layers, 0), (layers // 2,), (0, layers - 1), (layers,))):
                for wanted in (None, torch.tensor([17, 3])):
                    hidden, states = bench.tapped(
                        Chunk(f"{index} {wanted}", tokens, 0), taps, wanted
                    )
                    kept.append(
                        (states, expected := torch.cat([streams[tap] for tap in taps], dim=1))
                    )
                    assert_close(
                        states,
                        expected,
                        f"states of {told} at taps {taps} differ from transformers'",
                    )
                    right = whole if wanted is None else whole[wanted]
                    assert_close(
                        hidden,
                        right,
                        f"states of {told} from forward_tapped, with taps {taps}, differ from "
                        f"those of forward",
                    )
            for states, expected in kept:
                assert_close(
                    states, expected, f"states of {told} at taps are changed by later steps"
                )

    @check("model.side_by_side", since="1.0")
    def test_side_by_side(self) -> None:
        """A second model in the process changed the results of the first: state is kept outside of
        the module that `build` returned."""
        config = next(self.configs())
        references = [Reference(config, seed) for seed in (0, 1)]
        tokens = some_tokens(config, 12)
        expected = [self.bench(config, reference.tensors()).run(tokens) for reference in references]
        benches = [self.bench(config, reference.tensors()) for reference in references]
        for bench, logits in zip(benches, expected, strict=True):
            assert_close(
                bench.run(tokens),
                logits,
                "logits change when another model was built after this one",
            )

    # ---- weights

    @check("model.weight_names", since="1.0")
    def test_weight_names(self) -> None:
        """`weights()` doesn't list exactly the tensors of a checkpoint, with parameters that have
        `load`; only those that may be missing (a tied head) are optional."""
        for config, reference, bench in self.pairs():
            rules = list(bench.model.weights())
            held = set(reference.held())
            layouts = {
                place_of(rule): rule.shard_id for rule in rules if rule.source in held
            }  # a checkpoint has a part in one of several layouts
            names = {
                rule.source
                for rule in rules
                if rule.parameter is not None
                and layouts.get(place_of(rule), rule.shard_id) == rule.shard_id
            }
            places = Counter((rule.source, id(rule.parameter), rule.shard_id) for rule in rules)
            twice = sorted({name for (name, *_), count in places.items() if count > 1})
            require(not twice, f"{_told(config)}: these tensors have two rules: {twice}")
            require(
                names >= held,
                f"{_told(config)}: no rule for the checkpoint's {sorted(held - names)}",
            )
            require(
                names <= held,
                f"{_told(config)}: rules for tensors that no checkpoint has: "
                f"{sorted(names - held)}",
            )
            needed = {rule.source for rule in rules if not rule.optional}
            missing = sorted(set(reference.tensors()) - needed)
            require(
                not missing,
                f"{_told(config)}: these tensors are optional, but nothing can stand in for them: "
                f"{missing}",
            )

    @check("model.weight_use", since="1.0")
    def test_weight_use(self) -> None:
        """A tensor of the checkpoint is read but doesn't affect the numbers, or was never loaded
        into its parameter."""

        def usual(name: str) -> bool:
            # the bias of keys adds the same to all scores of a query
            return not name.endswith((*OF_CHOICES, *OF_KEYS))

        for config in self.configs():
            self.assert_used(config, lambda name: name.endswith(OF_CHOICES))
            configs.choosing_all_experts(config)  # an expert that no token chooses has no effect
            self.assert_used(config, usual)

    def assert_used(self, config: Any, which: Callable[[str], bool]) -> None:
        """Check that those tensors of a checkpoint affect the logits."""
        reference = Reference(config)
        tensors = reference.tensors()
        tokens = some_tokens(config, 24)
        if not (names := list(filter(which, tensors))):
            return
        bench = self.bench(config, tensors)
        before = bench.run(tokens, sequence="before")
        for name in names:
            tensor = tensors[name]
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
            # a norm may follow, for which only the sign of a scale counts
            other = -tensor if tensor.numel() == 1 else tensor + noise
            bench.load({name: other})
            changed = bench.run(tokens, sequence=name)
            bench.load({name: tensor})
            require(
                float((changed - before).abs().max()) > 1e-3,
                f"{_told(config)}: another {name} in the checkpoint changes no logit",
            )

    @check("model.weight_complete", since="1.0")
    def test_weight_complete(self) -> None:
        """Something that affects the numbers isn't loaded: they change with the previous content of
        the parameters' memory. `build` leaves parameters uninitialized; each part of each needs a
        rule in `weights()`."""
        for config in self.configs():
            tensors = Reference(config).tensors()
            tokens = some_tokens(config, 12)
            one, other = (
                self.bench(config, tensors, before=value).run(tokens) for value in (0.5, -2.0)
            )
            assert_close(
                one,
                other,
                f"logits of {_told(config)} depend on memory that no tensor of the checkpoint was "
                f"written to",
            )

    @check("model.checkpoint", since="1.0")
    def test_checkpoint(self) -> None:
        """A checkpoint can't be loaded from its files, or then gives other logits than
        transformers. Dovetail reads safetensors files by `weights()`: `parameter.load` gets a
        slice, which returns only what is requested. A config read from a file has fields that one
        created in Python lacks, such as `model_type`."""
        for config in self.configs():
            reference = Reference(config)
            tokens = some_tokens(config, 12)
            with tempfile.TemporaryDirectory() as folder:
                config.save_pretrained(folder)
                save_file(reference.tensors(), Path(folder) / "model.safetensors")
                logits = self.loaded(read_config(folder), Path(folder)).run(tokens)
            assert_close(
                logits,
                reference.run(tokens)[1],
                f"logits of {_told(config)}, loaded from files, differ from transformers'",
            )

    def loaded(self, config: Any, folder: Path) -> Bench:
        bench = self.bench(config, None)
        try:
            load_weights(bench.model, folder)
        except Exception as error:
            fail(f"a checkpoint of {_told(config)} can't be loaded: {describe(error)}")
        return bench

    @check("model.tied", since="1.0", capability="causal")
    def test_tied(self) -> None:
        """With `tie_word_embeddings` the head is the embedding, whether the checkpoint has one of
        the two or both; otherwise it has separate weights. Let both rules name one parameter, the
        head's `optional`."""
        for architecture in filter(configs.ties, self.served):
            config = configs.tiny(architecture, tie_word_embeddings=True)
            reference = Reference(config)
            tokens = some_tokens(config, 12)
            tensors = reference.tensors()
            expected = reference.run(tokens)[1]
            (tied, source), *more = reference.tied().items()
            require(
                not more,
                f"transformers ties more than one tensor in {architecture}: this check knows one",
            )
            both = {**tensors, tied: tensors[source]}
            instead = {name: tensor for name, tensor in both.items() if name != source}
            for what, held in (
                (f"{source} alone", tensors),
                (f"{tied} instead of {source}", instead),
                ("both", both),
            ):
                assert_close(
                    self.bench(config, held, before=0.3).run(tokens),
                    expected,
                    f"a tied checkpoint that holds {what} gives other logits",
                )

    # ---- ranks, specs and dtypes

    @check("model.shards", since="1.0", capability="tensor_parallel")
    def test_shards(self) -> None:
        """Split over 2 or 4 ranks, the model gives other logits than unsplit, or different ones by
        rank. Reduce row-parallel sums once (only one rank adds a bias), repeat K and V heads if
        there are more ranks, and gather logits without the vocabulary's padding."""
        for config, reference, bench in self.pairs():
            tokens = some_tokens(config, 12)
            tensors = reference.tensors()
            whole = bench.run(tokens)
            for size in (2, 4):
                for rank, logits in enumerate(
                    on_ranks(size, partial(self.logits_on_rank, config, tensors, tokens))
                ):
                    assert_close(
                        logits,
                        whole,
                        f"logits of {_told(config)} on rank {rank} of {size} differ from the whole "
                        f"model's",
                    )

    def logits_on_rank(
        self, config: Any, tensors: Tensors, tokens: torch.Tensor, group: ParallelGroup
    ) -> torch.Tensor:
        return Bench(self.arch, config, tensors, parallel=group).run(tokens)

    @check("model.layer_specs", since="1.0")
    def test_layer_specs(self) -> None:
        """`layer_specs` isn't what `build` passes to `make_attention`, in the same order and for
        the same rank: the KV pool would have another shape than the model."""
        for config in self.configs():
            for size in (1, 2, 4) if self.declares("tensor_parallel") else (1,):
                for specs, made in on_ranks(size, partial(self.specs_of, config)):
                    require(
                        specs == made,
                        f"{_told(config)}: layer_specs says {specs}, build() made {made}",
                    )

    @check("model.state_specs", since="1.0")
    def test_state_specs(self) -> None:
        """`state_specs` isn't what `build` passes to `make_state`, in the same order and for the
        same rank: the pool would have no room for the states."""
        for config in self.configs():
            for size in (1, 2, 4) if self.declares("tensor_parallel") else (1,):
                for specs, made in on_ranks(size, partial(self.state_specs_of, config)):
                    require(
                        specs == made,
                        f"{_told(config)}: state_specs says {specs}, build() made {made}",
                    )

    @check("model.max_len", since="1.0")
    def test_max_len(self) -> None:
        """Built for shorter sequences than the model allows (`BuildContext.max_len`), it gives
        other logits, or fails at the last position."""
        for config in self.configs():
            reference = Reference(config)
            tokens = some_tokens(config, SHORT)
            ours = Bench(self.arch, config, reference.tensors(), max_len=SHORT).run(tokens)
            assert_close(
                ours,
                reference.run(tokens)[1],
                f"logits of {_told(config)}, built for {SHORT} tokens, differ from transformers'",
            )

    def specs_of(self, config: Any, group: ParallelGroup) -> tuple[list[Any], list[Any]]:
        """Return the specs that are declared, and those of the layers that are made."""
        bench = Bench(self.arch, config, None, parallel=group)
        return list(self.arch.layer_specs(config, group)), [
            layer.spec for layer in bench.sequences.layers
        ]

    def state_specs_of(self, config: Any, group: ParallelGroup) -> tuple[list[Any], list[Any]]:
        """Return the states that are declared, and those that are made."""
        return list(self.arch.state_specs(config, group)), Bench(
            self.arch, config, None, parallel=group
        ).made

    @check("model.dtype", since="1.0")
    def test_dtype(self) -> None:
        """Parameters and hidden states don't have the requested dtype, or half precision is
        inaccurate: compute norms, rotary embedding and softmax in float32, as squares of large
        numbers overflow float16. The mean error of logits may be 1.5 times that of transformers in
        that dtype, the worst token's 3 times, including at positions that the dtype can't
        represent."""
        far = configs.tiny(self.served[0], max_position_embeddings=2 * FAR)
        for index, config in enumerate([*self.configs(), far]):
            for dtype in (torch.float16, torch.bfloat16)[bool(index) :]:
                self.assert_exact_in(
                    dtype,
                    configs.choosing_all_experts(config),
                    Reference(config),
                    FAR if config is far else 40,
                )
        plain = configs.tiny(self.served[0])
        self.assert_norms_exact(plain)
        reference = Reference(plain)
        if reference.enlarge_what_norms_of_heads_get(1000.0):
            self.assert_exact_in(
                torch.float16, plain, reference, 40, " where q and k are large before their norms"
            )

    def assert_exact_in(
        self, dtype: torch.dtype, config: Any, reference: Reference, length: int, what: str = ""
    ) -> None:
        """Check the logits of `length` random tokens in half precision against float32."""
        tokens = some_tokens(config, length)
        exact = reference.run(tokens)[1]
        bench = self.bench(config, reference.tensors(), dtype=dtype)
        wide = tuple(getattr(reference.model, "_keep_in_fp32_modules_strict", None) or ())
        rules = [
            rule
            for rule in bench.model.weights()
            if rule.parameter is not None and not rule.source.endswith(wide)
        ]
        # numbers of heads of recurrent layers, which are computed with in float32
        of_states = (
            "A_log",
            "dt_bias",
            ".D",
        )
        # those of a transform may be float32
        may_be_wide = (*of_states, *OF_CHOICES)
        rules = [
            rule
            for rule in rules
            if rule.transform is None and not rule.source.endswith(may_be_wide)
        ]
        found = {rule.parameter.dtype for rule in rules}
        require(found == {dtype}, f"parameters of a model in {dtype} are {found}")
        hidden = bench.step(Chunk("a", tokens, 0))
        require(
            hidden.dtype == dtype and hidden.device == CPU,
            f"hidden states of a model in {dtype} are {hidden.dtype} on {hidden.device}",
        )
        reference.model.to(dtype)
        ours, theirs = (
            (logits.float() - exact).abs().mean(1)
            for logits in (bench.logits(hidden), reference.run(tokens)[1])
        )
        for which, error, allowed in (
            ("on average", ours.mean(), 1.5 * theirs.mean()),
            ("at the worst token", ours.max(), 3 * theirs.max()),
        ):
            told = (
                f"{_told(config)} in {dtype}{what}: logits of {length} tokens are off by "
                f"{error:.3g} {which}, allowed are {allowed:.3g}"
            )
            require(error <= allowed, told)

    def assert_norms_exact(self, config: Any) -> None:
        """Check the norms in half precision, by embeddings that no layer adds anything to: each
        token's states equal those in float32, except for rounding. A common factor indicates a
        rounded mean of squares; squares of large numbers are infinite in float16."""
        for dtype, size in ((torch.bfloat16, 1.0), (torch.float16, 3000.0)):
            reference = Reference(config)
            tokens = torch.arange(config.vocab_size)
            reference.scale_matrices(0.0, embedding=size)
            reference.model.to(dtype)
            rounded = {name: tensor.float() for name, tensor in reference.tensors().items()}
            theirs = reference.run(tokens)[0].float()
            reference.model.float()
            exact = reference.run(tokens)[0]
            ours = self.bench(config, rounded, dtype=dtype).step(Chunk("a", tokens, 0)).float()
            factors = [
                (((states * exact).sum(1) / (exact * exact).sum(1)) - 1).abs().mean()
                for states in (ours, theirs)
            ]
            told = (
                f"{_told(config)} in {dtype}, with embeddings {size:g} times as large: norms "
                f"are off by a factor of {factors[0]:.3g} a token"
            )
            require(factors[0] <= 2 * factors[1], f"{told}, allowed are {2 * factors[1]:.3g}")


class Images:
    """Tokens of one sequence, some of which are placeholders of images, and their rows. Rows of the
    first level are embeddings of other tokens; those of the `deeper` levels are random. Values that
    the model must not read are NaN."""

    def __init__(self, config: Any, reference: Reference, deeper: int = 0) -> None:
        self.tokens = some_tokens(config, LENGTH_OF_IMAGES)
        self.is_row = torch.zeros(LENGTH_OF_IMAGES, dtype=torch.bool)
        self.is_row[[2, 3, 4, 7, 11]] = True
        others = some_tokens(config, LENGTH_OF_IMAGES, seed=1)
        if getattr(config, "hidden_size_per_layer_input", 0):
            others = torch.full_like(others, config.pad_token_id or 0)
        self.stand_ins = torch.where(self.is_row, others, self.tokens)
        embedded = reference.streams(self.stand_ins)[0]
        noise = torch.randn(deeper, *embedded.shape, generator=torch.Generator().manual_seed(0))
        rows = torch.cat((embedded[None], noise))
        self.rows = rows.masked_fill(~self.is_row[:, None], torch.nan)

    def part(
        self, start: int = 0, stop: int | None = None, more: int = 0
    ) -> dict[str, torch.Tensor]:
        """Return fields of `ModelInputs` for these tokens, and `more` tokens of text."""
        rows = F.pad(self.rows[:, start:stop], (0, 0, 0, more), value=torch.nan)
        is_row = F.pad(self.is_row[start:stop], (0, more))
        self._given = rows, is_row
        return {"rows": rows, "is_row": is_row}

    def check_kept(self) -> None:
        """Check that what `part` returned last, of all tokens, is as it was."""
        rows, is_row = self._given
        same = torch.equal(rows.nan_to_num(), self.rows.nan_to_num())
        require(same and rows.isnan().equal(self.rows.isnan()), "forward() changed rows")
        require(torch.equal(is_row, self.is_row), "forward() changed is_row")


def some_tokens(config: Any, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)
    )


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    require(
        ours.shape == theirs.shape,
        f"{what}: the shape is {list(ours.shape)}, expected {list(theirs.shape)}",
    )
    scale = max(1.0, float(theirs.abs().max()))
    errors = (ours - theirs).abs() / (TOLERANCE * scale + TOLERANCE * theirs.abs())
    worst = errors.nan_to_num(torch.inf).amax(1)
    token = int(worst.argmax())
    difference = float((ours[token] - theirs[token]).abs().max())
    require(
        worst[token] <= 1,
        f"{what}: by {difference:.3g} at token {token} of {len(ours)}, where numbers are as large "
        f"as {scale:.3g}",
    )


def _told(config: Any) -> str:
    """Return the config's differences from the tiny one, in words."""
    plain = configs.plain(config.architectures[0])
    known = {name for name in plain if not name.startswith("_") and name != "transformers_version"}
    different = {
        name: value
        for name, value in vars(config).items()
        if name in known and value != plain[name]
    }
    return f"{config.architectures[0]}({', '.join(f'{name}={value}' for name, value in different.items())})"


def _declared_for(cls: type[Any]) -> tuple[str, ...]:
    """Return the architectures that an installed plugin declares for a class, or for the nearest of
    its bases."""
    from dovetail.registry.registry import Registry

    declared = {
        c.spec.target: c.spec.architectures
        for c in Registry.discover(enforce_require=False).components()
        if c.spec.kind == "model"
    }
    return next(
        (
            declared[name]
            for base in cls.__mro__
            if (name := f"{base.__module__}:{base.__qualname__}") in declared
        ),
        (),
    )
