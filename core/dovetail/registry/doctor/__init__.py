"""The logic of `dovetail plugins doctor`: it finds problems of installed plugins, and says what to do about them.

`metadata` reads the files that pip has left and imports nothing; `probe` loads one plugin, in a process of its own; `examine` runs both over
all that is installed and compares the plugins' offers.
"""
