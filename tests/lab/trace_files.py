"""Small files of every trace format, written as their sources write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.009930+00:00,2399,6
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,,1.5,ChatGPT,472,18,490,Conversation log
45,,0,ChatGPT,1087,0,1087,Conversation log
118,,3.0,GPT-4,417,276,693,API log
"""
VTC_ARENA = """req_id,client,arrived_at,prompt_tokens,output_tokens
0,alice,0.000000,13,199
1,bob,0.207938,36,137
"""
SARATHI = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
74,918,992,0.08
290,905,1195,0.32
"""
LLMSERVINGSIM = """arrived_at,input_tokens,output_tokens
0.5,2358,531
0.75,1034,769
"""


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


MOONCAKE = lines(
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 3]},
)
VLLM_REQUESTS = lines(
    *(
        {
            "request_id": f"bench-{i}",
            "input_toks": 10 + i,
            "output_toks": 20,
            "arrival_time": 1777142838.25 + i,
            "queued_ts": 500.5 + i + i / 4,
            "scheduled_ts": 500.75 + i + i / 4,
            "first_token_ts": 501.5 + i,
            "last_token_ts": 503.5 + i,
        }
        for i in range(2)
    )
)
VTC_MEASURED = json.dumps(
    {
        "config": {"mode": "real"},
        "result": {
            "num_abort": 1,
            "responses": [
                {
                    "adapter_dir": "a",
                    "prompt_len": 13,
                    "output_len": 9,
                    "request_latency": 4.0,
                    "first_token_latency": 1.0,
                    "req_time": 2.0,
                },
                {
                    "adapter_dir": "b",
                    "prompt_len": 13,
                    "output_len": 9,
                    "request_latency": -1,
                    "first_token_latency": -1,
                    "req_time": 2.5,
                },
                {
                    "adapter_dir": "a",
                    "prompt_len": 14,
                    "output_len": 8,
                    "request_latency": 5.0,
                    "first_token_latency": 1.5,
                    "req_time": 3.0,
                },
            ],
        },
    }
)
_SERVE = {
    "total_input_tokens": 33,
    "input_lens": [11, 12, 10],
    "output_lens": [3, 0, 2],
    "errors": ["", "boom", ""],
}
BENCH_SERVE = json.dumps(
    {
        **_SERVE,
        "start_times": [100.0, 100.5, 101.0],
        "ttfts": [0.5, 0.0, 0.25],
        "itls": [[0.1, 0.1], [], [0.2]],
    }
)
BENCH_SERVE_WITHOUT_TIMES = json.dumps(_SERVE)
SHAREGPT = json.dumps(
    [
        {
            "id": "chat",
            "conversations": [
                {"from": "human", "value": "who was Ada Lovelace"},
                {"from": "gpt", "value": "a mathematician"},
                {"from": "human", "value": "when"},
                {"from": "gpt", "value": "in the 19th century"},
            ],
        },
        {"id": "empty", "conversations": []},
    ]
)
OPENAI = json.dumps(
    [
        {
            "messages": [
                {"role": "user", "content": "say something"},
                {"role": "assistant", "content": "something"},
            ]
        }
    ]
)

EVERY = {
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "vtc_arena": VTC_ARENA,
    "sarathi": SARATHI,
    "llmservingsim": LLMSERVINGSIM,
    "mooncake": MOONCAKE,
    "vllm_requests": VLLM_REQUESTS,
    "vtc_measured": VTC_MEASURED,
    "bench_serve": BENCH_SERVE,
    "sharegpt": SHAREGPT,
}


def written(folder: Path, text: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
