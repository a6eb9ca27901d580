"""Options of the methods that wrap the target. It knows nothing of torch."""

from __future__ import annotations

from divdec.baselines.registry import Method

INFERENCE_METHODS: tuple[Method, ...] = ()
