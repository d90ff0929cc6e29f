"""Packages by which programs that were written for other engines run: only their imports change."""
