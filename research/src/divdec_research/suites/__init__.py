"""TOFU and MUSE, with OpenUnlearning's metrics, and their aggregates."""
