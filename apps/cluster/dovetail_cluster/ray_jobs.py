"""`run`: runs a whole batch job with engines in actors of a Ray cluster
(`dovetail batch run --on ray`).

Ray Data streams groups of rows through the engines: a task on this machine reads the input, a pool
of actors computes, and this process writes the answers. As without Ray, the output folder alone
says which rows are left, so a job may be begun with Ray and finished without, or the reverse.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dovetail.errors import ConfigError, MissingExtraError
from dovetail_batch.job import Plan
from dovetail_batch.open_job import OpenJob, Summary, job_folder
from dovetail_batch.shards import GO_ON, BatchEngineFailed
from dovetail_cluster.ray_job_worker import COLUMN, BatchEngine, groups_of, rows_in_group
from dovetail_cluster.settings import plain_config

CALLS = 10  # groups under way in an engine: two full steps, and room for stragglers
ADDRESS_VARIABLE = "RAY_ADDRESS"
REACHABLE_S = 10.0
MODE_VARIABLE = "RAY_AUTH_MODE"


def run(plan: Plan, *, anew: bool = False, address: str | None = None) -> Summary:
    """Compute every unanswered row of the job on the Ray cluster at `address`. `anew`: delete the
    existing answers first.

    Raises as `dovetail_batch.runner.run` does. Ray restarts killed workers; other failures are
    retried as long as each attempt brings answers.
    """
    engine = _one_config(plan)
    address = address or os.environ.get(ADDRESS_VARIABLE)
    if not address:
        raise ConfigError(
            f"--on ray: say where the cluster is, with --address HOST:PORT or {ADDRESS_VARIABLE}; "
            f"`auto` is the one on this machine"
        )
    if address.startswith("ray://"):
        raise ConfigError(
            f"--address: {address}: Ray's client can't stream rows: run this on a machine of the "
            f"cluster, and give HOST:PORT or auto"
        )
    with _connected(address) as ray:
        gpus = _gpus(plan, ray)
        _check_room(ray.nodes(), len(plan.sources), gpus)
        with (
            job_folder(plan, anew=anew) as open_job,
            open_job() as job,
        ):  # last: old answers stay if the cluster is the wrong one
            while not job.is_done:
                _attempt(ray, job, engine, len(plan.sources), gpus)
            return job.end()


def _one_config(plan: Plan) -> dict[str, Any]:
    """Return the config of all engines as plain values. Raises `ConfigError` for settings that Ray
    can't honour."""
    if isinstance(plan.job.gpus, list) and plan.job.gpus:
        raise ConfigError(
            "gpus: with --on ray, Ray chooses which: give the number for each engine, such as "
            "`gpus: 1`"
        )
    first, *others = plan.configs
    if any(other != first for other in others):
        raise ConfigError(
            "engine: with --on ray, all engines have one config: give one, and their number as "
            "`engines`"
        )
    return plain_config(first)


def _gpus(plan: Plan, ray: Any) -> int:
    """Return the number of GPUs per engine. Raises `ConfigError` if the job doesn't give it and the
    cluster has GPUs."""
    if isinstance(plan.job.gpus, int):
        return plan.job.gpus
    if available := int(ray.cluster_resources().get("GPU", 0)):
        raise ConfigError(
            f"gpus: the cluster has {available}: say how many each engine gets, such as `gpus: 1`; "
            f"with 0 it computes on CPUs"
        )
    return 0


def _check_room(nodes: Iterable[Mapping[str, Any]], engines: int, gpus: int) -> None:
    """Raise `ConfigError` unless each engine gets a CPU and `gpus` GPUs of one machine: Ray would
    wait forever. `nodes`: of `ray.nodes()`."""
    found = [
        (int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0)))
        for node in nodes
        if node["Alive"]
    ]
    capacity = sum(min(cpus, there // gpus) if gpus else cpus for cpus, there in found)
    if capacity < engines:
        needs = (
            f"a CPU and {gpus} GPU{'' if gpus == 1 else 's'} of one machine" if gpus else "a CPU"
        )
        machines = "; ".join(f"{cpus} CPUs, {there} GPUs" for cpus, there in found)
        raise ConfigError(
            f"engines: {engines} don't fit: each takes {needs}, and Ray has room for {capacity}. "
            f"Its machines have: {machines}"
        )


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    """Connect to the cluster, with Ray's token authentication unless RAY_AUTH_MODE is set. Raises
    `MissingExtraError` and `ConfigError`."""
    os.environ.setdefault(MODE_VARIABLE, "token")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingExtraError.naming("ray", f"--on ray needs Ray: {error}") from None
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ours = not ray.is_initialized()  # otherwise the connection is the calling program's
    if ours:
        try:
            _check_reachable(address)
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"--address: {address}: no cluster can be reached there: {_first_line(error)}"
            ) from None
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise `OSError` if nothing listens there: Ray would retry for minutes."""
    host, found, port = address.rpartition(":")
    if found and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), REACHABLE_S).close()


def _attempt(ray: Any, job: OpenJob, engine: Mapping[str, Any], engines: int, gpus: int) -> None:
    """Send the unanswered rows to the cluster and keep the answers. Raises `BatchEngineFailed` if
    it fails without a single answer."""
    kept = 0
    dead = 0
    why = "Ray has lost rows"
    stream = _stream(ray, job, engine, engines, gpus)
    try:
        for batch in stream:
            for packed in batch[COLUMN]:
                kind, content, ready_s = pickle.loads(packed)
                if kind == "refused":
                    raise ConfigError(content)
                if kind == "answers":
                    job.ready(ready_s)
                    kept += job.store(content)
                else:
                    dead += 1
                    why = content
            if (
                dead > engines * CALLS
            ):  # more than were under way: everything answered before has arrived
                break
    except ray.exceptions.RayError as error:
        why = _first_line(error)
    finally:
        stream.close()  # ends the actors
    if not kept and not job.is_done:
        raise BatchEngineFailed(f"an engine on Ray has failed: {why}; {GO_ON}")


def _stream(
    ray: Any, job: OpenJob, engine: Mapping[str, Any], engines: int, gpus: int
) -> Generator[Mapping[str, Any]]:
    """Yield the messages of the engines in order of arrival."""
    context = ray.data.DataContext.get_current()
    context.target_max_block_size = 1  # a block per group, so that its answers arrive at once
    context.enable_progress_bars = False
    group = rows_in_group(int(engine["max_num_seqs"]))
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}  # where the input is
    left = job.rows_left()
    left.source.path = left.source.path.resolve()  # tasks have another working directory
    rows = ray.data.from_items([{COLUMN: pickle.dumps(left)}])
    groups = rows.map_batches(
        groups_of, fn_kwargs={"group": group}, batch_size=1, num_cpus=0, label_selector=here
    )
    answers = groups.map_batches(
        BatchEngine,
        fn_constructor_args=(dict(engine),),
        batch_size=1,
        num_cpus=1,
        num_gpus=gpus or None,
        compute=ray.data.ActorPoolStrategy(
            size=engines,
            max_tasks_in_flight_per_actor=CALLS + 2,
            max_concurrent_calls_per_actor=CALLS,
            enable_true_multi_threading=True,
        ),
    )
    yield from answers.iter_batches(batch_size=None, prefetch_batches=0)


def _first_line(error: BaseException) -> str:
    """Return an error's text without the remote stack trace that Ray adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
