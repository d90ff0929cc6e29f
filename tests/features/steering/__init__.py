"""A feature that a stranger might write: each request may name a steering vector, which is added to
the output of one decoder layer for all of its tokens.

`parts` is what travels: options, the request's value, parts of batches. `slots` is the loop's side,
`device` the device's, and `executors` bring both to an engine. Nothing in Dovetail names it.
"""
