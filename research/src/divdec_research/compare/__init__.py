"""Comparison of all unlearning methods on the same models and data with TOFU's evaluation suite."""
