"""Other unlearning methods on the same target and data, for comparison. Importing the package registers them all."""

import divdec.research.baselines.methods  # noqa: F401
