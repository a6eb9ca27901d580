"""Scores, plots, and HTML pages that need no network."""
