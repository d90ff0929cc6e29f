"""`JobSettings`: the keys of a job file. `Plan`: a valid job with the configs of its engines."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dovetail import EngineConfig
from dovetail.errors import ConfigError, RequestError
from dovetail.serving import Where, read_settings
from dovetail_batch.rows import KEYS, JobTask, RowReader

FORMAT_OF_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
CHANGES_NO_ANSWER = (  # keys of `engine.yaml` that may change while a job is interrupted
    "gpu_memory_utilization",
    "kv_cache_memory",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "overlap",
    "cuda_graphs",
    "observers",
    "kv_host_memory",
    "kv_tiers",
)

Source = str | dict[str, Any]
Format = Literal["jsonl", "csv", "parquet", "openai"]  # of an input
Column = Literal[
    "id", "prompt", "messages", "token_ids", "sampling", "pooling", "extra", "predicted_tokens"
]
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def _of_path(value: Any) -> Any:
    """Expand a bare path to a mapping."""
    return {"path": value} if isinstance(value, str) else value


class Input(BaseModel):
    """The rows of a job."""

    model_config = _STRICT

    path: Annotated[str, Field(min_length=1)]
    """The file. It is read twice, so it can't be standard input."""

    format: Format | None = None
    """The file's format; `openai`: lines of OpenAI's batch API. null: by the file's suffix."""

    columns: dict[Column, Annotated[str, Field(min_length=1)]] = {}
    """The file's column names by key, such as `{id: question_id, prompt: question}`; other columns
    are ignored. Empty: the names are the keys, and unknown columns are errors."""


class Output(BaseModel):
    """The answers of a job."""

    model_config = _STRICT

    path: Annotated[str, Field(min_length=1)]
    """The folder of the answers, created if needed."""

    format: Literal["jsonl", "parquet", "openai"] = "jsonl"
    """The format of the answers; `openai`: lines of OpenAI's batch API."""


class JobSettings(BaseModel):
    """The keys of a job file. Paths are relative to the working directory."""

    model_config = _STRICT

    engine: Source | Annotated[list[Source], Field(min_length=1)]
    """An engine's config: a file, a model's name, or the keys of `engine.yaml`. A list starts an
    engine per entry, all with the same model."""

    input: Annotated[Input, BeforeValidator(_of_path)]
    """The rows: a path, or `path`, `format` and `columns`."""

    output: Annotated[Output, BeforeValidator(_of_path)]
    """The answers: a path, or `path` and `format`."""

    task: JobTask = "generate"
    """The task decides whether the job generates an answer to each row, or embeds each row."""

    sampling: dict[str, Any] = {}
    """Default sampling parameters of rows."""

    pooling: dict[str, Any] = {}
    """Default parameters of rows to embed: `dimensions`, `truncate_prompt_tokens`,
    `use_activation`, and `prompt_name` of a prompt that the checkpoint stores."""

    engines: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of engines with this config, each in its own process."""

    gpus: list[str] | Annotated[int, Field(ge=0, le=1024)] = []
    """CUDA_VISIBLE_DEVICES of each engine, such as `["0", "1"]` for two engines of one GPU each.
    Empty: each sees all GPUs. A number: GPUs exclusive to each engine; with `--on ray`, Ray chooses
    which."""

    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """The seed from which those of rows without a seed are derived."""

    shard_rows: Annotated[int, Field(ge=1, le=1_000_000)] = 1000
    """Rows per file of answers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A valid job, before its input is read."""

    job: JobSettings
    format: Format  # of the input
    sources: tuple[Source, ...]  # the configs as given, one per engine
    configs: tuple[EngineConfig, ...]  # the same, parsed
    rows: RowReader

    @property
    def gpus(self) -> tuple[str | None, ...]:
        """The value of CUDA_VISIBLE_DEVICES of each engine on this machine; None: inherited. Raises
        `ConfigError` if there are too few GPUs."""
        given = self.job.gpus
        if isinstance(given, list):
            return tuple(given) or (None,) * len(self.sources)
        needed = given * len(self.sources)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = (
            [str(place) for place in range(needed)]
            if visible is None
            else [name for name in visible.split(",") if name]
        )
        if len(names) < needed:
            told = (
                f"{len(self.sources)} engines of {given} need {needed} GPUs, and "
                f"CUDA_VISIBLE_DEVICES names {len(names)}"
            )
            raise ConfigError(f"gpus: {told}")
        return tuple(
            ",".join(names[place * given : (place + 1) * given])
            for place in range(len(self.sources))
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the answers depend on, as plain values: a job resumes only with the same
        ones."""
        job = self.job
        engines = [
            {
                key: value
                for key, value in config.model_dump(mode="json").items()
                if key not in CHANGES_NO_ANSWER
            }
            for config in self.configs
        ]
        different = [
            engine for place, engine in enumerate(engines) if engine not in engines[:place]
        ]
        return {
            "engine": different[0] if len(different) == 1 else different,
            "sampling": job.sampling,
            **({"task": job.task, "pooling": job.pooling} if job.task != "generate" else {}),
            "seed": job.seed,
            "shard_rows": job.shard_rows,
            "input": {"format": self.format, "columns": job.input.columns},
            "output": {"format": job.output.format},
        }


def load_plan(name: str) -> Plan:
    """Read a job file. Raises `ConfigError` with a line for each invalid key that names its file
    and line."""
    job, where = read_settings(name, JobSettings, "engine: demo")
    sources = _sources(job, where)
    configs = tuple(_config(source, where) for source in sources)
    if len(models := {(config.model.path, str(config.tokenizer)) for config in configs}) > 1:
        raise ConfigError(
            where.at("engine").says(
                f"the engines of a job must have one model, got "
                f"{', '.join(sorted(model for model, _ in models))}"
            )
        )
    return Plan(job, _format(job, where), sources, configs, _reader(job, where))


def _sources(job: JobSettings, where: Where) -> tuple[Source, ...]:
    """Return the config of each engine as given."""
    if isinstance(job.engine, list):
        if job.engines != 1:
            raise ConfigError(
                where.at("engines").says(
                    f"engine is a list of {len(job.engine)}, which says how many there are: leave "
                    f"this out"
                )
            )
        sources = tuple(job.engine)
    else:
        sources = (job.engine,) * job.engines
    if isinstance(job.gpus, list) and job.gpus and len(job.gpus) != len(sources):
        raise ConfigError(
            where.at("gpus").says(
                f"expected one for each engine, which are {len(sources)}, got {len(job.gpus)}"
            )
        )
    return sources


def _config(source: Source, where: Where) -> EngineConfig:
    try:
        return EngineConfig.load(source)
    except ConfigError as error:
        raise ConfigError(where.at("engine").says(str(error))) from None


def _format(job: JobSettings, where: Where) -> Format:
    given = job.input
    place = where.at("input")
    if given.path == "-":
        raise ConfigError(
            place.says(
                "a job reads its rows twice, and again when it goes on: write standard input to a "
                "file first"
            )
        )
    found: Any = given.format or FORMAT_OF_SUFFIX.get(Path(given.path).suffix.lower())
    if found is None:
        raise ConfigError(
            place.says(
                f"{given.path}: its name doesn't end in {', '.join(FORMAT_OF_SUFFIX)}: say the "
                f"`format`"
            )
        )
    if found == "openai" and given.columns:
        raise ConfigError(
            place.at("columns").says("OpenAI's format has names of its own: leave this out")
        )
    if given.columns and not {"prompt", "messages", "token_ids"} & set(given.columns):
        raise ConfigError(
            place.at("columns").says(
                f"name the column of a prompt, messages or token_ids; what can be named is "
                f"{', '.join(KEYS)}"
            )
        )
    if Path(job.output.path).suffix.lower() in FORMAT_OF_SUFFIX:
        hint = (
            f"{job.output.path}: the answers are a folder of files, one for each "
            f"{job.shard_rows} rows: name a folder, and its `format`"
        )
        raise ConfigError(where.at("output").says(hint))
    return found  # type: ignore[no-any-return]


def _reader(job: JobSettings, where: Where) -> RowReader:
    for key in ("sampling", "pooling"):
        try:
            json.dumps(getattr(job, key))  # as in the manifest
        except TypeError as error:
            raise ConfigError(
                where.at(key).says(f"expected values that JSON has, too: {error}")
            ) from None
    try:
        return RowReader(
            job.sampling,
            job.seed,
            has_logprobs=job.output.format != "openai",
            task=job.task,
            pooling=job.pooling,
        )
    except RequestError as error:
        key, _, reason = str(error).partition(": ")
        raise ConfigError(where.at(key).says(reason)) from None
