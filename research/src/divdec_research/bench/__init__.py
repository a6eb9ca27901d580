"""Cost measurements on random models: compute against 1 + 2n/N, and latency (paper, appendices Compute and Latency)."""
