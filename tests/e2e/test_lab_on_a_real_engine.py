"""The lab's replay on the executor `local`: the same requests, in real time."""

from __future__ import annotations

from dovetail_lab.simulate import replay
from dovetail_lab.traces import Trace, TraceRequest

ENGINE = {
    "model": "demo",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 64,
    "kv_cache_memory": "4MiB",
    "attention": "torch",
}


def test_a_trace_is_sent_in_real_time_and_answered_as_long_as_its_limit_says() -> None:
    requests = tuple(
        TraceRequest(str(index), 0.05 * index, 10 + index, 3 + index) for index in range(4)
    )
    result = replay(ENGINE, Trace("made", "by hand", requests))
    assert [record.output_tokens for record in result] == [3, 4, 5, 6]
    assert all(record.arrival_s < record.token_times_s[0] for record in result)
    assert result.step_times.name == "measured"
    assert result.settings["executor"] == "real"
    assert len(result.timeline)
    assert result.timeline.device_s.sum() > 0
