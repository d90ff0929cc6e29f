"""Whether it keeps the contract of its kind."""

from dovetail.testing import ObserverSuite


class TestAcmeObserver(ObserverSuite):
    component = "acme"
