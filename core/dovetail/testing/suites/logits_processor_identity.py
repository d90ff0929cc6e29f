"""`LogitsProcessorIdentity`: checks that no part of an id, a seed or an argument is cut off, and that
a processor is after many calls what it was at first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from pydantic import ValidationError

from dovetail.testing.checks import check, require
from dovetail.testing.suites.holding import require_bounded
from dovetail.testing.suites.logits_processor_bench import (
    VOCAB,
    Asking,
    require_same,
)
from dovetail.testing.suites.logits_processor_subject import (
    LogitsProcessorSubject,
    context,
    encode_bytes,
)
from dovetail.testing.suites.process_state import (
    process_state,
    require_untouched_by_first_use,
)

MANY_IDS = 151_936  # ids of Qwen3's models: 18 bits
# added to the ids of a text: alike in 16 or 17 bits, or as numbers of 16 bits
SHIFTS = (0, 2**16, 2**16 + 1, 2**17, 2**17 + 1)
SEED = 0x5DEECE66D1234567
BITS = (range(16), range(16, 32), range(32, 48), range(48, 64))  # of a seed
IDS = (b"b"[0], b"c"[0], 5, 1)  # values of an argument
OUTSIDE = (VOCAB, VOCAB + 1, MANY_IDS - 1)  # ids that are not in the vocabulary
LONG = 200  # requests before a processor's size is taken
GROWTH = 4 * LONG  # most bytes more that it may keep after the next ones


class LogitsProcessorIdentity(LogitsProcessorSubject):
    """Ids, seeds and arguments that are alike, and long use."""

    @check("logits_processor.large_ids", since="1.0")
    def test_large_ids(self) -> None:
        """Texts of other ids got the same logits: ids that are equal in 16 bits, in 17, or as
        numbers of half precision. This is required of a processor that tells ids below 256 apart.
        Vocabularies have more than 2**16 ids; keep ids as int32 or int64."""
        lines = self._asking(vocab=MANY_IDS)
        found = {shift: self._apply(_shifted(lines, shift)) for shift in (*SHIFTS, 1)}
        if _same(found[0], found[1]):
            return
        for one, other in [*pairwise(SHIFTS), (0, 2**17)]:
            told = (
                f"{len(lines)} texts got the same logits after {one} as after {other} was added to "
                f"each id, of {MANY_IDS} ids"
            )
            require(not _same(found[one], found[other]), told)

    @check("logits_processor.seed", since="1.0")
    def test_seed(self) -> None:
        """Seeds that differ only in their high bits, or only in their low ones, gave the same
        logits. This is required of a processor whose logits depend on the seed: it has 64 bits, and
        all of them count."""
        lines = self._asking()
        first = self._apply(_seeded(lines, SEED))
        by_number = [self._apply(_seeded(lines, seed)) for seed in range(16)]
        if all(_same(first, one) for one in by_number):
            return
        for bits in BITS:
            others = (self._apply(_seeded(lines, SEED ^ (1 << bit))) for bit in bits)
            require(
                not all(_same(first, one) for one in others),
                f"seeds that differ in one of the bits {bits[0]} to {bits[-1]} gave the same logits",
            )

    @check("logits_processor.argument_ids", since="1.0")
    def test_argument_ids(self) -> None:
        """Integers of an argument that are equal in 16 bits, or lists that begin in the same way,
        were taken for one another. This is required of an argument whose small values are told
        apart."""
        lines = self._asking()
        for field in self._fields():
            for values in ([[one] for one in IDS], [[*range(200, 232), one] for one in IDS], IDS):
                self._require_apart(lines, field, values)

    def _require_apart(self, lines: list[Asking], field: str, values: Sequence[Any]) -> None:
        """Require that a value is told from the one that equals it in 16 bits, if these values are
        told apart; and that the end of a list counts, if it does for a list of one."""
        found = self._with(lines, field, values)
        if found is None:
            return
        if not _all_same(found):
            others = self._with(lines, field, [_more(value) for value in values])
            require(
                others is None or not all(map(_same, found, others)),
                f"{field!r}: each of {list(values)!r:.200} gave the logits that it gives with "
                f"2**16 added",
            )
        elif isinstance(values[0], list):
            alone = self._with(lines, field, [value[-1:] for value in values])
            require(
                alone is None or _all_same(alone),
                f"{field!r}: lists of {len(values[0])} ids that differ only in the last one gave "
                f"the same logits",
            )

    @check("logits_processor.ids_outside", since="1.1")
    def test_ids_outside_the_vocabulary(self) -> None:
        """An id of an argument that is outside the vocabulary changed a logit. Requests are checked
        against the tokenizer's ids, of which the model may have fewer: ignore others. This is
        required of lists of integers that accept such an id."""
        lines = self._asking()
        for field in self._fields():
            for inside in ([], [IDS[0]]):
                for outside in OUTSIDE:
                    found = self._with(lines, field, [inside, [*inside, outside]])
                    require(
                        found is None or _same(*found),
                        f"{field!r}: {[*inside, outside]} gave other logits than {inside}, with a "
                        f"vocabulary of {VOCAB} ids",
                    )

    @check("logits_processor.long_use", since="1.0")
    def test_long_use(self) -> None:
        """After many requests and steps a line got other logits, or the processor kept more than
        before. Forget what belongs to a row once it is removed."""
        lines, places = self.lines(drafts=False)
        bench = self.bench(lines, places)
        first = bench.apply()
        asking = [index for index, line in enumerate(lines) if line.arguments is not None]
        numbers = iter(range(10**9))

        def use(times: int) -> None:
            for _ in range(times):
                number = next(numbers)
                index = asking[number % len(asking)]
                sampling = replace(lines[index].sampling, seed=number)
                bench.update([index], [replace(lines[index], sampling=sampling)], [index])
                bench.apply([index])
                bench.update([index], lines[index : index + 1], [index])
                bench.apply([index])

        require_bounded(bench.processor, use, LONG, GROWTH, "requests that were removed")
        require_same(lines, bench.apply(), first, "after many requests and steps")

    @check("logits_processor.process_untouched", since="1.0")
    def test_process_untouched(self) -> None:
        """The processor changed what belongs to the whole process: torch's random numbers, default
        dtype, threads or modes, those of numpy or `random`, warnings, the environment, print
        options, loggers, or another setting. Draw from a `torch.Generator` of your own, or compute
        noise from the seed."""
        lines, places = self.lines()
        torch.rand(())  # if it seeds torch, that shows
        before = process_state(self.component_class)
        self.bench(lines, places).apply()
        for name, value in process_state(self.component_class).items():
            require(value == before[name], f"{name} isn't what it was before")

    @check("logits_processor.first_use", since="1.1")
    def test_first_use(self) -> None:
        """The first use of the processor in a process changed a setting of the whole process, such as
        the precision of torch's matrix products; or each use registered a function at exit."""
        require_untouched_by_first_use(self, {"arguments": self.arguments, "device": self.device})

    def use_once(self) -> None:
        lines, places = self.lines()
        self.bench(lines, places).apply()

    def _asking(self, vocab: int = VOCAB) -> list[Asking]:
        """Return lines of rows that ask, without drafts."""
        lines, _ = self.lines(vocab=vocab, drafts=False, rows=12)
        return [line for line in lines if line.arguments is not None]

    def _apply(self, lines: Sequence[Asking]) -> torch.Tensor:
        return self.bench(lines).apply()

    def _fields(self) -> Iterator[str]:
        yield from (info.alias or name for name, info in self.model.model_fields.items())

    def _with(
        self, lines: Sequence[Asking], field: str, values: Sequence[Any]
    ) -> list[torch.Tensor] | None:
        """Return the logits of lines that ask with each of these values of an argument; None if one
        is refused."""
        asked = []
        for value in values:
            given = {**self.arguments[0], field: value}
            try:
                asked.append(
                    self.model.model_validate(given, context=context(encode_bytes, MANY_IDS))
                )
            except ValidationError:
                return None
        return [self._apply([replace(line, arguments=one) for line in lines]) for one in asked]


def _shifted(lines: Sequence[Asking], shift: int) -> list[Asking]:
    def moved(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(token + shift for token in tokens)

    return [replace(line, prompt=moved(line.prompt), output=moved(line.output)) for line in lines]


def _seeded(lines: Sequence[Asking], seed: int) -> list[Asking]:
    return [replace(line, sampling=replace(line.sampling, seed=seed)) for line in lines]


def _more(value: Any) -> Any:
    """Add 2**16 to a number, or to the last one of a list."""
    return [*value[:-1], value[-1] + 2**16] if isinstance(value, list) else value + 2**16


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _all_same(found: Sequence[torch.Tensor]) -> bool:
    return all(_same(one, found[0]) for one in found)
