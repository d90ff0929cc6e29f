"""An engine with all three, which must be installed: requests that ask, and one that doesn't."""

import pytest
from dovetail import LLM, SamplingParams
from dovetail.errors import RequestError

PROMPT = "to be, or not to be, or not to be, or not to"
CPU = {"name": "local", "device": "cpu"}  # where logits don't depend on the batch
ASKED = {
    "greedy": {},
    "dry": {"dry": {"multiplier": 50.0, "sequence_breakers": []}},
    "top_n_sigma": {"top_n_sigma": {"n": 0.001}},
    "xtc": {"xtc": {"threshold": 0.01, "probability": 1.0}},
    "all": {"xtc": {}, "dry": {}, "top_n_sigma": {"n": 2.0}},
}


def test_requests_get_what_they_ask_for() -> None:
    with LLM("demo", max_model_len=128, logits_processors=["dry", "top_n_sigma", "xtc"], executor=CPU) as llm:

        def tokens(*names: str) -> list[list[int]]:
            params = [
                SamplingParams(temperature=5.0 * (name == "top_n_sigma"), seed=3, max_tokens=24, ignore_eos=True, logits_processors=ASKED[name])
                for name in names
            ]
            return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in llm.generate([PROMPT] * len(names), params)]

        together = dict(zip(ASKED, tokens(*ASKED), strict=True))
        for name in ("greedy", "dry", "all"):
            assert tokens(name) == [together[name]]
        with pytest.raises(RequestError, match="penalty_last_n"):
            llm.generate(PROMPT, SamplingParams(logits_processors={"dry": {"penalty_last_n": -2}}))
    assert together["top_n_sigma"] == together["greedy"], "only the most probable token is left"
    assert together["dry"] != together["greedy"] != together["xtc"]
    text = together["dry"]
    generated = range(len(text) - 24, len(text))
    assert not [text[end - 2 : end + 1] for end in generated if text[end - 2 : end + 1] in (text[start : start + 3] for start in range(end - 2))]
