"""Page of the leaderboard: the standings, a figure, and a table for each trace."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail_lab.digits import evenly, per_cent
from dovetail_lab.leaderboard.board import VERSION, fingerprint, specs
from dovetail_lab.leaderboard.standings import ALL, CONFIDENCE, Score, Standing
from dovetail_lab.report.engine import Engine
from dovetail_lab.report.html import write_page
from dovetail_lab.report.style import MUTED, Drawing, color_of, make, styled
from dovetail_lab.writing import write_whole

JSON = "leaderboard.json"


@dataclass(frozen=True, slots=True)
class Board:
    """The content of the page. `failures`: why schedulers have no standing, by name."""

    standings: Sequence[Standing]
    traces: Sequence[str]
    seeds: int
    failures: Mapping[str, str]
    command: str
    requests: int | None = None  # the first of each trace; None: all


def score_text(score: Score) -> str:
    """Return a score in per cent with its interval, and a star if it is in the first group: "87.1
    ±2.0*"."""
    return f"{100 * score.mean:.1f} ±{100 * score.half:.1f}{'*' if score.group == 1 else ' '}"


def write_leaderboard(board: Board, out: Path) -> list[Path]:
    """Write page, figure and JSON into the folder `out` and return the files, the page first.
    Raises `ConfigError`."""
    texts = specs()
    engine = Engine(
        "the board's files",
        {name: texts[name].splitlines() for name in ("engine", *board.traces)},
        "",
        "",
        (),
    )
    written = write_page(
        "leaderboard.html.j2",
        f"Leaderboard {VERSION}",
        board.command,
        [engine],
        [_drawing(board)] if board.standings else [],
        out,
        {},
        board=board,
        columns=(ALL, *board.traces),
        score_text=score_text,
        figures=[(trace, _figures(board, trace)) for trace in board.traces],
        confidence=f"{100 * CONFIDENCE:g} %",
    )
    write_whole(
        out / JSON, json.dumps(as_json(board), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    return [*written, out / JSON]


def _figures(board: Board, trace: str) -> list[list[str]]:
    """Return a row of texts for each scheduler, in the order of the trace's scores."""
    order = sorted(board.standings, key=lambda standing: -standing.scores[trace].mean)
    own = [standing.figures[trace] for standing in order]
    latencies = [
        evenly([one[name] for one in own])
        for name in ("ttft_mean", "ttft_p99", "itl_p99", "e2e_mean")
    ]
    rejected = [per_cent(one["rejected"] / one["requests"]) for one in own]
    cached = [per_cent(one["cached"]) for one in own]
    columns = [
        [score_text(standing.scores[trace]) for standing in order],
        *latencies,
        rejected,
        cached,
    ]
    return [[standing.entry.name, *cells] for standing, *cells in zip(order, *columns, strict=True)]


def _drawing(board: Board) -> Drawing:
    columns = (ALL, *board.traces)
    with styled():
        figure, panels = make(
            1, len(columns), 0.9 + 0.19 * max(len(board.standings), 3), sharey=True, sharex=True
        )
        for panel, trace in zip(panels, columns, strict=True):
            for row, standing in enumerate(board.standings):
                score = standing.scores[trace]
                shade = color_of(0) if score.group == 1 else MUTED
                panel.plot(
                    [100 * score.low, 100 * score.high],
                    [row, row],
                    color=shade,
                    linewidth=1.6,
                    solid_capstyle="butt",
                )
                panel.plot([100 * score.mean], [row], "o", markersize=4, color=shade)
            panel.set_title(trace)
            panel.set_xlim(-3, 103)
            panel.grid(visible=False, axis="y")
        panels[0].set_yticks(
            range(len(board.standings)), [standing.entry.name for standing in board.standings]
        )
        panels[0].set_ylim(len(board.standings) - 0.4, -0.6)
        figure.supxlabel("requests in time, %", fontsize="medium")
    caption = (
        f"Means over {board.seeds} seeds with {100 * CONFIDENCE:g} % intervals. In colour: "
        f"not measurably worse than the best."
    )
    return Drawing("leaderboard", "Scores", caption, figure)


def as_json(board: Board) -> dict[str, Any]:
    """Return plain values for other programs, with None for missing ones."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "board": VERSION,
        "confidence": CONFIDENCE,
        "seeds": board.seeds,
        "traces": {
            trace: [fingerprint(trace, seed, board.requests) for seed in range(board.seeds)]
            for trace in board.traces
        },
        "standings": [
            {
                "scheduler": standing.entry.name,
                "plugin": standing.entry.plugin,
                "scores": {
                    trace: {
                        "group": score.group,
                        "mean": score.mean,
                        "low": score.low,
                        "high": score.high,
                    }
                    for trace, score in standing.scores.items()
                },
                "figures": {
                    trace: {name: number(value) for name, value in own.items()}
                    for trace, own in standing.figures.items()
                },
            }
            for standing in board.standings
        ],
        "failures": dict(board.failures),
    }
