"""Bookkeeping of `dovetail.api.prefix_cache`: internal, so not a part of any interface."""
