"""`WorkloadOptions`: changes to a workload, in Python and as options of the lab's commands. Imports
nothing heavy, as `--help` needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """Changes to a workload. Applied in this order: `arrivals`, `slice`, `window`, `scale_rate`,
    `max_tokens`, `predictor`, `grammar_share`."""

    scale_rate: Annotated[
        float | None,
        typer.Option("--scale-rate", metavar="FACTOR", help="Multiply the arrival rate."),
    ] = None
    slice: Annotated[
        str | None,
        typer.Option(
            "--slice",
            metavar="FROM:TO",
            help="Part of the trace: 100:200 (requests) or 60s:120s (seconds).",
        ),
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(
            "--arrivals",
            metavar="PROCESS",
            help='Arrival process that replaces the trace\'s times, such as "poisson(4)".',
        ),
    ] = None
    max_tokens: Annotated[
        str,
        typer.Option(
            "--max-tokens", metavar="trace|N", help="max_tokens of requests as policies see it."
        ),
    ] = "trace"
    predictor: Annotated[
        str | None,
        typer.Option(
            "--predictor",
            help="Predictions of output lengths: oracle, noisy(0.5), bucket(2, 0.8), refined(0.5, "
            "16).",
        ),
    ] = None
    window: Annotated[
        str | None,
        typer.Option(
            "--window",
            metavar="FROM:TO",
            help="Measured part of a run: 60s:600s, or 60s: to exclude a warm-up.",
        ),
    ] = None
    seed: Annotated[
        int,
        typer.Option(
            "--seed", help="Seed of the engine, of synthetic workloads and of predictions."
        ),
    ] = 0
    format: Annotated[
        str | None,
        typer.Option("--format", help="Format of the trace.  [default: detected from its content]"),
    ] = None
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns",
            metavar="FIELD=COLUMN,…",
            help="Column map of a CSV file in an unknown format.",
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="FILE.json",
            help="Tokenizer for traces with text.  [default: count words]",
        ),
    ] = None
    grammar_share: Annotated[
        float | None,
        typer.Option(
            "--grammar-share",
            metavar="SHARE",
            help="Share of requests with a grammar, from 0 to 1.  [default: the trace's]",
        ),
    ] = None
