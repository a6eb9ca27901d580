"""The steered language model: target + experts + rule, its configuration, its cache and its bundle on disk."""
