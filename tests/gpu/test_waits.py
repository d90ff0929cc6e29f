"""Nothing that enqueues a step waits for the GPU; what the ring of pinned buffers sends arrives,
however busy the GPU is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from dovetail import LLMEngine, SamplingParams
from dovetail.nn.transfer import SLOT_BYTES, SLOTS, all_to_device, upload
from tests.e2e.reference import checkpoint
from tests.e2e.test_equal_to_transformers import random_prompts
from tests.gpu.device import SHAPES, on_a_gpu, settings_for

pytestmark = on_a_gpu

CONFIG = Qwen3Config(
    **{**SHAPES[0].fields, "vocab_size": 997},
    num_hidden_layers=2,
    head_dim=SHAPES[0].head_size,
    max_position_embeddings=512,
)
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"min_p": 0.05},
]
CHANGED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {3: 2.0}, "min_tokens": 5, "stop_token_ids": [4]},
    {"allowed_token_ids": [5, 6, 7]},
    {"logprobs": 2, "prompt_logprobs": 1},
]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("ways", [PLAIN, PLAIN + CHANGED])
def test_submitting_a_step_waits_for_nothing(ways: list[dict[str, Any]], graphs: bool) -> None:
    prompts = random_prompts([1, 5, 30, 200, 17, 64, 100, 9, 40], 997, 0)
    with checkpoint(CONFIG) as (directory, _):
        settings = settings_for(
            "triton",
            model=str(directory),
            dtype="float32",
            generation_config="none",
            cuda_graphs=graphs,
            max_model_len=400,
        )
        with LLMEngine.from_config(settings, max_num_batched_tokens=128) as engine:
            submit = engine.core.executor.submit

            def checked(batch: Any) -> Any:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    return submit(batch)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            for run in ("warm-up", "checked"):  # compiling a kernel may wait
                for index, (prompt, way) in enumerate(zip(prompts, ways, strict=False)):
                    params = SamplingParams(
                        **way,
                        seed=index,
                        max_tokens=20,
                        ignore_eos=True,
                        detokenize=False,
                        output_kind="final",
                    )
                    engine.add_request(f"{run} {index}", prompt, params)
                while engine.has_unfinished_requests():
                    for output in engine.step():
                        assert output.outputs[0].finish_reason != "error", output.outputs[
                            0
                        ].stop_reason
                engine.core.executor.submit = checked  # type: ignore[method-assign]


def test_what_is_sent_arrives_while_the_gpu_is_busy_and_the_ring_goes_round() -> None:
    device, rng = torch.device("cuda:0"), np.random.default_rng(0)
    busy = torch.randn(4096, 4096, device=device)
    sent, arrived = [], []
    for turn in range(3 * SLOTS):
        if turn % SLOTS == 0:
            for _ in range(50):
                busy = busy @ busy * 1e-3
        arrays = [rng.integers(0, 1 << 30, size) for size in (1, 7, turn)]
        sent.append([array.copy() for array in arrays])
        arrived.append(all_to_device(arrays, device))
        for array in arrays:
            array[:] = -1
    large, target = (
        rng.integers(0, 9, SLOT_BYTES),
        torch.empty(SLOT_BYTES, dtype=torch.int64, device=device),
    )
    upload(large, target)
    for tensors, arrays in zip(arrived, sent, strict=True):
        for tensor, array in zip(tensors, arrays, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy(), array)
    np.testing.assert_array_equal(target.cpu().numpy(), large)
