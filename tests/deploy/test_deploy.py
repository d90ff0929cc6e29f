"""The files in deploy/: each is read as its program would, names only what exists, and asks only
for metrics that the server has."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from typing import Any, cast

import pytest
import yaml
from prometheus_client import Metric

from dovetail.serving import TierStats
from dovetail_server.engine import ServedEngine
from dovetail_server.metrics import ServerMetrics
from dovetail_server.settings import ServerSettings
from dovetail_server.tier_metrics import tier_metrics
from tests.docs.pages import ROOT
from tests.server.test_metrics import IdleEngine, output

DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\b(?:vllm:|dovetail_)\w+")


def families() -> list[Metric]:
    """All metrics of a server that has seen a request, refused one, and has a host pool."""
    metrics = ServerMetrics(cast(ServedEngine, IdleEngine()))
    metrics.meter("a").saw(output(1, reason="stop"))
    metrics.request_refused(429)
    tiers = TierStats(missed={"slower": 1}, damaged_frames={"host": 1})
    return [*metrics.collect(), *tier_metrics(tiers, {"model_name": "a-model"})]


def queries() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    variables = [variable["query"]["query"] for variable in dashboard["templating"]["list"]]
    return [
        *variables,
        *(target["expr"] for panel in dashboard["panels"] for target in panel["targets"]),
    ]


def compose() -> dict[str, Any]:
    return cast("dict[str, Any]", yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


@pytest.mark.parametrize("query", queries())
def test_the_dashboard_asks_only_for_metrics_and_labels_that_the_server_has(query: str) -> None:
    samples = [sample for family in families() for sample in family.samples]
    asked = METRIC.findall(re.sub(r"\{[^}]*\}", "", query))
    assert asked
    assert set(asked) <= {sample.name for sample in samples}
    known = {label for sample in samples if sample.name in asked for label in sample.labels}
    for labels in re.findall(r"(?:by|on) \(([^)]*)\)", query):
        assert set(labels.split(", ")) <= known
    assert query.count("(") == query.count(")")


def test_the_dashboards_panels_lie_side_by_side() -> None:
    panels = json.loads((DEPLOY / "grafana/dashboard.json").read_text())["panels"]
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_compose_mounts_and_builds_what_is_here() -> None:
    services = compose()["services"]
    mounts = [
        mount.split(":")[0] for service in services.values() for mount in service.get("volumes", ())
    ]
    assert all(
        (DEPLOY / mount).exists() if mount.startswith(".") else mount in compose()["volumes"]
        for mount in mounts
    )
    build = services["dovetail"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    assert {
        name for service in services.values() for name in service.get("depends_on", ())
    } <= services.keys()


def test_every_published_port_is_open_to_this_machine_only() -> None:
    assert all(
        port.startswith("127.0.0.1:")
        for service in compose()["services"].values()
        for port in service.get("ports", ())
    )


def test_prometheus_asks_the_service_that_compose_starts_and_grafana_asks_prometheus() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"dovetail:{ServerSettings().port}"]}]
    [source] = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text()
    )["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["uid"] in (DEPLOY / "grafana/dashboard.json").read_text()
    [provider] = yaml.safe_load(
        (DEPLOY / "grafana/provisioning/dashboards/dovetail.yaml").read_text()
    )["providers"]
    assert (
        f"./grafana/dashboard.json:{provider['options']['path']}/dashboard.json:ro"
        in compose()["services"]["grafana"]["volumes"]
    )


def test_the_dockerfile_copies_what_the_build_needs_and_starts_the_server() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    copied = [
        path
        for step, rest in steps
        if step == "COPY" and "--from" not in rest
        for path in rest.split()[:-1]
    ]
    assert all((ROOT / path).exists() for path in copied)
    assert {"pyproject.toml", "README.md", "LICENSE", "core", "plugins", "apps"} <= set(copied)
    last = dict(steps)
    assert json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"]) == [
        "dovetail",
        "serve",
        "demo",
        "--host",
        "0.0.0.0",
    ]


@pytest.mark.parametrize("command", ["unit", "compose", "image"])
def test_every_option_in_a_command_is_one_of_the_servers(command: str) -> None:
    text = {
        "unit": unit()["Service"]["ExecStart"],
        "compose": shlex.join(compose()["services"]["dovetail"]["command"]),
        "image": (DEPLOY / "Dockerfile").read_text().split("ENTRYPOINT")[1],
    }[command]
    assert {
        name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", text)
    } <= ServerSettings.model_fields.keys()


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "dovetail.service")
    return parser


def test_the_unit_gives_a_drain_its_time_and_starts_a_dead_server_again() -> None:
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"]) > ServerSettings().drain_timeout_s
    assert (service["Restart"], service["KillMode"]) == ("on-failure", "mixed")
    assert (
        int(compose()["services"]["dovetail"]["stop_grace_period"].rstrip("s"))
        > ServerSettings().drain_timeout_s
    )


def test_nginx_collects_nothing_and_waits_as_long_as_a_request_may_take() -> None:
    text = re.sub(r"#.*", "", (DEPLOY / "nginx.conf").read_text())
    assert text.count("{") == text.count("}")
    assert all(line.strip().endswith((";", "{", "}")) for line in text.splitlines() if line.strip())
    assert "proxy_buffering off;" in text
    assert f"proxy_read_timeout {ServerSettings().request_timeout_s or 0:.0f}s;" in text
    assert f"client_max_body_size {ServerSettings().max_body_bytes >> 20}m;" in text


def test_every_metric_is_on_its_page_with_its_type() -> None:
    pages = [(ROOT / "docs/serving" / name).read_text() for name in ("metrics.md", "kv-tiers.md")]
    told = dict(re.findall(r"^\| `([\w:]+)` \| (\w+) \|", "\n".join(pages), re.MULTILINE))
    ours = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in families()
    }
    assert ours.items() <= told.items()


def test_the_image_has_grammars_whatever_else_it_is_built_with() -> None:
    [extras] = re.findall(r"pip install [^\n]*\"\.\[(.*)\]\"", (DEPLOY / "Dockerfile").read_text())
    assert set(extras.split(",")) == {"grammar", "${EXTRAS}"}
