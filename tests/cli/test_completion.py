"""Shell completion, requested as bash does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dovetail.api.component import KINDS
from dovetail.cli.app import app
from dovetail.cli.completion import join_words
from dovetail.config.engine import EngineConfig
from tests.registry.fakes import Site


def offered(line: str, **environment: str) -> list[str]:
    """Bash parts the line at blanks, "=" and ":"; the cursor is at its end."""
    words = re.findall(r"[=:]|[^\s=:]+", line) + ([""] if line.endswith(" ") else [])
    asked = {
        "_DOVETAIL_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
        **environment,
    }
    done: Any = CliRunner().invoke(app, [], env=asked, prog_name="dovetail")
    assert not done.stderr
    return done.stdout.split()  # type: ignore[no-any-return]


def test_kinds_and_the_names_of_a_kind() -> None:
    assert offered("dovetail plugins info ") == list(KINDS)
    assert offered("dovetail plugins test kv_") == ["kv_cache", "kv_tier"]
    assert {"fcfs", "vtc"} <= set(offered("dovetail plugins info scheduler "))
    assert offered("dovetail plugins info sampler d") == ["default"]


def test_a_plugins_components_are_offered_as_a_config_must_write_them(site: Site) -> None:
    site.install_scheduler("dovetail-a")
    site.install_scheduler("dovetail-b")
    assert offered("dovetail plugins test scheduler dovetail-") == [
        "dovetail-a:fair",
        "dovetail-b:fair",
    ]
    assert offered("dovetail plugins test scheduler dovetail-a:") == ["fair"]


def test_keys_and_values_of_the_config() -> None:
    assert {f"{key}=" for key in EngineConfig.model_fields} <= set(
        offered("dovetail config show --set ")
    )
    assert offered("dovetail generate demo --set se") == ["seed="]
    assert offered("dovetail generate demo --set overl") == ["overlap=true", "overlap=false"]
    assert offered("dovetail generate demo --set scheduler=fc") == ["fcfs"]
    assert offered("dovetail generate demo --set overlap=") == ["true", "false"]
    assert "bfloat16" in offered("dovetail config check --set dtype=")
    assert offered("dovetail config check --set scheduler.agi") == ["scheduler.aging_s="]
    assert "temperature=" in offered("dovetail generate demo --param te")


def test_models_that_are_bundled_cached_or_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    (tmp_path / "engine.yaml").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert offered("dovetail generate ") == [
        "demo",
        "demo-draft",
        "Qwen/Qwen3-0.6B",
        "engine.yaml",
        "mine",
    ]


def test_what_is_wrong_offers_nothing_and_says_nothing() -> None:
    assert offered("dovetail plugins info scheduler ", DOVETAIL_PLUGINS="nonsense") == []


def test_words_are_joined_for_bash_alone() -> None:
    environ = {
        "_DOVETAIL_COMPLETE": "complete_bash",
        "COMP_WORDS": "dovetail\n--set\nscheduler\n=\nfc",
        "COMP_CWORD": "4",
    }
    assert (join_words(environ), environ["COMP_WORDS"], environ["COMP_CWORD"]) == (
        "scheduler=",
        "dovetail --set scheduler=fc",
        "2",
    )
    for odd in (
        {},
        {"_DOVETAIL_COMPLETE": "complete_zsh"},
        environ | {"COMP_CWORD": "x"},
        environ | {"COMP_WORDS": "'"},
    ):
        assert join_words(dict(odd)) == ""


def test_the_script_for_bash_is_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dovetail"],
        env={**os.environ, "_DOVETAIL_COMPLETE": "source_bash"},
        capture_output=True,
        check=True,
    )
    subprocess.run(["bash", "-n"], input=done.stdout, check=True)
    assert b"dovetail" in done.stdout
