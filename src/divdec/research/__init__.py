"""Whole experiments on the embedded default: models trained from nothing, steered, measured and reported."""
