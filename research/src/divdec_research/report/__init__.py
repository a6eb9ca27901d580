"""Scores, charts and tables of evaluation results."""
