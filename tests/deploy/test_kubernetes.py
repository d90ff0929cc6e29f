"""The manifests in deploy/kubernetes/: each names only what the server, the router and the other
manifests have. No cluster is needed."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import yaml

from dovetail_cluster.gate import ASKED, serve_gate
from dovetail_cluster.probes import WAITING
from dovetail_cluster.smg_router import ARGUMENTS
from dovetail_server.routes import all_routes
from dovetail_server.settings import API_KEYS_VARIABLE, ServerSettings
from tests.docs.pages import ROOT

FOLDER = ROOT / "deploy/kubernetes"
VERSIONS = {
    "Deployment": "apps/v1",
    "Service": "v1",
    "ServiceAccount": "v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "NetworkPolicy": "networking.k8s.io/v1",
}


def manifests() -> list[dict[str, Any]]:
    return [
        one
        for file in sorted(FOLDER.glob("*.yaml"))
        for one in yaml.safe_load_all(file.read_text())
    ]


def named(kind: str, name: str) -> dict[str, Any]:
    [found] = [one for one in manifests() if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod(name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", named("Deployment", name)["spec"]["template"]["spec"])


def container(name: str) -> dict[str, Any]:
    [found] = pod(name)["containers"]
    return cast("dict[str, Any]", found)


def seconds_of_probe(probe: dict[str, Any]) -> int:
    return int(probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3))


def option(name: str) -> str:
    words = container("dovetail")["args"]
    return str(words[words.index(name) + 1])


def test_every_manifest_has_the_version_of_its_kind_and_a_name_of_its_own() -> None:
    found = [(one["kind"], one["metadata"]["name"]) for one in manifests()]
    assert len(found) == len(set(found))
    assert {one["kind"]: one["apiVersion"] for one in manifests()} == VERSIONS


@pytest.mark.parametrize("name", ["dovetail", "dovetail-router"])
def test_deployment_and_service_select_the_pods_that_the_template_labels(name: str) -> None:
    spec = named("Deployment", name)["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == named("Service", name)["spec"]["selector"]
    [port] = named("Service", name)["spec"]["ports"]
    assert port["targetPort"] in {one["name"] for one in container(name)["ports"]}


def test_each_probe_asks_a_route_of_the_server_at_a_port_that_it_listens_on() -> None:
    routes = {getattr(route, "path", "") for route in all_routes(ServerSettings())}
    server = container("dovetail")
    probes = {name: server[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert (
        {probe["httpGet"]["path"] for probe in probes.values()} == {"/health", "/ready"} <= routes
    )
    assert (
        probes["readinessProbe"]["httpGet"]["path"] == "/ready"
    )  # which alone says no while the server drains
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {server["ports"][0]["name"]}
    assert int(option("--port")) == server["ports"][0]["containerPort"]


def test_every_option_is_one_of_the_servers() -> None:
    options = {
        word.removeprefix("--").replace("-", "_")
        for word in container("dovetail")["args"]
        if word.startswith("--")
    }
    assert {
        name if name in ServerSettings.model_fields else f"{name}_s" for name in options
    } <= ServerSettings.model_fields.keys()


def test_a_pod_is_unready_before_it_drains_and_drains_before_it_is_killed() -> None:
    server = container("dovetail")
    [sleep, seconds] = server["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    assert seconds_of_probe(server["readinessProbe"]) < int(seconds)
    assert (
        pod("dovetail")["terminationGracePeriodSeconds"]
        >= int(seconds) + float(option("--drain-timeout")) + 6
    )  # front ends end


def test_a_rolling_update_takes_no_pod_away_before_there_is_another() -> None:
    assert named("Deployment", "dovetail")["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": 1,
        "maxUnavailable": 0,
    }


def test_the_autoscaler_alone_decides_on_the_gauge_of_waiting_requests() -> None:
    spec = named("HorizontalPodAutoscaler", "dovetail")["spec"]
    assert "replicas" not in named("Deployment", spec["scaleTargetRef"]["name"])["spec"]
    [metric] = spec["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert name == WAITING.replace(":", "_")  # colons aren't allowed in a path of Kubernetes' API
    assert spec["minReplicas"] < spec["maxReplicas"]
    [rule] = yaml.safe_load((ROOT / "deploy/prometheus-adapter.yaml").read_text())["rules"][
        "custom"
    ]
    assert rule["name"]["as"] == name
    assert rule["seriesQuery"].startswith(WAITING)


def test_the_router_finds_the_pods_of_the_deployment_and_may() -> None:
    words = dict(
        word.removeprefix("--").split("=", 1)
        for word in container("dovetail-router")["args"]
        if "=" in word
    )
    key, label = words["selector"].split("=")
    assert named("Deployment", "dovetail")["spec"]["template"]["metadata"]["labels"][key] == label
    assert (
        int(words["service-discovery-port"]) == container("dovetail")["ports"][0]["containerPort"]
    )
    [rule] = named("Role", "dovetail-router")["rules"]
    assert rule == {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    binding = named("RoleBinding", "dovetail-router")
    assert binding["roleRef"]["name"] == "dovetail-router"
    assert (
        binding["subjects"][0]["name"]
        == pod("dovetail-router")["serviceAccountName"]
        == named("ServiceAccount", "dovetail-router")["metadata"]["name"]
    )


def test_every_variable_in_arguments_is_in_the_environment_and_secrets_are_those_that_the_head_makes() -> (
    None
):
    router = container("dovetail-router")
    words = (*router["args"], *(one.get("value", "") for one in router["env"]))
    assert {name for word in words for name in re.findall(r"\$\((\w+)\)", word)} <= {
        one["name"] for one in router["env"]
    }
    head = (FOLDER / "engine.yaml").read_text().split("apiVersion")[0]
    [secret] = set(re.findall(r"create secret generic (\S+)", head))
    made = set(re.findall(r"--from-literal=(\w+)=", head))
    for one in manifests():
        for reference in references(one):
            assert reference["name"] == secret
            assert reference["key"] in made


def test_the_router_is_reached_through_its_gate_only() -> None:
    router = container("dovetail-router")
    words = dict(word.removeprefix("--").split("=", 1) for word in router["args"] if "=" in word)
    environment = {one["name"]: one.get("value") for one in router["env"]}
    gate = json.loads(environment[ARGUMENTS])["gate"]
    assert gate.keys() == inspect.signature(serve_gate).parameters.keys()
    assert (words["host"], int(words["port"])) == ("127.0.0.1", gate["router_port"])
    assert gate["port"] == router["ports"][0]["containerPort"]
    assert words["api-key"] == gate["key"] == environment[API_KEYS_VARIABLE]
    assert not ServerSettings.model_validate(gate["settings"]).page
    assert (
        {router[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
        == {"/health", "/ready"}
        <= ASKED.keys()
    )


def references(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "secretKeyRef" in value:
            yield value["secretKeyRef"]
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


@pytest.mark.parametrize("name", ["dovetail", "dovetail-router"])
def test_an_image_that_was_loaded_into_the_node_is_used_and_not_pulled(name: str) -> None:
    assert (
        container(name)["imagePullPolicy"] == "IfNotPresent"
    )  # by default an image with the tag `latest` is always pulled


@pytest.mark.parametrize("name", ["dovetail", "dovetail-router"])
def test_no_pod_is_root_or_may_become_it(name: str) -> None:
    assert pod(name)["securityContext"]["runAsNonRoot"] is True
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_pods_of_the_model_are_reached_by_the_router_and_by_prometheus_alone() -> None:
    spec = named("NetworkPolicy", "dovetail")["spec"]
    assert (
        spec["podSelector"]["matchLabels"]
        == named("Deployment", "dovetail")["spec"]["template"]["metadata"]["labels"]
    )
    [rule] = spec["ingress"]
    assert (
        rule["from"][0]["podSelector"]["matchLabels"]
        == named("Deployment", "dovetail-router")["spec"]["template"]["metadata"]["labels"]
    )
    assert rule["ports"] == [
        {"protocol": "TCP", "port": container("dovetail")["ports"][0]["containerPort"]}
    ]
