"""Decoding with a steered model: its cache, `generate`, lossless speculative decoding, and text from tokens."""
