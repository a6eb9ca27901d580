"""The laboratory of divdec: benchmarks, other unlearning methods, comparisons and figures."""
