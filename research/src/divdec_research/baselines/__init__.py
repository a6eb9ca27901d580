"""Other unlearning methods on the same target and data, for comparison; `methods` lists them."""
