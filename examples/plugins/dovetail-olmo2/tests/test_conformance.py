"""Whether it keeps the contract of its kind."""

from dovetail.testing import ModelSuite


class TestOlmo2(ModelSuite):
    component = "olmo2"
