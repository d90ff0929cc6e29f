"""Foundations of the core: checks of values, errors with places, bounded files. Not for plugins."""
