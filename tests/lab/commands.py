"""The lab's commands, called as a user would."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

from typer.testing import CliRunner

from dovetail.cli.app import app

ENGINE = """scheduler: {scheduler}
max_model_len: 512
max_num_seqs: 8
max_num_batched_tokens: 256
executor: {{name: simulated, num_pages: {blocks}, step_time: {{kind: linear, base_s: 0.01, per_token_s: 0.0001, per_row_s: 0.001}}}}
"""


def write_engine(path: Path, scheduler: str = "fcfs", blocks: int = 60) -> Path:
    path.write_text(ENGINE.format(scheduler=scheduler, blocks=blocks))
    return path


def lab(*arguments: object, fails: bool = False) -> str:
    """Return the output of `dovetail lab ...`; with `fails`, its error output. Reports show the
    process's command line, so it is this one meanwhile, not that of the tests."""
    command = ["lab", *map(str, arguments)]
    with patch.object(sys, "argv", ["dovetail", *command]):
        result = CliRunner().invoke(app, command)
    assert (result.exit_code != 0) == fails, result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output
