"""Measuring a model, steered or not: one teacher-forced pass, and answers generated greedily."""
