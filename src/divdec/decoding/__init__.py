"""How a steered model decodes: lossless self-speculation."""
