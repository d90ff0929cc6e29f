"""`SamplerLines`: checks of lines after drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from dovetail.api.sampler import SampledTokens
from dovetail.testing.checks import check, require
from dovetail.testing.suites.sampler_bench import Row
from dovetail.testing.suites.sampler_rows import mixed_rows, rows_with_long_words
from dovetail.testing.suites.sampler_subject import SamplerSubject, said

MOST_DRAFTS = 3


class SamplerLines(SamplerSubject):
    """Lines with drafts before them, as in speculative decoding."""

    @check("sampler.lines", since="1.0", capability="drafts")
    def test_lines(self) -> None:
        """A line after drafts isn't sampled as a row whose output ends with these, bit for bit: the
        drafts are in the history, after `num_tokens`, and count for the output position, penalties,
        bad words and `min_tokens`. `history.lengths(lines)` tells how many tokens a line follows.
        Also with a capture, where `capture_for` names one."""
        for rows in (mixed_rows(), rows_with_long_words()):
            lines, places = lines_of(rows)
            own = [replace(line, output=line.output + line.drafts, drafts=()) for line in lines]
            bench = self.bench(lines, places)
            others = self.bench(own)
            _require_same(lines, bench.sample(), others.sample())
            for row in sorted(set(places)):
                some = [index for index, place in enumerate(places) if place == row]
                alone = self.bench([lines[index] for index in some], [0] * len(some))
                if (capture := alone.capture()) is not None:
                    captured = alone.captured(capture).token_ids.tolist()
                    expected = [others.tokens([index])[0] for index in some]
                    told = (
                        f"{said(rows[row].sampling)}: captured ({capture.name}), its lines got "
                        f"{captured}, rows that end with the drafts {expected}"
                    )
                    require(captured == expected, told)

    @check("sampler.lines_apart", since="1.0", capability="drafts")
    def test_lines_apart(self) -> None:
        """A line got another token, or other log-probabilities, when other lines of its row had
        other logits, or weren't there. The executor decides which lines count; each is sampled by
        itself."""
        lines, places = lines_of(mixed_rows())
        expected = self.bench(lines, places).sample()
        for parity in (0, 1):
            kept = [index for index in range(len(lines)) if index % 2 == parity]
            moved = [
                replace(line, logits=line.logits if index in kept else line.logits[::-1])
                for index, line in enumerate(lines)
            ]
            _require_same(
                [lines[index] for index in kept],
                _some(self.bench(moved, places).sample(), kept),
                _some(expected, kept),
            )
            bench = self.bench(lines, places)
            _require_same(
                [lines[index] for index in kept], bench.sample(kept), _some(expected, kept)
            )


def lines_of(rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
    """Return 1 to 1 + MOST_DRAFTS lines for each of `rows`, and the row of each. Drafts are the
    row's most likely token, and 1, which begins some bad words; every second row asks for
    log-probabilities."""
    lines = []
    places = []
    for place, row in enumerate(rows):
        best = np.argsort(row.logits)[::-1]
        drafts = tuple(int(token) for token in (best[0], 1, best[0])[: place % (1 + MOST_DRAFTS)])
        sampling = replace(row.sampling, logprobs=place % 3 if place % 2 else None)
        lines += [
            replace(row, sampling=sampling, drafts=drafts[:ahead])
            for ahead in range(1 + len(drafts))
        ]
        places += [place] * (1 + len(drafts))
    return lines, places


def _some(sampled: SampledTokens, index: list[int]) -> SampledTokens:
    top = sampled.logprobs
    own = top and replace(
        top, token_ids=top.token_ids[index], logprobs=top.logprobs[index], ranks=top.ranks[index]
    )
    return SampledTokens(sampled.token_ids[index], own)


def _require_same(lines: Sequence[Row], found: SampledTokens, expected: SampledTokens) -> None:
    """Require equal tokens, and equal bits of the log-probabilities that lines ask for."""
    for index, (line, token, own) in enumerate(
        zip(lines, found.token_ids.tolist(), expected.token_ids.tolist(), strict=True)
    ):
        told = (
            f"{said(line.sampling)}, after {line.prompt}, {line.output} and the drafts "
            f"{line.drafts}: token {token} came, expected {own}"
        )
        require(token == own, told)
        if line.sampling.logprobs is None:
            continue
        ours = found.logprobs
        theirs = expected.logprobs
        require(
            ours is not None and theirs is not None,
            f"{said(line.sampling)}: no log-probabilities came",
        )
        columns = slice(1 + line.sampling.logprobs)
        same = (
            ours is not None
            and theirs is not None
            and torch.equal(ours.logprobs[index, columns], theirs.logprobs[index, columns])
            and torch.equal(ours.token_ids[index, columns], theirs.token_ids[index, columns])
            and torch.equal(ours.ranks[index], theirs.ranks[index])
        )
        require(
            same,
            f"{said(line.sampling)}, after the drafts {line.drafts}: other log-probabilities than "
            f"by itself",
        )
