"""`load_workload`: load a trace file of any known format, a YAML spec, a spec, or `paper:NAME`, and apply
`WorkloadOptions`."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

from dovetail.errors import MissingExtraError
from dovetail_lab.calls import parse_call
from dovetail_lab.nearest import suggest
from dovetail_lab.predictors import parse_predictor, predict
from dovetail_lab.traces import (
    CountTokens,
    Trace,
    TraceError,
    load_trace,
    parse_columns,
    scale_rate,
    set_grammar_share,
    set_max_tokens,
    slice_trace,
)
from dovetail_lab.traces.reading import read_source
from dovetail_lab.traces.transform import set_window
from dovetail_lab.workload_options import WorkloadOptions
from dovetail_lab.workloads.arrivals import ARRIVALS
from dovetail_lab.workloads.generate import generate, with_arrivals
from dovetail_lab.workloads.spec import parse_spec, parse_yaml_spec

PAPER = "paper:"
UNCHANGED = WorkloadOptions()


def load_workload(text: str, options: WorkloadOptions = UNCHANGED) -> Trace:
    """Return the trace that `text` names. Raises `TraceError`."""
    if options.seed < 0:
        raise TraceError(f"the seed must be 0 or more, got {options.seed}")
    trace = _load(text, options)
    if options.arrivals is not None:
        trace = with_arrivals(
            trace, parse_call(options.arrivals, ARRIVALS, "arrivals"), options.seed
        )
    if options.slice is not None:
        trace = slice_trace(trace, options.slice)
    if options.window is not None:
        trace = set_window(trace, options.window)
    if options.scale_rate is not None:
        trace = scale_rate(trace, options.scale_rate)
    trace = set_max_tokens(trace, options.max_tokens)
    if options.predictor is not None:
        trace = predict(trace, parse_predictor(options.predictor), options.seed)
    return (
        trace
        if options.grammar_share is None
        else set_grammar_share(trace, options.grammar_share, options.seed)
    )


def paper_workloads() -> list[str]:
    """Return the names of the workloads that follow papers, for `paper:NAME`."""
    return sorted(
        Path(entry.name).stem
        for entry in files("dovetail_lab").joinpath("workloads", "papers").iterdir()
        if entry.name.endswith(".yaml")
    )


def _paper(name: str, seed: int) -> Trace:
    known = paper_workloads()
    if name not in known:
        raise TraceError(f"{PAPER}{name}: unknown workload{suggest(name, known)}")
    text = (
        files("dovetail_lab")
        .joinpath("workloads", "papers", f"{name}.yaml")
        .read_text(encoding="utf-8")
    )
    source = f"{PAPER}{name}"
    return generate(parse_yaml_spec(text, source), seed, name=name, source=source)


def _load(text: str, options: WorkloadOptions) -> Trace:
    if text.startswith(PAPER):
        return _paper(text.removeprefix(PAPER), options.seed)
    if "=" in text and not os.path.exists(
        text
    ):  # `Path.exists` raises for a spec that is too long for a file's name
        return generate(parse_spec(text), options.seed, source=text)
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        return generate(
            parse_yaml_spec(read_source(path).text, text), options.seed, name=path.name, source=text
        )
    columns = None if options.columns is None else parse_columns(options.columns)
    count_tokens = None if options.tokenizer is None else _counter(options.tokenizer)
    return load_trace(path, format=options.format, columns=columns, count_tokens=count_tokens)


def _counter(path: str) -> CountTokens:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError.naming(
            "torch", "counting tokens needs the package tokenizers"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing more specific
        raise TraceError(f"{path}: expected a tokenizer.json: {error}") from None
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
