"""The conformance tests: they check that the component keeps the contract of its kind."""

from dovetail.testing import KVTierSuite


class TestAcmeTier(KVTierSuite):
    component = "acme"
    small = {"size": "1MiB"}  # options, besides `options`, with which it keeps at most small_bytes
    small_bytes = 2**20
