"""Images of a real engine's requests, recorded as a trace for a simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from dovetail import SamplingParams
from dovetail_lab.traces import load_trace
from tests.lab.runs import run
from tests.media.checkpoints import checkpoint, picture, written
from tests.media.test_in_engine import engine


@pytest.mark.slow("makes an engine with an image encoder")
def test_a_recorded_engine_encodes_as_many_pictures_in_a_simulation(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    directory = checkpoint("qwen3_vl")
    images = [picture(33, 50), picture(50, 33), picture(33, 50)]
    prompts = [
        {"prompt": f"{written('qwen3_vl')}what?", "multi_modal_data": {"image": image}}
        for image in images
    ]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    observers = [{"name": "trace", "path": str(path)}]
    with engine(directory, observers=observers) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    recorded = load_trace(path)
    for request, output in zip(recorded, outputs, strict=True):
        assert output.prompt_token_ids is not None
        assert request.prompt_tokens == len(output.prompt_token_ids)
        assert request.output_tokens == 3
        [image] = request.images
        [placeholder] = {*output.prompt_token_ids[image.start : image.stop]}
        assert output.prompt_token_ids.count(placeholder) == image.rows
    one, other, again = (request.images[0].digest for request in recorded)
    assert one == again != other
    result = run(recorded)
    assert [note for note in result.notes if note.startswith("images encoded: 2,")]
