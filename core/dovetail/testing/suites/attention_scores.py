"""`AttentionScores`: checks of attention sinks and soft caps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dovetail.testing.checks import check, require
from dovetail.testing.suites.attention_bench import Bench, Case
from dovetail.testing.suites.attention_judging import assert_as_defined
from dovetail.testing.suites.attention_small_cache import LONG, AttentionSmallCache


class AttentionScores(AttentionSmallCache):
    """The same contract, for layers with `LayerSpec.sinks` or `LayerSpec.softcap`."""

    def score_cases(self, **fields: Any) -> Iterator[tuple[str, Case]]:
        """Yield a step for each way in which a backend may attend: what computes one may forget
        what another keeps."""
        window = 20 if self.claims.window else None
        for dtype in self.tried_dtypes():
            mixed = self.case(
                (0, 30, 90, 5),
                (40, 9, 1, 1),
                dtype=dtype,
                windows=(None, window),
                padding=3,
                **fields,
            )
            yield f"in {dtype}: ", mixed
        yield (
            "decodes: ",
            self.case((LONG, 5, 17), (1,) * 3, **({"heads": 2, "kv_heads": 1} | fields)),
        )
        if "kv_heads" not in fields:
            yield (
                "with a head for each kv head: ",
                self.case((0, 20), (9, 1), heads=3, kv_heads=3, **fields),
            )
        if self.declares("cache_dtypes"):
            for case in self.small_case((0, 90), (30, 1), **fields):
                yield f"with K and V in {case.cache_dtype}: ", case
        if self.declares("mixed_graph"):
            yield (
                "planned with mixed_graph: ",
                self.case((0, 17, 90), (30, 1, 7), padding=3, mixed_graph=True, **fields),
            )

    def assert_scores(self, **fields: Any) -> None:
        """Check such layers in steps of every sort, with a shared prefix too."""
        for what, case in self.score_cases(**fields):
            assert_as_defined(self.bench(case), what)
        if self.declares("shared_prefix"):
            size = self.claims.default_block_size()
            blocks = -(-160 // size)
            tails = tuple(blocks * size + n for n in (1, size, 7))
            self.assert_shares(
                self.bench(self.case(tails, (1, 1, 1), **({"heads": 2, "kv_heads": 1} | fields))),
                blocks,
                (blocks,),
            )

    @check("attention.sinks", since="1.0", capability="sinks")
    def test_a_sink_takes_part_in_the_denominator_once(self) -> None:
        """With `LayerSpec.sinks` head h's softmax has one additional logit, `sinks[h]`, whose
        weight applies to no value. It isn't scaled; it counts once per query, in however many parts
        its keys are processed, and also if it is the largest. Other layers may have no sinks; sinks
        that the model changes in place are read again."""
        self.assert_scores(sinks=(True, False))
        bench = self.bench(
            self.case((0, 20), (9, 1), heads=4, kv_heads=2, sinks=(True,), scale=0.05)
        )
        assert_as_defined(bench, "with a scale of 0.05: ")
        for values in (torch.tensor([300.0, -300.0, 0.0, 20.0]), torch.full((4,), -torch.inf)):
            self.change_sinks(bench, values)
            assert_as_defined(bench, f"with the sinks {values.tolist()}: ")

    def change_sinks(self, bench: Bench, values: torch.Tensor) -> None:
        tensors = zip(bench.layers, bench.sinks, bench.bound_sinks, strict=True)
        for layer, known, bound in tensors:
            require(layer.sinks is not None, "bind_sinks() kept no sinks in `layer.sinks`")
            if known is not None and bound is not None:
                known.copy_(values)
                bound.copy_(values)  # the parameter alone, as loading weights does

    @check("attention.softcap", since="1.0", capability="softcap")
    def test_scores_are_capped_after_they_are_scaled(self) -> None:
        """With `LayerSpec.softcap = c` a scaled score s becomes c * tanh(s / c), before masking.
        Layers of one model may differ in it. Huge scores reach the cap; a sink isn't capped."""
        self.assert_scores(softcaps=(1.5, None))
        bench = self.bench(self.case((0, 20), (9, 1), scale=0.7, softcaps=(30.0,)))
        assert_as_defined(bench, "with a scale of 0.7: ")
        for q in (row for layer in bench.q for row in layer):
            q *= 300
        assert_as_defined(bench, "with huge scores: ")
        if self.declares("sinks"):
            assert_as_defined(
                self.bench(self.case((0, 20), (9, 1), softcaps=(0.5,), sinks=(True,))),
                "with sinks: ",
            )
