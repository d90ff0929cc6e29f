"""What is wrong with the plugins that are installed, and what to do about it: the logic of `dovetail plugins doctor`.

`metadata` reads what pip has left on disk and imports nothing; `probe` loads one plugin, in a process of its own; `examine` runs both over
everything that is installed and compares what the plugins offer.
"""
