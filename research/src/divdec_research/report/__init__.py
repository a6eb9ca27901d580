"""Page and charts of evaluation results."""
