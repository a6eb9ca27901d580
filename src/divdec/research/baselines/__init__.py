"""Other unlearning methods, on the same target and the same data, for comparison."""
