"""Clients of other projects against `dovetail serve`, each in an environment of its own:
`make test-clients`."""
