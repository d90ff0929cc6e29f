"""`dovetail generate --lora`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dovetail.cli.app import app
from tests.adapters import config_of, weights_of, write_adapter

MODULES = {"model.layers.0.self_attn.q_proj": (256, 256)}


def generate(*args: str) -> str:
    done = CliRunner().invoke(
        app, ["generate", "demo", "ROMEO:", "--temperature", "0", "--max-tokens", "8", *args]
    )
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow("makes an engine with an adapter")
def test_the_adapter_changes_the_answer(tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path / "a", config_of(target_modules=["q_proj"], r=32), weights_of(MODULES, rank=32)
    )
    assert generate("--lora", f"a={folder}") != generate()


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ("a", 2, "--lora: expected name=path, got 'a'"),
        ("=a", 2, "--lora"),
        ("a=none", 1, "is no directory here"),
    ],
)
def test_wrong_ones_are_named(given: str, code: int, says: str) -> None:
    done = CliRunner().invoke(
        app, ["generate", "demo", "ROMEO:", "--max-tokens", "2", "--lora", given]
    )
    assert done.exit_code == code
    assert says in done.stderr
