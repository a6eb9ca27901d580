"""Targets that are reached only through somebody else's API: steered from outside, with what the API offers."""
