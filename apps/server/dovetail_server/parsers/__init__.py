"""Streaming parsers of tool calls and reasoning in a model's text.

`registry` chooses the parser of an answer, which is fed with the text of each output. Parsers don't
depend on HTTP.
"""
