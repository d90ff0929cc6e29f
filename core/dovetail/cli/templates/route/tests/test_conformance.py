"""The conformance tests: they send requests to the routes, without an engine."""

from dovetail.testing import RouteExample, RouteSuite


class TestAcme(RouteSuite):
    name = "acme"
    examples = (RouteExample(path="/acme", body={"text": "Once upon a time."}),)
