"""Divergence Decoding for autoregressive image models."""
