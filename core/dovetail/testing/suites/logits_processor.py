"""`LogitsProcessorSuite`: checks that a logits processor conforms to the contract of
`dovetail.api.logits_processor`.

What a processor computes is up to its author. So it is compared with itself: a line gets the same
bits by itself, in a batch, in another row, after drafts, after a preemption, and after other
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ValidationError

from dovetail.api.sampler import Lines, RowSampling
from dovetail.errors import describe, shown
from dovetail.testing.checks import Untried, check, fail, require
from dovetail.testing.hygiene import UNKNOWN_KEY
from dovetail.testing.recording import Recording, nothing_asked
from dovetail.testing.suites.logits_processor_bench import (
    MOST_DRAFTS,
    VOCAB,
    WIDTH,
    Asking,
    ProcessorBench,
    require_same,
    said,
)
from dovetail.testing.suites.logits_processor_identity import LogitsProcessorIdentity
from dovetail.testing.suites.logits_processor_subject import (
    context,
    encode_bytes,
    plain,
    validated,
)
from dovetail.testing.suites.sampler_requests import JUNK

MANY_DRAFTS = (1, 4, 8, 32)
LARGE_VOCAB = 40_007  # where sums over the vocabulary are split among threads
# bits of float32: NaNs, -0, the least number, inf, -inf
SPECIAL = (
    0x7FC00001,
    0xFFC12345,
    0x80000000,
    0x00000001,
    0x7F800000,
    0xFF800000,
)

Replay = Callable[[], object]


class LogitsProcessorSuite(LogitsProcessorIdentity):
    """`arguments`: example arguments of requests, each a mapping; default: one empty mapping, for
    the defaults. At least one must change logits after repetitive texts of letters. Texts are
    encoded by a tokenizer whose tokens are the bytes. Runs on `device`: by default a GPU if
    available, otherwise the CPU. Processors must support both."""

    @check("logits_processor.arguments", since="1.0")
    def test_arguments(self) -> None:
        """`Arguments` isn't a pydantic model that forbids unknown keys, or doesn't accept its own
        values. They are validated when a request arrives, sent to the ranks as JSON
        (`model_dump(mode="json")`), and validated there again without the tokenizer: a validator
        must leave ids as they are, and the result must be equal."""
        require(
            isinstance(self.model, type) and issubclass(self.model, BaseModel),
            f"Arguments is {self.model!r}, expected a pydantic model",
        )
        for example, _ in zip(self.arguments, self.asked, strict=True):
            try:
                validated(self.model, {**example, UNKNOWN_KEY: 1})
            except ValidationError:
                continue
            fail(
                f"{self.model.__name__} took the unknown key {UNKNOWN_KEY!r}: give it "
                f'`model_config = ConfigDict(extra="forbid")`'
            )

    @check("logits_processor.bad_arguments", since="1.0")
    def test_bad_arguments(self) -> None:
        """An invalid value of an argument was accepted, and `update` or `apply` raised, other rows
        changed, or the largest logit wasn't finite afterwards; or `Arguments` raised something else
        than `ValueError`. Give each field a strict type and a range, refuse NaN and inf
        (`allow_inf_nan=False`), and bound the length of lists. Without a tokenizer
        (`ArgumentContext.encode` is None) reject texts."""
        fine = [
            Asking(line.logits, line.sampling, line.prompt, line.output)
            for line in self.lines(drafts=False)[0][:2]
        ]
        expected = self.bench(fine).apply()
        for field, key in (
            (field, info.alias or field) for field, info in self.model.model_fields.items()
        ):
            taken = []
            for junk in JUNK:
                given = {**self.arguments[0], key: junk}
                for encode in (encode_bytes, None):
                    if (arguments := self._taken(given, encode)) is not None:
                        taken.append(junk)
                        self._require_harmless(given, arguments, fine, expected)
            require(
                len(taken) < 2 * len(JUNK),
                f"the argument {field!r} takes every one of {len(JUNK)} values, from -1 and {{}} "
                f"to 'x'",
            )

    def _taken(self, given: Mapping[str, Any], encode: Any) -> BaseModel | None:
        """Return arguments as a rank gets them; None if they are refused on arrival."""
        try:
            first = self.model.model_validate(given, context=context(encode))
        except ValidationError:
            return None
        except Exception as error:
            fail(
                f"the arguments {shown(dict(given))}: {self.model.__name__} raised "
                f"{describe(error)}, expected a ValueError",
                error,
            )
        return self.sent(first)

    def _require_harmless(
        self,
        given: Mapping[str, Any],
        arguments: BaseModel,
        fine: list[Asking],
        expected: torch.Tensor,
    ) -> None:
        told = f"the arguments {shown(dict(given))} were taken"
        try:
            found = self.bench(
                [
                    fine[0],
                    replace(fine[1], arguments=arguments),
                    fine[1],
                    replace(fine[0], arguments=arguments),
                ]
            ).apply()
        except Exception as error:
            fail(f"{told}, and then it raised {describe(error)}", error)
        require_same(fine, found[[0, 2]], expected, f"{told} from a neighbour")
        _require_usable(found, told)

    @check("logits_processor.examples", since="1.0")
    def test_examples(self) -> None:
        """The examples of the suite change no logit, so the suite proves nothing: set `arguments`,
        a list of mappings. Or the largest logit isn't finite afterwards, which ends the request
        with an error."""
        lines, places = self.lines()
        bench = self.bench(lines, places)
        after = bench.apply()
        require(
            not _bits_equal(after, bench.logits),
            f"none of the arguments {shown([dict(example) for example in self.arguments])} changed "
            f"a logit",
        )
        _require_usable(after, "an example")

    @check("logits_processor.banned", since="1.0")
    def test_banned(self) -> None:
        """A logit of -inf was raised. Such a token can't be sampled, by the request's rules or its
        grammar; add to logits, or use `masked_fill` with -inf, but don't assign other values."""
        lines, places = self.lines()
        bench = self.bench(lines, places)
        bench.logits[:, ::3] = -torch.inf
        raised = (bench.apply() != -torch.inf) & (bench.logits == -torch.inf)
        for line, tokens in zip(lines, raised, strict=True):
            require(
                not tokens.any(),
                f"{said(line)}: the logit of token {int(tokens.int().argmax())}, which was -inf, "
                f"was changed",
            )

    @check("logits_processor.others", since="1.0")
    def test_others(self) -> None:
        """Logits of a row that didn't ask, or of padding, were changed; even the bits of NaN and -0
        must stay. Adding 0 and multiplying by 1 change them on some devices: use `torch.where`, or
        write only to rows that ask."""
        lines, places = self.lines()
        bench = self.bench(lines, places)
        bits = torch.tensor(
            [bit - 2**32 if bit >= 2**31 else bit for bit in SPECIAL],
            dtype=torch.int32,
            device=self.place,
        )
        quiet = [index for index, line in enumerate(lines) if line.arguments is None]
        bench.logits[quiet, 1 : 1 + len(bits)] = bits.view(torch.float32)
        given, _ = bench.batch(quiet)
        require_same(
            [lines[index] for index in quiet], bench.apply()[quiet], given, "among rows that ask"
        )
        require_same(
            [lines[index] for index in quiet],
            bench.apply(quiet),
            given,
            "in a step where no row asks",
        )
        for some in (
            [0, None, None],
            [None],
            [index for line in range(len(lines)) for index in (None, line)],
        ):
            before = bench.batch(some)[0]
            after = bench.apply(some)
            padding = [place for place, one in enumerate(some) if one is None]
            require(
                _bits_equal(after[padding], before[padding]), "the logits of padding were changed"
            )

    @check("logits_processor.batch", since="1.0")
    def test_batch(self) -> None:
        """A line's logits depend on the other lines of the step: their number, content, order, or
        padding. Sums over the vocabulary (`sum`, `std`, `softmax`) may round differently in another
        batch; add halves of the vocabulary repeatedly instead, which is the same for all."""
        lines, places = self.lines()
        bench = self.bench(lines, places)
        together = bench.apply()
        order = np.random.default_rng(2).permutation(len(lines)).tolist()
        batches: dict[str, list[int]] = {
            "reversed": [*range(len(lines))][::-1],
            "shuffled": order,
            "some": order[:5],
        }
        for name, some in {
            **batches,
            **{f"line {index} alone": [index] for index in range(len(lines))},
        }.items():
            require_same(
                [lines[index] for index in some],
                bench.apply(some),
                together[some],
                f"in another batch ({name})",
            )
        padded = [index for line in range(len(lines)) for index in (None, line)]
        require_same(lines, bench.apply(padded)[1::2], together, "with padding before each line")
        large, _ = self.lines(vocab=LARGE_VOCAB, rows=2, drafts=False)
        bench = self.bench(large)
        together = bench.apply()
        for index in range(len(large)):
            require_same(
                large[index : index + 1],
                bench.apply([index]),
                together[index : index + 1],
                f"alone, of {LARGE_VOCAB} tokens",
            )

    @check("logits_processor.row", since="1.0")
    def test_row(self) -> None:
        """A line's logits depend on the index of its row."""
        lines, places = self.lines()
        elsewhere = np.random.default_rng(1).permutation(60)
        moved = [int(elsewhere[place]) for place in places]
        require_same(
            lines,
            self.bench(lines, moved).apply(),
            self.bench(lines, places).apply(),
            "in another row",
        )

    @check("logits_processor.lines", since="1.0")
    def test_lines(self) -> None:
        """A line after drafts doesn't get what a row gets whose output ends with these, bit for
        bit. The drafts are in the history, after `num_tokens`; `history.lengths(lines)` is the
        number of tokens before a line; minus `prompt_lens` it is the output position."""
        lines, places = self.lines()
        own = [replace(line, output=line.output + line.drafts, drafts=()) for line in lines]
        require_same(
            lines,
            self.bench(lines, places).apply(),
            self.bench(own).apply(),
            "compared with a row that ends with the drafts",
        )

    @check("logits_processor.many_drafts", since="1.1")
    def test_many_drafts(self) -> None:
        """A line after 1, 4, 8 or 32 drafts doesn't get what a row gets whose output ends with
        these, bit for bit. `context.max_drafts` says how many there may be."""
        rows = [line for line in self.lines(drafts=False, rows=9)[0] if len(line.tokens) > 1]
        lines = []
        for place, row in enumerate(rows):
            text = row.tokens * MANY_DRAFTS[-1]
            if place % 2:  # of tokens that weren't there before
                text = tuple((token + index) % VOCAB for index, token in enumerate(text))
            lines += [replace(row, drafts=text[1 : 1 + count]) for count in MANY_DRAFTS]
        places = [place for place in range(len(rows)) for _ in MANY_DRAFTS]
        own = [replace(line, output=line.output + line.drafts, drafts=()) for line in lines]
        width = WIDTH + MANY_DRAFTS[-1]
        require_same(
            lines,
            self.bench(lines, places, width=width).apply(),
            self.bench(own, width=width, max_drafts=MANY_DRAFTS[-1]).apply(),
            "compared with a row that ends with the drafts",
        )

    @check("logits_processor.stale_history", since="1.0")
    def test_stale_history(self) -> None:
        """A line's logits depend on what its row of the history holds after its tokens, or on other
        rows' tokens. Read only the first `lengths(lines)` of its row."""
        lines, places = self.lines()
        quiet = self.bench(lines, places)
        loud = self.bench(lines, places)
        for place, known in {
            place: len(line.tokens) for place, line in zip(places, lines, strict=True)
        }.items():
            loud.history.token_ids[place, known:] = loud.history.token_ids[
                place, torch.arange(WIDTH - known) % known
            ]
        loud.history.token_ids[loud.max_rows] = loud.history.token_ids[0]
        loud.history.num_tokens[loud.max_rows] = WIDTH - MOST_DRAFTS
        require_same(lines, loud.apply(), quiet.apply(), "with other tokens after the row's own")

    @check("logits_processor.stateless", since="1.0")
    def test_stateless(self) -> None:
        """A line's logits changed when the processor was called again, after other calls, after
        drafts that were rejected, or in another instance. Keep nothing from one call to the next,
        and compute noise from the seed, the output position and the token's id."""
        lines, places = self.lines()
        bench = self.bench(lines, places)
        first = bench.apply()
        require_same(lines, self.bench(lines, places).apply(), first, "of another instance")
        require_same(lines, bench.apply(), first, "called again")
        logits = bench.logits
        bench.logits = bench.logits.flip(-1)
        for some in ([0], [*range(len(lines))][::-2], []):
            bench.apply(some)
        bench.logits = logits
        require_same(lines, bench.apply(), first, "after other calls")
        others = [
            replace(line, drafts=tuple((token + 1) % VOCAB for token in line.drafts))
            for line in lines
        ]
        self._tell(bench, others)
        require_same(
            others,
            bench.apply(),
            self.bench(others, places).apply(),
            "after its drafts were replaced",
        )

    @check("logits_processor.preemption", since="1.0")
    def test_preemption(self) -> None:
        """A request that was preempted and resumed in another row, with its history rebuilt, got
        other logits."""
        lines, _ = self.lines(drafts=False)
        count = len(lines)
        bench = self.bench(
            [*lines, *(replace(line, arguments=None, prompt=(1,), output=()) for line in lines)]
        )
        before = bench.apply(range(count))
        bench.update(range(count), [], [])
        require_same(
            lines, bench.apply(range(count)), bench.logits[:count], "whose row was removed"
        )
        for place, line in enumerate(lines, start=count):
            bench.tell(place, line.prompt, line.output)
        bench.update([], lines, range(count, 2 * count))
        require_same(lines, bench.apply(range(count, 2 * count)), before, "after a preemption")

    @check("logits_processor.reused_rows", since="1.0")
    def test_reused_rows(self) -> None:
        """`update` kept state of a row's previous request, raised for an unknown row, or didn't
        start rows that are both removed and added. Removals come first. It may also be called again
        with the same rows, after an error in another row."""
        lines, places = self.lines()
        rows = sorted(set(places))
        bench = self.bench(lines, places)
        bench.apply()
        arguments = {place: line.arguments for place, line in zip(places, lines, strict=True)}
        others = [
            replace(line, arguments=arguments[rows[place - 1]], sampling=RowSampling(seed=place))
            for place, line in zip(places, lines, strict=True)
        ]
        bench.update(rows, others)
        expected = self.bench(others, places).apply()
        require_same(others, bench.apply(), expected, "given to another request in one update")
        bench.update([], others)
        require_same(others, bench.apply(), expected, "added twice")
        bench.update(rows, [], [])
        require_same(others, bench.apply(), bench.logits, "removed")
        bench.update(rows, [], [])  # unknown ones
        bench.update([], lines)
        require_same(lines, bench.apply(), self.bench(lines, places).apply(), "added again")

    @check("logits_processor.read_only", since="1.0")
    def test_read_only(self) -> None:
        """The history, `lines`, a row's arguments or the list of rows was changed, but only
        `logits` may be."""
        lines, places = self.lines()
        bench = self.bench(lines, places)
        logits, given = bench.batch()
        tensors = {
            "token_ids": bench.history.token_ids,
            "num_tokens": bench.history.num_tokens,
            "prompt_lens": bench.history.prompt_lens,
        }
        tensors |= {"rows": given.rows, "ahead": given.ahead}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        asked = [plain(arguments) for arguments in self.asked]
        with torch.inference_mode():
            bench.processor.apply(logits, given)
        for name, tensor in tensors.items():
            require(torch.equal(tensor, before[name]), f"apply() changed {name}")
        require(
            [plain(arguments) for arguments in self.asked] == asked,
            "the arguments of a row were changed",
        )

    @check("logits_processor.sizes", since="1.0")
    def test_sizes(self) -> None:
        """It failed at a limit, or the result depends on it: a vocabulary of 1 or 3 tokens, one
        row, histories of one token or that fill their row, no drafts, no lines, or many times more
        lines than rows, as padding makes them."""
        for vocab in (1, 3):
            lines, places = self.lines(vocab=vocab)
            bench = self.bench(lines, places)
            together = bench.apply()
            for index in range(len(lines)):
                require_same(
                    lines[index : index + 1],
                    bench.apply([index]),
                    together[index : index + 1],
                    f"alone, of {vocab} tokens",
                )
        for lines in self._rows_at_limits():
            bench = self.bench(lines, width=max(len(line.tokens) for line in lines), max_drafts=0)
            require(
                bench.apply([]).shape == (0, VOCAB),
                "apply() changed the shape of logits of no line",
            )
            many: list[int | None] = [*range(len(lines)), None, None] * 20
            found = bench.apply(many)
            expected = bench.apply()
            for start in range(0, len(many), len(lines) + 2):
                require_same(
                    lines,
                    found[start : start + len(lines)],
                    expected,
                    f"in a batch of {len(many)} lines",
                )

    def _rows_at_limits(self) -> Iterator[list[Asking]]:
        """Yield a row of one token, one that fills the history, and all of both."""
        lines, _ = self.lines(drafts=False)
        asking = [line for line in lines if line.arguments is not None]
        short = [replace(line, prompt=line.prompt[:1], output=()) for line in asking]
        full = [
            replace(line, prompt=(line.prompt * WIDTH)[: WIDTH - len(line.output)])
            for line in asking
        ]
        yield from (short[:1], full[:1], [*short, *full])

    @check("logits_processor.extremes", since="1.0")
    def test_extremes(self) -> None:
        """Logits of NaN, inf or -inf in a row made `apply` raise, or changed other rows."""
        lines, _ = self.lines(drafts=False)
        expected = self.bench(lines).apply()
        for value in (float("nan"), float("inf"), float("-inf")):
            broken = [replace(line, logits=[value] * VOCAB) for line in lines]
            partly = [replace(line, logits=[value, *line.logits[1:]]) for line in lines]
            found = self.bench([*lines, *broken, *partly]).apply()
            require_same(lines, found[: len(lines)], expected, f"beside rows of {value}")

    @check("logits_processor.replayed", since="1.0", capability="cuda_graph")
    def test_replayed(self) -> None:
        """The operations of `apply`, recorded and replayed for other lines, arguments and
        histories, didn't give what `apply` does then: it read a value on the host, or a buffer that
        `update` replaced by another. Or it makes the host wait for the device, as `.item()`,
        `bool()` of a tensor, masks as indices and `nonzero` do. Branch with `torch.where`, and
        write to buffers in place. This is tried on the CPU, too, and needs no graph."""

        def record(bench: ProcessorBench, logits: torch.Tensor, lines: Lines) -> Replay:
            recording = Recording()
            try:
                with recording, nothing_asked():
                    bench.processor.apply(logits, lines)
            except AssertionError as error:
                fail(f"apply() can't be recorded: {error}", error)
            return recording.replay

        self._require_replays(record)

    @check("logits_processor.graph", since="1.0", capability="cuda_graph")
    def test_graph(self) -> None:
        """A CUDA graph of `apply` can't be captured, or its replay for other lines, arguments and
        histories doesn't give what `apply` does then."""
        if not self.place.startswith("cuda"):
            raise Untried("cuda_graph", f"the suite runs on {self.place}")

        def record(bench: ProcessorBench, logits: torch.Tensor, lines: Lines) -> Replay:
            bench.processor.apply(logits, lines)  # compiles kernels
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                bench.processor.apply(logits, lines)
            return graph.replay

        self._require_replays(record)

    @torch.inference_mode()
    def _require_replays(
        self, record: Callable[[ProcessorBench, torch.Tensor, Lines], Replay]
    ) -> None:
        """Record `apply` once, and replay it when lines, arguments and histories have changed."""
        lines, places = self.lines()
        bench = self.bench(lines, places)
        count = len(lines)
        rng = np.random.default_rng(4)
        logits, static = bench.batch([*range(count), None, None])
        replay = record(bench, logits, static)
        arguments = {place: line.arguments for place, line in zip(places, lines, strict=True)}
        for turn, what in enumerate(
            (
                "for the same lines",
                "for other lines",
                "with other arguments",
                "with other histories",
            )
        ):
            if turn == 2:
                lines = [
                    replace(line, arguments=arguments[(place + 1) % len(arguments)])
                    for place, line in zip(places, lines, strict=True)
                ]
                bench.update(sorted(set(places)), lines)
            if turn == 3:
                lines = [
                    replace(
                        line,
                        output=(*line.output, *line.prompt)[
                            : WIDTH - len(line.prompt) - MOST_DRAFTS
                        ],
                    )
                    for line in lines
                ]
                self._tell(bench, lines)
            order: list[int | None] = (
                [*range(count), None, None]
                if turn == 0
                else rng.permutation([*range(count), -1, -1]).tolist()
            )
            order = [None if index == -1 else index for index in order]
            fresh, now = bench.batch(order)
            logits.copy_(fresh)
            static.rows.copy_(now.rows)
            static.ahead.copy_(now.ahead)
            replay()
            told = [lines[index or 0] for index in order]
            require_same(told, logits, bench.apply(order), f"replayed {what}")

    @staticmethod
    def _tell(bench: ProcessorBench, lines: Sequence[Asking]) -> None:
        for place, line in zip(bench.places, lines, strict=True):
            bench.tell(place, line.prompt, line.output, line.drafts)


def _bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def _require_usable(logits: torch.Tensor, what: str) -> None:
    """Require that a token can be sampled from each line."""
    most = logits.amax(-1)
    require(
        most.isfinite().all(),
        f"{what}: the largest logit of a line became {most[~most.isfinite()][:1].sum():g}",
    )
