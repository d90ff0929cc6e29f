"""`run`: `dovetail batch run --on ray`. Engines are actors of a Ray cluster; rows come from this machine, and answers go to a folder on it.

Ray Data streams groups of rows from the input through the engines: a task on this machine reads, a pool of actors computes, and this process keeps
what comes. Which rows are left is known from the folder alone, as without Ray. So a job that was begun here can be finished there, and the reverse.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dovetail.errors import ConfigError, MissingExtraError
from dovetail_batch.errors import GO_ON, BatchEngineFailed
from dovetail_batch.job import Plan
from dovetail_batch.open_job import OpenJob, Summary, job_folder
from dovetail_cluster.batches_seats import check_seats
from dovetail_cluster.batches_worker import COLUMN, BatchEngine, groups_of, rows_in_group
from dovetail_cluster.plain_config import plain_config

CALLS = 10  # groups that are computed at the same time in an engine: two full steps, and what stragglers hold up
ADDRESS_VARIABLE = "RAY_ADDRESS"
REACHABLE_S = 10.0
MODE_VARIABLE = "RAY_AUTH_MODE"


def run(plan: Plan, *, anew: bool = False, address: str | None = None) -> Summary:
    """Compute every row of the job that has no answer on the Ray cluster at `address`. `anew`: remove the answers that are there first.

    Raises what `dovetail_batch.runner.run` does. Killed workers are started again; an attempt that ends otherwise is followed by another as long as
    each brings answers.
    """
    engine = _one_config(plan)
    address = address or os.environ.get(ADDRESS_VARIABLE)
    if not address:
        raise ConfigError(f"--on ray: say where the cluster is, with --address HOST:PORT or {ADDRESS_VARIABLE}; `auto` is the one on this machine")
    if address.startswith("ray://"):
        raise ConfigError(f"--address: {address}: Ray's client can't stream rows: run this on a machine of the cluster, and give HOST:PORT or auto")
    with _connected(address) as ray:
        gpus = _gpus(plan, ray)
        check_seats(ray.nodes(), len(plan.sources), gpus)
        with job_folder(plan, anew=anew) as folder, folder.open() as job:  # whose old answers stay if the cluster is the wrong one
            while not job.is_done:
                _attempt(ray, job, engine, len(plan.sources), gpus)
            return job.end()


def _one_config(plan: Plan) -> dict[str, Any]:
    """Return the config of all engines, as plain values. Raises `ConfigError` for what a cluster can't be asked for."""
    if isinstance(plan.job.gpus, list) and plan.job.gpus:
        raise ConfigError("gpus: with --on ray, Ray chooses which: give the number for each engine, such as `gpus: 1`")
    first, *others = plan.configs
    if any(other != first for other in others):
        raise ConfigError("engine: with --on ray, all engines have one config: give one, and their number as `engines`")
    return plain_config(first)


def _gpus(plan: Plan, ray: Any) -> int:
    """Return the number of GPUs that each engine gets. Raises `ConfigError` if the job leaves it open where there are some."""
    if isinstance(plan.job.gpus, int):
        return plan.job.gpus
    if there := int(ray.cluster_resources().get("GPU", 0)):
        raise ConfigError(f"gpus: the cluster has {there}: say how many each engine gets, such as `gpus: 1`; with 0 it computes on CPUs")
    return 0


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Be a driver of the cluster. Ray's tokens are asked for unless RAY_AUTH_MODE says otherwise. Raises `MissingExtraError` and `ConfigError`."""
    os.environ.setdefault(MODE_VARIABLE, "token")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtraError.naming("ray", f"--on ray needs Ray: {error}") from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ours = not ray.is_initialized()  # else the program that calls us has its own connection
    if ours:
        try:
            _check_reachable(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise ConfigError(f"--address: {address}: no cluster can be reached there: {_first_line(error)}") from None
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise `OSError` if nobody listens there: Ray would try for minutes."""
    host, found, port = address.rpartition(":")
    if found and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACHABLE_S).close()


def _attempt(ray: Any, job: OpenJob, engine: Mapping[str, Any], engines: int, gpus: int) -> None:
    """Give the rows that are left to the cluster, and keep the answers. Raises `BatchEngineFailed` if it ends early without a single one."""
    kept, dead, why = 0, 0, "Ray has lost rows"
    stream = _stream(ray, job, engine, engines, gpus)
    try:
        for batch in stream:
            for packed in batch[COLUMN]:
                kind, content, ready_s = pickle.loads(packed)
                if kind == "refused":
                    raise ConfigError(content)
                if kind == "answers":
                    job.ready(ready_s)
                    kept += job.keep_new(content)
                else:
                    dead, why = dead + 1, content
            if dead > engines * CALLS:  # more than were in the engines, so what was answered before has come
                break
    except ray.exceptions.RayError as error:
        why = _first_line(error)
    finally:
        stream.close()  # ends the actors, also of an attempt that was broken off
    if not kept and not job.is_done:
        raise BatchEngineFailed(f"an engine on Ray has failed: {why}; {GO_ON}")


def _stream(ray: Any, job: OpenJob, engine: Mapping[str, Any], engines: int, gpus: int) -> Generator[Mapping[str, Any]]:
    """Yield what the engines answer, in the order in which it comes."""
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = 1  # each group is a block of its own, so that its answers come when they are there
    context.enable_progress_bars = False
    group = rows_in_group(int(engine["max_num_seqs"]))
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}  # where the input is
    rows = ray.data.from_items([{COLUMN: pickle.dumps(job.snapshot())}])
    groups = rows.map_batches(groups_of, fn_kwargs={"group": group}, batch_size=1, num_cpus=0, label_selector=here)
    answers = groups.map_batches(
        BatchEngine,
        fn_constructor_args=(dict(engine),),
        batch_size=1,
        num_cpus=1,
        num_gpus=gpus or None,
        compute=ray.data.ActorPoolStrategy(
            size=engines, max_tasks_in_flight_per_actor=CALLS + 2, max_concurrent_calls_per_actor=CALLS, enable_true_multi_threading=True
        ),
    )
    yield from answers.iter_batches(batch_size=None, prefetch_batches=0)


def _first_line(error: BaseException) -> str:
    """Return what an error says, without the stack of another process that Ray puts into it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
