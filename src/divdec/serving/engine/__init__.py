"""Answers many requests at once with one steered model, in one process: continuous batching."""
