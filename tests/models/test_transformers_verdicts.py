"""A model through transformers is checked whole, in its own dtype, before it serves; what passed
isn't checked again."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail import LLMEngine
from dovetail.errors import UnsupportedError
from dovetail_models import transformers as served
from dovetail_models import transformers_check
from dovetail_models.transformers_verdicts import Verdict, folder
from tests.models.tiny_configs import random_model, tiny


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    random_model(tiny("gpt2")).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The checks that ran: "layers", "model"."""
    ran: list[str] = []

    def noted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def check(*args: Any) -> Any:
            ran.append(name)
            return own(*args)

        return check

    monkeypatch.setattr(served, "check", noted("layers", transformers_check.check))
    monkeypatch.setattr(served, "check_logprobs", noted("model", transformers_check.check_logprobs))
    return ran


def load(directory: Path, **keys: Any) -> LLMEngine:
    return LLMEngine.from_config(
        {
            "model": str(directory),
            "dtype": "bfloat16",
            "executor": {"name": "local", "num_pages": 64},
            **keys,
        }
    )


@pytest.mark.slow("makes several engines")
def test_a_second_start_checks_nothing_and_another_dtype_everything(
    checkpoint: Path, proofs: list[str]
) -> None:
    load(checkpoint).close()
    assert proofs == ["layers", "model"]
    load(checkpoint).close()
    assert proofs == ["layers", "model"]
    load(checkpoint, dtype="float32").close()
    assert proofs == ["layers", "model"] * 2


def test_a_step_of_one_row_and_one_token_is_enough(checkpoint: Path, proofs: list[str]) -> None:
    load(checkpoint, max_num_seqs=1, max_num_batched_tokens=5, max_model_len=20).close()
    assert proofs == ["layers", "model"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b'{"key": {}, "replaced": true}', b'{"key": null}']
)
def test_a_damaged_or_foreign_verdict_is_ignored_with_a_warning(
    checkpoint: Path, proofs: list[str], caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    verdict = Verdict(tiny("gpt2"), {"in": "here"})
    verdict.path.parent.mkdir(parents=True)
    verdict.path.write_bytes(content)
    assert verdict.read() is None
    assert "isn't a verdict on this model" in caplog.text
    verdict.write(replaced=False)
    assert verdict.read() is False


def test_a_verdict_is_of_one_config_and_environment() -> None:
    Verdict(tiny("gpt2"), {"dtype": "float32"}).write(replaced=True)
    assert Verdict(tiny("gpt2"), {"dtype": "float32"}).read() is True
    other = tiny("gpt2")
    other.activation_function = "relu"
    assert Verdict(other, {"dtype": "float32"}).read() is None
    assert Verdict(tiny("gpt2"), {"dtype": "bfloat16"}).read() is None


def test_a_verdict_is_of_the_versions_of_triton_and_of_plugins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Verdict(tiny("gpt2"), {}).write(replaced=True)
    assert Verdict(tiny("gpt2"), {}).read() is True
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "version", lambda name: "0")
        assert Verdict(tiny("gpt2"), {}).read() is None
    theirs = SimpleNamespace(dist=SimpleNamespace(name="acme", version="1"))
    monkeypatch.setattr(metadata, "entry_points", lambda **of: [theirs])
    assert Verdict(tiny("gpt2"), {}).read() is None


def test_code_of_transformers_that_fails_in_the_check_of_the_whole_model_refuses_it(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    def fails(*_: Any) -> None:
        raise IndexError("beyond the end")

    monkeypatch.setattr(served, "whole_logprobs", fails)
    with pytest.raises(
        UnsupportedError, match="its code fails in transformers: IndexError: beyond the end"
    ):
        load(checkpoint)


def test_a_folder_that_cannot_be_written_costs_only_the_next_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    verdict = Verdict(tiny("gpt2"), {})
    verdict.write(replaced=True)
    assert verdict.read() is None


def test_a_host_without_a_home_directory_checks_at_each_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fails)
    verdict = Verdict(tiny("gpt2"), {})
    verdict.write(replaced=True)
    assert verdict.read() is None


def write_often(barrier: Any) -> None:
    barrier.wait()
    for _ in range(8):
        Verdict(tiny("gpt2"), {}).write(replaced=True)


@pytest.mark.slow("starts processes")
def test_processes_that_write_at_once_leave_a_whole_file() -> None:
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(2)
    writers = [fork.Process(target=write_often, args=(barrier,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert Verdict(tiny("gpt2"), {}).read() is True
    assert [path.suffix for path in folder().iterdir()] == [".json"]


@pytest.mark.slow("compares models by transformers")
def test_a_model_that_computes_something_else_as_it_is_served_is_refused(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path
) -> None:
    own = served.TransformersModel.logits
    monkeypatch.setattr(
        served.TransformersModel, "logits", lambda self, hidden: 1.2 * own(self, hidden)
    )
    for _ in range(2):  # a refusal is no verdict
        with pytest.raises(UnsupportedError, match="differ from those computed by transformers"):
            load(checkpoint)


def test_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    monkeypatch.setattr(
        served.TransformersModel,
        "logits",
        lambda self, hidden: torch.full((len(hidden), 128), torch.nan),
    )
    with pytest.raises(UnsupportedError, match="differ from those computed by transformers"):
        load(checkpoint)


def test_a_verdict_can_be_read_by_people(checkpoint: Path) -> None:
    load(checkpoint).close()
    (path,) = folder().iterdir()
    stored = json.loads(path.read_text())
    assert stored["key"]["config"]["model_type"] == "gpt2"
    assert stored["key"]["environment"]["dtype"] == "torch.bfloat16"
    assert "torch" in stored["key"]["environment"]["in"]
