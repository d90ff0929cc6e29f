"""Dovetail's types, as type checkers see them in a user's program."""

from __future__ import annotations

from pathlib import Path

import pytest

USER = """
from dovetail import OutputKind, SamplingParams

params = SamplingParams(
    n=2, temperature=0, top_p=0.9, seed=1, max_tokens=None, stop="x", stop_token_ids=[1], logit_bias={5: 1}, allowed_token_ids=(1, 2),
    bad_words=["a", "b"], logprobs=0, output_kind="delta", extra_args={"key": [1]}, truncate_prompt_tokens=-1,
)
SamplingParams(output_kind="final")
SamplingParams(stop=["x", "y"], output_kind=OutputKind.CUMULATIVE)
made: SamplingParams = SamplingParams.of({"temperature": 0})
places: dict[SamplingParams, int] = {params: hash(params)}
"""
WRONG = {
    'SamplingParams(output_kind="detla")': "arg-type",
    "SamplingParams(tempature=1)": "call-arg",
    "SamplingParams(temperature='hot')": "arg-type",
    "params.n = 3": "misc",
}


@pytest.mark.full
def test_a_user_s_program_passes_mypy_strict_where_it_is_right_and_nowhere_else(
    tmp_path: Path,
) -> None:
    api = pytest.importorskip("mypy.api")
    program = tmp_path / "program.py"
    program.write_text(USER + "".join(f"{line}\n" for line in WRONG))
    said, failed, _ = api.run(
        [
            "--strict",
            "--cache-dir",
            str(tmp_path / "cache"),
            "--hide-error-context",
            "--no-error-summary",
            str(program),
        ]
    )
    assert not failed
    first = USER.count("\n") + 1
    found = [
        (int(line.split(":")[1]), line.rpartition("[")[2].rstrip("]"))
        for line in said.splitlines()
        if ": error:" in line
    ]
    assert found == list(enumerate(WRONG.values(), start=first)), said
