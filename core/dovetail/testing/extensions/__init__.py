"""Suites of what a plugin may add beside components: routes, commands, weight formats. That of
routers is `dovetail_lab.testing.RouterSuite`.

A package subclasses the suite and names its offer; pytest runs the checks.
"""
