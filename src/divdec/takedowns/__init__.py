"""Takedown requests: a registry of texts that a model shall not repeat, and the correction of its logits."""
