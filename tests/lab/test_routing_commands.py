"""`--replicas` and `--router` of the lab's commands, and how routers are found."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dovetail.cli.app import app
from dovetail.errors import ConfigError, DovetailError, PluginError
from dovetail_lab.records import RunResult, Timeline
from dovetail_lab.routers import PrefixAware, RoundRobin, Routing, parse_router
from tests.lab.runs import engine
from tests.registry.fakes import Site
from tests.registry.site import site  # noqa: F401

WORKLOAD = "arrivals=poisson(40) requests=12 prompt=uniform(8, 90) output=uniform(4, 12)"


class Last(RoundRobin):
    """Sends everything to the last replica."""

    def choose(self, request, replicas):  # type: ignore[no-untyped-def]
        return len(replicas) - 1


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "e.yaml"
    path.write_text(json.dumps(engine()))
    return str(path)


def lab(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["lab", *words])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_a_run_tells_the_replica_of_each_request_and_what_routed_it(
    config: str, tmp_path: Path
) -> None:
    told = lab(
        "run",
        config,
        "--trace",
        WORKLOAD,
        "--replicas",
        "3",
        "--router",
        "prefix_aware(blocks=9)",
        "--out",
        str(tmp_path / "out"),
    )
    assert "3 replicas, routed by prefix_aware(blocks=9), each with overlap " in told
    run = RunResult.load(tmp_path / "out" / "run.json")
    assert (run.settings["replicas"], run.settings["router"]) == (3, "prefix_aware(blocks=9)")
    assert {one.replica for one in run} <= {0, 1, 2}


@pytest.mark.slow("compares engines of several replicas")
@pytest.mark.usefixtures("no_figures")
def test_each_engine_of_a_comparison_has_its_router(config: str, tmp_path: Path) -> None:
    names = ("e (1)", "e (2)")
    routed = [
        word
        for name, router in zip(names, ("round_robin", f"{__name__}:Last"), strict=True)
        for word in ("--router", f"{name}:{router}")
    ]
    out = tmp_path / "out"
    common = (
        "--trace",
        WORKLOAD,
        "--replicas",
        "2",
        "--out",
        str(out),
        "--jobs",
        "1",
        "--resamples",
        "100",
    )
    lab("compare", config, config, *common, *routed, "--keep-runs")
    runs = {run.name: run for run in map(RunResult.load, out.glob("e_*.json"))}
    assert [runs[name].settings["router"] for name in names] == ["round_robin", "Last"]
    assert [{one.replica for one in runs[name]} for name in names] == [{0, 1}, {1}]


def test_sweep_takes_replicas(config: str) -> None:
    assert "ttft_mean" in lab(
        "sweep", config, "--trace", WORKLOAD, "--replicas", "2", "--rates", "1,2", "--jobs", "1"
    )


@pytest.mark.slow("simulates many trials")
def test_capacity_takes_replicas(config: str) -> None:
    assert "requests/s" in lab(
        "capacity",
        config,
        "--trace",
        WORKLOAD,
        "--replicas",
        "2",
        "--slo",
        "ttft_p99<100",
        "--tolerance",
        "1",
        "--jobs",
        "1",
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--router", "vllm"), "give --replicas"),
        (("--replicas", "0"), "--replicas: expected 1 to 1024, got 0"),
        (("--replicas", "2", "--router", "prefix_awar"), "did you mean prefix_aware?"),
        (
            ("--replicas", "2", "--router", "prefix_aware(blocks=0)"),
            "blocks: Input should be greater than or equal to 1",
        ),
        (
            ("--replicas", "2", "--router", "nowhere:Router"),
            "router nowhere:Router: it can't be imported: ModuleNotFoundError",
        ),
        (
            ("--replicas", "2", "--router", "json:loads"),
            "is no class that is made from dovetail_lab.routers.Router",
        ),
    ],
)
def test_what_cannot_be_routed_is_refused(config: str, options: tuple[str, ...], why: str) -> None:
    assert why in lab("run", config, "--trace", WORKLOAD, *options, code=2)


def test_decisions_and_real_time_are_of_one_engine(config: str, tmp_path: Path) -> None:
    told = lab(
        "compare",
        config,
        config,
        "--trace",
        WORKLOAD,
        "--replicas",
        "2",
        "--decisions",
        "--out",
        str(tmp_path),
        code=2,
    )
    assert "a log is of one engine" in told
    real = tmp_path / "real.yaml"
    real.write_text("model: demo")
    assert "replicas are simulated" in lab(
        "run", str(real), "--trace", WORKLOAD, "--replicas", "2", "--real", code=2
    )


ROUTERS_OF_A_PACKAGE = f"""
from dovetail.api import RouterSpec, hookimpl

@hookimpl
def dovetail_routers():
    yield RouterSpec(name="last", target="{__name__}:Last")
    yield RouterSpec(name="broken", target="nowhere:X")
    yield RouterSpec(name="odd", target="{__name__}:Path")
"""


def test_a_package_names_its_router(site: Site) -> None:  # noqa: F811
    site.install("dovetail-last", modules={"last_plugin": ROUTERS_OF_A_PACKAGE})
    assert type(parse_router("last")) is type(parse_router("dovetail-last:last")) is Last
    assert Routing(2, "last").router == "last"
    with pytest.raises(
        PluginError, match=r"router 'broken' of plugin .*: importing nowhere failed"
    ):
        parse_router("broken")
    with pytest.raises(ConfigError, match="is no class that is made from"):
        parse_router("odd")
    with pytest.raises(DovetailError, match=r"there are .*prefix_aware, vllm, broken, last, odd"):
        parse_router("xyz")


def test_a_router_that_two_packages_offer_is_named_in_full(site: Site) -> None:  # noqa: F811
    for name in ("dovetail-a", "dovetail-b"):
        module = name.replace("-", "_")
        site.install(name, modules={module: ROUTERS_OF_A_PACKAGE})
    with pytest.raises(ConfigError, match="dovetail-a:last and dovetail-b:last: write it in full"):
        parse_router("last")
    assert type(parse_router("dovetail-b:last")) is Last


def test_each_run_has_a_new_router() -> None:
    assert parse_router("prefix_aware(4)") is not parse_router("prefix_aware(4)")
    assert parse_router("prefix_aware(4, least_match=0.5)") == PrefixAware(
        blocks=4, least_match=0.5
    )


def test_a_timeline_of_replicas_sums_what_is_and_keeps_what_was_done() -> None:
    def line(*times: float) -> Timeline:
        return Timeline.of_rows(
            [(time, 0.5, 1, 2, 10, 3, 3, 0, 0, 0, 90, 8, 2, 0.1, 0, 0, 0) for time in times]
        )

    both = Timeline.of_replicas([line(1.0, 3.0), line(2.0)], num_pages=100)
    np.testing.assert_array_equal(both.time_s, [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(both.waiting, [1, 2, 2])
    np.testing.assert_array_equal(both.kv_free, [190, 180, 180])
    np.testing.assert_array_equal(both.prefill_tokens, [10, 10, 10])
    np.testing.assert_array_equal(both.device_s, [0.25, 0.25, 0.25])
