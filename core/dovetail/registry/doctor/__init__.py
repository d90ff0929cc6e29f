"""Diagnostics for `dovetail plugins doctor`: problems of installed plugins, each with a remedy.

`metadata` reads installed metadata and imports nothing; `probe` loads one plugin in its own
process; `examine` runs both over everything installed and reports name collisions.
"""
