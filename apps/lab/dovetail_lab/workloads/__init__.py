"""Synthetic workloads: requests drawn from a short description."""

from __future__ import annotations

from dovetail_lab.workload_options import WorkloadOptions
from dovetail_lab.workloads.generate import generate
from dovetail_lab.workloads.load import load_workload
from dovetail_lab.workloads.spec import Stream, WorkloadSpec, parse_spec

__all__ = ["Stream", "WorkloadOptions", "WorkloadSpec", "generate", "load_workload", "parse_spec"]
