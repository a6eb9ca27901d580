"""Estimates of what steering costs in operations, memory and time."""
