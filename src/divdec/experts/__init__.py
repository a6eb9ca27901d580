"""Experts compute a divergence over the target's vocabulary; see `divdec.experts.protocol`.

Importing this package loads no torch: counting n-grams and the registry work without it.
"""
