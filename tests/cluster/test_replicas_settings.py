"""Cluster files, the command line of a replica, and the socket by which a cluster is asked."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
import typer

from dovetail.cli.streams import guard_output
from dovetail.errors import ConfigError, DovetailError
from dovetail_cluster.control import ControlSocket, NotUp, names_up, runtime_folder, tell
from dovetail_cluster.local_launcher import LocalLauncher, serve_command, visible_gpus
from dovetail_cluster.running import announce
from dovetail_cluster.settings import ClusterSettings, load_cluster
from dovetail_server.command import serve


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("DOVETAIL_API_KEYS", raising=False)


def load(tmp_path: Path, text: str) -> ClusterSettings:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return load_cluster(str(file))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "engine: demo\nreplcas: 2",
            r"cluster.yaml:2: replcas: unknown key, did you mean replicas\?",
        ),
        ("replicas: 2", "engine: this key is required"),
        ("engine: demo\nreplicas: 0", "cluster.yaml:2: replicas"),
        ("engine: demo\nreplicas: {min: 3, max: 2}", "min is 3, which is more than max, 2"),
        ("engine: demo\nreplicas: two", "cluster.yaml:2: replicas"),
        (
            "engine: demo\nserve:\n  drain_timeot_s: 3",
            r"cluster.yaml:3: serve.drain_timeot_s: unknown option, did you mean drain_timeout_s\?",
        ),
        (
            "engine: demo\nserve:\n  port: 3",
            "cluster.yaml:3: serve.port: the cluster decides this itself",
        ),
        ("engine: demo\nserve: {api_keys: [secret]}", "DOVETAIL_API_KEYS: leave this out"),
        (
            "engine: demo\nrouter: {policy: cache_awre}",
            "cluster.yaml:2: router.policy: expected 'cache_aware'",
        ),
        (
            "engine: demo\nrouter: {port: 81, metrics_port: 81}",
            "router: port and metrics_port are both 81",
        ),
        ("engine: {model: demo, schedler: fcfs}", "schedler"),
        ("engine: demo\nplace: slurm", "cluster.yaml:2: place: expected 'here' or 'ray'"),
        ("engine: demo\nname: ../else", "cluster.yaml:2: name"),
        ("just text", "cluster.yaml:1: expected keys and values"),
    ],
)
def test_what_is_wrong_is_reported_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(tmp_path, text)


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: can't be read"):
        load_cluster("nowhere.yaml")


def test_a_number_of_replicas_is_both_bounds(tmp_path: Path) -> None:
    replicas = load(tmp_path, "engine: demo\nreplicas: 3").replicas
    assert (replicas.min, replicas.max) == (3, 3)


def test_every_option_of_the_server_can_be_given_and_is_read_as_it_was_meant() -> None:
    options = {
        "max_queued_requests": None,
        "page": False,
        "served_model_name": ["a", "b"],
        "drain_timeout_s": 5.0,
        "log_requests": True,
    }
    module, command, *words = serve_command(
        ClusterSettings.model_validate({"engine": "demo", "serve": options}), "127.0.0.1"
    )
    assert (module, command) == ("dovetail", "serve")
    app = typer.Typer()
    app.command()(serve)
    given = typer.main.get_command(app).make_context("serve", words).params
    assert [*given["sources"]] == ["demo"]
    assert {name: given[name] for name in options} == {
        **options,
        "max_queued_requests": "null",
        "drain_timeout_s": given["drain_timeout_s"],
    }
    assert float(given["drain_timeout_s"]) == 5.0
    assert (given["host"], given["port"]) == ("127.0.0.1", 0)


def test_replicas_log_no_requests_unless_told() -> None:
    assert "--no-log-requests" in serve_command(ClusterSettings(engine="demo"), "127.0.0.1")


def test_keys_of_an_engine_become_settings_of_its_command_line() -> None:
    command = serve_command(
        ClusterSettings.model_validate(
            {"engine": {"model": "demo", "scheduler": {"name": "fcfs"}}}
        ),
        "127.0.0.1",
    )
    assert command[2:5] == ["demo", "--set", 'scheduler={"name": "fcfs"}']


def test_gpus_are_given_to_one_replica_each_and_too_few_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 2,GPU-a")
    assert visible_gpus() == ["0", "2", "GPU-a"]
    settings = ClusterSettings.model_validate({"engine": "demo", "gpus": 2, "replicas": 2})
    with pytest.raises(ConfigError, match="2 replicas of 2 need 4, and this machine has 3"):
        LocalLauncher(settings)
    assert LocalLauncher(settings, gpus=["0", "1", "2", "3"]).has_room()


def answering(control: ControlSocket) -> threading.Thread:
    thread = threading.Thread(target=control.serve_once, args=(10.0, lambda what: {"did": what}))
    thread.start()
    return thread


def test_a_cluster_answers_by_its_name_and_a_name_is_taken_once() -> None:
    control = ControlSocket("one")
    try:
        assert names_up() == ["one"]
        with pytest.raises(ConfigError, match="a cluster named one is up"):
            ControlSocket("one")
        other = ControlSocket("two")
        assert names_up() == ["one", "two"]
        other.close()
        thread = answering(control)
        assert tell("one", "status") == {"did": "status"}
        thread.join()
    finally:
        control.close()
    with pytest.raises(NotUp, match="no cluster named one is up"):
        tell("one", "status")


def test_a_socket_that_a_killed_process_left_behind_is_no_cluster() -> None:
    folder = runtime_folder()
    (folder / "gone.lock").touch()
    (folder / "gone.sock").touch()
    with pytest.raises(NotUp):
        tell("gone", "status")
    ControlSocket("gone").close()


def test_invalid_messages_at_the_socket_do_not_affect_others() -> None:
    control = ControlSocket("one")
    try:
        for nonsense in (b"\n", b"{}\n", b"[1]\n", b"\xff\xfe\n", b""):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(runtime_folder() / "one.sock"))
                client.sendall(nonsense)
                client.shutdown(socket.SHUT_WR)
                control.serve_once(1.0, lambda what: {"did": what})
        thread = answering(control)
        assert tell("one", "down") == {"did": "down"}
        thread.join()
    finally:
        control.close()


def test_a_look_at_the_lock_doesnt_keep_a_cluster_from_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (runtime_folder() / "one.lock").open("a") as look:
        fcntl.flock(look, fcntl.LOCK_SH)
        monkeypatch.setattr("time.sleep", lambda _: fcntl.flock(look, fcntl.LOCK_UN))
        ControlSocket("one").close()


def test_a_name_that_no_file_can_have_is_of_no_cluster() -> None:
    with pytest.raises(NotUp):
        tell("x" * 300, "status")


def test_what_a_cluster_refuses_is_an_error() -> None:
    control = ControlSocket("one")
    try:
        thread = threading.Thread(
            target=control.serve_once, args=(10.0, lambda what: {"error": "no room"})
        )
        thread.start()
        with pytest.raises(DovetailError, match="the cluster one: no room"):
            tell("one", "restart")
        thread.join()
    finally:
        control.close()


@pytest.mark.parametrize("as_command", [False, True])
def test_a_cluster_serves_even_if_its_output_is_not_read(
    monkeypatch: pytest.MonkeyPatch, as_command: bool
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", open(writes, "w", encoding="utf-8"))  # noqa: SIM115  # its line can't be written at its end either
        patch.setattr("sys.__stdout__", sys.stdout)
        if as_command:
            guard_output()
        announce("it serves")
        announce("it serves")


def test_the_folder_must_be_the_users_alone(tmp_path: Path) -> None:
    (tmp_path / "dovetail").mkdir(mode=0o777)
    (tmp_path / "dovetail").chmod(0o777)
    with pytest.raises(DovetailError, match="isn't a private folder of this user"):
        runtime_folder()
