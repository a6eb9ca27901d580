"""Cost measurements on random models: compute against 1 + 2n/N (paper, appendix Compute Requirements)."""
