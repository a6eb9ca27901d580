"""Decoding with a steered model: logits processors, lossless speculative decoding, and text from tokens."""
