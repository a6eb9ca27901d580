"""A pair of auxiliaries with a tokenizer other than the target's."""
