"""Optional extras of the distribution and the modules that each installs."""

import importlib.util
from collections.abc import Sequence

from divdec.errors import UsageError

EXTRAS = {
    "serve": ("fastapi", "uvicorn", "prometheus_client", "sse_starlette", "llguidance"),
    "vllm": ("vllm",),
    "ui": ("gradio",),
    "gguf": ("gguf",),
}


def missing(names: Sequence[str]) -> list[str]:
    """Return the modules that are not installed."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def require(extra: str, feature: str) -> None:
    """Check that an extra is installed.

    Raises:
        UsageError: names the feature that needs it and the command that installs it.
    """
    if modules := missing(EXTRAS[extra]):
        raise UsageError(f"{feature} needs {' and '.join(modules)}: pip install 'divdec[{extra}]'")
