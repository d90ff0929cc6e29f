"""Traces: recorded requests, read from files of several formats."""

from __future__ import annotations

from dovetail_lab.traces.formats import FORMATS, load_trace
from dovetail_lab.traces.objects import CountTokens
from dovetail_lab.traces.reading import TraceError
from dovetail_lab.traces.request import Measured, Span, Trace, TraceImage, TraceRequest
from dovetail_lab.traces.tables import parse_columns
from dovetail_lab.traces.transform import scale_rate, set_grammar_share, set_max_tokens, slice_trace

__all__ = [
    "CountTokens",
    "FORMATS",
    "Measured",
    "Span",
    "Trace",
    "TraceError",
    "TraceImage",
    "TraceRequest",
    "load_trace",
    "parse_columns",
    "scale_rate",
    "set_grammar_share",
    "set_max_tokens",
    "slice_trace",
]
