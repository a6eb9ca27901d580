"""Options of the methods that change the target's weights. It knows nothing of torch."""

from __future__ import annotations

from divdec.baselines.registry import Method

GRADIENT_METHODS: tuple[Method, ...] = ()
