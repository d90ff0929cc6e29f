"""The conformance suite of the `triton` backend in Triton's interpreter, which
`test_triton_interpreter.py` runs in a process of its own."""

from __future__ import annotations

from dovetail.testing import AttentionSuite
from tests.attention import interpreter

interpreter.mend()


class TestTriton(AttentionSuite):
    component = "dovetail:triton"
    device = "cpu"
    dtypes = ("float32", "float16")  # the interpreter rounds bfloat16 wrongly
    max_len = 40  # it takes milliseconds a tile
    examples = 5
