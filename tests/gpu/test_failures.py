"""Messages for users when the GPU runs out of memory at start-up, or fails during a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen3Config

from dovetail import LLMEngine
from dovetail.errors import ConfigError, UnsupportedError
from tests.e2e.reference import checkpoint
from tests.gpu.device import SHAPES, on_a_gpu, settings_for

pytestmark = on_a_gpu

CONFIG = Qwen3Config(
    **SHAPES[0].fields,
    num_hidden_layers=1,
    head_dim=SHAPES[0].head_size,
    max_position_embeddings=256,
)

BREAKING = """
import json, sys, torch
from dovetail import LLMEngine, SamplingParams
from dovetail.errors import EngineDeadError

with LLMEngine.from_config(json.loads(sys.argv[1])) as engine:
    for name in ("first", "second"):
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True, detokenize=False))
    for _ in range(4):
        engine.step()
    def break_the_device(*args):
        torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]  # an assertion on the device, which nobody waits for
    engine.core.executor.worker.runner.model.register_forward_pre_hook(break_the_device)
    ends = {}
    while engine.has_unfinished_requests():
        ends |= {o.request_id: [o.outputs[0].finish_reason, o.outputs[0].stop_reason] for o in engine.step() if o.finished}
    try:
        engine.add_request("later", [1], SamplingParams(max_tokens=1, detokenize=False))
        later = "accepted"
    except EngineDeadError as error:
        later = str(error)
    print(json.dumps({"ends": ends, "later": later}), flush=True)
    import os
    os._exit(0)  # the device is lost to this process: nothing can be released in order
"""


def test_out_of_memory_at_start_says_what_was_asked_what_is_free_and_what_to_lower() -> None:
    with checkpoint(CONFIG) as (directory, _):
        settings = settings_for(
            "triton",
            model=str(directory),
            dtype="float32",
            generation_config="none",
            kv_cache_memory="900GiB",
        )
        with pytest.raises(
            UnsupportedError,
            match=r"can't start: OutOfMemoryError: .*Tried to allocate .* is free.*lower .* "
            r"kv_cache_memory",
        ):
            LLMEngine.from_config(settings)
        with LLMEngine.from_config(
            {**settings, "kv_cache_memory": "64MiB"}
        ) as engine:  # and the GPU is fine
            assert engine.capacity.num_pages > 0


def test_a_share_of_the_memory_that_leaves_no_room_says_what_to_raise() -> None:
    with checkpoint(CONFIG) as (directory, _):
        settings = settings_for(
            "triton",
            model=str(directory),
            dtype="float32",
            generation_config="none",
            gpu_memory_utilization=1e-6,
        )
        del settings["kv_cache_memory"]
        with pytest.raises(
            ConfigError, match=r"gpu_memory_utilization: .*gives 0\. .*Raise gpu_memory_utilization"
        ):
            LLMEngine.from_config(settings)


def test_a_cuda_error_ends_the_engine_and_names_the_requests_in_the_batch() -> None:
    """In a process of its own, which loses its device for good."""
    with checkpoint(CONFIG) as (directory, _):
        settings = settings_for(
            "triton",
            model=str(directory),
            dtype="float32",
            generation_config="none",
            cuda_graphs=False,
        )
        done = subprocess.run(
            [sys.executable, "-c", BREAKING, json.dumps(settings)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=Path(__file__).parents[2],
        )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told["ends"]) == {"first", "second"}
    for reason, why in told["ends"].values():
        assert reason == "error"
        assert "CUDA error" in why or "device-side assert" in why
        assert "requests in it: first, second" in why
    assert "the engine is dead and takes no more work" in told["later"]
