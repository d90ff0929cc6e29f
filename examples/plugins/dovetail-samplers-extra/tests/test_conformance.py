"""Whether they keep the contract of their kind. Breakers are token ids: the suite's texts are of
letters."""

from dovetail.testing import LogitsProcessorSuite


class TestDry(LogitsProcessorSuite):
    component = "dry"
    arguments = [
        {},
        {"multiplier": 2.0, "base": 1.1, "allowed_length": 1, "sequence_breakers": ["b", 100, 10**9]},
        {"allowed_length": 1, "penalty_last_n": 12, "sequence_breakers": []},
    ]


class TestTopNSigma(LogitsProcessorSuite):
    component = "top_n_sigma"
    arguments = [{}, {"n": 2.5}]


class TestXtc(LogitsProcessorSuite):
    component = "xtc"
    arguments = [{"threshold": 0.01}, {"threshold": 0.02, "probability": 1.0}]
