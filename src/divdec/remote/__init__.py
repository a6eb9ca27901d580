"""Targets behind an OpenAI-compatible API, steered through `logit_bias`."""
