"""Whether it keeps the contract of its kind."""

from dovetail.testing import KVCacheSuite


class TestGDSF(KVCacheSuite):
    component = "gdsf"
