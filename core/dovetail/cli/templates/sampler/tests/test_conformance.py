"""Whether it keeps the contract of its kind."""

from dovetail.testing import SamplerSuite


class TestAcmeSampler(SamplerSuite):
    component = "acme"
