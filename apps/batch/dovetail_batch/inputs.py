"""`source_of`: the `Source` for a job's input."""

from __future__ import annotations

from pathlib import Path

from dovetail_batch.job import Plan
from dovetail_batch.sources import Csv, Jsonl, Source


def source_of(plan: Plan) -> Source:
    """Raises `ConfigError` if the file can't be read as what it is said to be, `MissingExtraError` without pyarrow."""
    given = plan.job.input
    path = Path(given.path)
    columns: dict[str, str] = {ours: theirs for ours, theirs in given.columns.items()}  # noqa: C416 - of another type than the pairs' own
    if plan.format == "parquet":
        from dovetail_batch.parquet import Parquet

        return Parquet(path, columns)
    if plan.format == "csv":
        return Csv(path, columns)
    if plan.format == "openai":
        from dovetail_batch.openai_format import OpenAIBatch

        return OpenAIBatch(path, limited="max_tokens" in plan.job.sampling)
    return Jsonl(path, columns)
