"""Forget, retain and holdout sets: reading them, laying them out as tokens, and a fictitious world to try on."""
