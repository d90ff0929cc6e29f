"""Whether it keeps the contract of its kind."""

from dovetail.testing import AttentionSuite


class TestAcmeAttention(AttentionSuite):
    component = "acme"
