"""`dovetail generate --image`: what `LLM` makes of the same prompt and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dovetail import LLM, SamplingParams
from dovetail.cli.app import app
from tests.media.checkpoints import checkpoint, picture, written

KIND = "mistral3"


def generate(*arguments: str) -> Result:
    options = ["--max-tokens", "4", "--temperature", "0", "--json", "--set", "dtype=float32"]
    return CliRunner().invoke(app, ["generate", str(checkpoint(KIND)), *arguments, *options])


@pytest.mark.slow("makes a checkpoint, and loads it")
@pytest.mark.usefixtures("shared_image_processes")
def test_images_in_files_are_read_as_in_a_program(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one.png", "two.png")]
    for seed, file in enumerate(files):
        picture(30 + seed, 20, seed).save(file)
    named = [option for file in files for option in ("--image", str(file))]
    text = f"{written(KIND)} and {written(KIND)}: "
    content = [
        *[{"type": "image", "image": str(file)} for file in files],
        {"type": "text", "text": "What is it?"},
    ]
    params = SamplingParams(max_tokens=4, temperature=0)
    with LLM(str(checkpoint(KIND)), dtype="float32") as llm:
        data = {"prompt": text, "multi_modal_data": {"image": [*map(str, files)]}}
        expected = [
            llm.generate(data, params)[0],
            llm.chat([{"role": "user", "content": content}], params)[0],
        ]
    told = [generate(text, *named), generate("What is it?", "--chat", *named)]
    for result, output in zip(told, expected, strict=True):
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        assert found["prompt_tokens"] == len(output.prompt_token_ids)
        assert found["outputs"][0]["token_ids"] == list(output.outputs[0].token_ids)
    wrong = generate("none", *named)
    assert wrong.exit_code == 2
    assert "it has 0, and there are 2 images" in wrong.stderr


def test_a_file_of_prompts_names_its_own_images() -> None:
    done = CliRunner().invoke(app, ["generate", "demo", "--prompts-file", "x", "--image", "y"])
    assert done.exit_code == 2
    assert "--image is for one prompt" in done.stderr
